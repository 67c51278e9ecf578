"""Exporting aside: in a child process, so that what torch loads for it does not stay in this one.

The modules behind ``torch.export`` take 40 to 100 MiB that a process never gives back, on a device
that may not have them to spare while it trains. The child is a copy of this process: it finds the
model as it is, sends back the graph, and ends.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import signal
import struct
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from terrazzo.errors import ModelError
from terrazzo.graph.export import Export, export
from terrazzo.records import Graph

LOADED = "torch.export._trace"
"""Where this module is loaded already, a child would save nothing."""
LONGEST_S = 600.0
"""A copy of a process can hang where a thread that was not copied held a lock."""
GRAPH, REFUSED, FAILED = "graph", "refused", "failed"


def export_aside(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Export:
    """The export of a child process; where there can be none, or it fails, this one's own."""
    if LOADED in sys.modules or not _can_fork():
        return export(model, args, kwargs)
    kind, text, constants = _ask_child(model, args, kwargs)
    if kind == REFUSED:
        raise ModelError(text)
    if kind == FAILED:
        return export(model, args, kwargs)
    return Export(Graph.from_json(text), constants)


def _can_fork() -> bool:
    """A GPU's driver does not survive in a copy of the process."""
    return sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _ask_child(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str, dict[str, torch.Tensor]]:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of other threads, which are torch's and wait for messages.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.close(read)
            _answer(write, model, args, kwargs)
            status = 0
        os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        if not select.select([pipe], [], [], LONGEST_S)[0]:
            os.kill(child, signal.SIGKILL)
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not data:
        return FAILED, "", {}
    (size,) = struct.unpack_from("<q", data)
    kind, _, text = data[8 : 8 + size].decode().partition("\n")
    return kind, text, torch.load(io.BytesIO(data[8 + size :]))


def _answer(write: int, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """In the child: torch's other threads were not copied, so one must do. It ends before there is
    anything to collect, and looking through all objects would copy their pages."""
    torch.set_num_threads(1)
    gc.disable()
    constants: dict[str, torch.Tensor] = {}
    try:
        made = export(model, args, kwargs)
        kind, text = GRAPH, made.graph.to_json()
        constants = {name: t.detach().clone().contiguous() for name, t in made.constants.items()}
    except ModelError as error:
        kind, text = REFUSED, str(error)
    letter = f"{kind}\n{text}".encode()
    stored = io.BytesIO()
    torch.save(constants, stored)
    with os.fdopen(write, "wb") as pipe:
        pipe.write(struct.pack("<q", len(letter)) + letter + stored.getvalue())
