"""How long a step takes on a simulated board, what the board draws, and how warm it gets.

A step is a soft maximum of three lines of work: the accelerator (itself a soft roofline of
arithmetic and memory), the one core that launches kernels, and the cores that prepare input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from terrazzo.boards.board import Board, Workload

ROUNDS = 60
"""Heat, leakage and throttling depend on each other: so often they are computed in turn."""
NO_LOAD = Workload("idle", 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a board really does in one mode, which its sensors only tell in part."""

    step_s: float
    power_w: float
    rails_w: Mapping[str, float]
    temperature_c: float
    throttled: bool


@dataclass(frozen=True, slots=True)
class _Times:
    step_s: float
    arithmetic_s: float
    accelerator_s: float
    launch_s: float
    input_s: float
    moved_bytes: float


def truth(board: Board, workload: Workload, mode: Mapping[str, float]) -> Truth:
    """Settled: after the board has become as warm as it gets, throttled if it has to be."""
    asked = board.full(mode)
    share, warm_c = 1.0, board.thermal.ambient_c + 10
    found = instant(board, workload, asked, temperature_c=warm_c, share=share)
    for _ in range(ROUNDS):
        settled_c = board.thermal.ambient_c + board.thermal.c_per_w * found.power_w
        warm_c += 0.5 * (settled_c - warm_c)
        share = throttle(board, share, warm_c)
        found = instant(board, workload, asked, temperature_c=warm_c, share=share)
    return found


def throttle(board: Board, share: float, temperature_c: float) -> float:
    """Which part of its clocks a board grants itself, a little at a time."""
    beyond = temperature_c - board.thermal.limit_c
    if beyond > 0:
        return max(share * (1 - min(0.02 * beyond, 0.2)), 0.35)
    return min(share * (1 + min(-0.004 * beyond, 0.02)), 1.0)


def instant(
    board: Board,
    workload: Workload,
    mode: Mapping[str, float],
    *,
    temperature_c: float,
    share: float = 1.0,
) -> Truth:
    """At this temperature, with clocks lowered to a share of what was asked."""
    cpu_hz, gpu_hz = mode["cpu_hz"] * share, mode["gpu_hz"] * share
    cores, mem_hz = mode["cores"], mode["mem_hz"]
    times = _times(board, workload, cores=cores, cpu_hz=cpu_hz, gpu_hz=gpu_hz, mem_hz=mem_hz)
    warmth = 2.0 ** ((temperature_c - 25) * board.thermal.leak_per_c)
    step_s = times.step_s or 1.0
    if board.gpu is not None:
        gpu_busy = (times.arithmetic_s + 0.4 * (times.accelerator_s - times.arithmetic_s)) / step_s
        gpu_w = board.gpu.dynamic_w(gpu_hz, gpu_busy) + board.gpu.leakage_w(gpu_hz, warmth)
        working = (times.launch_s + times.input_s) / step_s
    else:
        gpu_w, working = 0.0, times.accelerator_s / step_s * cores + times.input_s / step_s
    per_core = min(working / cores, 1.0)
    cpu_w = cores * (board.cpu.dynamic_w(cpu_hz, per_core) + board.cpu.leakage_w(cpu_hz, warmth))
    moved = times.moved_bytes / step_s if times.step_s else 0.0
    mem_w = board.bytes_w * moved / 1e9
    if board.memory is not None:
        mem_w += board.memory.dynamic_w(mem_hz, 0.0) + board.memory.leakage_w(mem_hz, 1.0)
    inner_w = board.base_w + gpu_w + cpu_w + mem_w
    total_w = inner_w * (1 + board.loss_per_w * inner_w)
    rails = {"cpu": cpu_w, "gpu": gpu_w, "memory": mem_w, "base": board.base_w}
    return Truth(times.step_s, total_w, rails, temperature_c, share < 0.999)


def _times(
    board: Board, workload: Workload, *, cores: float, cpu_hz: float, gpu_hz: float, mem_hz: float
) -> _Times:
    speed, soft = board.speed, board.speed.softness
    if workload is NO_LOAD:
        return _Times(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    many = 1 / (speed.serial + (1 - speed.serial) / cores)
    memory_bytes_per_s = speed.bytes_per_hz * mem_hz or speed.fixed_bytes_per_s
    if board.gpu is not None:
        asks = speed.gpu_bytes_per_hz * gpu_hz
        arithmetic_s = workload.flops / (speed.gpu_flops_per_hz * gpu_hz)
        stalled = 1 + speed.stall * cpu_hz / max(mem_hz, 1.0)
    else:
        asks = speed.gpu_bytes_per_hz * cpu_hz * many
        arithmetic_s = workload.flops / (speed.cpu_flops_per_hz * cpu_hz * many)
        stalled = 1 + speed.stall * cpu_hz * many / memory_bytes_per_s
    rate = (memory_bytes_per_s**-4 + asks**-4) ** -0.25
    accelerator_s = _soft(soft, arithmetic_s, workload.bytes / rate)
    launch_s = (workload.launches * speed.launch_cycles + workload.serial_cycles) * stalled / cpu_hz
    workers = max(cores - 1, 0.5) if board.gpu is not None else cores
    input_s = workload.input_cycles * stalled / (cpu_hz * workers**0.9)
    if board.gpu is not None:
        step_s = _soft(2 * soft, accelerator_s, launch_s, input_s) + speed.overhead_s
    else:
        step_s = accelerator_s + launch_s + input_s + speed.overhead_s
    return _Times(step_s, arithmetic_s, accelerator_s, launch_s, input_s, workload.bytes)


def _soft(power: float, *parts: float) -> float:
    """A maximum without a corner."""
    return float(sum(part**power for part in parts) ** (1 / power))
