"""Gradients that are written out: the same as those of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.records import Ref
from terrazzo.runtime.derivatives import Pool, derivative
from terrazzo.runtime.operators import Operator
from terrazzo.runtime.pooling import CACHED

X, Y = Ref("x"), Ref("y")
NORM = (X, Ref("moments"), Ref("weight"), Ref("bias"), 1e-3, "batch", 0)
SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "terrazzo.normalize": [(2, 3, 5, 4), (2, 3), (3,), (3,)],
    "terrazzo.max_pool2d": [(2, 3, 5, 4), (3,)],
    "aten.add.Tensor": [(2, 3, 5, 4), (2, 3, 1, 1)],
    "aten.conv2d.default": [(2, 4, 5, 6), (6, 2, 3, 3), (6,)],
}
CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("aten.relu.default", (X,)),
    ("aten.hardtanh.default", (X, 0.0, 6.0)),
    ("aten.hardtanh.default", (X,)),
    ("aten.leaky_relu.default", (X, 0.1)),
    ("aten.sigmoid.default", (X,)),
    ("aten.silu.default", (X,)),
    ("aten.hardswish.default", (X,)),
    ("aten.hardsigmoid.default", (X,)),
    ("aten.add.Tensor", (X, Y)),
    ("aten.conv2d.default", (X, Y, Ref("b"), (2, 1), (1, 0), (1, 1), 2)),
    ("aten.conv2d.default", (X, Y, None, (1, 1), (1, 1), (2, 1), 2)),
    ("aten.max_pool2d.default", (X, (2, 2))),
    ("aten.max_pool2d.default", (X, (3, 2), (2, 1), (1, 0))),
    ("terrazzo.max_pool2d", (X, (2, 2), (2, 2), (0, 0), (1, 1), False, Ref("weight"))),
    ("terrazzo.max_pool2d", (X, (3, 2), (2, 1), (1, 0), (1, 1), False, Ref("weight"))),
    ("terrazzo.normalize", NORM),
    ("terrazzo.moments", (X, "batch", 0)),
]


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize(("op", "args"), CASES)
def test_as_autograd(op: str, args: tuple[Any, ...], overwrites: bool) -> None:
    torch.manual_seed(0)
    shapes = SHAPES.get(op, [(2, 3, 5, 4)])[: sum(isinstance(a, Ref) for a in args)]
    tensors = [torch.randn(shape, dtype=torch.float64) * 4 for shape in shapes]
    if op == "terrazzo.normalize":
        tensors[1] = tensors[1].abs() + 0.1
    entered = [tensor.clone().requires_grad_() for tensor in tensors]
    right: Tensor = Operator(op, args)(entered, lambda *_: None)  # type: ignore[arg-type, return-value]
    grad = torch.randn(right.shape, dtype=torch.float64)
    expected = torch.autograd.grad(right, entered, grad, allow_unused=True)
    call = Operator(op, args)
    if overwrites:
        call.overwrite()
    written = derivative(call, wanted=[True] * len(shapes), late=())
    assert written is not None
    result, kept = written.forward([tensor.clone() for tensor in tensors])
    torch.testing.assert_close(result, right.detach(), rtol=1e-13, atol=1e-13)
    given = grad.clone()
    found = written.backward(None, given, kept, own=overwrites)  # type: ignore[arg-type]
    assert overwrites or torch.equal(given, grad), "what others read is left alone"
    for one, other in zip_longest(found, expected):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        else:  # a weight that only its sign is asked of
            assert one is None


def test_a_pool_adds_to_the_gradient_that_there_is() -> None:
    """As what flows back and an addition; through a few maps at a time."""
    shape = (3, 5, 301, 299)
    assert shape[0] * shape[1] * shape[2] * shape[3] > CACHED
    for padding in ((0, 0), (1, 1)):
        call = Operator("aten.max_pool2d.default", (X, (3, 3), (2, 2), padding))
        written = derivative(call, wanted=[True], late=())
        assert isinstance(written, Pool)
        result, kept = written.forward([torch.randn(shape)])
        grad, before = torch.randn(result.shape), torch.randn(shape)
        (flow,) = written.backward(None, grad, kept, own=False)  # type: ignore[arg-type]
        assert flow is not None
        found = before.clone()
        assert written.add(found, grad, kept)
        torch.testing.assert_close(found, before + flow)


@pytest.mark.parametrize("has_statistics", [True, False])
@pytest.mark.parametrize("affine", ["weight bias", "bias", ""])
def test_a_norm_of_all_there_is(affine: str, has_statistics: bool) -> None:
    """As torch's own in training mode: result, gradients and new running statistics."""
    torch.manual_seed(0)
    names = [*affine.split(), *(("mean", "variance") if has_statistics else ())]
    slots = [Ref(n) if n in names else None for n in ("weight", "bias", "mean", "variance")]
    call = Operator("terrazzo.batch_norm", (X, *slots, 0.3, 1e-3), shape=(2, 3, 5, 4))
    x = (torch.randn(2, 3, 5, 4, dtype=torch.float64) * 4 + 7).requires_grad_()
    given = {n: torch.rand(3, dtype=torch.float64) + 0.5 for n in names}
    trained = [x, *(given[n].requires_grad_() for n in affine.split())]
    kept = [given[n].detach().clone() if n in given else None for n in ("mean", "variance")]
    right = F.batch_norm(x, *kept, given.get("weight"), given.get("bias"), True, 0.3, 1e-3)
    grad = torch.randn(right.shape, dtype=torch.float64)
    expected = torch.autograd.grad(right, trained, grad, retain_graph=True)
    wanted = [True] * len(trained) + [False] * (len(names) + 1 - len(trained))
    written = derivative(call, wanted=wanted, late=())
    assert written is not None
    (result, *new), saved = written.forward([x.detach(), *(given[n].detach() for n in names)])
    torch.testing.assert_close(result, right.detach(), rtol=1e-12, atol=1e-12)
    if has_statistics:
        for one, other in zip(new, kept, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    else:
        assert new == [None, None]
    found = written.backward(None, grad, saved, own=False)  # type: ignore[arg-type]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    through, *_ = call([x, *given.values()], lambda *_: None)  # type: ignore[arg-type, return-value]
    for one, other in zip(torch.autograd.grad(through, trained, grad), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_norm_over_single_values_is_left_to_torch_which_refuses_it() -> None:
    call = Operator("terrazzo.batch_norm", (X, *[None] * 4, 0.3, 1e-3), shape=(1, 3, 1, 1))
    assert derivative(call, wanted=[True], late=()) is None


def test_a_falling_leaky_relu_is_left_to_autograd() -> None:
    call = Operator("aten.leaky_relu.default", (X, -0.1))
    assert derivative(call, wanted=[True], late=()) is None


def test_wide_and_dilated_windows_are_left_to_autograd() -> None:
    for args in ((X, (5, 5)), (X, (2, 2), (2, 2), (0, 0), (2, 2)), (X, 2, 2, 0, 1, True)):
        assert derivative(Operator("aten.max_pool2d.default", args), wanted=[True], late=()) is None


def test_only_what_flows_is_computed() -> None:
    call = Operator("aten.conv2d.default", (X, Y, None, (1, 1), (0, 0), (1, 1), 1))
    written = derivative(call, wanted=[False, True], late=())
    assert written is not None
    result, kept = written.forward([torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)])
    ones = torch.ones_like(result)
    flows = written.backward(None, ones, kept, own=True)  # type: ignore[arg-type]
    assert flows[0] is None and flows[1] is not None
