"""A diagnosis: four trials of one training put together, and what follows from them.

Two ways to the same answer. By difference: with the same batch again and again a step is nothing
but computing; with files in memory pre-processing comes on top; with files from storage fetching.
By spans: of every step, how long the loop waited, and what the stages of its batch took. Stage
costs for predictions are those of batches made in the loop, where nothing disturbs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from terrazzo.errors import RunError, UsageError
from terrazzo.feed.advice import Advice, Facts, advise
from terrazzo.feed.pipeline import Pipeline, sharing_of
from terrazzo.feed.stalls import FedStep, Stalls, fed_steps, stalls_of
from terrazzo.feed.tuner import SETTLING
from terrazzo.records import document
from terrazzo.records.event import read_events
from terrazzo.records.storage import Storage
from terrazzo.records.trial import COLD, FILE, SYNTHETIC, USUAL, WARM, TrialFacts
from terrazzo.records.units import seconds_text

KIND, VERSION = "stalls", 1
LEAST_STEPS = 3
UNDISTURBED = 0.5
"""Of the steps whose batches are made in the loop, the part that costs are taken from."""
FAR = 0.15
"""Two ways to one number that differ by more do not agree."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One trial: its steps, their average, and what else was noted."""

    stalls: Stalls
    facts: TrialFacts
    steps: tuple[FedStep, ...]

    @classmethod
    def read(cls, folder: Path) -> Seen:
        """From the folder of a trial's run."""
        steps = tuple(fed_steps(read_events(folder)))
        found = stalls_of(steps, quickest=UNDISTURBED)
        path = folder / FILE
        if found is None or not path.exists():
            raise RunError(
                f"the trial in {folder} was not fed by tz.feed, or by less than two batches: write "
                "`for x, y in tz.feed(loader, net)` in the training loop"
            )
        if len(steps) < LEAST_STEPS:
            raise RunError(
                f"the trial in {folder} ended after {len(steps)} steps, and {LEAST_STEPS} are "
                "needed: let the script train for more batches, or in smaller ones"
            )
        facts = TrialFacts.from_json(path.read_text(encoding="utf-8"))
        if facts.mode == USUAL:
            found = stalls_of(steps, skip=unsettled(steps)) or found
            found = replace(found, workers=max(found.workers, facts.own_workers))
        return cls(found, facts, steps)


def unsettled(steps: Sequence[FedStep]) -> int:
    """How many of a script's steps are not counted: workers are being started in the first half.

    In a short trial also later. Steps whose batches the loop has made are no average with others.
    """
    half = len(steps) // 2
    other = [place for place, step in enumerate(steps) if step.is_apart != steps[-1].is_apart]
    begin = max(half, other[-1] + 1 + SETTLING) if other else half
    return begin if len(steps) - begin >= LEAST_STEPS else half


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a training's input costs, and what would change it."""

    synthetic_s: float
    warm_s: float
    cold_s: float
    """Steps by trial, batches made in the loop."""
    usual: Stalls
    pipeline: Pipeline
    advice: Advice
    facts: Facts
    storage: Storage | None

    @property
    def prepare_stall_s(self) -> float:
        """By difference."""
        return max(0.0, self.warm_s - self.synthetic_s)

    @property
    def fetch_stall_s(self) -> float:
        return max(0.0, self.cold_s - self.warm_s)

    @property
    def predicted_s(self) -> float:
        """What the pipeline says of the step as it is, to be held against what was seen."""
        return self.pipeline.step_s

    @property
    def doubt(self) -> str:
        """Why these numbers should not be trusted; empty: nothing speaks against them."""
        off = self.predicted_s / self.usual.step_s - 1
        if abs(off) > FAR:
            return (
                f"a step took {seconds_text(self.usual.step_s)}, and by the trials alone it should "
                f"be {seconds_text(self.predicted_s)}"
            )
        if self.warm_s > (1 + FAR) * self.cold_s:
            return (
                f"steps took longer with files in memory ({seconds_text(self.warm_s)}) than with "
                f"files from storage ({seconds_text(self.cold_s)})"
            )
        return ""

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    def save(self, path: Path) -> None:
        try:
            document.write(path, self.to_json() + "\n")
        except OSError as error:
            text = f"cannot write {path}: {error.strerror}; name another place"
            raise UsageError(text) from error


def diagnose(trials: Mapping[str, Seen], *, storage: Storage | None = None) -> Diagnosis:
    """From the trials of all four modes."""
    synthetic, warm, cold, usual = (trials[mode] for mode in (SYNTHETIC, WARM, COLD, USUAL))
    facts = _facts(trials)
    pipeline = pipeline_of(trials, facts, storage=storage)
    return Diagnosis(
        synthetic_s=synthetic.stalls.step_s,
        warm_s=warm.stalls.step_s,
        cold_s=cold.stalls.step_s,
        usual=usual.stalls,
        pipeline=pipeline,
        advice=advise(pipeline, usual.stalls, facts, storage=storage),
        facts=facts,
        storage=storage,
    )


def pipeline_of(
    trials: Mapping[str, Seen], facts: Facts, *, storage: Storage | None = None
) -> Pipeline:
    """The costs of stages, each where it is least disturbed."""
    synthetic, warm, cold, usual = (trials[mode] for mode in (SYNTHETIC, WARM, COLD, USUAL))
    alone = synthetic.stalls
    fetch_s, prepare_s = cold.stalls.fetch_s, warm.stalls.prepare_s + warm.stalls.collate_s
    if not cold.stalls.samples:  # a data set that is only iterated: its stages are not told apart
        fetch_s = max(0.0, cold.stalls.step_s - warm.stalls.step_s)
        prepare_s = max(0.0, warm.stalls.step_s - alone.step_s)
    found = Pipeline(
        loop_s=alone.step_s - alone.wait_s,
        loop_cpu_s=synthetic.facts.cpu_s,
        fetch_s=fetch_s,
        prepare_s=prepare_s,
        workers=usual.stalls.workers,
        cores=usual.facts.cores,
    )
    if storage is None or not facts.stored_bytes:
        return found
    floor_s = facts.batch * facts.stored_bytes / storage.sequential_bytes_per_s
    return replace(found, sharing=sharing_of(storage, facts.stored_bytes), floor_s=floor_s)


def _facts(trials: Mapping[str, Seen]) -> Facts:
    synthetic, cold = trials[SYNTHETIC].facts, trials[COLD].stalls
    batch = cold.samples or synthetic.batch
    return Facts(
        samples=synthetic.samples,
        batch=batch,
        stored_bytes=cold.read_bytes / batch if batch else 0.0,
        decoded_bytes=synthetic.batch_bytes / synthetic.batch if synthetic.batch else 0.0,
        free_bytes=trials[USUAL].facts.free_bytes,
        most_workers=trials[WARM].facts.most_workers,
        stays=trials[WARM].facts.stays,
    )
