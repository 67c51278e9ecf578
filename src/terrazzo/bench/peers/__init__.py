"""What a user would pick: one small file for each way to train on these devices.

The names are here and the code is loaded when it is asked for: a device that runs one peer must
not carry the memory of all.
"""

from __future__ import annotations

import importlib

from terrazzo.bench.peers.peer import Peer, Trainer, Work
from terrazzo.errors import UsageError

__all__ = ["AUTO", "BASELINES", "NAMES", "ONE_CORE", "Peer", "Trainer", "Work", "find"]

_CLASSES = {
    "alone": "alone.Alone",
    "accumulate": "accumulate.Accumulate",
    "ddp": "ddp.Ddp",
    "fsdp2": "fsdp2.Fsdp2",
    "pipeline": "pipeline.Pipeline",
    "each": "terrazzo.Terrazzo",
    "one": "terrazzo.Terrazzo",
    "auto": "terrazzo.Terrazzo",
}
NAMES = tuple(_CLASSES)
ONE_CORE = "core"
"""One core of a device of several: for the published experiment, which is against that."""
_CLASSES[ONE_CORE] = "core.Core"
AUTO = "auto"
"""Terrazzo as its planner has it: the race measures the devices first, and plans."""
BASELINES = ("alone", "accumulate")
"""One device without any other; the faster of them is what a speedup is over."""
TERRAZZO, PLAN = "terrazzo ", "plan "


def find(name: str) -> Peer:
    """A peer by name; ``terrazzo LAYOUT GROUPS`` and ``plan FILE`` are Terrazzo as asked for."""
    own = name.startswith((TERRAZZO, PLAN))
    if not own and name not in _CLASSES:
        raise UsageError(f"no peer {name!r}; there are {', '.join(NAMES)}")
    module, _, kind = ("terrazzo.Terrazzo" if own else _CLASSES[name]).partition(".")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    peer: Peer = found(name) if kind == "Terrazzo" else found()
    return peer
