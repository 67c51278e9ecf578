"""Who reads which samples of a batch, and whether one device reads for all."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.feed import choice
from terrazzo.feed.choice import EACH, READER, Choice, chosen, is_worth_trying
from terrazzo.feed.parts import heard, told
from terrazzo.feed.rota import Order, Rota, givers


@st.composite
def rotas(draw: Any) -> tuple[Rota, list[int]]:
    devices, samples = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    batch = draw(st.integers(1, samples))
    has = torch.tensor(
        draw(st.lists(st.lists(st.booleans(), min_size=samples, max_size=samples),
                      min_size=devices, max_size=devices))
    )  # fmt: skip
    for sample in range(samples):  # somebody has it
        has[draw(st.integers(0, devices - 1)), sample] = True
    spans = [sorted(draw(st.tuples(*[st.integers(0, batch)] * 2))) for _ in range(devices)]
    needs = tuple((low, high) for low, high in spans)
    order = Order(samples, batch, draw(st.booleans()), draw(st.booleans()), seed=3)
    rota = Rota(order, has, needs if draw(st.booleans()) else (), each=draw(st.booleans()))
    position = draw(st.integers(0, max(order.batches - 1, 0)))
    return rota, order.indices(draw(st.integers(0, 3)), position)


@given(rotas())
def test_every_row_is_read_by_who_has_it(drawn: tuple[Rota, list[int]]) -> None:
    rota, indices = drawn
    rows = rota.rows(indices)
    for row, index in enumerate(indices):
        readers = [device for device, read in enumerate(rows) if row in read]
        assert readers
        assert all(rota.has[device, index] for device in readers)
        near = [
            device
            for device, (low, high) in enumerate(rota.needs)
            if len(indices) == rota.order.batch and low <= row < high and rota.has[device, index]
        ]
        if rota.each and near:
            assert readers == near
        else:
            assert len(readers) == 1
            assert not near or readers[0] in near
        for device, giver in enumerate(givers(rows, len(indices))[row]):
            assert giver == device if device in readers else giver in readers


def test_who_has_the_same_samples_shares_the_work() -> None:
    rota = Rota(Order(8, 8, False, False, 0), torch.ones(3, 8, dtype=torch.bool))
    assert sorted(map(len, rota.rows(range(8)))) == [2, 3, 3]


def test_all_batches_together_are_the_data_set() -> None:
    for drop_last, right in ((False, 10), (True, 8)):
        order = Order(10, 4, drop_last, shuffle=True, seed=1)
        seen = [index for p in range(order.batches) for index in order.indices(2, p)]
        assert len(set(seen)) == len(seen) == right


def test_a_part_survives_being_told() -> None:
    mine = torch.tensor([True, False, False, True, True, False, True, False, False, True, True])
    assert torch.equal(heard(told(mine), 11), mine)
    assert heard(told(None), 11).all()
    assert not heard("", 11).any()


class TestChoice:
    def told(self, **seconds: float | None) -> dict[str, Any]:
        return {"refused": False, **seconds}

    def test_one_reads_until_that_is_measured(self) -> None:
        assert chosen([self.told(), self.told(reader=0.2)]) == READER
        assert chosen([self.told(reader=0.1), self.told(reader=None)]) == READER

    def test_then_each_is_tried(self) -> None:
        assert chosen([self.told(reader=0.1), self.told(reader=0.2)]) is None
        assert chosen([self.told(reader=0.1), {"refused": True, "reader": 0.1}]) == READER

    def test_the_slowest_device_decides(self) -> None:
        rows = [self.told(reader=0.2, each=0.1), self.told(reader=0.2, each=0.19)]
        assert chosen(rows) == EACH
        rows[0]["each"] = 0.199
        assert chosen(rows) == READER, "that is no gain"

    def test_what_cannot_pay_is_not_tried(self) -> None:
        reader = {"own_s": 0.1, "whole_s": 0.2, "sent_s": 0.1}
        other = {"own_s": 0.29, "whole_s": 0.0, "sent_s": 0.0}
        assert is_worth_trying([reader, other])
        assert not is_worth_trying([reader, {**other, "own_s": 0.31}])
        assert not is_worth_trying([reader, {**other, "own_s": math.inf}])

    def test_the_first_steps_and_other_members_do_not_count(self) -> None:
        found = Choice()
        found.among((0, 1))
        found.begin()
        for _ in range(choice.SKIPPED + choice.LEAST):
            found.step(READER)
        assert found.told()[READER] is None
        found.step(READER)
        assert found.told()[READER] > 0
        found.among((0,))
        assert found.told()[READER] is None
