"""Agreement: devices compare notes before they work together, so that none waits for ever.

Every note has the same size, whatever it is about, so a device that is somewhere else in the
script is found out instead of breaking the connection.

A digest of a tensor is a few sums of its elements with fixed random weights. Rounding changes such
a sum by about eps times the norm of the tensor, another batch by about the norm itself, so a limit
in between tells them apart on mixed hardware too. Plain sums would not do: the gradients of a
cross entropy sum to zero whatever the targets are, and large normalised batches all look alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from terrazzo.errors import Disagreement
from terrazzo.members.control import Interrupted
from terrazzo.runtime.links import Links
from terrazzo.runtime.phase import READING

FORWARD, BACKWARD, COMMIT, FEED, ALIGN, AGREE, STATE, WEIGHT, CHANGE, SPARE, PACE, PLAN = map(
    float, range(1, 13)
)
NAMES = {
    FORWARD: "a forward call",
    BACKWARD: "a backward pass",
    COMMIT: "the end of a backward pass",
    FEED: READING,
    ALIGN: "comparing weights",
    AGREE: "tz.agree",
    STATE: "net.state_dict()",
    WEIGHT: "a sum or norm of a cut weight",
    CHANGE: "net.change_plan()",
    SPARE: "keeping a copy of cut weights",
    PACE: "net.keep_pace()",
    PLAN: "tz.plan(net, ...)",
}
SUMS = 8
NOTE = 4 + SUMS + 1
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far digests of equal data may lie apart, relative to the norm of the data."""

INNER, OUTER = 61, 59
"""Weights repeat after the product of these: two primes, so that no row of a picture does."""


@dataclass(frozen=True)
class Note:
    """What one device says: where it is, which call, what it is about, and a digest."""

    kind: float
    call: int
    subject: str
    digest: Tensor
    flag: float = 0.0
    tolerance: float = 1e-3


def digest(tensors: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Weighted sums and the squared norm of all elements; and the tolerance for comparing."""
    total = torch.zeros(SUMS + 1, dtype=torch.float64)
    tolerance = 1e-6
    for tensor in tensors:
        if tensor.is_floating_point():
            tolerance = max(tolerance, TOLERANCE.get(tensor.dtype, 5e-2))
        flat = tensor.detach().reshape(-1)
        flat = flat if flat.dtype in TOLERANCE else flat.double()
        if flat.numel():
            total[:SUMS] += _weighted_sums(flat).cpu()
            total[SUMS] += flat.square().sum(dtype=torch.float64).cpu()
    return total, tolerance


def _weighted_sums(flat: Tensor) -> Tensor:
    """An element's weight is the product of two, by its column and row in lines of INNER."""
    inner, outer = (_weights(count, flat.dtype, flat.device) for count in (INNER, OUTER))
    full = flat.numel() // INNER * INNER
    lines = flat[:full].view(-1, INNER) @ inner
    if full < flat.numel():  # padded, all of it would have to be copied
        rest = flat[full:]
        lines = torch.cat([lines, (rest @ inner[: rest.numel()]).unsqueeze(0)])
    repeats = -(-lines.shape[0] // OUTER)
    lines = lines * outer.repeat(repeats, 1)[: lines.shape[0]]
    return lines.sum(0, dtype=torch.float64)


@cache
def _weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same on every device: Python's generator does not depend on hardware."""
    draw = random.Random(count)
    rows = [[draw.uniform(-1, 1) for _ in range(SUMS)] for _ in range(count)]
    return torch.tensor(rows).to(device=device, dtype=dtype)


NOTHING = torch.zeros(SUMS + 1, dtype=torch.float64)


def compare(links: Links, note: Note, *, explain: str | Callable[[], str]) -> list[float]:
    """Compares notes; gives everybody's flags. ``explain`` is this device's side of the story."""
    if links.devices == 1:
        return [note.flag]
    begin = time.perf_counter()
    number = int(note.subject[:12], 16) if note.subject else 0
    row = torch.tensor([note.kind, note.call, number, note.flag], dtype=torch.float64)
    rows = links.gather(torch.cat([row, note.digest]), counted=False)
    if links.recorder is not None:
        links.recorder.span("agree", NAMES[note.kind], begin)
    notes: list[list[float]] = rows.tolist()
    if any(other[:3] != notes[0][:3] for other in notes):
        raise _disagreement(links, explain, _who_differs(links, rows[:, :3]))
    alike = all(other[4:] == notes[0][4:] for other in notes)
    if not alike and not _close(rows[:, 4:], note.tolerance):
        raise _disagreement(links, explain, _what_differs(note.kind))
    return [other[3] for other in notes]


def _close(digests: Tensor, tolerance: float) -> bool:
    """NaN is equal to NaN here: it has a check of its own."""
    finite = torch.isfinite(digests)
    if not bool(finite.all()):
        return bool((finite == finite[0]).all())
    squares = digests[:, -1]
    spread = (digests.amax(0) - digests.amin(0))[:-1]
    norm = squares.amax().sqrt().clamp(min=1e-30)
    same_norm = squares.amax().sqrt() - squares.amin().sqrt() <= tolerance * norm
    return bool(same_norm and (spread <= tolerance * norm).all())


def _who_differs(links: Links, rows: Tensor) -> str:
    """Names the devices that are not with the majority, or with device 0 if there is none."""
    counts = (rows.unsqueeze(0) == rows.unsqueeze(1)).all(2).sum(1)
    usual = rows[int(counts.argmax())]
    odd = [links.called(at) for at, row in enumerate(rows) if not bool((row == usual).all())]
    who = f"{', '.join(odd)} {'differs' if len(odd) == 1 else 'differ'}"
    return (
        f"the devices are not doing the same thing: {who} from the others, in what they call or in "
        "a mode, a setting, a frozen layer, autocast or an input's requires_grad"
    )


def _what_differs(kind: float) -> str:
    if kind == BACKWARD:
        return (
            "the gradients that come into net differ between devices, so the targets or the loss "
            "do, or weights have drifted apart: give every device the same y (tz.feed does), the "
            "same loss and the same learning rate"
        )
    return (
        "the batches given to net differ between devices: read on one device with "
        "tz.feed(loader, net), or give every device the same batch (no DistributedSampler)"
    )


def _disagreement(links: Links, explain: str | Callable[[], str], what: str) -> Disagreement:
    """That they differ is known already: who has heard all stories may hang up on the others."""
    mine = explain if isinstance(explain, str) else explain()
    try:
        stories = links.gather_text(mine)
    except Interrupted:
        return Disagreement(f"{what}. {links.called(links.device)}: {mine}")
    if len(set(stories)) == 1:
        told = f"all say: {stories[0]}"
    else:
        told = "; ".join(f"{links.called(at)}: {story}" for at, story in enumerate(stories))
    return Disagreement(f"{what}. {told}")
