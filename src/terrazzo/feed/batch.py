"""Batch: what one device has read and others have parts of, to be spread once more if need be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrazzo.errors import UsageError
from terrazzo.geometry import Box
from terrazzo.runtime.links import Links

if TYPE_CHECKING:
    from terrazzo.feed.feed import Feed


END = object()
"""Comes after the last batch of a loader, whose batches may be anything, None among them."""


NAMES_CODE = ("default_factory_module", "__enum__")
"""In a description of a structure: torch would import what follows."""


class Host(Protocol):
    """Who does something before a batch is handed out, on all devices together (a Run)."""

    def before_batch(self, feed: Feed) -> None: ...

    def after_last(self, feed: Feed) -> None: ...

    def before_joining(self, feed: Feed) -> None: ...

    @property
    def admits(self) -> bool:
        """Whether devices that come later can be let in."""


class Fed(NamedTuple):
    """A batch as one device has it: None at the end of the data."""

    header: dict[str, Any]
    wholes: list[Tensor]
    batch: Any


class Batch:
    """One batch; the tensors that go into net are real on the device that reads."""

    def __init__(self, feed: Feed, number: int, epoch: int) -> None:
        self.feed, self.number, self.epoch = feed, number, epoch
        self.tensors: list[Tensor] = []


class Slice:
    """One input in a batch: where the parts of it come from."""

    def __init__(self, batch: Batch, place: int, like: Tensor) -> None:
        self.batch, self.place = batch, place
        self.dtype = like.dtype
        self.epoch = batch.epoch

    def spread(self, boxes: Sequence[Box]) -> Tensor:
        """This device's box of it; all devices call this at once."""
        feed = self.batch.feed
        feed.find_reader()
        self.epoch = feed.links.epoch
        if feed.spread.rota is not None:
            return feed.many.read_again(self.batch, self.place, boxes)
        whole = self.batch.tensors[self.place] if self.batch.tensors else None
        return scatter(feed.links, whole, boxes, reader=feed.place, dtype=self.dtype)


def scatter(
    links: Links, whole: Tensor | None, boxes: Sequence[Box], *, reader: int, dtype: torch.dtype
) -> Tensor:
    """Every device its box; ``whole`` is on the reader only."""
    mine = boxes[links.device]
    if links.device == reader:
        assert whole is not None
        pieces = [whole[box.slices()].contiguous() for box in boxes]
        links.exchange(
            [
                (device, piece)
                for device, piece in enumerate(pieces)
                if device != reader and piece.numel()
            ],
            [],
        )
        return pieces[reader]
    piece = torch.empty(mine.shape, dtype=dtype)
    links.exchange([], [(reader, piece)] if piece.numel() else [])
    return piece


def describe(batch: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """What the others must know of a batch before it comes, and its tensors."""
    if batch is END:
        return {"end": True}, []
    leaves, tree = pytree.tree_flatten(batch)
    _check(pytree.treespec_dumps(tree))
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


def outlines(header: dict[str, Any]) -> list[Tensor]:
    """Tensors of the right shapes that hold nothing."""
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for shape, dtype in header["tensors"]
    ]


def rebuild(header: dict[str, Any], tensors: list[Any], batch: Any) -> Any:
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
    return pytree.tree_unflatten(leaves, loaded_tree(header["tree"]))


def loaded_tree(text: str) -> pytree.TreeSpec:
    """The structure of a batch, as another device has told it."""
    _check(text)
    return pytree.treespec_loads(text)


def _check(tree: str) -> None:
    """What names code by itself is never loaded from another device."""
    if any(name in tree for name in NAMES_CODE):
        raise UsageError(
            "the batch is made of a defaultdict or has members of an Enum as keys, which other "
            "devices would have to import by name: return plain dicts from the collate function"
        )
