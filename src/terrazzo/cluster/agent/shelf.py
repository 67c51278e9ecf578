"""Shelves: the newest checkpoint in the folder of a run that is whole, by the hashes it carries.

The starter asks this on every device and of its own folder; nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

PREFIX, REPLACED, STATE = "step-", ".replaced-", "state.json"
PLACES = ("checkpoints/*", "device-*/checkpoints/*")
"""Where devices keep them, and where the starter puts those of equal names."""
CHUNK_BYTES = 1 << 20


def newest(request: dict[str, Any]) -> dict[str, Any]:
    """Its step and path, step -1 where there is none; and the later ones that are damaged."""
    run = Path(request["run"]).expanduser()
    damaged: list[str] = []
    for step, path in sorted(_candidates(run), reverse=True):
        if is_whole(path):
            return {"step": step, "path": str(path), "damaged": damaged}
        damaged.append(str(path))
    return {"step": -1, "path": "", "damaged": damaged}


def _candidates(run: Path) -> list[tuple[int, Path]]:
    found = []
    for place in PLACES:
        for path in run.glob(f"{place}/*"):
            # One that was about to be replaced when the power went is still good.
            number = path.name.removeprefix(REPLACED).removeprefix(PREFIX)
            if PREFIX in path.name and number.isdigit() and path.is_dir():
                found.append((int(number), path))
    return found


def is_whole(folder: Path) -> bool:
    """Whether all files are there with the hashes that are written down."""
    try:
        hashes = json.loads((folder / STATE).read_text(encoding="utf-8"))["hashes"]
        return bool(hashes) and all(_hash(folder / name) == seen for name, seen in hashes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            found.update(data)
    return found.hexdigest()
