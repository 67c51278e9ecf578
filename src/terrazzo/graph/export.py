"""From an nn.Module and example inputs to a Graph, by torch.export."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Node as FxNode
from torch.utils import _pytree as pytree

from terrazzo.errors import ModelError
from terrazzo.graph.canonical import RANDOM, Call, rewrite
from terrazzo.graph.flops import flops
from terrazzo.graph.pooling import pool_first
from terrazzo.graph.tracing import fixed_momentum, lower, path_taken, seeded, trace
from terrazzo.records import Argument, Dtype, Graph, Node, Ref, Value

KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}

ASSERTED = frozenset({"aten._assert_tensor_metadata.default"})
"""What export notes of dtypes it saw; a net makes another graph when those change."""


@dataclass(frozen=True)
class Export:
    """A graph, with the tensors that are baked into it rather than held by the model."""

    graph: Graph
    constants: Mapping[str, torch.Tensor]


def export(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Export:
    """Exports a model in the mode it is in (train or eval) for inputs of these shapes.

    It is traced twice under different seeds: a branch that depends on Python's random numbers
    would be frozen silently, and shows as a difference. Only what differs is lowered twice.
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    traces = []
    with fixed_momentum(model) as cumulative:
        for seed in (0, 1):
            with seeded(seed):
                traces.append(trace(model, args, kwargs))
    if path_taken(traces[0]) == path_taken(traces[1]):
        traces.pop()
    exports = []
    for program in traces:
        with seeded(0):
            lowered = lower(program, model, args=args, kwargs=kwargs)
        exports.append(_read(model, Reader(lowered, cumulative)))
    if len({export.graph.digest for export in exports}) > 1:
        raise ModelError(
            f"{type(model).__name__} takes another path when random seeds differ: a branch or a "
            f"size depends on Python's random numbers{_first_difference(exports)}. Draw with "
            "torch inside the model (torch.rand, bernoulli_), or outside of net(...)."
        )
    return exports[0]


def _read(model: nn.Module, reader: Reader) -> Export:
    """What the reader stumbles over is a limit of ours, and told as one."""
    try:
        return reader.read()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} holds something that is not understood: {error!r}. Wrap a "
            "smaller part of it (model.backbone = tz.parallelize(...))."
        ) from error


def _first_difference(exports: Sequence[Export]) -> str:
    for one, other in zip(exports[0].graph.nodes, exports[1].graph.nodes, strict=False):
        if one != other:
            return f" (first at {one.title})"
    return ""


