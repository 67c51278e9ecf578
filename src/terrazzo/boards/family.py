"""Boards and workloads drawn at random, for measuring the predictor on what it was not made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from terrazzo.boards.board import Board, Clock, Speed, Thermal, Workload, load_board, spread
from terrazzo.boards.physics import truth

KINDS = ("jetson", "pi", "desktop")


@dataclass(frozen=True)
class _Draw:
    """Numbers around others, in the order in which they are asked for."""

    random: np.random.Generator

    def around(self, value: float, by: float) -> float:
        return float(value * np.exp(self.random.uniform(-np.log(by), np.log(by))))

    def clock(self, old: Clock, low: float, high: float, count: int) -> Clock:
        knee, floor = self.random.uniform(0.4, 0.75), self.random.uniform(0.55, 0.72)
        top = floor * self.random.uniform(1.25, 1.65)
        return replace(
            old,
            hz=tuple(spread(low, high, count)),
            volts=((float(knee), float(floor)), (1.0, float(top))),
            farads=self.around(old.farads, 1.6),
            idle_share=min(self.around(old.idle_share, 1.7), 1.0),
            leak_w=self.around(old.leak_w, 1.8),
        )

    def speed(self, old: Speed, kind: str) -> Speed:
        return replace(
            old,
            gpu_flops_per_hz=self.around(old.gpu_flops_per_hz, 1.6),
            cpu_flops_per_hz=self.around(old.cpu_flops_per_hz, 1.5),
            bytes_per_hz=self.around(old.bytes_per_hz, 1.6),
            fixed_bytes_per_s=self.around(old.fixed_bytes_per_s, 1.5) if kind == "pi" else 0.0,
            gpu_bytes_per_hz=self.around(old.gpu_bytes_per_hz, 1.6),
            launch_cycles=self.around(old.launch_cycles, 2.0),
            stall=self.around(old.stall, 2.0),
            softness=float(self.random.uniform(2.0, 6.0)),
            overhead_s=self.around(old.overhead_s, 2.0),
        )

    def thermal(self, old: Thermal, kind: str) -> Thermal:
        return replace(
            old,
            c_per_w=self.around(old.c_per_w, 1.3) * (0.25 if kind == "desktop" else 1.0),
            ambient_c=float(self.random.uniform(18, 34)),
            leak_per_c=self.around(old.leak_per_c, 1.4),
        )


def drawn_board(kind: str, seed: int) -> Board:
    """A board of a kind; every figure that matters lies within wide limits around ours."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    draw = _Draw(random)
    like = load_board("pi-like" if kind == "pi" else "orin-like")
    top_cpu, top_gpu = random.uniform(1.4e9, 2.4e9), random.uniform(0.8e9, 1.4e9)
    top_mem = random.uniform(1.6e9, 3.4e9)
    cpu = draw.clock(like.cpu, 0.4e9 if kind != "pi" else 0.8e9, top_cpu, 12)
    gpu, memory = like.gpu, like.memory
    if gpu is not None and memory is not None:
        gpu = draw.clock(gpu, 0.12e9, top_gpu, 11)
        memory = replace(draw.clock(memory, 0.2e9, top_mem, 4), idle_share=1.0)
        if kind == "desktop":
            gpu = replace(gpu, hz=tuple(spread(0.3e9, 1.9e9, 24)), farads=gpu.farads * 6)
            memory = replace(memory, hz=tuple(spread(0.8e9, 5e9, 5)), farads=memory.farads * 5)
    speed, thermal = draw.speed(like.speed, kind), draw.thermal(like.thermal, kind)
    cores = int(random.choice((4, 6, 8, 12)))
    return replace(
        like,
        name=f"{kind}-{seed}",
        tree="desktop" if kind == "desktop" else like.tree,
        cores=4 if kind == "pi" else cores,
        cluster=4 if kind == "pi" else cores // 2,
        base_w=draw.around(like.base_w, 1.8) * (8 if kind == "desktop" else 1),
        loss_per_w=draw.around(like.loss_per_w, 1.5) * (0.1 if kind == "desktop" else 1),
        cpu=cpu,
        gpu=gpu,
        memory=memory,
        thermal=thermal,
        speed=speed,
        presets=(),
    )


def drawn_workload(board: Board, seed: int) -> Workload:
    """A training step: bound by arithmetic, memory, launches or input, or by several at once.

    Each of the four takes, in the highest mode, some part of a step of 0.05 to 0.4 seconds.
    """
    random = np.random.default_rng([seed, 77])
    whole_s = float(np.exp(random.uniform(np.log(0.05), np.log(0.4))))
    parts = random.dirichlet((0.8, 0.8, 0.5, 0.5)) + 0.02
    parts /= parts.max()
    speed, top = board.speed, board.full({})
    if board.gpu is not None:
        flops = speed.gpu_flops_per_hz * top["gpu_hz"] * whole_s
        moved = speed.bytes_per_hz * top["mem_hz"] * whole_s
    else:
        flops = speed.cpu_flops_per_hz * top["cpu_hz"] * board.cores * whole_s
        moved = speed.fixed_bytes_per_s * whole_s
        parts[2:] *= 0.15  # what launches and input take adds up there
    return Workload(
        f"drawn-{seed}",
        flops=float(flops * parts[0]),
        bytes=float(moved * parts[1]),
        launches=float(top["cpu_hz"] * whole_s * parts[2] / speed.launch_cycles),
        input_cycles=float(top["cpu_hz"] * max(top["cores"] - 1, 1) ** 0.9 * whole_s * parts[3]),
    )


def measured(
    board: Board, workload: Workload, mode: dict[str, float], random: np.random.Generator
) -> tuple[float, float]:
    """Seconds of a step and watts as a profile of some seconds would tell them, with its errors."""
    found = truth(board, workload, mode)
    return blurred(board, found.step_s, found.power_w, random)


def blurred(
    board: Board, step_s: float, power_w: float, random: np.random.Generator
) -> tuple[float, float]:
    """What a board's clock and sensor make of a true time and a true power."""
    sensor = board.sensor
    seconds = step_s * (1 + sensor.time_noise * random.standard_normal())
    if random.random() < sensor.disturbed:
        seconds *= 1 + random.uniform(0.03, 0.2)
    watts = power_w * (1 + sensor.noise * random.standard_normal() / 3)
    watts *= 1 + sensor.wander * random.uniform(-1, 1)
    return float(seconds), float(round(watts / 0.02) * 0.02)
