"""Exchange: boxes move between devices, and their gradients move back and add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.runtime.links import Message
from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Exchange, Move, Program

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One box of a move: who the other device is, and where the box lies here, on either side."""

    peer: int
    source: Slices
    target: Slices
    fills_source: bool = False
    fills_target: bool = False
    """Whether the box is all that this device holds of the array."""


class _Moves:
    """One move as this device sees it, worked out once."""

    def __init__(self, move: Move, program: Program, device: int) -> None:
        self.source, self.target, self.adds = move.source, move.target, move.adds
        boxes = [program.arrays[name].boxes for name in (move.source, move.target)]
        held, wanted = (None if part is None else part[device] for part in boxes)
        self.gathers = wanted is None
        self.device = device
        self.sent: list[_Piece] = []
        self.arriving: list[_Piece] = []
        """In the order of the plan, what stays here among the rest, so that sums repeat."""
        for transfer in move.transfers:
            here = (transfer.source == device, transfer.destination == device)
            source = transfer.box.within(held).slices() if held and here[0] else ()
            target = transfer.box.within(wanted).slices() if wanted else transfer.box.slices()
            if here[1]:
                fills = [transfer.box == box for box in (held, wanted)]
                self.arriving.append(_Piece(transfer.source, source, target, *fills))
            elif here[0]:
                self.sent.append(_Piece(transfer.destination, source, ()))


class ExchangeStep:
    def __init__(self, step: Exchange, program: Program, *, device: int) -> None:
        self.step = step
        self.weights = any(
            program.graph.values[program.arrays[move.source].value].kind == "parameter"
            for move in step.moves
        )
        self.moves = [_Moves(move, program, device) for move in step.moves]

    def forward(self, run: Run) -> None:
        sends: list[Message] = []
        receives: list[Message] = []
        arrivals: list[tuple[Tensor, Tensor, bool]] = []
        for tag, move in enumerate(self.moves):
            source = run.held[move.source]
            target = run.empty(move.target)
            begun = not move.adds  # the first addend is written, if it is as large as the sum
            if move.adds and not (move.arriving and move.arriving[0].fills_target):
                target.zero_()
                begun = True
            for piece in move.sent:
                sends.append((piece.peer, tag, source[piece.source].contiguous()))
            for piece in move.arriving:
                place, adds, begun = target[piece.target], move.adds and begun, True
                if piece.peer == move.device:
                    arrivals.append((place, source[piece.source], adds))
                    continue
                straight = place.is_contiguous() and not adds
                buffer = place if straight else _buffer(place)
                receives.append((piece.peer, tag, buffer))
                if not straight:
                    arrivals.append((place, buffer, adds))
            run.held[move.target] = target
        run.links.exchange(sends, receives)
        for place, buffer, adds in arrivals:
            if adds:
                place.add_(buffer)
            else:
                place.copy_(buffer)

    def backward(self, run: Run) -> None:
        sends: list[Message] = []
        receives: list[Message] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        results = []
        if self.weights:
            run.catch_up()
        for tag, move in enumerate(self.moves):
            if move.target not in run.live:
                continue
            grad = run.gradient(move.target)
            result = _begun(run, move, grad)
            results.append((move.source, result))
            for piece in move.arriving:
                if piece.peer != move.device and not move.gathers:
                    sends.append((piece.peer, tag, grad[piece.target].contiguous()))
            # A gathered gradient is complete on every device: each takes what it owns.
            for piece in () if move.gathers else move.sent:
                place = result[piece.source]
                buffer = _buffer(place)
                receives.append((piece.peer, tag, buffer))
                arrivals.append((place, buffer))
        run.links.exchange(sends, receives, meanwhile=run.catch_up)
        for place, buffer in arrivals:  # in the order of the plan, so that sums repeat
            place.add_(buffer)
        for name, result in results:
            first = name not in run.grads
            run.add(name, result)
            if first:
                run.exclusive.add(name)


def _begun(run: Run, move: _Moves, grad: Tensor) -> Tensor:
    """The gradient of what was moved, as far as it stayed here, in memory of its own."""
    kept = [piece for piece in move.arriving if piece.peer == move.device]
    if len(kept) == 1 and kept[0].fills_source:
        return grad[kept[0].target].clone(memory_format=torch.contiguous_format)
    result = run.zeros(move.source)
    for piece in kept:
        result[piece.source].add_(grad[piece.target])
    return result


def _buffer(place: Tensor) -> Tensor:
    return torch.empty_like(place, memory_format=torch.contiguous_format)
