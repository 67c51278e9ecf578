"""The dtype of every value: as exported, or as autocast makes it.

Autocast is not in the graph. A device with an empty box still has to know what its peers send, so
the graph is run once on fake tensors under the caller's autocast.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from terrazzo.geometry import Box
from terrazzo.graph.pooling import POOL, TURNING_POOL
from terrazzo.records import Argument, Graph, Node, Ref
from terrazzo.records.graph import walk
from terrazzo.runtime.kernels import Site
from terrazzo.runtime.operators import whole_operator


def infer_dtypes(graph: Graph, *, autocast: bool, kind: str) -> Mapping[str, torch.dtype]:
    found = {name: getattr(torch, value.dtype) for name, value in graph.values.items()}
    if not autocast:
        return found
    device = torch.device(kind)
    with FakeTensorMode(), torch.no_grad():
        tensors: dict[str, Tensor] = {
            name: torch.empty(value.shape, dtype=found[name], device=device)
            for name, value in graph.values.items()
            if value.kind != "node"
        }

        def site(shape: tuple[int, ...], box: Box) -> Site:
            return Site(shape, box, 0, 0, device)

        for node in graph.nodes:
            shape = graph.shape(node.output) if node.output else ()
            op, args = _without_numbers(node)
            call = whole_operator(op, args, shape)
            result = call([tensors[ref.name] for ref in walk(args)], site)
            results = (result,) if isinstance(result, Tensor) else result
            for name, tensor in zip(node.outputs, results, strict=False):
                if name:
                    tensors[name], found[name] = tensor, tensor.dtype
    return found


def _without_numbers(node: Node) -> tuple[str, tuple[Argument, ...]]:
    """An operator that asks for no numbers, which a fake tensor cannot tell: a cumulative average
    divides by a counter, and a pool may go by the sign of a weight."""
    if node.op == "terrazzo.batch_norm" and isinstance(node.args[5], Ref):
        return node.op, (*node.args[:5], 0.1, node.args[6])
    if node.op == TURNING_POOL:
        return POOL, node.args[:-1]
    return node.op, node.args
