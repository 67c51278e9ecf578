"""The helper: a small process with the right to change power modes, for one that has none.

It knows four actions and checks every argument against the knobs that this device has. It is asked
by lines of JSON on its standard input; when that ends, however the asking process died, it puts the
device back.

    sudo python -m terrazzo.power.helper
    {"do": "apply", "mode": {"cores": 4, "cpu_hz": 1.2e9}}
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from terrazzo.errors import KnobError
from terrazzo.power.keeper import Keeper, usual_path
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.modes import Mode

LONGEST = 4096
"""Characters of a request."""


def answer(line: str, panel: Panel) -> dict[str, Any]:
    """What is replied to one request; whatever is wrong with it is in the reply."""
    try:
        if len(line) > LONGEST:
            raise KnobError(f"a request has {len(line)} characters, at most {LONGEST} are read")
        request = json.loads(line)
        action = request.get("do") if isinstance(request, dict) else None
        if not isinstance(action, str) or action not in ACTIONS:
            raise KnobError(f"no action {action!r}; there are {', '.join(ACTIONS)}")
        return ACTIONS[action](panel, request)
    except json.JSONDecodeError as error:
        return {"error": f"a request is no JSON: {error}"}
    except KnobError as error:
        return {"error": str(error)}


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


def _ping(panel: Panel, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"process": os.getpid()}


ACTIONS: dict[str, Callable[[Panel, Mapping[str, Any]], dict[str, Any]]] = {
    "ping": _ping, "knobs": _knobs, "read": _read, "apply": _apply,
}  # fmt: skip


def serve(panel: Panel, keeper: Keeper, requests: IO[str], replies: IO[str]) -> None:
    """Until the requests end; then the device is as it was."""
    with keeper.borrowed(panel, say=lambda words: print(words, file=sys.stderr)):
        for line in requests:
            print(json.dumps(answer(line, panel)), file=replies, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=Path("/"), help="of the files, for tests")
    parser.add_argument("--state", type=Path, help="where the state is saved meanwhile, for tests")
    options = parser.parse_args()
    if "SUDO_UID" in os.environ and (options.root != Path("/") or options.state):
        print("under sudo the helper serves this device only: no --root, no --state", flush=True)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    panel = Panel.find(Sysfs(options.root))
    try:
        serve(panel, Keeper(options.state or usual_path(os.environ)), sys.stdin, sys.stdout)
    except KnobError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
