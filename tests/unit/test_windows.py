"""Windowed operators with any numbers: kernels, strides, paddings and boxes against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from terrazzo.geometry import Box, cut
from terrazzo.graph.rules import LOCAL, Letters, place, rule_for
from terrazzo.records import Graph, Node, Ref, Value
from terrazzo.runtime.operators import local_operator, whole_operator

many = settings(
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

extents = st.integers(1, 17)
counts = st.integers(1, 5)
paddings = st.integers(0, 6)


def pair(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(numbers, numbers)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The maps are tiny, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def no_site(shape: tuple[int, ...], box: Box) -> Any:
    raise AssertionError("a window draws no random numbers")


class Operator:
    """One operator as a graph of one node, with tensors for what it reads."""

    def __init__(self, op: str, args: tuple[Any, ...], *shapes: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        names = ["x", "w"][: len(shapes)]
        self.tensors = [
            torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
        ]
        self.node = Node(op, (*(Ref(name) for name in names), *args), ("y",))
        self.whole: Tensor = whole_operator(op, self.node.args, ())(self.tensors, no_site)
        values = {
            name: Value(name, "node", tuple(tensor.shape), "float64")
            for name, tensor in zip([*names, "y"], [*self.tensors, self.whole], strict=True)
        }
        self.graph = Graph(values, (self.node,), (), (), {})

    @classmethod
    def drawn(cls, op: str, args: tuple[Any, ...], *shapes: tuple[int, ...]) -> Operator:
        """As drawn by hypothesis; what torch itself refuses is passed over."""
        try:
            made = cls(op, args, *shapes)
        except RuntimeError:
            reject()
        assume(0 < made.whole.numel() < 40_000)
        assume(bool(made.whole.isfinite().all()))  # a dilated pool may see only padding
        return made

    def box(self, box: Box) -> Tensor:
        """One box, from slices of the whole tensors."""
        rule = rule_for(self.node.op)
        assert rule is not None and rule.local is not None
        local = rule.local(self.node, self.graph, box)
        held = [read.box for read in local.reads]
        for tensor, have in zip(self.tensors, held, strict=True):
            assert Box.whole(tensor.shape).contains(have) and not have.is_empty
        pieces = [t[have.slices()] for t, have in zip(self.tensors, held, strict=True)]
        made: Tensor = local_operator(local, held, shape=tuple(self.whole.shape), box=box)(
            pieces, no_site
        )
        return made

    def check(self, data: st.DataObject) -> None:
        """A grid of boxes gives the whole result and its gradient; so does any single box."""
        axes = Letters("hw", {"x": "." * (self.tensors[0].dim() - 2) + "hw", "w": "....", "y": ""})
        assume(place(self.node, self.graph, axes).role == LOCAL)
        shares = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)
        rows, cols = (cut(n, data.draw(shares)) for n in self.whole.shape[-2:])
        lead = Box.whole(self.whole.shape).spans[:-2]
        made = torch.cat(
            [
                torch.cat([self.box(Box((*lead, row, col))) for col in cols if col[0] < col[1]], -1)
                for row in rows
                if row[0] < row[1]
            ],
            -2,
        )
        torch.testing.assert_close(made, self.whole, rtol=1e-11, atol=1e-11)
        seed = torch.randn(self.whole.shape, dtype=torch.float64)
        for one, other in zip(self._grad(made, seed), self._grad(self.whole, seed), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    def _grad(self, result: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, self.tensors, seed)


@many
@given(pair(extents), pair(counts), pair(counts), pair(paddings), pair(counts), st.data())
def test_convolution(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    data: st.DataObject,
) -> None:
    args = (None, stride, padding, dilation, 2)
    Operator.drawn("aten.conv2d.default", args, (1, 2, *size), (4, 1, *kernel)).check(data)


@many
@given(pair(extents), pair(counts), pair(counts), pair(paddings), pair(counts), st.data())
def test_transposed_convolution(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    data: st.DataObject,
) -> None:
    more = data.draw(pair(st.integers(0, 4)))
    args = (None, stride, padding, more, 1, dilation)
    Operator.drawn("aten.conv_transpose2d.input", args, (1, 2, *size), (2, 3, *kernel)).check(data)


def half(
    padding: tuple[int, int], kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, ...]:
    """Pools take padding up to half of what their window spans."""
    spanned = (((k - 1) * d + 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    return tuple(map(min, padding, spanned))


@many
@given(pair(extents), pair(counts), pair(counts), pair(paddings), st.booleans(), st.data())
def test_max_pool(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil: bool,
    data: st.DataObject,
) -> None:
    dilation = data.draw(pair(counts))
    args = (kernel, stride, half(padding, kernel, dilation), dilation, ceil)
    Operator.drawn("aten.max_pool2d.default", args, (1, 2, *size)).check(data)


@many
@given(pair(extents), pair(counts), pair(counts), pair(paddings), st.booleans(), st.data())
def test_avg_pool(
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil: bool,
    data: st.DataObject,
) -> None:
    counting, divisor = data.draw(st.booleans()), data.draw(st.sampled_from([None, None, 3]))
    args = (kernel, stride, half(padding, kernel, (1, 1)), ceil, counting, divisor)
    Operator.drawn("aten.avg_pool2d.default", args, (1, 2, *size)).check(data)


@many
@given(pair(extents), pair(extents), st.booleans(), st.data())
def test_adaptive_pools(
    size: tuple[int, int], result: tuple[int, int], largest: bool, data: st.DataObject
) -> None:
    assume(result != (1, 1))
    op = "terrazzo.adaptive_max_pool2d" if largest else "aten.adaptive_avg_pool2d.default"
    Operator.drawn(op, (result,), (1, 2, *size)).check(data)


scales = st.floats(0.2, 4.5) | st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0])


@many
@given(pair(extents), st.tuples(scales, scales), st.booleans(), st.data())
def test_nearest(
    size: tuple[int, int], scale: tuple[float, float], by_scale: bool, data: st.DataObject
) -> None:
    result = tuple(max(int(n * s), 1) for n, s in zip(size, scale, strict=True))
    args = (None, scale) if by_scale else (result, None)
    Operator.drawn("aten.upsample_nearest2d.vec", args, (1, 2, *size)).check(data)


@many
@given(pair(extents), st.tuples(scales, scales), st.booleans(), st.booleans(), st.data())
def test_bilinear(
    size: tuple[int, int],
    scale: tuple[float, float],
    by_scale: bool,
    corners: bool,
    data: st.DataObject,
) -> None:
    result = tuple(max(int(n * s), 1) for n, s in zip(size, scale, strict=True))
    args = (None, corners, scale) if by_scale else (result, corners, None)
    Operator.drawn("aten.upsample_bilinear2d.vec", args, (1, 2, *size)).check(data)


@many
@given(
    pair(extents),
    st.tuples(*[st.integers(-4, 12)] * 4),
    st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    st.data(),
)
def test_pad(
    size: tuple[int, int], amounts: tuple[int, ...], mode: str, data: st.DataObject
) -> None:
    left = [n + sum(min(a, 0) for a in p) for n, p in zip(size[::-1], (amounts[:2], amounts[2:]))]  # noqa: B905
    assume(mode != "circular" or min(left) >= max(*amounts, 1))  # torch reads beyond its input
    args = (amounts, mode, 0.5 if mode == "constant" else None)
    Operator.drawn("aten.pad.default", args, (1, 2, *size)).check(data)


@many
@given(pair(st.integers(1, 6)), st.integers(1, 3), st.booleans(), st.data())
def test_pixel_shuffles(size: tuple[int, int], factor: int, up: bool, data: st.DataObject) -> None:
    if up:
        shape = (2, 2 * factor * factor, *size)
    else:
        shape = (2, 2, size[0] * factor, size[1] * factor)
    op = "aten.pixel_shuffle.default" if up else "aten.pixel_unshuffle.default"
    Operator.drawn(op, (factor,), shape).check(data)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 5)])
def test_images_without_a_batch(kernel: tuple[int, int]) -> None:
    """Three dimensions: channels, rows, columns."""
    x, w = (2, 9, 8), (3, 2, *kernel)
    operator = Operator("aten.conv2d.default", (None, (1, 1), (2, 2), (1, 1), 1), x, w)
    height, width = operator.whole.shape[-2:]
    made = operator.box(Box(((0, 3), (1, height), (0, width - 1))))
    torch.testing.assert_close(made, operator.whole[:, 1:, :-1], rtol=1e-11, atol=1e-11)
