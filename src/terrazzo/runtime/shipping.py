"""Shipping: one device exports the model, the others receive its graph.

Exporting takes seconds and some hundred MiB, which a small device may not have; and all devices
then hold the same graph, bit by bit, whatever their versions and hardware. The one that exports
does it in a copy of its process: it has as much memory for a step as the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from terrazzo.errors import ModelError
from terrazzo.graph.export import Export, export
from terrazzo.records import Graph
from terrazzo.runtime.aside import export_aside
from terrazzo.runtime.links import Links


def export_together(
    model: nn.Module,
    links: Links,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lean: bool = False,
) -> Export:
    """The same export on every device; what device 0 cannot export, nobody can.

    ``lean``: memory is short, so what exporting needs shall not stay on a single device either.
    """
    if links.devices == 1:
        return (export_aside if lean else export)(model, args, kwargs)
    links.where = "exporting the model"
    made: Export | None = None
    letter: dict[str, str] = {}
    if links.device == 0:
        try:
            made = export_aside(model, args, kwargs)
            letter = {"graph": made.graph.to_json()}
        except ModelError as error:
            letter = {"error": str(error)}
        except Exception as error:  # a mistake of ours: the others must not wait for a graph
            links.broadcast_bytes(json.dumps({"error": f"device 0: {error!r}"}).encode())
            raise
    data = links.broadcast_bytes(json.dumps(letter).encode() if links.device == 0 else None)
    letter = json.loads(data)
    if "error" in letter:
        raise ModelError(letter["error"])
    return _with_constants(made, letter["graph"], links, 0)


def ship(made: Export | None, links: Links, source: int) -> Export:
    """An export of one device for all; the others may pass theirs, if they have it."""
    letter = made.graph.to_json().encode() if made is not None else b""
    data = links.broadcast_bytes(letter if links.device == source else None, source)
    return _with_constants(made, data.decode(), links, source)


def _with_constants(made: Export | None, graph_json: str, links: Links, source: int) -> Export:
    graph = made.graph if made else Graph.from_json(graph_json)
    constants = {}
    for value in graph.values.values():
        if value.kind == "constant":
            tensor = (
                made.constants[value.target].detach().clone().contiguous()
                if made
                else torch.empty(value.shape, dtype=getattr(torch, value.dtype))
            )
            constants[value.target] = links.broadcast(tensor, source)
    return Export(graph, constants)