class Reader:
    """Reads one exported program into a Graph."""

    def __init__(self, program: torch.export.ExportedProgram, cumulative: frozenset[str]) -> None:
        self.program = program
        self.cumulative = cumulative
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.mutations: dict[str, str] = {}
        self.randoms = 0

    def read(self) -> Export:
        inputs = self._read_inputs()
        self._read_nodes(self.program.graph.nodes, {}, gradient=True)
        outputs = self._read_outputs()
        self._add_instance_norm_mutations()
        self._set_cumulative_momentum()
        self.nodes = [replace(node, flops=flops(node, self.values)) for node in self.nodes]
        used = {name for node in self.nodes for name in node.refs}
        kept = {
            name: value
            for name, value in self.values.items()
            if value.kind in ("input", "node") or name in used or Ref(name) in outputs
        }
        graph = Graph(
            values=kept,
            nodes=tuple(self.nodes),
            inputs=inputs,
            outputs=outputs,
            mutations=self.mutations,
            output_tree=pytree.treespec_dumps(self.program.call_spec.out_spec),
        )
        constants = {
            value.target: self.program.constants[value.target]
            for value in kept.values()
            if value.kind == "constant"
        }
        return Export(pool_first(graph), constants)

    def _read_inputs(self) -> tuple[str, ...]:
        placeholders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        inputs = []
        for spec in self.program.graph_signature.input_specs:
            if spec.kind not in KINDS:
                raise ModelError(f"the model holds {spec.kind.name.lower()} {spec.arg}: refused")
            name = spec.arg.name
            if spec.kind == InputKind.USER_INPUT:
                inputs.append("" if isinstance(spec.arg, ConstantArgument) else name)
            if isinstance(spec.arg, ConstantArgument):
                continue
            kind = KINDS[spec.kind]
            target = spec.target or ""
            self._add_value(name, placeholders[name].meta["val"], kind=kind, target=target)
        return tuple(inputs)

    def _read_outputs(self) -> tuple[Argument, ...]:
        outputs: list[Argument] = []
        for spec in self.program.graph_signature.output_specs:
            if spec.kind == OutputKind.USER_OUTPUT:
                if isinstance(spec.arg, ConstantArgument):
                    outputs.append(spec.arg.value)
                else:
                    outputs.append(Ref(spec.arg.name))
            elif spec.kind == OutputKind.BUFFER_MUTATION and spec.target is not None:
                self.mutations[spec.target] = spec.arg.name
            else:
                raise ModelError(
                    f"the model writes into {spec.target or 'its input'} "
                    f"({spec.kind.name.lower().replace('_', ' ')}); clone it first"
                )
        return tuple(outputs)

    def _add_value(self, name: str, fake: Any, *, kind: str = "node", target: str = "") -> None:
        shape = tuple(int(extent) for extent in fake.shape)
        dtype = str(fake.dtype).removeprefix("torch.")
        self.values[name] = Value(name, kind, shape, dtype, target)
        self.shapes[name], self.dtypes[name] = shape, dtype

    def _read_nodes(
        self, nodes: Any, names: dict[FxNode, Argument], *, gradient: bool
    ) -> dict[FxNode, Argument]:
        """Reads nodes in order; ``names`` gives the arguments known so far in this (sub)graph."""
        for node in nodes:
            if node.op == "placeholder" and node not in names:
                names[node] = Ref(node.name)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._read_call(node, names, gradient=gradient)
        return names

    def _read_call(self, node: FxNode, names: dict[FxNode, Argument], *, gradient: bool) -> None:
        layer = _layer(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            self._read_region(node, names, gradient=gradient)
            return
        op = f"{node.target.namespace}.{node.target._schema.name.split('::')[1]}"
        op = f"{op}.{node.target._overloadname}"
        if op in ASSERTED:
            return
        if not node.target._schema.returns:
            raise ModelError(
                f"{layer or 'the model'} calls {op}, which gives nothing back and is not known. "
                "Check values outside of net(...)."
            )
        parts = self._parts(node, names)
        if not parts:
            return
        call = Call(
            op=op,
            args=_arguments(node, names),
            parts=parts,
            layer=layer,
            gradient=gradient,
            shapes=self.shapes,
            dtypes=self.dtypes,
        )
        for new in rewrite(call):
            if new.op == op:  # no rewrite knew better
                self._refuse(new, node.target)
            self.nodes.append(self._numbered(new))
            for name in new.outputs:
                if name and name not in self.values:  # the running statistics of instance norm
                    self._add_value(name, _buffer_like(self.values, new))

    def _parts(self, node: FxNode, names: dict[FxNode, Argument]) -> dict[int, str]:
        """Names the outputs in use, and teaches ``names`` what they are called."""
        value = node.meta["val"]
        _refuse_symbols(node, value)
        if isinstance(value, torch.Tensor):
            names[node] = Ref(node.name)
            self._add_value(node.name, value)
            return {0: node.name}
        parts: dict[int, str] = {}
        for user in node.users:
            if user.target is operator.getitem and user.args[0] is node:
                position = int(user.args[1])  # type: ignore[arg-type]
                parts.setdefault(position, user.name)
                names[user] = Ref(parts[position])
                self._add_value(parts[position], value[position])
        return parts

    def _read_region(self, node: FxNode, names: dict[FxNode, Argument], *, gradient: bool) -> None:
        """Inlines a ``with torch.no_grad()`` inside the model; other regions are refused."""
        kind = str(node.target)
        if "set_grad_enabled" not in kind:
            raise ModelError(
                f"{_layer(node) or 'the model'} contains a region {kind!r} that cannot be kept "
                "exact; put autocast and checkpointing around net(...) instead"
            )
        enabled, inner, *given = node.args
        module = getattr(self.program.graph_module, str(inner.target))  # type: ignore[union-attr]
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        known = {p: names[g] for p, g in zip(placeholders, given, strict=True)}  # type: ignore[index]
        known = self._read_nodes(module.graph.nodes, known, gradient=gradient and bool(enabled))
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        for user in node.users:
            if user.target is operator.getitem:
                names[user] = known[output.args[0][user.args[1]]]

    def _refuse(self, node: Node, target: torch._ops.OpOverload) -> None:
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise ModelError(
                f"{node.title} draws random numbers in a way that depends on how work is split. "
                "Use dropout, bernoulli_, rand, randn or their _like forms, or draw outside of "
                "net(...) and pass the tensor in."
            )
        if target._schema.is_mutable:
            raise ModelError(
                f"{node.title} changes its arguments in place in a way torch.export does not see. "
                "Use its functional form."
            )

    def _numbered(self, node: Node) -> Node:
        """Random operators carry their place among the random operators of the model."""
        if node.op not in RANDOM:
            return node
        self.randoms += 1
        return replace(node, args=(*node.args, self.randoms))

    def _add_instance_norm_mutations(self) -> None:
        for node in self.nodes:
            if node.op == "terrazzo.instance_norm" and node.outputs[1]:
                for argument, name in zip(node.args[3:5], node.outputs[1:], strict=True):
                    assert isinstance(argument, Ref)
                    self.mutations[self.values[argument.name].target] = name

    def _set_cumulative_momentum(self) -> None:
        """momentum=None averages over all batches: the momentum is one over the new counter."""
        counters: dict[str, str] = {}
        for index, node in enumerate(self.nodes):
            if node.layer not in self.cumulative:
                continue
            if node.op == "aten.add.Tensor" and self.values[node.output].dtype == "int64":
                counters[node.layer] = node.output
            elif node.op == "terrazzo.batch_norm":
                args = (*node.args[:5], Ref(counters[node.layer]), node.args[6])
                self.nodes[index] = replace(node, args=args)


def _buffer_like(values: Mapping[str, Value], node: Node) -> torch.Tensor:
    argument = node.args[3]
    assert isinstance(argument, Ref)
    value = values[argument.name]
    return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")


def _refuse_symbols(node: FxNode, value: Any) -> None:
    """A size or a number that only data can tell: another one at every call."""
    sizes = [size for part in pytree.tree_leaves(value) for size in getattr(part, "shape", (part,))]
    if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
        raise ModelError(
            f"{_layer(node) or node.name} ({node.target}) has a size or a number that depends on "
            "data. Wrap only the part with fixed shapes (model.backbone = tz.parallelize(...)) and "
            "leave the rest ordinary PyTorch."
        )


def frozen_in(model: nn.Module) -> frozenset[str]:
    """The parameters that ask for no gradient at this moment, by every name they have."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def wants_inputs(model: nn.Module, example: Sequence[Any]) -> bool:
    """Whether gradients of inputs are asked for: one of the example says so, or nothing is trained,
    and what else would a step be for."""
    leaves = pytree.tree_leaves(tuple(example))
    asked = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
    return asked or not any(parameter.requires_grad for parameter in model.parameters())


def _layer(node: FxNode) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).split("@")[0]


def _arguments(node: FxNode, names: Mapping[FxNode, Argument]) -> tuple[Argument, ...]:
    """All arguments in the order of the schema, defaults filled in."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    return tuple(
        _argument(given.get(a.name, a.default_value if a.has_default_value() else None), names)
        for a in target._schema.arguments
    )


def _argument(value: Any, names: Mapping[FxNode, Argument]) -> Argument:
    if isinstance(value, FxNode):
        return names[value]
    if isinstance(value, (list, tuple)):
        return tuple(_argument(part, names) for part in value)
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ModelError(f"an operator takes {value!r} ({type(value).__name__}): not supported")
