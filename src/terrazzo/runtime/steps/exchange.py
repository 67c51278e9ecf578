"""Exchange: boxes move between devices, and their gradients move back and add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.runtime.steps.step import Run
from terrazzo.runtime.wire import Parcel
from terrazzo.schedule import Exchange, Move, Program

Slices = tuple[slice, ...]
Arrival = tuple[Tensor, Tensor, bool]
"""A place, what goes there, and whether it is added."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One box of a move: who the other device is, and where the box lies here, on either side."""

    peer: int
    source: Slices
    target: Slices
    shape: tuple[int, ...]
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
            shape = transfer.box.shape
            here = (transfer.source == device, transfer.destination == device)
            source = transfer.box.within(held).slices() if held and here[0] else ()
            target = transfer.box.within(wanted).slices() if wanted else transfer.box.slices()
            if here[1]:
                fills = [transfer.box == box for box in (held, wanted)]
                self.arriving.append(_Piece(transfer.source, source, target, shape, *fills))
            elif here[0]:
                self.sent.append(_Piece(transfer.destination, source, (), shape))


class ExchangeStep:
    """One that ends later is ended, and its way back begun, by an ``ArriveStep``."""

    def __init__(self, step: Exchange, program: Program, *, device: int) -> None:
        self.step = step
        self.weights = any(program.is_parameter(move.source) for move in step.moves)
        self.moves = [_Moves(move, program, device) for move in step.moves]

    def forward(self, run: Run) -> None:
        self._depart(run)
        if not self.step.ends_later:
            self.arrive(run)

    def _depart(self, run: Run) -> None:
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        stays: list[tuple[Tensor, Tensor]] = []
        arrivals: list[Arrival] = []
        run.ease(self.step.writes)
        for move in self.moves:
            source = run.held[move.source]
            target = run.held[move.target] = run.empty(move.target)
            begun = not move.adds  # the first addend is written, if it is as large as the sum
            if move.adds and not (move.arriving and move.arriving[0].fills_target):
                target.zero_()
                begun = True
            for piece in move.sent:
                sends.append((piece.peer, source[piece.source].contiguous()))
            for piece in move.arriving:
                place, adds, begun = target[piece.target], move.adds and begun, True
                if piece.peer == move.device:
                    here = source[piece.source]
                    if move.adds:
                        arrivals.append((place, here, adds))
                    else:
                        stays.append((place, here))
                    continue
                straight = place.is_contiguous() and not adds
                buffer = place if straight else _buffer(place)
                receives.append((piece.peer, buffer))
                if not straight:
                    arrivals.append((place, buffer, adds))
        voyage = run.links.depart(sends, receives, busy=self.step.ends_later)
        for place, here in stays:
            place.copy_(here)
        run.under_way = (voyage, arrivals)

    def arrive(self, run: Run) -> None:
        """What others sent comes to its place."""
        voyage, arrivals = run.landing()
        voyage.land()
        for place, buffer, adds in arrivals:
            if adds:
                place.add_(buffer)
            else:
                place.copy_(buffer)

    def backward(self, run: Run) -> None:
        if not self.step.ends_later:
            self.depart_back(run)
        self._arrive_back(run)

    def depart_back(self, run: Run) -> None:
        """Sends back the gradients of what others sent."""
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        if self.weights:
            run.catch_up()
        for move in self.moves:
            # A gathered gradient is complete on every device: each takes what it owns.
            if move.target not in run.live or move.gathers:
                continue
            grad = run.gradient_so_far(move.target)
            for piece in move.arriving:
                if piece.peer != move.device:
                    sends.append((piece.peer, grad[piece.target].contiguous()))
            for piece in move.sent:
                room = torch.empty(piece.shape, dtype=grad.dtype, device=grad.device)
                receives.append((piece.peer, room))
        voyage = run.links.depart(sends, receives, busy=True)
        run.under_way = (voyage, [buffer for _, buffer in receives])

    def _arrive_back(self, run: Run) -> None:
        voyage, buffers = run.landing()
        run.ease(move.source for move in self.moves if move.target in run.live)
        results = [
            (move, _begun(run, move, run.gradient(move.target)))
            for move in self.moves
            if move.target in run.live
        ]
        run.catch_up()
        voyage.land()
        arrived = iter(buffers)
        for move, result in results:
            for piece in () if move.gathers else move.sent:
                result[piece.source].add_(next(arrived))  # in the order of the plan: sums repeat
            first = move.source not in run.grads
            run.add(move.source, result)
            if first:
                run.exclusive.add(move.source)


class ArriveStep:
    """The end of an exchange, and the beginning of its way back."""

    def __init__(self, exchange: ExchangeStep) -> None:
        self.exchange = exchange

    def forward(self, run: Run) -> None:
        self.exchange.arrive(run)

    def backward(self, run: Run) -> None:
        self.exchange.depart_back(run)


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
