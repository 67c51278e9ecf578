"""Resuming: the latest checkpoint that any device has, brought to all of them."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.runtime.checkpoint import Checkpoint
from terrazzo.runtime.links import Links
from terrazzo.runtime.recovery import give_parcel, take_parcel, together


def latest_of_all(links: Links, found: Checkpoint | None) -> dict[str, Any] | None:
    """The state of a run from what each device has found, if any has; all ask at one time."""
    return together(links, lambda: _latest(links, found))


def _latest(links: Links, found: Checkpoint | None) -> dict[str, Any] | None:
    own = -1.0 if found is None else float(found.step)
    steps = links.gather(torch.tensor([own], dtype=torch.float64), counted=False).flatten()
    if float(steps.max()) < 0:
        return None
    source = int(steps.argmax())
    if found is not None and links.device == source:
        give_parcel(links, [dict(found.model), found.rest], source, name="the run")
        model, rest = found.model, found.rest
    else:
        model, rest = take_parcel(links, source)
    return {**rest, "net": model}
