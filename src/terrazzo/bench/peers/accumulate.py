"""One device, image by image: little memory, but BatchNorm sees one image at a time."""

from __future__ import annotations

from terrazzo.bench.cases import Case
from terrazzo.bench.peers.alone import AloneTrainer
from terrazzo.bench.peers.peer import Trainer, Work


class Accumulate:
    name = "accumulate"
    claims_exact = False
    alone = True
    compiles = False

    def can(self, case: Case, devices: int) -> str | None:
        return "one image: the same as alone" if case.batch == 1 else None

    def build(self, work: Work) -> Trainer:
        return AloneTrainer(work, pieces=work.case.batch)
