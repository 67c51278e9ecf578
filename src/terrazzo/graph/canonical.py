"""One spelling for each meaning: rewrites ATen operators into the few forms the rules know.

What torch.export leaves behind says the same thing in several ways (view, flatten, squeeze;
chunk, split, unbind) or returns tuples of which one part is used. Here each becomes one node with
plain outputs. Names under ``terrazzo.`` are operators whose meaning is ours: norms that give their
new running statistics back, and random operators numbered by their place in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from terrazzo.errors import ModelError
from terrazzo.records import Argument, Dtype, Node, Ref

Parts = Mapping[int, str]
"""Names of the used outputs of an operator, by position."""


@dataclass(frozen=True)
class Call:
    """One operator as exported: normalised arguments, outputs in use, and shapes to look up."""

    op: str
    args: tuple[Argument, ...]
    parts: Parts
    layer: str
    gradient: bool
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def node(
        self, op: str, args: tuple[Argument, ...], *outputs: str, gradient: bool | None = None
    ) -> Node:
        keep = self.gradient if gradient is None else gradient
        return Node(op, args, outputs, self.layer, gradient=keep)

    def shape_of(self, argument: Argument) -> tuple[int, ...]:
        assert isinstance(argument, Ref)
        return self.shapes[argument.name]


Rewrite = Callable[[Call], list[Node]]


def _reshape(call: Call) -> list[Node]:
    (name,) = call.parts.values()
    return [call.node("aten.reshape.default", (call.args[0], call.shapes[name]), name)]


def _slices(call: Call) -> list[Node]:
    """chunk, split and their kin: one slice for each part in use."""
    source = call.args[0]
    dim = next(a for a in reversed(call.args) if isinstance(a, int)) if len(call.args) > 2 else 0
    dim %= len(call.shape_of(source))
    start, nodes = 0, []
    sizes = _sizes(call, dim)
    for position, size in enumerate(sizes):
        if position in call.parts:
            args = (source, dim, start, start + size, 1)
            nodes.append(call.node("aten.slice.Tensor", args, call.parts[position]))
        start += size
    return nodes


def _sizes(call: Call, dim: int) -> list[int]:
    extent = call.shape_of(call.args[0])[dim]
    given = call.args[1]
    if isinstance(given, tuple):
        return [size for size in given if isinstance(size, int)]
    assert isinstance(given, int)
    size = -(-extent // given) if call.op.startswith("aten.chunk") else given
    return [min(size, extent - start) for start in range(0, extent, size)]


def _unbind(call: Call) -> list[Node]:
    dim = call.args[1] if len(call.args) > 1 else 0
    return [
        call.node("aten.select.int", (call.args[0], dim, position), name)
        for position, name in call.parts.items()
    ]


def _broadcast(call: Call) -> list[Node]:
    sources = call.args[0]
    assert isinstance(sources, tuple)
    return [
        call.node("aten.expand.default", (sources[position], call.shapes[name], False), name)
        for position, name in call.parts.items()
    ]


def _first(op: str, arguments: int | None = None) -> Rewrite:
    """An operator with a tuple result of which only the first part is used."""

    def rewrite(call: Call) -> list[Node]:
        if set(call.parts) != {0}:
            return [call.node(call.op, call.args, *_all_parts(call.parts))]
        return [call.node(op, call.args[:arguments], call.parts[0])]

    return rewrite


def _all_parts(parts: Parts) -> tuple[str, ...]:
    return tuple(parts.get(position, "") for position in range(max(parts) + 1))


def _batch_norm(call: Call) -> list[Node]:
    """In training: (x, weight, bias, mean, variance, momentum, eps) to (y, mean, variance)."""
    if call.op.endswith("no_stats"):
        x, weight, bias, _, momentum, eps = call.args
        mean = variance = None
    else:
        x, weight, bias, mean, variance, _, momentum, eps = call.args
    args = (x, weight, bias, mean, variance, momentum, eps)
    outputs = tuple(call.parts.get(position, "") for position in (0, 3, 4))
    return [call.node("terrazzo.batch_norm", args, *outputs)]


def _batch_norm_eval(call: Call) -> list[Node]:
    x, weight, bias, mean, variance, momentum, eps = call.args
    args = (x, weight, bias, mean, variance, False, momentum, eps, False)
    return [call.node("aten.batch_norm.default", args, call.parts[0])]


def _instance_norm(call: Call) -> list[Node]:
    x, weight, bias, mean, variance, use_input, momentum, eps, _ = call.args
    if not use_input:
        fixed = (x, weight, bias, mean, variance, False, momentum, eps, False)
        return [call.node("aten.batch_norm.default", fixed, call.parts[0])]
    args = (x, weight, bias, mean, variance, momentum, eps)
    stem = call.parts[0]
    outputs = (stem, f"{stem}_mean", f"{stem}_variance") if mean is not None else (stem, "", "")
    return [call.node("terrazzo.instance_norm", args, *outputs)]


def _group_norm(call: Call) -> list[Node]:
    x, groups, weight, bias, eps = call.args[:5]
    return [call.node("terrazzo.group_norm", (x, groups, weight, bias, eps), call.parts[0])]


def _layer_norm(call: Call) -> list[Node]:
    if set(call.parts) != {0}:
        return [call.node(call.op, call.args, *_all_parts(call.parts))]
    return [call.node("aten.layer_norm.default", (*call.args, False), call.parts[0])]


def _adaptive_avg(call: Call) -> list[Node]:
    """With sizes that divide, an adaptive pool is a plain one."""
    name, shape = call.parts[0], call.shape_of(call.args[0])
    result = call.shapes[name]
    divides = all(a % b == 0 for a, b in zip(shape[-2:], result[-2:], strict=True))
    if not divides or result[-2:] == (1, 1):
        return [call.node("aten.adaptive_avg_pool2d.default", call.args, name)]
    kernel = tuple(a // b for a, b in zip(shape[-2:], result[-2:], strict=True))
    args = (call.args[0], kernel, kernel, (0, 0), False, True, None)
    return [call.node("aten.avg_pool2d.default", args, name)]


def _full(fill: float | None) -> Rewrite:
    """new_zeros and its kin take only size and dtype from the tensor they are called on."""

    def rewrite(call: Call) -> list[Node]:
        name = call.parts[0]
        value = call.args[2] if fill is None else fill
        args = (call.shapes[name], value, Dtype(call.dtypes[name]), None, None, None)
        return [call.node("aten.full.default", args, name)]

    return rewrite


def _renamed(op: str, keep: int) -> Rewrite:
    """An operator of ours with the first arguments of torch's."""

    def rewrite(call: Call) -> list[Node]:
        return [call.node(op, call.args[:keep], call.parts[0])]

    return rewrite


