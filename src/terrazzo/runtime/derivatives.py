"""Derivatives: operators with their gradients written out, for steps that do without autograd.

Autograd serves every operator, and asks its price for each: nodes, edges, an engine that is started
for every piece between two messages. Networks of many small layers spend more on that than on their
arithmetic. The few operators that they consist of stand here with what they keep and what flows
back, in the very calls of ATen that autograd would make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from terrazzo.graph.pooling import POOL, TURNING_POOL
from terrazzo.graph.rules.norms import BATCH
from terrazzo.records import Ref
from terrazzo.runtime.convolutions.backward import gradients
from terrazzo.runtime.convolutions.forward import conv2d
from terrazzo.runtime.convolutions.late import OP as CONVOLUTION
from terrazzo.runtime.convolutions.late import flow_back
from terrazzo.runtime.convolutions.pointwise import gaps_of
from terrazzo.runtime.norms import (
    fixed,
    fixed_flow,
    own_moments,
    own_moments_flow,
    whole_flow,
    whole_running,
)
from terrazzo.runtime.operators import Operator
from terrazzo.runtime.pooling import (
    Around,
    Windows,
    add_pooled_flow,
    pooled,
    pooled_flow,
    sides,
    windows_of,
)

if TYPE_CHECKING:
    from terrazzo.runtime.steps.step import Run

Flows = Sequence[Tensor | None]
"""By input: its gradient, where it is wanted."""
Form = tuple[torch.Size, torch.dtype]

aten = torch.ops.aten


class Derivative(Protocol):
    """One operator with its gradient; ``fresh``: that lies in memory of its own.

    ``keeps`` says how many of its inputs, the first ones, are read again in the backward pass, and
    ``keeps_result`` whether its result is.
    """

    fresh: bool
    keeps: int
    keeps_result: bool

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The result, and what ``backward`` needs of it. Of several results the first one carries
        a gradient."""
        ...

    def backward(self, run: Run, grad: Tensor, kept: Any, *, own: bool) -> Flows:
        """Gradients of the inputs; ``own``: nobody else reads ``grad``, it may be overwritten."""
        ...


class Activation:
    """One input; ``back`` makes its gradient from what is kept: the result, or the input."""

    fresh = True

    def __init__(self, call: Operator, back: Back, *, of_result: bool) -> None:
        self._call, self._back, self._of_result = call.call, back, of_result
        self.keeps, self.keeps_result = int(not of_result), of_result
        if of_result and call.may_overwrite:
            self._call = OVERWRITING.get(call.op, call.call)
        self._arguments = call.args[1:]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        result: Tensor = self._call(tensors[0], *self._arguments)
        return result, result if self._of_result else tensors[0]

    def backward(self, run: Run, grad: Tensor, kept: Tensor, *, own: bool) -> Flows:
        own = own and grad.dtype == kept.dtype
        return (self._back(grad, kept, self._arguments, own),)


class Sum:
    """The sum of two maps; one may be broadcast."""

    fresh, keeps, keeps_result = False, 0, False

    def __init__(self, wanted: Sequence[bool]) -> None:
        self._wanted = wanted

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Form]]:
        one, other = tensors
        return one + other, ((one.shape, one.dtype), (other.shape, other.dtype))

    def backward(self, run: Run, grad: Tensor, kept: Sequence[Form], *, own: bool) -> Flows:
        return [
            (grad if grad.shape == shape else grad.sum_to_size(shape)).to(dtype) if wanted else None
            for (shape, dtype), wanted in zip(kept, self._wanted, strict=True)
        ]


