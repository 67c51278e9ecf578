"""The tuner on simulated devices: it finds what is best there, and stays with it."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import pairwise

import pytest

from terrazzo.feed.tuner import ENOUGH, Limits, Settings, Tuner


class Device:
    """Workers that make batches, a loop that uses them up, and cores that both share.

    A batch waits ``io_s`` for storage and computes ``cpu_s``; a step computes ``train_s`` on all
    cores. What workers compute meanwhile is taken from the step.
    """

    def __init__(
        self, io_s: float, cpu_s: float, train_s: float, *, cores: int = 4, noise: float = 0.0
    ) -> None:
        self.io_s, self.cpu_s, self.train_s = io_s, cpu_s, train_s
        self.cores, self.noise = cores, noise
        self.draw = random.Random(1)
        self.now_s = 0.0
        self._free: list[float] = []
        self._ready: list[float] = []

    def step(self, settings: Settings) -> tuple[float, float, float]:
        """Waiting, training, and the making of a batch."""
        make_s = (self.io_s + self.cpu_s) * self._shaken()
        if not settings.workers:
            self._free, self._ready = [], []
            train_s = self.train_s * self._shaken()
            self.now_s += make_s + train_s
            return make_s, train_s, make_s
        while len(self._free) < settings.workers:
            heapq.heappush(self._free, self.now_s)
        while len(self._free) > settings.workers:
            heapq.heappop(self._free)
        while len(self._ready) < max(settings.ahead, 1):
            begin = max(heapq.heappop(self._free), self.now_s)
            end = begin + (self.io_s + self.cpu_s) * self._shaken()
            heapq.heappush(self._free, end)
            self._ready.append(end)
        wait_s = max(self._ready.pop(0) - self.now_s, 0.0)
        busy = min(settings.workers * self.cpu_s / (self.io_s + self.cpu_s), self.cores)
        train_s = self.train_s * (1 + busy / self.cores) * self._shaken()
        self.now_s += wait_s + train_s
        return wait_s, train_s, make_s

    def _shaken(self) -> float:
        return 1.0 + self.draw.gauss(0, self.noise) if self.noise else 1.0

    def mean_s(self, settings: Settings, steps: int = 300) -> float:
        """Of steps with fixed settings."""
        other = Device(self.io_s, self.cpu_s, self.train_s, cores=self.cores, noise=self.noise)
        return sum(sum(other.step(settings)[:2]) for _ in range(steps)) / steps

    def best_s(self) -> float:
        return min(self.mean_s(Settings(k, 2 * k)) for k in range(9))


def tuned(device: Device, steps: int = 1500) -> tuple[Tuner, Counter[Settings], float]:
    """The tuner afterwards; of the last third of steps their settings, and their mean length."""
    tuner = Tuner(Settings(), Limits(workers=8, ahead=32))
    used: Counter[Settings] = Counter()
    spent_s = 0.0
    for number in range(steps):
        if number >= steps * 2 // 3:
            used[tuner.settings] += 1
        wait_s, train_s, make_s = device.step(tuner.settings)
        spent_s += (wait_s + train_s) * (number >= steps * 2 // 3)
        tuner.step(wait_s=wait_s, train_s=train_s, make_s=make_s)
    return tuner, used, spent_s / (steps - steps * 2 // 3)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize(
    ("io_s", "cpu_s", "train_s", "cores"),
    [
        (0.300, 0.010, 0.100, 4),
        (0.050, 0.010, 0.100, 4),
        (0.010, 0.200, 0.100, 4),
        (0.500, 0.020, 0.050, 4),
        (0.100, 0.030, 0.100, 1),
    ],
    ids=["slow card", "one is enough", "decoding", "card much slower", "one core"],
)
def test_it_ends_close_to_the_best_fixed_number(
    io_s: float, cpu_s: float, train_s: float, cores: int, noise: float
) -> None:
    device = Device(io_s, cpu_s, train_s, cores=cores, noise=noise)
    _, _, mean_s = tuned(device)
    assert mean_s <= (1.03 + 0.2 * noise**2) * device.best_s()  # the best of nine is a lucky one


def test_it_begins_with_one_worker_and_goes_up_by_one() -> None:
    device, tuner = Device(0.3, 0.01, 0.1), Tuner(Settings(), Limits(8, 32))
    path = [0]
    for _ in range(800):
        wait_s, train_s, make_s = device.step(tuner.settings)
        tuner.step(wait_s=wait_s, train_s=train_s, make_s=make_s)
        if tuner.settings.workers != path[-1]:
            path.append(tuner.settings.workers)
    assert path[:4] == [0, 1, 2, 3]
    assert all(abs(a - b) == 1 for a, b in pairwise(path))


def test_where_nothing_waits_nothing_is_tried() -> None:
    device = Device(0.0001, 0.0005, 0.1, noise=0.3)
    tuner, used, _ = tuned(device)
    assert used == {Settings(): 500}
    assert tuner.latest is not None
    assert tuner.latest.wait_s < ENOUGH * tuner.latest.step_s


def test_workers_that_only_take_cores_from_training_are_given_up() -> None:
    """One core, and samples that only compute: making them beside a step is no faster."""
    tuner, used, _ = tuned(Device(0.0, 0.05, 0.1, cores=1))
    assert tuner.settings == Settings()
    assert used[Settings()] > 400


def test_limits_hold() -> None:
    device = Device(1.0, 0.01, 0.05)
    tuner = Tuner(Settings(), Limits(workers=2, ahead=5))
    for _ in range(600):
        wait_s, train_s, make_s = device.step(tuner.settings)
        tuner.step(wait_s=wait_s, train_s=train_s, make_s=make_s)
        assert tuner.settings.workers <= 2
        assert tuner.settings.ahead <= 5


def test_a_limit_that_falls_breaks_a_trial_off() -> None:
    tuner = Tuner(Settings(), Limits(8, 32))
    while tuner.settings.workers < 3:
        tuner.step(wait_s=1.0 / (1 + tuner.settings.workers), train_s=0.1, make_s=1.0)
    tuner.bound(Limits(2, 4))
    assert tuner.settings == Settings(2, 4)
    assert not tuner.is_trying
    for _ in range(300):
        tuner.step(wait_s=1.0, train_s=0.1, make_s=1.0)
        assert tuner.settings.workers <= 2
        assert tuner.settings.ahead <= 4


def test_fixed_settings_are_only_watched() -> None:
    tuner = Tuner(Settings(1, 2), Limits(8, 32), fixed=True)
    for _ in range(200):
        assert tuner.step(wait_s=1.0, train_s=0.1, make_s=1.0) is None
    assert tuner.latest is not None
