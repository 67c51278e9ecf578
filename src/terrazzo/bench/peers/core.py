"""One core of one device, image by image: what published speedups are often over."""

from __future__ import annotations

from terrazzo.bench.cases import Case
from terrazzo.bench.peers.alone import AloneTrainer
from terrazzo.bench.peers.peer import Trainer, Work


class Core:
    name = "core"
    claims_exact = False  # BatchNorm sees one image at a time
    alone = True
    compiles = False

    def can(self, case: Case, devices: int) -> str | None:
        return None if case.threads > 1 else "a device has one thread here: the same as accumulate"

    def build(self, work: Work) -> Trainer:
        return AloneTrainer(work, pieces=work.case.batch)