class Convolution:
    """Its weights' gradients wait if ``late`` names them."""

    fresh, keeps, keeps_result = True, 2, False

    def __init__(self, call: Operator, wanted: Sequence[bool], late: Sequence[str]) -> None:
        _, _, bias, *how = call.args
        self._has_bias = bias is not None
        self._how = tuple(how)
        # Of channels that several devices sum up, one device adds the bias; the others have none.
        by_bias = self._has_bias and wanted[2]
        self._flows, self._mask = wanted[0], [wanted[0], wanted[1], by_bias]
        self._late = tuple(late) if self._has_bias else tuple(late)[:1]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, weight = tensors[0], tensors[1]
        bias = tensors[2] if self._has_bias else None
        return conv2d(x, weight, bias, *self._how), (x, weight)

    def backward(self, run: Run, grad: Tensor, kept: tuple[Tensor, Tensor], *, own: bool) -> Flows:
        stride, padding, dilation, groups = self._how
        how = (stride, padding, gaps_of(*kept, dilation), False, (0, 0), groups)
        if self._late:
            return (flow_back(run, grad, kept, how=how, names=self._late, flows=self._flows),)
        return gradients((grad, *kept, [grad.shape[-3]], *how), self._mask)


class Normalisation:
    """A batch norm with known statistics."""

    fresh, keeps_result = True, False

    def __init__(self, call: Operator, wanted: Sequence[bool]) -> None:
        _, _, weight, bias, self._eps, _, _ = call.args
        self._has = (weight is not None, bias is not None)
        self.keeps = 3 if self._has[0] else 2
        self._flows = wanted[0]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        x, moments, *affine = tensors
        weight = affine[0] if self._has[0] else None
        bias = affine[-1] if self._has[1] else None
        return fixed(x, moments, (weight, bias), self._eps), (x, moments, weight)

    def backward(self, run: Run, grad: Tensor, kept: tuple[Any, ...], *, own: bool) -> Flows:
        x, moments, weight = kept
        gx, flow, gw, gb = fixed_flow(grad, x, moments, weight, self._eps, flows=self._flows)
        return (gx, flow, *(part for part, has in zip((gw, gb), self._has, strict=True) if has))


class WholeNormalisation:
    """A batch norm of all there is, with its new running statistics."""

    fresh, keeps_result = True, False

    def __init__(self, call: Operator, wanted: Sequence[bool]) -> None:
        _, *statistics, self._momentum, self._eps = call.args
        self._has = [argument is not None for argument in statistics]
        self.keeps = 2 if self._has[0] else 1
        asked = iter(wanted[1:])
        affine = [has and next(asked) for has in self._has[:2]]
        self._wanted = [wanted[0], *affine]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, rest = tensors[0], iter(tensors[1:])
        weight, bias, mean, variance = (next(rest) if has else None for has in self._has)
        found = own_moments(x)
        result = fixed(x, found, (weight, bias), self._eps)
        new = whole_running(found, mean, variance, self._momentum, x)
        return (result, *new), (x, found, weight)

    def backward(self, run: Run, grad: Tensor, kept: tuple[Any, ...], *, own: bool) -> Flows:
        x, found, weight = kept
        flows = whole_flow(grad, x, found, weight, eps=self._eps, wanted=self._wanted)
        has = (True, *self._has[:2])
        return [flow for flow, is_there in zip(flows, has, strict=True) if is_there]


class Statistics:
    """Mean and variance of channels that a device has all of."""

    fresh, keeps, keeps_result = True, 1, False

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (x,) = tensors
        found = own_moments(x)
        return found, (x, found)

    def backward(self, run: Run, grad: Tensor, kept: tuple[Tensor, Tensor], *, own: bool) -> Flows:
        return (own_moments_flow(grad, *kept),)


class Pool:
    """A max pool by rows; as torch's own, it keeps what it has read from being changed.

    ``turning``: it goes by the sign of its second input, to which no gradient flows.
    """

    fresh, keeps, keeps_result = True, 1, False

    def __init__(self, windows: Windows, around: Around, *, turning: bool) -> None:
        self._windows, self._around, self._turning = windows, around, turning

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, torch.Size]]:
        x, weight = tensors[0].contiguous(), tensors[1] if self._turning else None
        result, numbers = pooled(x, self._windows, self._around, weight=weight, numbered=True)
        assert numbers is not None
        return result, (numbers, x.shape)

    def backward(
        self, run: Run, grad: Tensor, kept: tuple[Tensor, torch.Size], *, own: bool
    ) -> Flows:
        return (pooled_flow(grad, *kept, self._windows, self._around),)

    def add(self, flow: Tensor, grad: Tensor, kept: tuple[Tensor, torch.Size]) -> bool:
        """Adds the gradient to the one that there is already, where that can be done."""
        if not flow.is_contiguous() or flow.dtype != grad.dtype:
            return False
        add_pooled_flow(flow, grad, kept[0], self._windows, self._around)
        return True


