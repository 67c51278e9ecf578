"""Stages: the way of a batch from storage to a device, as spans in the record of a run.

    storage -> fetch -> prepare -> collate -> copy -> deliver -> net
               '---- beside training ----'   '--- in the loop ---'

What runs beside training is of kind ``stage`` (BESIDE) and never adds to the time of a step. What
the training loop itself spends on its next batch is of kind ``feed``: ``wait`` until the batch is
there, ``copy``, ``deliver``. So the stall of a step is the sum of its ``feed`` spans, and the stage
spans of the same batch say what it waited for. Without workers the first three stages run inside
``wait``, and their spans lie within it. ``copy`` is taking a batch over from a worker, and bringing
it onto a GPU, which comes after ``deliver`` and on every device that has asked for it. While a copy
waits for what the GPU still computes, that is computing; a span without bytes says that the GPU
waited for a copy.

All others lie in ``events-<device>.jsonl`` of the device that reads. Their phase is ``feed``, with
the number of the call of net that came before (0: the first batch). ``bytes`` of a span: of
``fetch`` what was read from storage, of ``copy`` and ``deliver`` what was moved. Its ``values``:

    epoch, batch    which batch, both counted from 0
    worker          who made it; -1: the training process itself, in ``wait``
    samples         how many samples it has
    held, peer      of ``fetch``: how many samples came from memory, and from other devices
    worked_s        how many seconds the stage worked between the begin and the end of its span;
                    samples of one batch are fetched and prepared in turns

Notes (kind ``note``) of the same device: ``tuned`` whenever settings change (workers, depth,
held_bytes, cores, stall_s and step_s of a mean step before it), and ``epoch`` at the end of each
one (epoch, batches, samples, read_bytes, held, peer, skipped, and the seconds that each stage and
``wait`` took in all), ``held`` when memory is given back (held_bytes that are left).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from terrazzo.records.event import Event

FETCH, PREPARE, COLLATE, COPY, DELIVER = STAGES = ("fetch", "prepare", "collate", "copy", "deliver")
WAIT = "wait"
PHASE = "feed"
BESIDE, IN_LOOP = "stage", "feed"
"""Kinds of spans: of what runs beside training, and of what the loop itself spends."""
TUNED, EPOCH, HELD = "tuned", "epoch", "held"
"""Names of notes."""
INLINE = -1
"""The worker of a batch that the training process made itself."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One stage of one batch, as it stands in the record."""

    device: int
    call: int
    stage: str
    is_beside: bool
    begin_s: float
    end_s: float
    worked_s: float
    bytes: int
    epoch: int
    batch: int
    worker: int
    samples: int
    held: int
    peer: int


def stage_spans(events: Iterable[Event]) -> Iterator[StageSpan]:
    """The stages among the events of a run."""
    for event in events:
        if event.phase != PHASE or event.kind not in (BESIDE, IN_LOOP):
            continue
        told = dict(event.values)
        yield StageSpan(
            device=event.device,
            call=event.call,
            stage=event.name,
            is_beside=event.kind == BESIDE,
            begin_s=event.begin_s,
            end_s=event.end_s,
            worked_s=told.get("worked_s", event.seconds),
            bytes=event.bytes,
            epoch=int(told.get("epoch", 0)),
            batch=int(told.get("batch", 0)),
            worker=int(told.get("worker", INLINE)),
            samples=int(told.get("samples", 0)),
            held=int(told.get("held", 0)),
            peer=int(told.get("peer", 0)),
        )
