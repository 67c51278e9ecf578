"""A rehearsal: a script's own training loop, fed under the condition of a trial for some steps.

A file is dropped from the page cache in the moment it is opened, so that no list of a data set's
files is needed: Python tells of every file it opens (an audit hook). Libraries that open files
without Python are not seen, and stay as warm as they are.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from terrazzo.feed.cores import allowed_cores
from terrazzo.records import document
from terrazzo.records.trial import COLD, FILE, SYNTHETIC, USUAL, WARM, Trial, TrialFacts

SKIPPED = 1
"""Steps whose processor time is not counted: the first one warms up."""
NOT_DATA = (".py", ".pyc", ".so", ".pth")
NOT_FOLDERS = ("/proc/", "/sys/", "/dev/")


class TrialOver(SystemExit):
    """The steps of a trial are done: the script ends here, and nothing is wrong."""

    def __init__(self) -> None:
        super().__init__(0)


class Rehearsal:
    """Counts steps over all epochs of a script, and ends it when there are enough."""

    def __init__(self, trial: Trial, folder: Path | None) -> None:
        self.trial, self.folder = trial, folder
        self.watch = Watch(evicts=trial.mode in (COLD, USUAL))
        self.done = 0
        self._cpu_s = 0.0
        self._facts: dict[str, int] = {"samples": 0, "batch": 0, "batch_bytes": 0}

    def loader(self, loader: Iterable[Any] | None) -> Iterable[Any] | None:
        """What a script's loader becomes for this trial; None on a device that does not read."""
        if loader is None:
            return None
        self._look_at(loader)
        self.watch.begin()
        if self.trial.mode == USUAL:
            return loader
        again = repeated(loader, self.trial.steps + 1)
        if self.trial.mode == SYNTHETIC:
            batch = next(iter(again))
            self._measure(batch)
            return Same(batch, self.trial.steps + 1)
        if self.trial.mode == WARM:
            for _ in again:
                pass
        return again

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Hands batches on until there were enough of them; then the script ends."""
        for batch in batches:
            if self.done == self.trial.steps + 1:
                break
            if self.done == SKIPPED:
                self._cpu_s = -time.process_time()
            self.done += 1
            yield batch
        if self.done > self.trial.steps:
            self._cpu_s += time.process_time()
            self._tell()
            raise TrialOver

    def _look_at(self, loader: Iterable[Any]) -> None:
        if isinstance(loader, DataLoader):
            with suppress(TypeError, NotImplementedError):
                self._facts["samples"] = len(loader.dataset)  # type: ignore[arg-type]

    def _measure(self, batch: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if tensors:
            self._facts["batch"] = int(tensors[0].shape[0]) if tensors[0].ndim else 1
            self._facts["batch_bytes"] = sum(t.numel() * t.element_size() for t in tensors)

    def _tell(self) -> None:
        if self.folder is None:
            return
        facts = TrialFacts(
            mode=self.trial.mode,
            steps=self.trial.steps,
            cpu_s=self._cpu_s / max(self.trial.steps, 1),
            cores=allowed_cores(),
            free_bytes=_free_bytes(),
            folder=self.watch.folder,
            **self._facts,
        )
        document.write(self.folder / FILE, facts.to_json())


class Same:
    """One batch, again and again."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.count)


def repeated(loader: Iterable[Any], count: int) -> Iterable[Any]:
    """The first ``count`` batches of a loader, the same ones each time, without workers."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return First(loader, count)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    indices = list(itertools.islice(_round(sampler), count))
    options: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": loader.generator}
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=indices, **options)
    return DataLoader(loader.dataset, batch_sampler=indices, **options)


def _round(source: Iterable[Any]) -> Iterator[Any]:
    """From the beginning again at the end; an empty source ends at once."""
    while True:
        empty = True
        for item in source:
            empty = False
            yield item
        if empty:
            return


class First:
    """The first items of anything that can be gone through again."""

    def __init__(self, source: Iterable[Any], count: int) -> None:
        self.source, self.count = source, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(_round(self.source), self.count)


class Watch:
    """Hears of every file this process, and those it forks, open for reading."""

    def __init__(self, *, evicts: bool) -> None:
        self.evicts, self.folder = evicts, ""
        self._busy = threading.local()
        self._begun = False

    def begin(self) -> None:
        """From now on; there is no end to it but that of the process."""
        if self._begun:
            return
        self._begun = True
        if self.evicts:
            for link in Path("/proc/self/fd").iterdir():  # what is open already
                with suppress(OSError):
                    self._drop(str(link.readlink()))
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or getattr(self._busy, "now", False):
            return
        path, _, flags = arguments
        reads = not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY
        if isinstance(path, (str, bytes)) and reads:
            self._busy.now = True
            try:
                self._drop(os.fsdecode(path))
            finally:
                self._busy.now = False

    def _drop(self, path: str) -> None:
        full = str(Path(path).absolute())
        if full.endswith(NOT_DATA) or full.startswith((*NOT_FOLDERS, sys.prefix, sys.base_prefix)):
            return
        with suppress(OSError):
            number = os.open(full, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(number).st_mode):
                    self.folder = str(Path(full).parent)
                    if self.evicts:
                        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)


def _free_bytes() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return 0
