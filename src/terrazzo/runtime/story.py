"""Story: what a device is about to do, in words, for those who do something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from terrazzo.runtime.part import Part

if TYPE_CHECKING:
    from terrazzo.runtime.net import Net


def autocast(leaves: Sequence[Any]) -> str:
    """What autocast does to this call, if anything: on a GPU it is not what it is on a CPU."""
    placed = (leaf.device.type for leaf in leaves if isinstance(leaf, (Tensor, Part)))
    kind = next(placed, "cpu")
    return f"{kind} {torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else "none"


def story(leaves: Sequence[Any], net: Net) -> str:
    """What this device is about to do, in words."""
    shapes = [
        f"{'x'.join(map(str, leaf.shape))} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in leaves
        if isinstance(leaf, (Tensor, Part))
    ]
    parameters = list(net._model.parameters())
    trained = sum(p.requires_grad for p in parameters)
    return (
        f"forward in {'train' if net.training else 'eval'} mode, inputs {', '.join(shapes)}, "
        f"gradients {'on' if torch.is_grad_enabled() else 'off'}, autocast {autocast(leaves)}, "
        f"{trained} of "
        f"{len(parameters)} parameters trained, seed {net.seed}"
    )


def outline(leaf: Any) -> Any:
    """A tensor's shape and kind without its memory: a net lives longer than its first batch."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
