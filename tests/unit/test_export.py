"""From module to graph: nothing gets lost on the way."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import terrazzo as tz
from terrazzo.checking import row
from terrazzo.graph.export import export
from terrazzo.records import Graph, Ref

sys.path.insert(0, str(Path(__file__).parent))
from does import Does, X, autocast_region


def steps(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], ...]:
    """Two training steps: outputs, gradients and buffers."""
    outputs = {}
    for step in range(2):
        made = [t for t in pytree.tree_leaves(model(*args, **kwargs)) if torch.is_tensor(t)]
        torch.stack([(t * t + t).sum() for t in made if t.requires_grad]).sum().backward()
        outputs |= {f"{step}.{place}": t.detach().clone() for place, t in enumerate(made)}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return outputs, gradients, dict(model.named_buffers())


def assert_exact(model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """The graph, run on one device, does what the model does; gives the graph."""
    net = tz.parallelize(copy.deepcopy(model), args)
    expected, found = steps(model, *args, **kwargs), steps(net, *args, **kwargs)
    for what, one, other in zip(("outputs", "gradients", "buffers"), expected, found, strict=True):
        assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}
        judged = row(what, one, other, 1e-10)
        assert judged.ok, judged
    return net.program.graph


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


# ---- what a graph says --------------------------------------------------------------------------


def test_train_and_eval_are_two_graphs() -> None:
    model = Does(lambda self, x: self.drop(self.norm(x)), norm=nn.BatchNorm2d(4), drop=nn.Dropout())
    train = export(model, (X,)).graph
    evaluation = export(model.eval(), (X,)).graph
    assert "terrazzo.batch_norm" in ops(train)
    assert "terrazzo.dropout" in ops(train)
    assert set(train.mutations) == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    assert "aten.batch_norm.default" in ops(evaluation)
    assert "terrazzo.dropout" not in ops(evaluation)
    assert evaluation.mutations == {}
    assert model.training is False, "export leaves the model as it was"


def test_names_are_those_of_the_model() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.ReLU()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    graph = export(Does(lambda self, x: self.block(x) + 1, block=Block()), (X,)).graph
    layers = [node.layer for node in graph.nodes]
    assert layers == ["conv", "block.layers.0", "block.layers.1", ""]
    targets = {value.target: value.kind for value in graph.values.values() if value.target}
    assert targets == {
        "conv.weight": "parameter", "conv.bias": "parameter",
        "block.layers.0.weight": "parameter", "block.layers.0.bias": "parameter",
    }  # fmt: skip
    assert graph.nodes[0].title == "conv (aten.conv2d.default)"
    assert graph.nodes[0].flops == 2 * 2 * 4 * 8 * 6 * 3 * 9


def test_a_graph_survives_json_and_its_digest_with_it() -> None:
    model = Does(lambda self, x: (F.pad(x, (1, 1), value=float("-inf")).clamp(-3), None, 2.5, "a"))
    graph = export(model, (X,)).graph
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert again.digest == graph.digest
    assert export(model, (X[:, :, :7],)).graph.digest != graph.digest


def test_export_leaves_random_state_and_buffers_alone() -> None:
    model = Does(lambda self, x: self.drop(self.norm(x)), norm=nn.BatchNorm2d(4), drop=nn.Dropout())
    before = copy.deepcopy(model.state_dict())
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), float(torch.rand(()))
    random.seed(5)
    torch.manual_seed(5)
    export(model, (X,))
    assert (random.random(), float(torch.rand(()))) == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_random_operators_are_numbered_by_their_place() -> None:
    model = Does(lambda self, x: F.dropout(x * torch.rand_like(x), 0.3) + torch.randn(6).double())
    drawn = [node for node in export(model, (X,)).graph.nodes if "terrazzo.rand" in node.op]
    drawn += [n for n in export(model, (X,)).graph.nodes if n.op == "terrazzo.dropout"]
    assert sorted(node.args[-1] for node in drawn) == [1, 2, 3]


# ---- what must come out the same ----------------------------------------------------------------


def in_place(self: Any, x: Tensor) -> Tensor:
    y = F.relu(x.mul_(2).add_(1), inplace=True) * 3
    y[:, 0] = 0.5
    y[:, 1, 2:4] += 1
    return y.clamp_(max=3) + y


def views(self: Any, x: Tensor) -> Tensor:
    half, rest = x.chunk(2, 1)
    flat = x.view(2, 2, 2, 8, 6).transpose(1, 2).reshape(2, 4, 8, 6)
    one, _, three, _ = x.unbind(1)
    parts = x.split([1, 3], 1)
    return torch.cat([half, rest * 2, flat, parts[1], (one - three).unsqueeze(1)], 1)


def write_through_a_view(self: Any, x: Tensor) -> Tensor:
    rows = x[:, :, 2:5]
    rows.mul_(3)
    x.view(-1)[::7].zero_()
    return x + 1


def tied_weights(self: Any, x: Tensor) -> Tensor:
    return self.one(x) + self.two(torch.tanh(x))


def constants(self: Any, x: Tensor) -> Tensor:
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]], dtype=x.dtype)
    return F.conv2d(x, kernel.expand(4, 1, 3, 3), groups=4, padding=1)


def counted_calls(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    self.level.mul_(0.9).add_(x.detach().mean() * 0.1)
    return x * self.level + self.count


def several_outputs(self: Any, x: Tensor) -> Any:
    return {"map": x, "pair": (x.sum(), [x.mean((2, 3))]), "name": "conv", "none": None}


def dtypes(self: Any, x: Tensor) -> Tensor:
    return x.float().double() + (x > 0).to(x.dtype) * x.long().double()


def no_grad_region(self: Any, x: Tensor) -> Tensor:
    """Forward alone would not notice if the region were lost."""
    with torch.no_grad():
        scale = x.abs().mean((2, 3), keepdim=True)
        with torch.enable_grad():
            scale = scale * 1 + x.sum()
    return x / (scale + 10)


@torch.no_grad()
def norm_of(x: Tensor) -> Tensor:
    return x.norm()


def no_grad_function(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    found = norm_of(x)
    return x * found, found


def no_grad_buffer(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.level.mul_(0.5).add_(x.mean())
    return x * self.level


def detached(self: Any, x: Tensor) -> Tensor:
    return x * x.detach().abs() + x.clone().detach()


def test_no_grad_regions_stop_gradients() -> None:
    for act in (no_grad_region, no_grad_function, detached):
        graph = assert_exact(Does(act), X)
        assert "aten.detach.default" in ops(graph)
    model = Does(no_grad_buffer)
    model.register_buffer("level", torch.ones((), dtype=torch.float64))
    assert_exact(model, X)


def test_an_autocast_region_becomes_casts() -> None:
    model = Does(autocast_region, layer=nn.Conv2d(4, 4, 1))
    model.layer.float()
    graph = assert_exact(model, X)
    assert ops(graph).count("aten._to_copy.default") >= 4


@pytest.mark.parametrize(
    "surroundings",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_a_graph_does_not_depend_on_where_it_was_made(surroundings: Callable[[], Any]) -> None:
    model, x = Does(no_grad_region).float(), X.float()
    expected = export(model, (x,)).graph
    with surroundings():
        found = export(model, (x,)).graph
    assert found == expected


def test_in_place_operators() -> None:
    assert_exact(Does(in_place), X)


def test_views_and_what_is_written_through_them() -> None:
    assert_exact(Does(views), X)
    assert_exact(Does(write_through_a_view), X)


def test_tied_weights_keep_one_gradient() -> None:
    model = Does(tied_weights, one=nn.Conv2d(4, 4, 1), two=nn.Conv2d(4, 4, 1, bias=False))
    model.two.weight = model.one.weight
    graph = assert_exact(model, X)
    targets = [value.target for value in graph.values.values() if value.kind == "parameter"]
    assert len(targets) == 4, "conv has two, one has two, and two shares its only one"


def test_constants_travel_with_the_graph() -> None:
    model = Does(constants)
    exported = export(model, (X,))
    assert [tuple(t.shape) for t in exported.constants.values()] == [(3, 3)]
    assert_exact(model, X)


def test_buffers_that_the_model_changes() -> None:
    model = Does(counted_calls)
    model.register_buffer("count", torch.zeros((), dtype=torch.float64))
    model.register_buffer("level", torch.ones((), dtype=torch.float64), persistent=False)
    graph = assert_exact(model, X)
    assert set(graph.mutations) == {"count", "level"}


def test_structure_of_outputs_and_dtypes() -> None:
    assert_exact(Does(several_outputs), X)
    assert_exact(Does(dtypes), X)


def test_keyword_and_constant_arguments() -> None:
    def act(self: Any, x: Tensor, scale: float, *, shift: Tensor, sign: str = "plus") -> Tensor:
        return x * scale + (shift if sign == "plus" else -shift)

    model, shift = Does(act), torch.ones(6, dtype=torch.float64)
    graph = export(model, (X, 2.0), {"shift": shift, "sign": "minus"}).graph
    assert [bool(name) for name in graph.inputs] == [True, False, True, False]
    assert "aten.neg.default" in ops(graph)


@pytest.mark.parametrize("momentum", [None, 0.3, 1.0])
def test_batch_norm_of_any_momentum(momentum: float | None) -> None:
    layers = {
        "plain": nn.BatchNorm2d(4, momentum=momentum),
        "bare": nn.BatchNorm2d(4, momentum=momentum, affine=False),
        "forgetful": nn.BatchNorm2d(4, momentum=momentum, track_running_stats=False),
    }
    model = Does(lambda self, x: self.plain(x) + self.bare(x) * self.forgetful(x), **layers)
    graph = assert_exact(model, X)
    assert ops(graph).count("terrazzo.batch_norm") == 3
    assert model.plain.momentum == momentum, "export gives the setting back"
    norm = next(node for node in graph.nodes if node.layer == "plain" and "norm" in node.op)
    assert isinstance(norm.args[5], Ref) == (momentum is None)


def test_instance_norm_keeps_running_statistics() -> None:
    layers = {
        "tracked": nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=0.2),
        "plain": nn.InstanceNorm2d(4),
    }
    model = Does(lambda self, x: self.tracked(x) * 2 + self.plain(x), **layers)
    graph = assert_exact(model, X)
    assert {"tracked.running_mean", "tracked.running_var"} <= set(graph.mutations)
    model.eval()
    model.zero_grad()
    assert_exact(model, X)


def test_group_and_layer_norm() -> None:
    layers = {"groups": nn.GroupNorm(2, 4), "lines": nn.LayerNorm(6)}
    assert_exact(Does(lambda self, x: self.lines(self.groups(x)), **layers), X)
