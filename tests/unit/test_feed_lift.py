"""Bringing batches to a device that is no GPU leaves them as they are, and is recorded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.feed import lift as lift_module
from terrazzo.feed.lift import PINNED, PLAIN, RUN_AHEAD, TRIED, Lift, lift_of
from terrazzo.feed.stalls import fed_steps, stalls_of
from terrazzo.geometry import Box
from terrazzo.records.event import read_events
from terrazzo.records.stage import COPY, WAIT, StageSpan, stage_spans
from terrazzo.runtime.part import Part
from terrazzo.runtime.recorder import Recorder

COPY_S, STEP_S = 0.05, 0.05
CLOCK_S = 1e-4
"""Times in a record are rounded."""


def test_nothing_is_staged_without_a_gpu() -> None:
    lift = Lift("cpu")
    box = Box(((0, 1), (0, 3)))
    for number, batch in enumerate(lift.batches([[torch.ones(2), "name", 3]] * (2 * TRIED + 1))):
        assert torch.equal(batch[0], torch.ones(2))
        assert batch[1:] == ["name", 3]
        assert lift.way == PLAIN, number
    ((part,),) = lift.batches([[Part(torch.zeros(1, 3), box, (2, 3))]])
    assert part.box == box
    assert tuple(part.shape) == (2, 3)


def test_one_lift_for_all_epochs_of_a_loop() -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(1, 3, 8, 8),))
    batches = [(torch.full((1, 3, 8, 8), float(n)), n) for n in range(4)]
    for _ in range(2):
        found = [(x[0, 0, 0, 0].item(), n) for x, n in tz.feed(batches, net, device="cpu")]
        assert found == [(float(n), n) for n in range(4)]
    lift = lift_of(net, "cpu")
    assert lift.choice.step_s(PLAIN) is None, "one step of each epoch counts, of two"
    run = tz.Run(net, loader=batches, feeding={"device": "cpu"})
    for _ in run.epochs(6):
        assert [n for _, n in run.feed()] == [0, 1, 2, 3]
    assert lift.choice.step_s(PLAIN) is not None
    assert lift_of(net.eval(), "cpu") is not lift


class Far(Tensor):
    """A batch that takes its time to be moved."""

    def to(self, *place: Any, **options: Any) -> Tensor:
        time.sleep(COPY_S)
        return self.as_subclass(Tensor).to(*place, **options)


def test_copying_is_a_part_of_a_step_of_its_own(tmp_path: Path) -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(1, 3, 8, 8),))
    net.links.recorder = recorder = Recorder(tmp_path, 0)
    batches = [(torch.zeros(1, 3, 8, 8).as_subclass(Far), n) for n in range(6)]
    for _ in range(2):
        for _ in tz.feed(batches, net, device="meta"):
            time.sleep(STEP_S)
    recorder.flush()
    events = list(read_events(tmp_path))
    copies = [span for span in stage_spans(events) if span.stage == COPY]
    numbers = [(span.epoch, span.batch) for span in copies]
    assert numbers == [(epoch, batch) for epoch in (0, 1) for batch in range(6)]
    assert {span.bytes for span in copies} == {4 * 3 * 8 * 8}
    assert not any(span.is_beside for span in copies)
    waits = [span for span in stage_spans(events) if span.stage == WAIT]
    for wait, copy in zip(waits, copies, strict=True):
        assert wait.end_s <= copy.begin_s + CLOCK_S, "copying is not waiting for a batch"
    found = stalls_of(fed_steps(events), skip=0)
    assert found is not None
    assert found.copy_s >= COPY_S - CLOCK_S
    assert found.compute_s >= STEP_S - CLOCK_S
    assert sum(seconds for _, seconds in found.parts) == pytest.approx(found.step_s)


class Gpu:
    """Stands for one that needs some time for a step, and has the times of its marks made up."""

    def __init__(self, *, busy_s: float, late_s: float) -> None:
        self.busy_s, self.late_s = busy_s, late_s

    def mark(self, _: Any) -> Gpu:
        return self

    def wait(self) -> None:
        time.sleep(self.busy_s)

    def until_s(self, _: Gpu) -> float:
        return self.late_s


def copies(gpu: Gpu, way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[StageSpan]:
    class Lifted(Lift):
        way = property(lambda _: way)  # type: ignore[assignment]

        def _brought(self, batch: Any, way: str) -> Any:
            return batch

    monkeypatch.setattr(lift_module, "Mark", gpu.mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    recorder = Recorder(folder, 0)
    lift = Lifted("meta", recorder=lambda: recorder)
    lift._stream = object()  # type: ignore[assignment]
    for _ in lift.batches([torch.zeros(3)] * (RUN_AHEAD + 2)):
        pass
    recorder.flush()
    return [span for span in stage_spans(read_events(folder)) if span.stage == COPY]


def test_a_plain_copy_that_waits_for_the_gpu_computes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = copies(Gpu(busy_s=0.03, late_s=0.01), PLAIN, tmp_path, monkeypatch)
    assert len(found) == RUN_AHEAD + 2
    for span in found:
        assert span.end_s - span.begin_s == pytest.approx(0.01, abs=CLOCK_S), "what the GPU copied"


@pytest.mark.parametrize(("late_s", "counts_s"), [(0.01, 0.01), (9.0, 0.03), (-0.5, None)])
def test_a_gpu_that_waits_for_a_copy_is_found_when_it_is_waited_for(
    late_s: float, counts_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than the loop has waited, and nothing where the copy came in time."""
    found = copies(Gpu(busy_s=0.03, late_s=late_s), PINNED, tmp_path, monkeypatch)
    caught = [span for span in found if not span.bytes]
    assert [span.batch for span in caught] == ([] if counts_s is None else [0, 1])
    for span in caught:
        assert counts_s is not None
        took_s = span.end_s - span.begin_s
        assert took_s >= counts_s - CLOCK_S
        assert took_s <= counts_s + CLOCK_S or late_s > 1, "a sleep may last longer than it should"
