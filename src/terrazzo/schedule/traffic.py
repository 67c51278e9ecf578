"""The bytes a program sends, counted before it runs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from terrazzo.records.graph import BYTES
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.program import Combine, Exchange, Move, Program, Spread


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload per device: boxes sent to peers, and the sizes of what collectives work on."""

    sent_bytes: tuple[int, ...]
    summed_bytes: tuple[int, ...]


def moved_bytes(program: Program, move: Move, *, back: bool) -> list[int]:
    """What each device sends for one move, forwards or back."""
    value = program.graph.values[program.arrays[move.source].value]
    sent = [0] * program.devices
    if back and program.arrays[move.target].is_whole:
        return sent  # each device slices a gradient that is already complete
    for transfer in move.transfers:
        if transfer.source != transfer.destination:
            sender = transfer.destination if back else transfer.source
            sent[sender] += transfer.box.size * BYTES[value.dtype]
    return sent


def traffic(program: Program, differentiable: Set[str]) -> Traffic:
    """One training step; ``differentiable`` are the arrays that carry a gradient."""
    sent, summed = [0] * program.devices, [0] * program.devices
    for step in program.steps:
        if isinstance(step, Exchange):
            for move in step.moves:
                ways = (False, True) if move.source in differentiable else (False,)
                for back in ways:
                    for device, amount in enumerate(moved_bytes(program, move, back=back)):
                        sent[device] += amount
        elif isinstance(step, Spread) and step.target in differentiable:
            for device, amount in enumerate(_spread_bytes(program, step)):
                summed[device] += amount
        elif isinstance(step, Combine):
            amount = _combined_bytes(program, step)
            summed = [before + amount for before in summed]
    return Traffic(tuple(sent), tuple(summed))


def _spread_bytes(program: Program, step: Spread) -> list[int]:
    """A gradient is summed by those who hold the same box; a box of one's own needs no sum."""
    array = program.arrays[step.source]
    value = program.graph.values[array.value]
    if array.boxes is None:
        return [value.bytes] * program.devices
    return [
        box.size * BYTES[value.dtype] if len(others) > 1 else 0
        for box, others in zip(array.boxes, sharers(array.boxes), strict=True)
    ]


def _statistic_bytes(dtype: str) -> int:
    """Statistics travel in float32, and in float64 when the model computes in float64."""
    return 8 if dtype == "float64" else 4


def _combined_bytes(program: Program, step: Combine) -> int:
    value = program.graph.values[program.graph.nodes[step.node].refs[0]]
    size = 1
    for extent in step.reduction.shape:
        size *= extent
    if step.reduction.rows:
        return step.reduction.rows * size * 8
    return size * (_statistic_bytes(value.dtype) if value.is_floating else 8)