def _dropout(call: Call) -> list[Node]:
    if call.op == "aten.dropout.default" and not call.args[2]:
        return [call.node("aten.alias.default", call.args[:1], call.parts[0])]
    if set(call.parts) - {0}:
        raise ModelError(
            f"{call.layer or call.op}: the mask of a dropout is used by the model; "
            "draw it with torch.rand_like instead"
        )
    x, p = call.args[:2]
    if p in (0, 1):  # torch draws nothing here, and the next operator draws what this one would
        op, args = ("aten.mul.Scalar", (x, 0.0)) if p else ("aten.alias.default", (x,))
        return [call.node(op, args, call.parts[0])]
    return [call.node("terrazzo.dropout", call.args[:2], call.parts[0])]


def _draw(op: str) -> Rewrite:
    """torch.rand and torch.randn: a tensor made of nothing but its size."""

    def rewrite(call: Call) -> list[Node]:
        name = call.parts[0]
        return [call.node(op, (call.shapes[name], Dtype(call.dtypes[name])), name)]

    return rewrite


REWRITES: dict[str, Rewrite] = {
    **{
        f"aten.{op}": _reshape
        for op in (
            "view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int "
            "squeeze.default squeeze.dim squeeze.dims unsqueeze.default view_as.default "
            "_reshape_alias.default view_copy.default reshape_as.default"
        ).split()
    },
    **{
        f"aten.{op}": _slices
        for op in (
            "split.Tensor split.sizes split_with_sizes.default chunk.default unsafe_split.Tensor "
            "unsafe_chunk.default unsafe_split_with_sizes.default"
        ).split()
    },
    "aten.unbind.int": _unbind,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.max_pool2d_with_indices.default": _first("aten.max_pool2d.default"),
    "aten.adaptive_max_pool2d.default": _first("terrazzo.adaptive_max_pool2d"),
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_eval,
    "aten.instance_norm.default": _instance_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.adaptive_avg_pool2d.default": _adaptive_avg,
    "aten._adaptive_avg_pool2d.default": _adaptive_avg,
    "aten.new_zeros.default": _full(0.0),
    "aten.new_empty.default": _full(0.0),
    "aten.empty.memory_format": _full(0.0),
    "aten.new_ones.default": _full(1.0),
    "aten.new_full.default": _full(None),
    "aten.copy.default": _renamed("terrazzo.copy", 2),
    "aten.native_dropout.default": _dropout,
    "aten.dropout.default": _dropout,
    "aten.bernoulli.p": _renamed("terrazzo.bernoulli", 2),
    "aten.bernoulli.default": _renamed("terrazzo.bernoulli", 1),
    "aten.rand_like.default": _renamed("terrazzo.rand_like", 1),
    "aten.randn_like.default": _renamed("terrazzo.randn_like", 1),
    "aten.rand.default": _draw("terrazzo.rand"),
    "aten.randn.default": _draw("terrazzo.randn"),
}

RANDOM = frozenset(
    f"terrazzo.{name}" for name in "dropout bernoulli rand_like randn_like rand randn".split()
)


def rewrite(call: Call) -> list[Node]:
    """The nodes that say what one exported operator means."""
    change = REWRITES.get(call.op)
    if change is None:
        return [call.node(call.op, call.args, *_all_parts(call.parts))]
    return change(call)
