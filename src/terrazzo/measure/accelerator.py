"""The accelerator: what a net lies on, where that is not the computer itself.

A GPU works behind the back of the processor that launches its work, in memory of its own, which
other processes may share. So measuring has to ask what it is, whether it is done, and how much room
it has left. A CPU is no accelerator: it has no title, is always done, and its room is the
computer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrazzo.runtime.links import Links

CPU = torch.device("cpu")
DRIVER = Path("/sys/module/nvidia/version")


def lies_on(model: nn.Module, example: Sequence[object] = ()) -> torch.device:
    """Where a model computes: where its weights lie, or without any, what it is given."""
    tensors = [*model.parameters(), *pytree.tree_leaves(example)]
    return next((one.device for one in tensors if isinstance(one, Tensor)), CPU)


def can_measure(model: nn.Module, torch_device: torch.device) -> bool:
    """Whether all of a model lies there, and operators can be timed there."""
    there = all(weight.device == torch_device for weight in model.parameters())
    return there and torch_device.type in (CPU.type, "cuda")


def absent(torch_device: torch.device) -> str:
    """Why nothing can be measured there, in words; empty if it can."""
    if torch_device.type != "cuda":
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA: install one that is not, or measure the CPU"
    if not torch.cuda.is_available():
        return "torch finds no GPU: look at its driver (nvidia-smi), or measure the CPU"
    count = torch.cuda.device_count()
    if (torch_device.index or 0) >= count:
        return f"there is no {torch_device}: torch finds {count}, numbered from 0"
    return ""


def title(torch_device: torch.device, driver: Path = DRIVER) -> str:
    """What figures of it hold for: its name and what drives it. Empty for a CPU."""
    if torch_device.type != "cuda":
        return "" if torch_device.type == CPU.type else torch_device.type
    cuda, hip = torch.version.cuda, torch.version.hip
    words = [torch.cuda.get_device_name(torch_device), f"ROCm {hip}" if hip else f"CUDA {cuda}"]
    with suppress(OSError, UnicodeDecodeError):  # boards and other makers tell no version there
        words.append(f"driver {driver.read_text(encoding='ascii').strip()}")
    return ", ".join(words)


def identity(torch_device: torch.device) -> str:
    """Which one it is, of all that there are; empty for a CPU."""
    if torch_device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(torch_device).uuid)


def settle(torch_device: torch.device) -> None:
    """Waits until all that was launched is done."""
    if torch_device.type == "cuda":
        torch.cuda.synchronize(torch_device)


def cache_bytes(torch_device: torch.device) -> int:
    """What it keeps near its cores; 0 for a CPU, which does not tell."""
    if torch_device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(torch_device).L2_cache_size)


def give_back(torch_device: torch.device) -> None:
    """Memory that torch keeps for later, to whoever else uses the GPU."""
    if torch_device.type == "cuda":
        torch.cuda.empty_cache()


def room_bytes(links: Links, torch_device: torch.device) -> int:
    """What this device's net may take of its GPU, with what it has already; 0 for a CPU.

    Of what is free, devices that share a GPU get equal parts. All devices call it at once.
    """
    give_back(torch_device)
    own = identity(torch_device)
    sharing = links.gather_text(own).count(own)
    if torch_device.type != "cuda":
        return 0
    free_bytes, _ = torch.cuda.mem_get_info(torch_device)
    return free_bytes // sharing + torch.cuda.memory_reserved(torch_device)
