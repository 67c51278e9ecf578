"""Where the tensors of this device are in a test: "cuda,cuda" are two processes on one GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

GPU = "cuda"
ALIKE, MIXED, REVERSED = f"{GPU},{GPU}", f"cpu,{GPU}", f"{GPU},cpu"


def here(places: str) -> torch.device:
    """This device's place in a list of places, one for each."""
    number = dist.get_rank() if dist.is_initialized() else 0
    return torch.device(places.split(",")[number])


def moved(thing: Any, place: torch.device | str) -> Any:
    """A module, or tensors in any structure, at another place."""
    if isinstance(thing, nn.Module):
        return thing.to(place)
    return pytree.tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, thing)
