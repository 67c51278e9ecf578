"""Together: devices that are connected already measure themselves for a model, and all know it.

Operators first, all devices at once as in a training step, then the links. What a device could not
measure is no reason to stop a training: then nobody has a profile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from terrazzo.errors import TerrazzoError
from terrazzo.measure.accelerator import identity, room_bytes
from terrazzo.measure.device import Terms, measure_device, warm_up
from terrazzo.measure.key import profile_key
from terrazzo.measure.kin import kin
from terrazzo.measure.links import measure_network
from terrazzo.measure.rehearsal import Rehearsal, rehearsed
from terrazzo.measure.timing import free_accelerator, free_memory
from terrazzo.records import Graph, document
from terrazzo.records.profile import Profile, device_from
from terrazzo.runtime.ceiling import ceiling_bytes
from terrazzo.runtime.links import Links
from terrazzo.runtime.sockets import own_address

Say = Callable[[str], None]


def are_apart(links: Links, torch_device: torch.device) -> bool:
    """Whether devices are on several machines, real or emulated, or on several processors of one:
    its CPU and its GPUs. All ask at once."""
    own = f"{own_address(links.sockets)[1]} {identity(torch_device)}"
    return len(set(links.gather_text(own))) > 1


@contextmanager
def _torch_as_it_comes() -> Iterator[None]:
    """A script may have made float64 or a GPU torch's default, in which bytes count otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@_torch_as_it_comes()
def measure_together(
    links: Links,
    graph: Graph,
    *,
    torch_device: torch.device,
    place: str,
    budget_s: float,
    say: Say,
) -> Profile | str:
    """A profile of all devices, or why there is none; the same on all.

    Each measures where its own net lies.
    """
    name = f"device{links.members[links.device]}"
    warm_up(torch_device)
    memory_bytes = room_bytes(links, torch_device) or ceiling_bytes()
    terms = Terms(name, memory_bytes, budget_s, kin(links, torch_device), torch_device)
    rehearsal = Rehearsal(links, torch_device)
    try:
        own = json.dumps(asdict(measure_device(graph, terms, say)))
    except (TerrazzoError, RuntimeError, MemoryError) as error:  # torch's words for little memory
        own = json.dumps({"error": f"{name}: {error}"})
    finally:
        free_memory()
        free_accelerator(torch_device)
    tables = [json.loads(text) for text in links.gather_text(own)]
    for table in tables:
        if "error" in table:
            return str(table["error"])
    with document.reading("what devices measured"):
        mine = rehearsed(device_from(tables[links.device]), rehearsal, links, say)
        told = links.gather_text(json.dumps(asdict(mine)))
        devices = tuple(device_from(json.loads(text)) for text in told)
    network = measure_network(links, say, torch_device)
    free_accelerator(torch_device)
    key = profile_key(
        graph,
        place=place,
        threads=[device.threads for device in devices],
        accelerators=[device.accelerator for device in devices],
    )
    return Profile(key=key, devices=devices, network=network, measured_s=time.time())
