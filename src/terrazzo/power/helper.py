"""The helper: a small process with the right to change power modes, for one that has none.

It knows a few actions and checks every argument against the knobs that this device has. It is asked
by lines of JSON on its standard input; when it is told to leave, or that input ends, however the
asking process died, it puts the device back.

    sudo python -I -m terrazzo.power.helper
    {"do": "apply", "mode": {"cores": 4, "cpu_hz": 1.2e9}}
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from terrazzo.errors import KnobError
from terrazzo.power.keeper import STATE, Keeper
from terrazzo.power.knob import Files
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.modes import Mode

LONGEST = 4096
"""Characters of a request."""


def answer(line: str, panel: Panel, before: Files) -> dict[str, Any]:
    """What is replied to one request; ``before`` is what ``restore`` puts back.

    Whatever is wrong with a request is in the reply.
    """
    try:
        if len(line) > LONGEST:
            raise KnobError(f"a request has {len(line)} characters, at most {LONGEST} are read")
        request = json.loads(line)
        action = request.get("do") if isinstance(request, dict) else None
        if not isinstance(action, str) or action not in (*ACTIONS, RESTORE, LEAVE):
            known = ", ".join((*ACTIONS, RESTORE, LEAVE))
            raise KnobError(f"no action {action!r}; there are {known}")
        if action == LEAVE:
            return {LEAVE: True}
        if action == RESTORE:
            panel.restore(before)
            return _read(panel, request)
        return ACTIONS[action](panel, request)
    except (json.JSONDecodeError, RecursionError) as error:
        return {"error": f"a request is no JSON: {error}"}
    except KnobError as error:
        return {"error": str(error), "knob": error.knob}


def _knobs(panel: Panel, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"knobs": {name: list(values) for name, values in panel.knobs.items()}}


def _read(panel: Panel, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"mode": dict(panel.read().values)}


def _apply(panel: Panel, request: Mapping[str, Any]) -> dict[str, Any]:
    wanted = request.get("mode")
    if not isinstance(wanted, dict) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in wanted.values()
    ):
        raise KnobError(f"mode is {wanted!r}; a table of knobs and numbers is needed")
    panel.apply(Mode.of(wanted))
    return _read(panel, request)


ACTIONS: dict[str, Callable[[Panel, Mapping[str, Any]], dict[str, Any]]] = {
    "knobs": _knobs, "read": _read, "apply": _apply,
}  # fmt: skip
RESTORE, LEAVE = "restore", "leave"


def serve(panel: Panel, keeper: Keeper, requests: IO[str], replies: IO[str]) -> None:
    """Until the requests end, or one says so; then the device is as it was."""
    with keeper.borrowed(panel, say=lambda words: print(words, file=sys.stderr)) as before:
        for line in requests:
            reply = answer(line, panel, before)
            if LEAVE in reply:  # processes that the asker has started may hold the input open
                break
            print(json.dumps(reply), file=replies, flush=True)


def work(panel: Panel, keeper: Keeper) -> int:
    """Serves standard input; 0 says that the device is as it was."""
    # Ctrl-C in a terminal reaches the asker too, whose end is the end of the requests.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(panel, keeper, sys.stdin, sys.stdout)
    except KnobError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    loose = open_to_others(code())
    if loose and os.geteuid() == 0:
        words = (
            f"the power helper does not run as root from code that others may change: {loose[0]} "
            "is not root's alone. Install Terrazzo where only root can write, or start the whole "
            "command with sudo"
        )
        print(json.dumps({"error": words}), flush=True)
        return 2
    return work(Panel.find(Sysfs()), Keeper(STATE))


def code() -> list[Path]:
    """All that Python has taken code from here, itself included."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [Path(sys.executable), *(Path(name) for name in (*files, *sys.path) if name)]


def open_to_others(paths: Iterable[Path]) -> list[Path]:
    """Those of these, and of the folders around them, that somebody beside root may change."""
    places = {
        place
        for path in paths
        for end in (path.absolute(), path.resolve())
        for place in (end, *end.parents)
    }
    return sorted(place for place in places if _is_open(place))


def _is_open(place: Path) -> bool:
    try:
        found = place.stat()
    except OSError:
        return False
    # In a folder with the sticky bit nobody can replace what is root's.
    held = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    return found.st_uid != 0 or bool(found.st_mode & 0o022 and not held)


if __name__ == "__main__":
    sys.exit(main())
