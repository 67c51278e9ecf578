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
            args = _with_plain_momentum(node)
            call = whole_operator(node.op, args, shape)
            result = call([tensors[ref.name] for ref in walk(args)], site)
            results = (result,) if isinstance(result, Tensor) else result
            for name, tensor in zip(node.outputs, results, strict=False):
                if name:
                    tensors[name], found[name] = tensor, tensor.dtype
    return found


def _with_plain_momentum(node: Node) -> tuple[Argument, ...]:
    """A cumulative average divides by a counter, which a fake tensor cannot tell."""
    if node.op == "terrazzo.batch_norm" and isinstance(node.args[5], Ref):
        return (*node.args[:5], 0.1, node.args[6])
    return node.args
