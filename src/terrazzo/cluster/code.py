"""Code: which files travel to the devices with a training script, and which do not.

Inside a git repository, what git tracks; elsewhere the script's own folder, without environments,
caches, hidden files and records of runs. A file ``.terrazzoignore`` at the top names more that
stays here, one pattern a line. Data do not travel: they are where the device that reads them is.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from terrazzo.errors import UsageError
from terrazzo.records.units import bytes_text

IGNORE = ".terrazzoignore"
NEVER = (".*", "__pycache__", "*.pyc", "venv", "env", "node_modules", "runs", "*.egg-info")
MOST_FILES = 20_000
OWN_KINDS = (".py", ".toml", ".css", ".js", ".typed")

Entry = tuple[str, int, int]
"""Digest, size and mode of a file."""


@dataclass(frozen=True, slots=True)
class Code:
    """Files below one folder, as they are now, and where in it to start."""

    root: Path
    files: Mapping[str, Entry]
    directory: str = "."
    """Where a script runs, relative to the root; where it would run here."""
    name: str = "code"
    left_out: tuple[str, ...] = ()
    """Python files beside the script that git does not track."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self.files.values())

    @property
    def digest(self) -> str:
        text = repr(sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def of_script(cls, script: Path, *, here: Path, limit_bytes: int) -> Code:
        """What a script needs, by what is around it."""
        path = script.resolve()
        top = _git_top(path.parent)
        root = top or path.parent
        names = set(_tracked(root) if top else _below(root))
        own = path.relative_to(root).as_posix()
        beside = {
            found.relative_to(root).as_posix()
            for found in path.parent.glob("*.py")
            if top and found != path
        }
        names = {*(name for name in names if not _ignored(name, _patterns(root))), own}
        inside = root == here.resolve() or root in here.resolve().parents
        directory = here.resolve() if inside else root
        code = cls(
            root=root,
            files=_entries(root, names, limit_bytes),
            directory=directory.relative_to(root).as_posix(),
            name=f"{_word(root.name)}-{_short(root)}",
            left_out=tuple(sorted(beside - names)),
        )
        _within(code, limit_bytes)
        return code

    @classmethod
    def of_terrazzo(cls) -> Code:
        """This very package: devices run the starter's version, whatever they have installed."""
        package = Path(__file__).parents[1]
        names = {
            path.relative_to(package.parent).as_posix()
            for path in package.rglob("*")
            if path.suffix in OWN_KINDS and path.is_file()
        }
        return cls(root=package.parent, files=_entries(package.parent, names, 1 << 30), name="own")


def _git_top(folder: Path) -> Path | None:
    """The repository around a folder; None where there is none, or no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--show-toplevel"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(done.stdout.rstrip("\n")).resolve()


def _tracked(root: Path) -> Iterator[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"git does not say what it tracks in {root}: {error}") from error
    for name in done.stdout.split(b"\0"):
        if name:
            yield os.fsdecode(name)


def _below(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _matches(name, NEVER))
        if (Path(folder) / "pyvenv.cfg").is_file():  # an environment by another name
            folders.clear()
            continue
        for name in files:
            if not _matches(name, NEVER):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _patterns(root: Path) -> tuple[str, ...]:
    try:
        lines = (root / IGNORE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    return tuple(line.strip().strip("/") for line in lines if line.strip() and line[0] != "#")


def _ignored(name: str, patterns: Iterable[str]) -> bool:
    """A pattern names a file, a folder, or a path from the top."""
    parts = PurePosixPath(name).parts
    paths = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(_matches(part, patterns) for part in (*parts, *paths))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _entries(root: Path, names: Iterable[str], limit_bytes: int) -> dict[str, Entry]:
    """Plain files that lie below the root; a link is followed if it leads to one of these."""
    found = {}
    for name in sorted(names):
        path = root / name
        try:
            real = path.resolve(strict=True)
            state = real.stat()
        except OSError:
            continue  # tracked, but deleted
        if not stat.S_ISREG(state.st_mode) or root not in real.parents:
            continue
        if state.st_size > limit_bytes:
            raise _too_much(name, state.st_size, limit_bytes)
        mode = 0o755 if state.st_mode & 0o100 else 0o644
        found[name] = (hashlib.sha256(real.read_bytes()).hexdigest(), state.st_size, mode)
        if len(found) > MOST_FILES:
            raise UsageError(
                f"{root} holds more than {MOST_FILES} files to copy: name what can stay in "
                f"{root / IGNORE}"
            )
    return found


def _within(code: Code, limit_bytes: int) -> None:
    if code.size_bytes > limit_bytes:
        largest = max(code.files, key=lambda name: code.files[name][1])
        raise _too_much(f"{code.root} (largest: {largest})", code.size_bytes, limit_bytes)


def _too_much(what: str, size: int, limit_bytes: int) -> UsageError:
    return UsageError(
        f"{what} has {bytes_text(size)}, at most {bytes_text(limit_bytes)} are copied: name what "
        f"can stay here in {IGNORE}, or write copy_limit = in the cluster's file"
    )


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()[:24] or "code"


def _short(root: Path) -> str:
    """Tells folders of one name apart, also those of another machine."""
    text = f"{os.uname().nodename}:{root}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
