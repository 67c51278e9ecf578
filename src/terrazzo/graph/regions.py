"""Regions of a model under no_grad or autocast, kept through the lowering of torch.export.

torch.export marks such a region, and then its lowering inlines it: the forward stays right and the
gradient becomes silently wrong. What leaves a no_grad region is therefore detached before, which
says the same in the graph itself. Where even that would not be the same, the model is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Set

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from terrazzo.errors import ModelError

DETACH = torch.ops.aten.detach.default


def keep_regions(program: ExportedProgram, *, under_autocast: bool) -> None:
    """Makes regions explicit; ``under_autocast``: the caller of the model uses autocast."""
    buffers = frozenset(program.graph_signature.inputs_to_buffers)
    module = program.graph_module
    for node in list(module.graph.nodes):
        kind = str(node.target)
        if node.op == "call_function" and "set_grad_enabled" in kind and node.args[0] is False:
            _refuse_writes(getattr(module, node.args[1].target), node, buffers)
            _detach_results(program, node)
        elif "wrap_with_autocast" in kind and under_autocast:
            raise ModelError(
                f"{_layer(node)} switches autocast by itself, and net was called under autocast. "
                "Leave that layer outside of the part that is parallelized, or call net without "
                "autocast."
            )
        elif node.op == "call_function":
            _refuse_write_through_detach(node, buffers)
    module.recompile()


def _detach_results(program: ExportedProgram, region: FxNode) -> None:
    graph = program.graph_module.graph
    for result in list(region.users):
        with graph.inserting_after(result):
            detached = graph.call_function(DETACH, (result,))
        detached.meta = copy.copy(result.meta)

        def is_old(user: FxNode, new: FxNode = detached) -> bool:
            return user is not new

        result.replace_all_uses_with(detached, delete_user_cb=is_old)
        program.graph_signature.replace_all_uses(result.name, detached.name)


def _refuse_writes(inside: GraphModule, region: FxNode, buffers: Set[str]) -> None:
    """Under no_grad an in-place write is seen by later layers, but not by their gradients."""
    placeholders = [node for node in inside.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, region.args[2:], strict=True))
    for node in inside.graph.nodes:
        for root, _ in _written(node):
            outside = given.get(root)
            if isinstance(outside, FxNode) and outside.name not in buffers:
                raise ModelError(
                    f"{_layer(node)} writes into a tensor in place under no_grad ({node.target}); "
                    "compute a new tensor instead"
                )


def _refuse_write_through_detach(node: FxNode, buffers: Set[str]) -> None:
    for root, detached in _written(node):
        if detached and root.name not in buffers:
            raise ModelError(
                f"{_layer(node)} writes in place through a detached view ({node.target}), which "
                "gradients would not see; compute a new tensor instead"
            )


def _written(node: FxNode) -> list[tuple[FxNode, bool]]:
    """The tensors an operator writes into, behind all views, and whether one of those detaches."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            parts = value if isinstance(value, (list, tuple)) else [value]
            found += [_root(part) for part in parts if isinstance(part, FxNode)]
    return found


def _root(node: FxNode) -> tuple[FxNode, bool]:
    detached = False
    while isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        source = node.args[0] if node.args else None
        if not returns or returns[0].alias_info is None or not isinstance(source, FxNode):
            break
        detached = detached or node.target is DETACH
        node = source
    return node, detached


def _layer(node: FxNode) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).split("@")[0] or "the model"
