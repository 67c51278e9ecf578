"""One device reads; each gets its box of the input, and all get the targets.

Tensors keep their dtype on the wire: uint8 pictures travel as uint8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from terrazzo.errors import ModelError, RunError, UsageError
from terrazzo.geometry import Box
from terrazzo.runtime.agreement import FEED, NOTHING, Note, compare
from terrazzo.runtime.net import Net
from terrazzo.runtime.part import Part


def feed(
    loader: Iterable[Any] | None, net: Net, *, inputs: int = 1, reader: int = 0
) -> Iterator[Any]:
    """Iterates over a loader on device ``reader`` and hands every batch to all devices.

    The first ``inputs`` tensors of a batch go into net and arrive as the part a device needs; all
    others arrive whole. Other devices may pass None for the loader.
    """
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        raise UsageError(
            "the loader has a DistributedSampler, so every device would train on other samples. "
            "tz.feed reads on one device and spreads each batch: use a plain sampler."
        )
    if net.links.devices == 1:
        if loader is None:
            raise UsageError("tz.feed got no loader, and there is no other device to read")
        yield from loader
        return
    if net.links.device == reader:
        if loader is None:
            raise UsageError(f"device {reader} reads the data, but its loader is None")
        yield from _read(loader, net, inputs)
    else:
        yield from _receive(net, inputs, reader)


def _meet(net: Net, reader: int) -> None:
    net.links.where = "waiting for the next batch"
    subject = f"{reader:012x}"
    note = Note(FEED, 0, subject, NOTHING)
    compare(net.links, note, explain=f"waiting for a batch from device {reader}")


def _read(loader: Iterable[Any], net: Net, inputs: int) -> Iterator[Any]:
    links, reader = net.links, net.links.device
    batches: Iterator[Any] | None = None
    while True:
        try:
            batches = iter(loader) if batches is None else batches
            batch = next(batches, None)
            header, tensors = _describe(batch)
        except Exception as error:
            _meet(net, reader)
            text = f"{type(error).__name__}: {error}"
            links.broadcast_bytes(json.dumps({"error": text}).encode(), reader)
            raise
        _meet(net, reader)
        links.broadcast_bytes(json.dumps(header).encode(), reader)
        if batch is None:
            return
        mine = _spread(net, tensors, inputs, reader)
        yield _rebuild(header, mine, batch)


def _receive(net: Net, inputs: int, reader: int) -> Iterator[Any]:
    while True:
        _meet(net, reader)
        header = json.loads(net.links.broadcast_bytes(None, reader))
        if "error" in header:
            raise RunError(f"device {reader}, which reads the data, failed: {header['error']}")
        if "end" in header:
            return
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for shape, dtype in header["tensors"]
        ]
        yield _rebuild(header, _spread(net, tensors, inputs, reader), None)


def _describe(batch: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """What the others must know of a batch before it comes, and its tensors."""
    if batch is None:
        return {"end": True}, []
    leaves, tree = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [isinstance(leaf, Tensor) for leaf in leaves]
    header = {
        "tree": pytree.treespec_dumps(tree),
        "tensors": [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors],
        "plain": plain,
        "places": places,
    }
    try:
        json.dumps(header)
    except TypeError as error:
        raise UsageError(
            f"the batch holds something that is neither a tensor nor plain data ({error}): return "
            "tensors, numbers and strings from the collate function"
        ) from error
    return header, tensors


def _spread(net: Net, tensors: list[Tensor], inputs: int, reader: int) -> list[Any]:
    """Sends every device its part; ``tensors`` are real on the reader only."""
    shapes = [tuple(tensor.shape) for tensor in tensors[:inputs]]
    try:
        boxes = net.boxes(shapes)
    except ModelError as error:
        raise ModelError(
            f"{error} tz.feed took the first of the tensors in a batch for the input of net, here "
            f"{', '.join(str(list(shape)) for shape in shapes)}: inputs come first in a batch, and "
            "inputs=2 says that there are two."
        ) from error
    parts: list[Any] = [
        _scatter(net, tensor, box, reader)
        for tensor, box in zip(tensors[:inputs], boxes, strict=True)
    ]
    for tensor in tensors[inputs:]:
        whole = tensor.contiguous()
        if whole.is_meta:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        parts.append(net.links.broadcast(whole, reader))
    return parts


def _scatter(net: Net, tensor: Tensor, boxes: tuple[Box, ...], reader: int) -> Part:
    links = net.links
    shape, mine = tuple(tensor.shape), boxes[net.links.device]
    if links.device == reader:
        pieces = [tensor[box.slices()].contiguous() for box in boxes]
        links.exchange(
            [
                (device, 0, piece)
                for device, piece in enumerate(pieces)
                if device != reader and piece.numel()
            ],
            [],
        )
        return Part(pieces[reader], mine, shape)
    piece = torch.empty(mine.shape, dtype=tensor.dtype)
    links.exchange([], [(reader, 0, piece)] if piece.numel() else [])
    return Part(piece, mine, shape)


def _rebuild(header: dict[str, Any], tensors: list[Any], batch: Any) -> Any:
    """The batch in its own structure, with parts in place of tensors."""
    found = iter(tensors)
    if batch is not None:
        leaves, tree = pytree.tree_flatten(batch)
        return pytree.tree_unflatten(
            [next(found) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )
    leaves = [
        next(found) if is_tensor else plain
        for is_tensor, plain in zip(header["places"], header["plain"], strict=True)
    ]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(header["tree"]))
