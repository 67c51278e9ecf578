"""Chance: the states of the random generators a loader may draw from, as plain data.

The device that reads tells the others where its generators stood when an epoch began, so that
another can read the same batches in the same order.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from terrazzo.feed import draws
from terrazzo.feed.draws import NUMPY, PYTHON, TORCH


def drawn_from(loader: Any, known: draws.States | None = None) -> dict[str, Any]:
    """Of torch, Python and NumPy, now or as they are ``known``; and of the loader's generators."""
    state, python, (kind, keys, *rest) = draws.states() if known is None else known
    found = {TORCH: _text(state), PYTHON: python, NUMPY: [kind, keys.tolist(), *rest]}
    for name, owner in _owners(loader):
        found[name] = _text(owner.get_state())
    return found


def draw_as(told: dict[str, Any], loader: Any) -> None:
    """Sets the generators here to where those of another device stood, as far as it is told."""
    state, python, numpy = draws.states()
    if TORCH in told:
        state = _tensor(told[TORCH])
    if PYTHON in told:
        version, words, gauss = told[PYTHON]
        python = (version, tuple(words), gauss)
    if NUMPY in told:
        numpy = tuple(told[NUMPY])
    draws.restore((state, python, numpy))
    for name, owner in _owners(loader):
        if name in told:
            owner.set_state(_tensor(told[name]))


def draw_but(told: dict[str, Any], names: Collection[str]) -> None:
    """Sets those generators that all share, less some: reading draws from these."""
    draw_as({name: state for name, state in told.items() if name not in names}, None)


def _owners(loader: Any) -> list[tuple[str, torch.Generator]]:
    places = {"loader": loader, "sampler": getattr(loader, "sampler", None)}
    found = [(name, getattr(place, "generator", None)) for name, place in places.items()]
    return [(name, g) for name, g in found if isinstance(g, torch.Generator)]


def _text(state: Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
