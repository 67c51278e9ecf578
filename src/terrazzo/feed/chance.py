"""Chance: the states of the random generators a loader may draw from, as plain data.

The device that reads tells the others where its generators stood when an epoch began, so that
another can read the same batches in the same order.
"""

from __future__ import annotations

import random
import sys
from base64 import b64decode, b64encode
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def drawn_from(loader: Any) -> dict[str, Any]:
    """Of torch, Python and NumPy, and of the loader's own generators."""
    found: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [kind, keys.tolist(), *rest]
    for name, owner in _owners(loader):
        found[name] = _text(owner.get_state())
    return found


def draw_as(told: dict[str, Any], loader: Any) -> None:
    """Sets the generators here to where those of another device stood, as far as it is told."""
    if "torch" in told:
        torch.set_rng_state(_tensor(told["torch"]))
    if "python" in told:
        version, state, gauss = told["python"]
        random.setstate((version, tuple(state), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in told:
        numpy.random.set_state(tuple(told["numpy"]))
    for name, owner in _owners(loader):
        if name in told:
            owner.set_state(_tensor(told[name]))


def moved(before: dict[str, Any]) -> set[str]:
    """Which of the generators that all share have been drawn from since."""
    now = drawn_from(None)
    return {name for name in now if now[name] != before.get(name)}


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