def _pool(
    _: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: Any = False,
    *weight: Any,
) -> Pool | None:
    """By the arguments of ``aten.max_pool2d``, and a weight behind them."""
    windows = windows_of(kernel, stride, dilation, ceil)
    return None if windows is None else Pool(windows, sides(padding), turning=bool(weight))


Back = Callable[[Tensor, Tensor, Sequence[Any], bool], Tensor]
"""Makes the gradient of an activation from that of its result, what was kept, its arguments, and
whether it may overwrite the gradient."""


def _back(name: str, defaults: Sequence[Any] = (), *fixed: Any) -> Back:
    """torch's own; ``defaults`` of its arguments may be left out, ``fixed`` come behind them."""
    packet = getattr(aten, f"{name}_backward")
    place = "grad_input" if "grad_input" in packet.overloads() else "out"
    overwriting = getattr(packet, place)

    def back(grad: Tensor, kept: Tensor, given: Sequence[Any], own: bool) -> Tensor:
        arguments = (grad, kept, *given, *defaults[len(given) :], *fixed)
        found: Tensor = (
            overwriting(*arguments, **{place: grad}) if own else packet.default(*arguments)
        )
        return found

    return back


OF_RESULT: dict[str, Back] = {
    "aten.relu.default": _back("threshold", (), 0),
    "aten.leaky_relu.default": _back("leaky_relu", (0.01,), False),
    "aten.hardtanh.default": _back("hardtanh", (-1, 1)),
    "aten.sigmoid.default": _back("sigmoid"),
}
"""A leaky ReLU's result has the sign of its input, and a clamped one is within its bounds where the
input was: for both the input serves as well."""
OF_BOTH = frozenset({"aten.leaky_relu.default", "aten.hardtanh.default"})
"""Those of them for which torch keeps the input, which may be kept here too."""
OF_INPUT: dict[str, Back] = {
    "aten.silu.default": _back("silu"),
    "aten.hardswish.default": _back("hardswish"),
    "aten.hardsigmoid.default": _back("hardsigmoid"),
}


OVERWRITING: dict[str, Callable[..., Tensor]] = {"aten.hardtanh.default": aten.hardtanh_.default}
"""Those that only here overwrite their input: autograd would copy it first, for the gradient."""


def derivative(
    call: Operator, *, wanted: Sequence[bool], late: Sequence[str], shown: bool = False
) -> Derivative | None:
    """The operator with its gradient; None where that is left to autograd.

    ``wanted`` says which inputs carry a gradient, ``late`` names those of a convolution that wait;
    a result that is ``shown`` to the caller may be changed in place where torch keeps the input.
    """
    op, args = call.op, call.args
    if op in OF_RESULT:
        if op == "aten.leaky_relu.default" and any(slope < 0 for slope in args[1:]):
            return None  # its sign is lost in the result
        return Activation(call, OF_RESULT[op], of_result=not (shown and op in OF_BOTH))
    if op in OF_INPUT:
        return Activation(call, OF_INPUT[op], of_result=False)
    if op == "aten.add.Tensor" and len(wanted) == 2 and all(alpha == 1 for alpha in args[2:]):
        return Sum(wanted)
    if op in (POOL, TURNING_POOL):
        return _pool(*args)
    if op == CONVOLUTION and len(args) == 7 and len(call.shape) != 3:
        return Convolution(call, wanted, late)
    if op == "terrazzo.normalize" and args[5] == BATCH:
        return Normalisation(call, wanted)
    if op == "terrazzo.batch_norm" and len(call.shape) == 4 and not isinstance(args[5], Ref):
        single = prod(call.shape) == call.shape[1]  # which torch refuses, in its own words
        return None if single else WholeNormalisation(call, wanted)
    if op == "terrazzo.moments" and args[1] == BATCH:
        return Statistics()
    return None
