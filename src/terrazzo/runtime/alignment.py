"""Alignment: weights that drifted apart by rounding become one device's again.

On like hardware nothing ever differs. On mixed hardware even an optimiser's step rounds
differently; a difference that small is taken from device 0, a larger one is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from terrazzo.errors import Disagreement
from terrazzo.runtime.agreement import ALIGN, NOTHING, Note, compare
from terrazzo.runtime.cut import plain
from terrazzo.runtime.links import Links
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.tiling import Boxes

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-2}
"""How far apart, relative to their norm, weights may drift and still count as rounding."""


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: plain(tensor) for name, tensor in named.items()}


def _bits(tensor: Tensor) -> int:
    """A digest of the exact bits."""
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    view = (
        flat.view(torch.uint8)
        if flat.element_size() == 1
        else flat.view(_INTEGERS[flat.element_size()])
    )
    weights = torch.arange(1, view.numel() + 1, device=view.device)
    # Weights in line would miss differences such as 1, -2, 1 of the last bit, which rounding makes.
    weights = weights * 2654435761 & 0x7FFFFFFF
    weights = (weights ^ weights >> 15) * 2246822519 & 0x7FFFFFFF
    return int((view.to(torch.int64) * (weights ^ weights >> 13 | 1)).sum())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def align_weights(model: nn.Module, links: Links, homes: Mapping[str, Boxes]) -> int:
    """Gives the number of tensors that differed and were taken from the first who holds them."""
    if links.devices == 1:
        return 0
    links.where = "comparing weights"
    compare(links, Note(ALIGN, 0, "", NOTHING), explain="comparing weights")
    state = _state(model)
    digests = links.gather(
        torch.tensor([_bits(tensor) for tensor in state.values()], dtype=torch.int64),
        counted=False,
    )
    changed = 0
    for (name, tensor), column in zip(state.items(), digests.T.tolist(), strict=True):
        circles = sharers(homes[name]) if name in homes else (tuple(range(links.devices)),)
        for circle in dict.fromkeys(circles):  # those who hold the same numbers, or should
            if len({column[device] for device in circle}) > 1:
                box = homes[name][circle[0]].shape if name in homes else tensor.shape
                _take_first(name, tensor, links, circle=circle, shape=box)
                changed += 1
    return changed


def _take_first(
    name: str, tensor: Tensor, links: Links, *, circle: tuple[int, ...], shape: Sequence[int]
) -> None:
    mine = links.device in circle
    first = tensor if mine else torch.zeros(shape, dtype=tensor.dtype)
    first = links.broadcast(first.clone().contiguous(), circle[0])
    limit = ROUNDING.get(tensor.dtype, 5e-2) if tensor.is_floating_point() else 0.0
    scale = float(first.double().norm()) or 1.0
    gap = float((tensor.double() - first.double()).norm()) / scale if mine else 0.0
    gaps = links.gather(torch.tensor([gap], dtype=torch.float64), counted=False).flatten()
    if not bool((gaps <= limit).all()):
        worst = int(gaps.nan_to_num(nan=float("inf")).argmax())
        raise Disagreement(
            f"{name} on device {worst} differs from device {circle[0]} by "
            f"{float(gaps[worst]):.1e} of its norm, more than rounding explains "
            f"({limit:.0e}): did the devices step with other "
            "learning rates, or load other weights? Load the same checkpoint on all."
        )
    if mine:
        tensor.copy_(first)
