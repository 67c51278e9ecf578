"""Steps of a run: who waited for whom, and where the time went."""

from __future__ import annotations

import pytest

from terrazzo.records.event import Event
from terrazzo.report.steps import Step, steps_of


def span(device: int, kind: str, name: str, begin_s: float, end_s: float) -> Event:
    return Event(device, 1, "forward", kind, name, begin_s, end_s)


class TestSteps:
    def test_who_comes_first_waits(self) -> None:
        early, late = span(0, "exchange", "g", 1.0, 5.0), span(1, "exchange", "g", 4.0, 5.0)
        step = Step(1, 2, (early, late), {})
        assert step.waiting_s == {early: 3.0, late: 0.0}
        assert step.split(0) == pytest.approx(
            {"compute": 0, "exchange": 1, "sum": 0, "agree": 0, "feed": 0, "waiting": 3, "other": 0}
        )

    def test_nobody_waits_longer_than_the_span_lasts(self) -> None:
        """One that never needed the late device was done before it came."""
        early, late = span(0, "exchange", "g", 1.0, 2.0), span(1, "exchange", "g", 9.0, 9.5)
        assert Step(1, 2, (early, late), {}).waiting_s[early] == 1.0

    def test_repeated_names_meet_in_order(self) -> None:
        spans = [span(d, "sum", "n", begin + d, begin + 3) for begin in (0.0, 10.0) for d in (0, 1)]
        waited = Step(1, 2, tuple(spans), {}).waiting_s
        assert [waited[one] for one in spans] == [1.0, 0.0, 1.0, 0.0]

    def test_a_missing_partner_means_no_waiting(self) -> None:
        assert Step(1, 2, (span(0, "sum", "n", 0.0, 3.0),), {}).waiting_s == {}

    def test_time_between_spans_is_the_rest(self) -> None:
        events = [span(0, "compute", "a", 0.0, 2.0), span(0, "compute", "b", 3.0, 4.0)]
        events.append(Event(0, 2, "forward", "compute", "a", 6.0, 7.0))
        first, second = steps_of(events, 1)
        assert first.split(0)["compute"] == 3.0
        assert first.split(0)["other"] == 3.0
        assert (first.seconds, second.seconds) == (6.0, 1.0)
