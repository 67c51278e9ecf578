"""Max pools ahead of norms and activations: which of them move, and that no number does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.graph.export import export
from terrazzo.graph.pooling import end_of
from terrazzo.records import Graph
from terrazzo.runtime.pooling import turning_max_pool2d


def ops(module: nn.Module, shape: tuple[int, ...] = (2, 4, 12, 12)) -> str:
    """The operators by their short names, without those that count batches."""
    graph = export(module, (torch.zeros(shape),)).graph
    counts = {name for name, value in graph.values.items() if not value.shape}
    return " ".join(n.op.split(".")[1] for n in graph.nodes if not counts.issuperset(n.outputs))


class Shown(nn.Module):
    """What is pooled is read by something else too."""

    def __init__(self, show: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.norm, self.show = nn.BatchNorm2d(4), show

    def forward(self, x: Tensor) -> object:
        y = self.norm(x).relu()
        return self.show(F.max_pool2d(y, 2), y)


class Unwatched(nn.Module):
    """What is pooled asks for no gradient, and the pool stands outside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.norm(x)
        return F.max_pool2d(y, 2)


POOL = nn.MaxPool2d(2)
MOVED: dict[str, tuple[nn.Module, str]] = {
    "norm": (nn.Sequential(nn.BatchNorm2d(4), POOL), "max_pool2d moments running normalize"),
    "norm and activation": (
        nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(0.1), POOL),
        "max_pool2d moments running normalize leaky_relu",
    ),
    "norm with given statistics": (
        nn.Sequential(nn.BatchNorm2d(4).eval(), nn.ReLU(), POOL), "max_pool2d batch_norm relu",
    ),
    "one norm, for it has one sign": (
        nn.Sequential(nn.BatchNorm2d(4).eval(), nn.BatchNorm2d(4).eval(), POOL),
        "batch_norm max_pool2d batch_norm",
    ),
    "two activations": (nn.Sequential(nn.ReLU(), nn.Sigmoid(), POOL), "max_pool2d relu sigmoid"),
    "overlapping windows": (nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1)), "max_pool2d relu"),
    "one pool behind another": (
        nn.Sequential(nn.ReLU(), POOL, nn.Tanh(), POOL), "max_pool2d max_pool2d relu tanh",
    ),
    "not what falls": (nn.Sequential(nn.LeakyReLU(-0.1), POOL), "leaky_relu max_pool2d"),
    "not what falls and rises": (nn.Sequential(nn.SiLU(), POOL), "silu max_pool2d"),
    "as far as it goes": (
        nn.Sequential(nn.SiLU(), nn.ReLU(), POOL), "silu max_pool2d relu",
    ),
    "not where nothing shrinks": (
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 1, 1)), "relu max_pool2d",
    ),
    "not with holes": (
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, 2, dilation=2)), "relu max_pool2d",
    ),
    "not beyond the edge": (
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)), "relu max_pool2d",
    ),
    "not what is shown": (
        Shown(lambda pooled, y: (pooled, y)), "batch_norm relu max_pool2d",
    ),
    "not what is read twice": (
        Shown(lambda pooled, y: (pooled, y.tanh())), "batch_norm relu max_pool2d tanh",
    ),
    "not where gradients end": (Unwatched(), "batch_norm detach max_pool2d"),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_what_moves(name: str) -> None:
    module, expected = MOVED[name]
    assert ops(module) == expected


def graph_of(*modules: nn.Module) -> Graph:
    return export(nn.Sequential(*modules), (torch.zeros(2, 4, 12, 12),)).graph


def test_names_and_sizes_stay_where_they_were() -> None:
    graph = graph_of(nn.BatchNorm2d(4), nn.ReLU(), POOL, nn.Conv2d(4, 4, 3))
    (conv,) = (node for node in graph.nodes if node.op == "aten.conv2d.default")
    pool = next(i for i, node in enumerate(graph.nodes) if "max_pool2d" in node.op)
    last = end_of(graph, pool)
    assert graph.nodes[last].outputs == (conv.refs[0],), "the map that the pool made"
    assert graph.nodes[last].op == "aten.relu.default"
    assert end_of(graph, last) == last
    normalize = next(node for node in graph.nodes if node.op == "terrazzo.normalize")
    assert graph.shape(normalize.output) == (2, 4, 6, 6)
    assert normalize.flops == 2 * 4 * 6 * 6


@pytest.mark.parametrize("kernel", [2, 3, 4])
@pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 0), (-1, -1, -1), (0, 0, 0)])
def test_by_the_sign_of_a_weight(signs: tuple[int, ...], kernel: int) -> None:
    """As the pool behind a norm: in turned channels the smallest, in level ones the first."""
    torch.manual_seed(0)
    weight = torch.tensor(signs, dtype=torch.float64) * 0.7
    x = torch.randint(-3, 4, (2, 3, 9, 10)).double()  # many ties
    one, other = (x.clone().requires_grad_() for _ in range(2))
    scale = weight.view(-1, 1, 1)
    found = turning_max_pool2d(one, (kernel, kernel), (2, 2), 1, 1, False, weight) * scale
    expected = F.max_pool2d(other * scale, kernel, 2, 1)
    assert torch.equal(found, expected)
    seed = torch.randn_like(expected)
    found.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)


def test_at_the_edge_of_a_tile_only_what_is_outside_is_filled() -> None:
    x = torch.randn(1, 2, 7, 8)
    weight = torch.tensor([1.0, -1.0])
    found = turning_max_pool2d(x, (2, 2), (2, 2), ((1, 0), (0, 0)), 1, False, weight)
    scale = weight.view(-1, 1, 1)
    filled = F.pad(x * scale, (0, 0, 1, 0), value=float("-inf"))
    assert torch.equal(found * scale, F.max_pool2d(filled, 2))
