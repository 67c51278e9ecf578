"""The agent's entry: one request, one answer, and then it is gone."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from terrazzo.cluster.agent import calls, files, look, shelf, veil
from terrazzo.cluster.agent.frames import ERROR, Frames
from terrazzo.cluster.agent.ward import Ward


def main() -> None:
    """Talks over this process's standard streams, which nobody else may use from here on."""
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up among frames
    frames = Frames(source, sink)
    frames.greet()
    try:
        answer(frames.hear(), frames)
    except EOFError:
        return
    except Exception as error:
        frames.send(ERROR, json.dumps(words(error)).encode())


def answer(request: dict[str, Any], frames: Frames) -> None:
    verb = request["verb"]
    if verb == "run":
        Ward(request, frames).run()
    elif verb == "look":
        frames.tell(look.look(request))
    elif verb == "port":
        frames.tell(look.free_port(request["address"]))
    elif verb == "hold":
        calls.hold(request, frames)
    elif verb == "call":
        frames.tell(calls.call(request))
    elif verb == "veil":
        veil.hold(request, frames)
    elif verb == "sync":
        frames.tell(files.sync(request, frames))
    elif verb == "put":
        frames.tell(files.put(request, frames))
    elif verb == "fetch":
        frames.tell(files.fetch(request, frames))
    elif verb == "shelf":
        frames.tell(shelf.newest(request))
    elif verb == "remove":
        frames.tell(files.remove(request))
    else:
        raise ValueError(f"this agent knows no {verb!r}")


def words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"
