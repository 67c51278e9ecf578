"""A rig: a simulated board in a folder, with files to read and write and time that is told to pass.

Code under test is given the folder as its root and the rig's ``clock`` and ``pause`` in place of
time's own; the rest of it runs as on a board.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from terrazzo.boards.board import Board, Workload
from terrazzo.boards.kernel import Kernel
from terrazzo.boards.physics import NO_LOAD, instant, throttle
from terrazzo.boards.sensors import SENSORS, USUAL, Shown, put

TICK_S = 0.25
THERMAL_ZONE = "sys/class/thermal/thermal_zone0"


class Rig:
    """A board at work; all that its sensors never tell is here too, for tests to compare with."""

    def __init__(
        self,
        board: Board,
        root: Path,
        *,
        workload: Workload = NO_LOAD,
        sensors: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        self.board, self.root, self.workload = board, root, workload
        self.kernel = Kernel(board, root)
        self.time_s, self.steps, self.energy_j = 1000.0, 0.0, 0.0
        self.temperature_c, self.share = board.thermal.ambient_c + 8, 1.0
        self.frozen = False
        self._sensors = [SENSORS[name] for name in sensors or USUAL[board.tree]]
        self._random = np.random.default_rng(seed)
        self._wander = 0.0
        self.pause(0.0)

    def clock(self) -> float:
        return self.time_s

    def pause(self, seconds: float) -> None:
        """Lets time pass: what was written takes effect, steps are made, sensors move on."""
        self.kernel.poll()
        board, left = self.board, seconds
        while True:
            length_s = min(left, TICK_S)
            now = instant(
                board,
                self.workload,
                self.kernel.mode(),
                temperature_c=self.temperature_c,
                share=self.share,
            )
            self.time_s += length_s
            self.energy_j += now.power_w * length_s
            self.steps += self._done(now.step_s, length_s)
            settled_c = board.thermal.ambient_c + board.thermal.c_per_w * now.power_w
            part = 1 - np.exp(-length_s / board.thermal.seconds)
            self.temperature_c += float(part) * (settled_c - self.temperature_c)
            if length_s:
                self.share = throttle(board, self.share, self.temperature_c)
            left -= length_s
            if left <= 1e-9:
                break
        if not self.frozen:
            noise = board.sensor.noise * self._random.standard_normal()
            self._wander += 0.1 * (board.sensor.wander * self._random.standard_normal())
            self._wander = float(np.clip(self._wander, -board.sensor.wander, board.sensor.wander))
            shown = Shown(self.time_s, 1 + float(noise) + self._wander, self.energy_j, now)
            for sensor in self._sensors:
                sensor(self.root, board, shown)
        put(self.root / THERMAL_ZONE / "type", "cpu-thermal")
        put(self.root / THERMAL_ZONE / "temp", f"{self.temperature_c * 1e3:.0f}")

    def _done(self, step_s: float, length_s: float) -> float:
        if step_s == 0:
            return 0.0
        noise = self.board.sensor.time_noise * self._random.standard_normal()
        if self._random.random() < self.board.sensor.disturbed * length_s / 10:
            noise += self._random.uniform(0.05, 0.3)
        return length_s / (step_s * (1 + float(noise)))
