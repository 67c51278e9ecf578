"""Batches that may have to be handed out again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrazzo.feed import repeats
from terrazzo.feed.repeats import Repeats


def batch(number: int) -> Any:
    return {"number": number}, [torch.zeros(4)], number


def test_what_was_read_since_a_position_comes_again() -> None:
    kept = Repeats()
    kept.forget(2, is_read=False)
    for number in (2, 3, 4):
        kept.add(batch(number))
    again = kept.since(3)
    assert again is not None
    kept.rewind(again, 3)
    assert [kept.next(), kept.next(), kept.next()] == [*again, None]
    assert [one[2] for one in kept.since(3) or []] == [3, 4], "and once more, if need be"
    assert kept.since(2) is None


def test_one_that_was_read_before_counts() -> None:
    kept = Repeats()
    kept.forget(5, is_read=True)
    assert kept.since(5) is None, "the batch at 5 is not here: it must be read again"


def test_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_BYTES", 40)
    kept = Repeats()
    kept.forget(0, is_read=False)
    for number in range(3):
        kept.add(batch(number))
    assert kept.since(0) is None
    kept.forget(3, is_read=False)
    kept.add(batch(3))
    assert len(kept.since(3) or []) == 1
