"""What a device draws while it waits and while it is measured, by its own meters or an estimate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from terrazzo.records.profile import DeviceProfile
from terrazzo.runtime.energy import open_log

IDLE_S = 1.0


def with_watts(
    measure: Callable[[], DeviceProfile], environment: Mapping[str, str], device: int
) -> DeviceProfile:
    """The profile with watts; without, where energy is switched off or can't be told."""
    log = open_log(environment, device)
    if log is None:
        return measure()
    sampler = log.sampler
    try:
        begun = sampler.begin()
        time.sleep(IDLE_S)  # all devices wait now
        idle_w = sampler.end(begun).mean_w
        begun = sampler.begin()
        found = measure()
        busy_w = sampler.end(begun).mean_w
    finally:
        sampler.stop()
    return replace(found, busy_w=busy_w, idle_w=min(idle_w, busy_w), is_metered=sampler.is_measured)
