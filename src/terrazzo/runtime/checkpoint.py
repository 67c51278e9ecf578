"""Checkpoints: a run as it was between two steps, on disk, all of it or nothing.

    checkpoints/
      step-00000120/
        model.safetensors   weights and buffers, whole, under the model's own names
        parts.safetensors   the tensors of everything else
        state.json          what those belong to, and a hash of both files

``model.load_state_dict(safetensors.torch.load_file(...))`` loads the first without Terrazzo.
Nothing in these files can run. A checkpoint is written beside, flushed and renamed, so that it is
there or it is not; one whose hashes do not fit is passed over for the one before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from terrazzo.errors import RunError, UsageError
from terrazzo.records import document
from terrazzo.runtime.parcel import pack, unpack

KIND, VERSION = "checkpoint", 1
MODEL, PARTS, STATE = "model.safetensors", "parts.safetensors", "state.json"
PREFIX, UNFINISHED, REPLACED, ASIDE = "step-", ".unfinished-", ".replaced-", "before-"
KEPT = 2
"""Checkpoints that stay: one may be damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after so many steps."""

    step: int
    model: Mapping[str, Tensor]
    rest: Any
    passed_over: tuple[str, ...] = ()
    """Later checkpoints that could not be read, and why."""


class Shelf:
    """The checkpoints of a run on one device."""

    def __init__(self, folder: Path, *, kept: int = KEPT) -> None:
        if kept < 1:
            raise UsageError(f"kept={kept}: keep at least one checkpoint")
        self.folder, self.kept = folder, kept

    @property
    def steps(self) -> list[int]:
        """After how many steps there is one, the latest last."""
        names = [path.name for path in self.folder.glob(f"{PREFIX}*") if path.is_dir()]
        numbers = [name.removeprefix(PREFIX) for name in names]
        return sorted(int(number) for number in numbers if number.isdigit())

    def save(self, step: int, model: Mapping[str, Tensor], rest: Any) -> Path:
        """Writes one; only then those that are too many go."""
        tensors: list[Tensor] = []
        packed = pack(rest, tensors, name="the run")
        files = {MODEL: dict(model), PARTS: {str(place): t for place, t in enumerate(tensors)}}
        body = {"step": step, "tensors": len(tensors), "state": packed}
        target = self.folder / f"{PREFIX}{step:08d}"
        with self._refusing(step, sum(t.nbytes for t in (*model.values(), *tensors))):
            self._write(files, body, target)
        before = [old for old in self.steps if old <= step]
        for old in before[: -self.kept]:
            self._remove(self.folder / f"{PREFIX}{old:08d}")
        return target

    def _remove(self, path: Path) -> None:
        """All of it or nothing, also when the device loses power meanwhile."""
        aside = self.folder / f"{UNFINISHED}{path.name}-old"
        with contextlib.suppress(OSError):
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def put_aside(self, *, above: int) -> tuple[list[int], Path]:
        """Moves those of later steps, of another training, to a folder beside; tells which."""
        later = [step for step in self.steps if step > above]
        number = 1 + len(list(self.folder.glob(f"{ASIDE}*")))
        beside = self.folder / f"{ASIDE}{number}"
        for step in later:
            beside.mkdir(exist_ok=True)
            (self.folder / f"{PREFIX}{step:08d}").rename(beside / f"{PREFIX}{step:08d}")
        return later, beside

    def _write(
        self, files: Mapping[str, Mapping[str, Tensor]], body: Mapping[str, Any], target: Path
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._heal()
        for left in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        beside = self.folder / f"{UNFINISHED}{target.name}"
        beside.mkdir()
        for name, tensors in files.items():
            save_file(_apart(tensors), beside / name)
            _flush(beside / name)
        hashes = {name: _hash(beside / name) for name in files}
        text = document.dump(KIND, VERSION, {**body, "hashes": hashes})
        document.write(beside / STATE, text)
        _flush(beside)
        replaced = self.folder / f"{REPLACED}{target.name}"
        if target.exists():  # the same steps were made again, after going back
            target.rename(replaced)
        beside.rename(target)
        _flush(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _heal(self) -> None:
        """One that was about to be replaced when the power went is still good."""
        for left in self.folder.glob(f"{REPLACED}*"):
            target = self.folder / left.name.removeprefix(REPLACED)
            if target.exists():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.rename(target)

    @contextlib.contextmanager
    def _refusing(self, step: int, size: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            for left in self.folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            raise RunError(
                f"the checkpoint of step {step} ({size / 2**20:.1f} MiB) could not be written to "
                f"{self.folder}: {error}{_free(self.folder)}. Those before it are still there: "
                "free some space, or name another folder"
            ) from error

    def latest(self) -> Checkpoint | None:
        """The latest that can be read, if there is any; of those that cannot, a warning tells."""
        with contextlib.suppress(OSError):  # a folder that can only be read
            self._heal()
        try:
            found = self.load() if self.steps else None
        except RunError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            return None
        for problem in () if found is None else found.passed_over:
            told = f"a checkpoint in {self.folder} was passed over: {problem}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        return found

    def load(self, step: int | None = None) -> Checkpoint:
        """The latest that can be read, or the one of a step."""
        wanted = self.steps[::-1] if step is None else [step]
        if not wanted:
            raise UsageError(f"{self.folder} holds no checkpoint")
        passed_over: list[str] = []
        for number in wanted:
            try:
                found = self._read(number)
            except (OSError, UsageError, SafetensorError, KeyError, IndexError) as error:
                passed_over.append(f"step {number}: {error}")
                continue
            return Checkpoint(number, found[0], found[1], tuple(passed_over))
        raise RunError(
            f"no checkpoint in {self.folder} can be read ({'; '.join(passed_over)}): take another "
            "device's, or start anew"
        )

    def _read(self, step: int) -> tuple[dict[str, Tensor], Any]:
        folder = self.folder / f"{PREFIX}{step:08d}"
        body = document.parse((folder / STATE).read_text(encoding="utf-8"), KIND, VERSION)
        for name in (MODEL, PARTS):
            if _hash(folder / name) != body["hashes"][name]:
                raise UsageError(f"{folder / name} is damaged: its hash is another")
        parts = load_file(folder / PARTS)
        tensors = [parts[str(place)] for place in range(body["tensors"])]
        return load_file(folder / MODEL), unpack(body["state"], tensors)


def latest_among(folder: Path) -> Checkpoint | None:
    """The latest that can be read in any folder below: who wrote it may not be here any more."""
    shelves = [Shelf(path) for path in sorted(folder.glob("*")) if path.is_dir()]
    best: Checkpoint | None = None
    for shelf in sorted(shelves, key=lambda one: one.steps[-1:], reverse=True):
        if best is None or best.step < max(shelf.steps, default=0):
            found = shelf.latest()
            best = found if best is None or (found and found.step > best.step) else best
    return best


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the host, and no two in the same memory: tied weights are written twice."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        found[name] = own.clone() if place in seen else own
        seen.add(place)
    return found


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            found.update(data)
    return found.hexdigest()


def _flush(path: Path) -> None:
    """A file, or the names in a folder, reach the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _free(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    except OSError:
        return ""
