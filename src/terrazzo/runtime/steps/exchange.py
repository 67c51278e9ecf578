"""Exchange: boxes move between devices, and their gradients move back and add."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Exchange, Move

Message = tuple[int, int, Tensor]


class ExchangeStep:
    def __init__(self, step: Exchange) -> None:
        self.step = step

    def forward(self, run: Run) -> None:
        sends: list[Message] = []
        receives: list[Message] = []
        arrivals = []
        for tag, move in enumerate(self.step.moves):
            source = run.held[move.source]
            target = run.zeros(move.target) if move.adds else run.empty(move.target)
            held, wanted = run.box(move.source), run.box(move.target)
            for transfer in move.transfers:
                if transfer.source == run.device:
                    piece = source[transfer.box.within(held).slices()]
                    if transfer.destination == run.device and move.adds:
                        arrivals.append((target[transfer.box.within(wanted).slices()], piece, True))
                    elif transfer.destination == run.device:
                        target[transfer.box.within(wanted).slices()] = piece
                    else:
                        sends.append((transfer.destination, tag, piece.contiguous()))
                elif transfer.destination == run.device:
                    place = target[transfer.box.within(wanted).slices()]
                    buffer = (
                        place
                        if place.is_contiguous() and not move.adds
                        else torch.empty_like(place, memory_format=torch.contiguous_format)
                    )
                    receives.append((transfer.source, tag, buffer))
                    arrivals.append((place, buffer, move.adds))
            run.held[move.target] = target
        run.links.exchange(sends, receives)
        for place, buffer, adds in arrivals:  # in the order of the plan, so that sums repeat
            if adds:
                place.add_(buffer)
            elif place is not buffer:
                place.copy_(buffer)

    def backward(self, run: Run) -> None:
        sends: list[Message] = []
        receives: list[Message] = []
        arrivals, results = [], []
        for tag, move in enumerate(self.step.moves):
            if move.target not in run.live:
                continue
            grad, result = run.gradient(move.target), run.zeros(move.source)
            if run.array(move.target).is_whole:
                self._slice(run, move, grad, result)
            else:
                held, wanted = run.box(move.source), run.box(move.target)
                for transfer in move.transfers:
                    if transfer.destination == run.device:
                        piece = grad[transfer.box.within(wanted).slices()]
                        if transfer.source == run.device:
                            result[transfer.box.within(held).slices()] += piece
                        else:
                            sends.append((transfer.source, tag, piece.contiguous()))
                    elif transfer.source == run.device:
                        place = result[transfer.box.within(held).slices()]
                        buffer = torch.empty_like(place, memory_format=torch.contiguous_format)
                        receives.append((transfer.destination, tag, buffer))
                        arrivals.append((place, buffer))
            results.append((move.source, result))
        run.links.exchange(sends, receives)
        for place, buffer in arrivals:  # in the order of the plan, so that sums repeat
            place.add_(buffer)
        for name, result in results:
            run.add(name, result)

    @staticmethod
    def _slice(run: Run, move: Move, grad: Tensor, result: Tensor) -> None:
        """A whole gradient is complete on every device: each takes what it owns."""
        held = run.box(move.source)
        for transfer in move.transfers:
            if transfer.source == run.device == transfer.destination:
                result[transfer.box.within(held).slices()] = grad[transfer.box.slices()]
