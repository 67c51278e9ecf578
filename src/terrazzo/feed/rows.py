"""Rows: batches that several devices have read parts of, put together row by row.

A device makes a small batch of the samples that it has read. Where every tensor of it has a row for
each sample, as torch's own collate function makes them, the rows of all devices are the batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrazzo.errors import UsageError
from terrazzo.feed.batch import loaded_tree
from terrazzo.feed.rota import Rows, givers
from terrazzo.geometry import Box
from terrazzo.runtime.links import Links
from terrazzo.runtime.wire import Parcel


@dataclass(frozen=True)
class Column:
    """One tensor of a batch: a row's shape and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Form:
    """What all rows of a batch have in common."""

    tree: str
    kinds: tuple[Column | None, ...]
    """None: a text for each row."""

    @property
    def columns(self) -> list[Column]:
        return [kind for kind in self.kinds if kind is not None]

    @property
    def has_texts(self) -> bool:
        return None in self.kinds

    def to_json(self) -> str:
        kinds = [
            None if kind is None else [list(kind.shape), str(kind.dtype).removeprefix("torch.")]
            for kind in self.kinds
        ]
        return json.dumps([self.tree, kinds])

    @classmethod
    def from_json(cls, text: str) -> Form:
        tree, kinds = json.loads(text)
        return cls(
            tree,
            tuple(
                None if kind is None else Column(tuple(kind[0]), getattr(torch, kind[1]))
                for kind in kinds
            ),
        )

    def build(self, tensors: Sequence[Any], texts: Sequence[list[str]]) -> Any:
        """A batch of this form."""
        found, told = iter(tensors), iter(texts)
        leaves = [next(told) if kind is None else next(found) for kind in self.kinds]
        return pytree.tree_unflatten(leaves, loaded_tree(self.tree))


def taken_apart(batch: Any, count: int) -> tuple[Form, list[Tensor], list[list[str]]]:
    """The form of so many rows, their tensors and their texts."""
    leaves, tree = pytree.tree_flatten(batch, is_leaf=_is_text)
    for leaf in leaves:
        fits = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count
        if not fits and not (_is_text(leaf) and len(leaf) == count):
            shown = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else leaf
            raise UsageError(
                f"a batch of {count} samples that this device has read holds {shown!r:.80}, and "
                "what several devices read is put together row by row: let samples be tensors, "
                "numbers and texts, or give all samples to one device, which reads for the others"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    kinds = tuple(
        Column(tuple(leaf.shape[1:]), leaf.dtype) if isinstance(leaf, Tensor) else None
        for leaf in leaves
    )
    texts = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    return Form(pytree.treespec_dumps(tree), kinds), tensors, texts


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


class Sent(NamedTuple):
    sends: list[Parcel]
    receives: list[Parcel]


class Piece:
    """A device's box of one column, before and after the rows of others have come."""

    def __init__(self, column: Column, own: Tensor | None, boxes: Sequence[Box]) -> None:
        """``own`` are the rows that this device has read."""
        self.column, self.own, self.boxes = column, own, boxes
        self._rooms: list[tuple[list[int], Tensor]] = []

    def post(self, device: int, rows: Rows, by: Sequence[Sequence[int]]) -> Sent:
        """What this device sends of it, and what it waits for; ``by`` are the givers."""
        at = {row: place for place, row in enumerate(rows[device])}
        posted = Sent([], [])
        for other, box in enumerate(self.boxes):
            given = [row for row in range(*box.spans[0]) if by[row][other] == device]
            if other == device:
                self._mine, self._box = given, box
                self._places = [at[row] for row in given]
            elif given:
                posted.sends.append((other, self._cut([at[row] for row in given], box)))
        low, high = self._box.spans[0]
        for other in range(len(rows)):
            given = [row for row in range(low, high) if by[row][device] == other != device]
            if given:
                shape = (len(given), *self._box.shape[1:])
                self._rooms.append((given, torch.empty(shape, dtype=self.column.dtype)))
                posted.receives.append((other, self._rooms[-1][1]))
        return posted

    def _cut(self, places: list[int], box: Box) -> Tensor:
        assert self.own is not None
        is_all = len(places) == len(self.own)  # in order, so these are the rows as they are
        rows = self.own if is_all else self.own[places]
        return rows[(slice(None), *box.slices()[1:])].contiguous()

    def landed(self) -> Tensor:
        """The box, once everything has arrived."""
        if self._mine and not self._rooms:
            return self._cut(self._places, self._box)
        found = torch.empty(self._box.shape, dtype=self.column.dtype)
        low = self._box.spans[0][0]
        if self._mine:
            found[[row - low for row in self._mine]] = self._cut(self._places, self._box)
        for rows, room in self._rooms:
            found[[row - low for row in rows]] = room
        return found


class Gathering:
    """A device's boxes of all columns of a batch; all devices begin it at once."""

    def __init__(
        self, links: Links, pieces: Sequence[Piece], rows: Rows, count: int, *, ahead: bool
    ) -> None:
        """Of so many rows; ``ahead``: it travels beside something else."""
        self._pieces = pieces
        by = givers(rows, count)
        posted = [piece.post(links.device, rows, by) for piece in pieces]
        sends = [message for one in posted for message in one.sends]
        receives = [message for one in posted for message in one.receives]
        self._voyage = links.depart(sends, receives, busy=ahead)

    def land(self) -> list[Tensor]:
        """The boxes, once everything has arrived."""
        self._voyage.land()
        return [piece.landed() for piece in self._pieces]
