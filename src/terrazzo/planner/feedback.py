"""Feedback: what a run measured, put into the profile that the next plan is made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.errors import PlanError
from terrazzo.records.profile import DeviceProfile, Profile


def slowed(profile: Profile, slowness: Sequence[float]) -> Profile:
    """The same devices, each taking so many times as long for everything that it computes.

    A processor that computes more slowly also copies, packs and sends more slowly.
    """
    if len(slowness) != len(profile.devices) or not all(factor > 0 for factor in slowness):
        told = ", ".join(f"{factor:g}" for factor in slowness) or "none"
        raise PlanError(
            f"a profile of {len(profile.devices)} devices was to be slowed down by {told}: give "
            "one positive factor for each device"
        )
    devices = zip(profile.devices, slowness, strict=True)
    return replace(profile, devices=tuple(_slowed(device, factor) for device, factor in devices))


def _slowed(device: DeviceProfile, factor: float) -> DeviceProfile:
    if factor == 1.0:
        return device
    forward_s, backward_s = device.calls_s
    return replace(
        device,
        seconds_per_cpu_s=device.seconds_per_cpu_s * factor,
        calls_s=(forward_s * factor, backward_s * factor),
        copy_bytes_per_s=device.copy_bytes_per_s / factor,
        fresh_s_per_byte=device.fresh_s_per_byte * factor,
        update_s_per_element={k: s * factor for k, s in device.update_s_per_element.items()},
        timings=tuple(timing.stretched(factor) for timing in device.timings),
        own=device.own.stretched(factor),
    )
