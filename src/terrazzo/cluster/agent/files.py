"""Files on a device: a folder made like the starter's by sending what differs, and small copies.

A file is written beside its place and moved there, so that a full disk or a lost connection leaves
the old one. Only paths inside the folder are touched, and only files that came the same way are
ever removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from terrazzo.cluster.agent.frames import DATA, Frames

MANIFEST = ".terrazzo-files.json"
CHUNK_BYTES = 1 << 20
KEEP_VERSIONS = 3


def sync(request: dict[str, Any], frames: Frames) -> dict[str, Any]:
    """Makes a folder hold exactly the files told, of all that were ever brought there."""
    folder = Path(request["folder"]).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, list[Any]] = request["files"]  # path: [digest, size, mode]
    for name in wanted:
        inside(folder, name)
    known = read_manifest(folder)
    missing = [name for name, row in wanted.items() if not holds(folder, name, row, known)]
    frames.tell({"missing": missing, "folder": str(folder)})
    for name in missing:
        digest, size, mode = wanted[name]
        receive_file(frames, inside(folder, name), size=size, mode=mode, digest=digest)
    for name in set(known) - set(wanted):
        inside(folder, name).unlink(missing_ok=True)
    write_manifest(folder, wanted)
    os.utime(folder)
    if request.get("prune"):
        prune(folder)
    return {"folder": str(folder), "brought": len(missing)}


def inside(folder: Path, name: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in name:
        raise ValueError(f"{name!r} is no path inside {folder}")
    return folder.joinpath(*pure.parts)


def holds(folder: Path, name: str, wanted: list[Any], known: dict[str, Any]) -> bool:
    """Whether the file is there as wanted: by its times where these are known, else by reading."""
    digest, size, mode = wanted
    path = inside(folder, name)
    try:
        state = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(state.st_mode) or state.st_size != size:
        return False
    is_known = known.get(name) == [digest, state.st_mtime_ns]
    if not is_known and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        return False
    if stat.S_IMODE(state.st_mode) != mode:
        path.chmod(mode)
    return True


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_manifest(folder: Path, wanted: dict[str, list[Any]]) -> None:
    rows = {
        name: [row[0], inside(folder, name).lstat().st_mtime_ns] for name, row in wanted.items()
    }
    scratch = folder / f"{MANIFEST}.{secrets.token_hex(4)}.part"
    scratch.write_text(json.dumps(rows), encoding="utf-8")
    scratch.replace(folder / MANIFEST)


def receive_file(frames: Frames, path: Path, *, size: int, mode: int, digest: str = "") -> None:
    """A file in frames of data; all of them are read even where the disk is full."""
    trouble: OSError | None = None
    # Devices may share a home: each writes beside the place under a name of its own.
    scratch = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.part")
    seen, left = hashlib.sha256(), size
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        trouble, number = error, -1
    while left > 0:
        kind, body = frames.receive()
        if kind != DATA or not body or len(body) > left:
            raise ValueError(f"{path.name} did not come as announced")
        seen.update(body)
        left -= len(body)
        if trouble is None:
            try:
                written = 0
                while written < len(body):
                    written += os.write(number, body[written:])
            except OSError as error:
                trouble = error
    if number >= 0:
        os.close(number)
    if trouble is None and (not digest or seen.hexdigest() == digest):
        scratch.chmod(mode)
        scratch.replace(path)
        return
    scratch.unlink(missing_ok=True)
    if trouble is None:
        raise ValueError(f"{path} arrived damaged; was it changed while it was sent?")
    raise OSError(trouble.errno, f"{os.strerror(trouble.errno or 0)}: {path}")


def send_file(frames: Frames, path: Path) -> None:
    """The other direction; a file that shrinks meanwhile is filled up, one that grows cut."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        frames.tell({"size": left})
        while left > 0:
            body = file.read(min(CHUNK_BYTES, left)) or bytes(min(CHUNK_BYTES, left))
            frames.send(DATA, body)
            left -= len(body)


def put(request: dict[str, Any], frames: Frames) -> dict[str, Any]:
    """Files to absolute places of the starter's choosing."""
    for name, size, mode in request["files"]:
        receive_file(frames, Path(name).expanduser(), size=size, mode=mode)
    return {}


def fetch(request: dict[str, Any], frames: Frames) -> dict[str, Any]:
    send_file(frames, Path(request["path"]).expanduser())
    return {}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """Folders and files that were put there."""
    for name in request["paths"]:
        path = Path(name).expanduser()
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return {}


def prune(folder: Path) -> None:
    """Of the folders beside this one, the latest few stay."""
    beside = sorted(
        (path for path in folder.parent.iterdir() if (path / MANIFEST).is_file()),
        key=lambda path: path.stat().st_mtime,
    )
    for old in beside[:-KEEP_VERSIONS]:
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
