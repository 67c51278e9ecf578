"""What a race calls the same gradients: float64's, within what plain float32 is off by rounding."""

from __future__ import annotations

import pytest
import torch

from terrazzo.bench import peers
from terrazzo.bench.cases import Case
from terrazzo.bench.gradients import worst_gap
from terrazzo.bench.record import NOISE_TIMES
from terrazzo.bench.truth import NUDGES, Truth

CASE = Case.of("darknet-small", on="1", batch=2, side=32)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth.of(CASE)


def gap(peer: str, truth: Truth) -> float:
    trainer = peers.find(peer).build(peers.Work(CASE, device=0, devices=1))
    trainer.step()
    return worst_gap(trainer.gradients(), truth.gradients)


class TestParts:
    def test_parts_are_a_step(self) -> None:
        whole, parts = (peers.find("accumulate").build(peers.Work(CASE, 0, 1)) for _ in range(2))
        whole.step()
        for number in range(parts.parts):
            parts.part(number)
        assert parts.parts == CASE.batch
        assert worst_gap(parts.gradients(), whole.gradients()) == 0


class TestTruth:
    def test_it_is_in_float64_and_torch_is_left_as_it_was(self, truth: Truth) -> None:
        assert {g.dtype for g in truth.gradients.values()} == {torch.float64}
        assert torch.backends.mkldnn.enabled

    def test_the_noise_is_the_worst_of_several_roundings(self, truth: Truth) -> None:
        assert len(truth.noises) == 3 + NUDGES
        assert truth.noise == max(truth.noises.values())
        assert len(set(truth.noises.values())) > NUDGES, "the runs must differ"
        assert truth.noises["as it is"] == gap("alone", truth)
        assert 0 < truth.noise < 1e-3

    def test_other_statistics_lie_far_beyond_it(self, truth: Truth) -> None:
        assert gap("accumulate", truth) > 10 * NOISE_TIMES * truth.noise
