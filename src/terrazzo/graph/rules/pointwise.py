"""Operators that compute each element from the elements at the same place, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.geometry import Box
from terrazzo.graph.rules.rule import (
    LOCAL,
    TABLE,
    Axes,
    AxesOf,
    Local,
    Placement,
    Read,
    Rule,
    is_cut,
    whole,
)
from terrazzo.records import Graph, Node


def broadcast_axes(shape: Sequence[int], graph: Graph, names: Sequence[str], axes: AxesOf) -> Axes:
    """The letters of a broadcast result: each dimension takes the first letter it meets."""
    letters = ["."] * len(shape)
    for name in names:
        offset = len(shape) - len(graph.shape(name))
        for dim, (extent, letter) in enumerate(zip(graph.shape(name), axes[name], strict=True)):
            place = offset + dim
            if letter != "." and letters[place] == "." and extent == shape[place]:
                letters[place] = letter
    return "".join(
        letter if letter == "." or letters.index(letter) == dim else "."
        for dim, letter in enumerate(letters)
    )


def broadcast_read(box: Box, shape: Sequence[int], source: Sequence[int]) -> Read:
    """The part of a (smaller) tensor that broadcasting lays over a box of the result."""
    if box.is_empty:
        return Read(Box.empty(len(source)))
    offset = len(shape) - len(source)
    spans = tuple(
        (0, 1) if extent == 1 and shape[offset + dim] != 1 else box.spans[offset + dim]
        for dim, extent in enumerate(source)
    )
    return Read(Box(spans))


def _place(node: Node, graph: Graph, axes: AxesOf) -> Placement:
    letters = broadcast_axes(graph.shape(node.output), graph, node.refs, axes)
    return Placement(LOCAL, letters) if is_cut(letters) else whole(node, graph)


def _local(node: Node, graph: Graph, box: Box) -> Local:
    shape = graph.shape(node.output)
    reads = tuple(broadcast_read(box, shape, graph.shape(name)) for name in node.refs)
    return Local(reads, node.op, node.args)


def _expand(node: Node, graph: Graph, box: Box) -> Local:
    reads = (broadcast_read(box, graph.shape(node.output), graph.shape(node.refs[0])),)
    return Local(reads, node.op, (node.args[0], box.shape, *node.args[2:]))


UNARY = """
    abs acos acosh alias asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min
    clone contiguous cos cosh deg2rad detach elu empty_like erf erfc erfinv exp exp2 expm1 fill
    floor frac full_like gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan
    leaky_relu lgamma lift_fresh_copy log log10 log1p log2 log_sigmoid logical_not logit mish
    nan_to_num neg ones_like positive rad2deg reciprocal relu relu6 round rsqrt rsub selu sgn
    sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh tanhshrink
    threshold trunc zeros_like _to_copy type_as to digamma
"""

BINARY = """
    add sub mul div pow remainder fmod floor_divide true_divide maximum minimum atan2 hypot xlogy
    logaddexp copysign eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor where addcmul addcdiv lerp masked_fill heaviside squared_difference
    clamp_max clamp_min clamp rsub float_power fmax fmin __and__ __or__ __xor__
"""

OVERLOADS = """
    default Tensor Scalar Tensor_Scalar Scalar_Tensor Tensor_Tensor Tensor_mode Scalar_mode self
    int float out_dtype dtype dtype_layout other ScalarSelf ScalarOther decimals
"""

pointwise = Rule(place=_place, local=_local)
names = sorted({*UNARY.split(), *BINARY.split()})
TABLE.add(pointwise, *(f"aten.{name}.{over}" for name in names for over in OVERLOADS.split()))
TABLE.add(
    pointwise,
    "terrazzo.copy",
    "terrazzo.dropout",
    "terrazzo.bernoulli",
    "terrazzo.rand_like",
    "terrazzo.randn_like",
)
TABLE.add(Rule(place=_place, local=_expand), "aten.expand.default")
