"""What a feed says of itself: bad samples, and what it has found out."""

from __future__ import annotations

import pytest

from terrazzo.feed.stages import Clock
from terrazzo.feed.tally import SAID, Tally
from terrazzo.feed.tuner import Change, Limits, Mean, Settings, Tuner

SLOW, FAST = Mean(0.0620, 0.01364, 0.0), Mean(0.0410, 0.00041, 0.0)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("terrazzo: feed: ") for line in capsys.readouterr().err.splitlines()]


def end(tally: Tally, number: int) -> None:
    tally.end(None, Clock(None), number, 15)


def test_a_bad_sample_is_named_once_and_counted_in_every_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally()
    for epoch in range(3):
        tally.skip(["sample 13 (file 13.jpg)"])
        end(tally, epoch)
    assert said(capsys) == ["left out: sample 13 (file 13.jpg)", "epoch 0: 1 bad sample left out"]
    tally.skip(["sample 13 (file 13.jpg)", "sample 14"])
    end(tally, 3)
    assert said(capsys) == ["left out: sample 14", "epoch 3: 2 bad samples left out"]
    end(tally, 4)
    assert said(capsys) == ["epoch 4: 0 bad samples left out"]
    end(tally, 5)
    assert said(capsys) == []


def test_of_many_bad_samples_the_first_are_named_and_all_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally()
    tally.skip([f"sample {number}" for number in range(40)])
    end(tally, 0)
    *named, last, count = said(capsys)
    assert len(named) == SAID - 1
    assert last == f"left out: sample {SAID - 1}; further ones are only counted"
    assert count == "epoch 0: 40 bad samples left out"


def test_what_it_was_at_first_is_told_where_it_was_otherwise() -> None:
    tuner = Tuner(Settings(1, 2), Limits(8, 32))
    tuner.first = SLOW
    found = Tally().sentence(tuner, None, Change(tuner.settings, FAST, "steps take longer"))
    assert found == (
        "1 worker, 2 batches ahead: steps of 41.0 ms, 1.0% waiting; at first 62.0 ms, 22.0% "
        "waiting (steps take longer)"
    )


def test_what_did_not_pay_is_told_without_repeating_it() -> None:
    """By a tuner whose first trial made steps longer."""
    tuner, change = Tuner(Settings(), Limits(1, 1)), None
    while change is None or tuner.is_trying:
        wait_s = 0.12 if tuner.settings.workers else 0.012
        change = tuner.step(wait_s=wait_s, train_s=0.05, make_s=0.01) or change
    assert Tally().sentence(tuner, None, change) == (
        "no workers: steps of 62.0 ms, 19.4% waiting "
        "(1 worker, 1 batch ahead did not pay: 62.0 ms before, 170 ms with it)"
    )
