"""How much of this machine each device gets, and whether it is enough. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.errors import LabError

PERIOD_US = 10_000
"""Short, because a receiver that has used up its share wakes only in the next period."""
LEAST_QUOTA_US = 1_000
"""The kernel takes no less, and a write it refuses leaves the device unthrottled."""
LONGEST_PERIOD_US = 1_000_000
HEADROOM = 0.1
"""Part of this machine that the lab keeps for its network, the launcher and the system."""


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """Microseconds of processor time in each period of microseconds."""

    quota_us: int
    period_us: int

    @property
    def cores(self) -> float:
        return self.quota_us / self.period_us

    @property
    def saved_us(self) -> int:
        """What it may keep of a period in which it did not get its turn: no more than one."""
        return self.quota_us

    @classmethod
    def of(cls, cores: float) -> CpuQuota:
        """The quota for a share of cores, in the shortest period that the kernel allows."""
        if not cores * LONGEST_PERIOD_US >= LEAST_QUOTA_US:
            raise LabError(
                f"a device would get {cores:.2g} of a core, the kernel gives no less than "
                f"{LEAST_QUOTA_US / LONGEST_PERIOD_US:g}: this machine is too fast for that preset"
            )
        period_us = max(PERIOD_US, math.ceil(LEAST_QUOTA_US / cores))
        return cls(max(LEAST_QUOTA_US, round(cores * period_us)), min(period_us, LONGEST_PERIOD_US))


def threads_of(cores: float, most: int) -> int:
    """As many threads as the share can keep busy: more would only wait for each other."""
    return max(1, min(most, math.ceil(cores - 0.05)))


def require_fit(
    shares: Sequence[float], *, cores: int, held: float = 0.0, what: str = "this cluster"
) -> None:
    """Refuses a cluster whose devices together need more than this machine can give."""
    needed, usable = sum(shares), cores * (1 - HEADROOM)
    if needed + held <= usable + 1e-9:
        return
    free = max(0.0, usable - held)
    others = f" and other labs hold {held:.2f}" if held else ""
    fitting = _fitting(shares, free)
    remedy = (
        f"the first {fitting} of its {len(shares)} devices would fit"
        if fitting
        else "not one of its devices would fit"
    )
    raise LabError(
        f"{what} needs {needed:.2f} cores, this machine has {cores} of which {usable:.2f} are for "
        f"devices{others}: {needed - free:.2f} missing; {remedy}. Ask for fewer or slower devices, "
        "or use a larger machine"
    )


def require_memory(limits_bytes: Sequence[int], *, free_bytes: int, what: str) -> None:
    """Refuses a cluster whose memory limits this machine could not fill."""
    needed = sum(limits_bytes)
    if needed <= free_bytes:
        return
    gib = 2**30
    fitting = _fitting(limits_bytes, free_bytes)
    raise LabError(
        f"{what} may fill {needed / gib:.1f} GiB of memory, this machine has "
        f"{free_bytes / gib:.1f} GiB free: {(needed - free_bytes) / gib:.1f} GiB missing; "
        f"its first {fitting} devices would fit. Ask for fewer, or for a preset of your own with "
        "less memory_mib"
    )


def _fitting(needs: Sequence[float], free: float) -> int:
    total, count = 0.0, 0
    for need in needs:
        total += need
        if total > free + 1e-9:
            break
        count += 1
    return count
