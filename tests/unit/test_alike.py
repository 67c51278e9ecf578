"""Devices of one kind are planned as equals, others as what they are."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from terrazzo.planner.alike import NEAR, levelled, speed
from terrazzo.planner.guess import Figures, guessed
from terrazzo.records.profile import DeviceProfile, Profile

MIB = 1 << 20


def measured(*factors: float, noise: float = 0.0) -> Profile:
    """Devices of one make, slower than the first by factors, each box off by chance."""
    drawn = random.Random(3)
    figures = [Figures(f"board-{place}", 7e9, 900 * MIB, 94e6 / 8) for place in range(len(factors))]
    profile = guessed(figures)
    devices = [
        slowed(replace(device, machine=profile.devices[0].machine), factor, drawn, noise)
        for device, factor in zip(profile.devices, factors, strict=True)
    ]
    return replace(profile, devices=tuple(devices))


def slowed(
    device: DeviceProfile, factor: float, drawn: random.Random, noise: float
) -> DeviceProfile:
    timings = tuple(
        timing.stretched(factor * drawn.uniform(1, 1 + noise)) for timing in device.timings
    )
    return replace(device, timings=timings, seconds_per_cpu_s=factor)


def test_noise_between_devices_of_one_kind_is_gone_and_its_middle_stays() -> None:
    profile = measured(1.0, 1.05, 0.97, 1.1, 1.02, 0.99, noise=0.1)
    found = levelled(profile)
    assert len({device.timings for device in found.devices}) == 1
    assert [device.name for device in found.devices] == [d.name for d in profile.devices]
    assert found.devices[0].seconds_per_cpu_s == median(
        device.seconds_per_cpu_s for device in profile.devices
    )
    assert min(map(speed, profile.devices)) < speed(found.devices[0])
    assert speed(found.devices[0]) < max(map(speed, profile.devices))


def test_a_device_that_is_really_slower_stays_so() -> None:
    profile = measured(1.0, 1.0, 1 + 2 * NEAR)
    found = levelled(profile).devices
    assert found[0].timings == found[1].timings != found[2].timings
    assert speed(found[2]) == speed(profile.devices[2])


def test_devices_of_another_make_are_never_taken_together() -> None:
    profile = measured(1.0, 1.01)
    other = replace(profile.devices[1].machine, processor="something else")
    devices = (profile.devices[0], replace(profile.devices[1], machine=other))
    assert levelled(replace(profile, devices=devices)).devices == devices


def test_what_only_one_had_time_to_measure_counts_for_all() -> None:
    profile = measured(1.0, 1.02)
    short = replace(profile.devices[1], timings=profile.devices[1].timings[:-1])
    found = levelled(replace(profile, devices=(profile.devices[0], short)))
    loads = [{timing.load for timing in device.timings} for device in found.devices]
    assert loads[0] == loads[1] == {t.load for t in profile.devices[0].timings}


def test_devices_that_have_timed_nothing_in_common_are_compared_by_what_all_do() -> None:
    """Each has timed boxes of another size: how fast they look says nothing about the devices."""
    profile = measured(1.0, 1.0, 1.0)
    short = [t for t in profile.devices[0].timings if t.load.is_product][:3]
    apart = [replace(d, timings=(t,)) for d, t in zip(profile.devices, short, strict=True)]
    assert len({speed(device) for device in apart}) == 3
    found = levelled(replace(profile, devices=tuple(apart))).devices
    assert len({device.timings for device in found}) == 1 and len(found[0].timings) == 3
    slow = replace(
        apart[2],
        calls_s=tuple(2 * s for s in apart[2].calls_s),
        copy_bytes_per_s=apart[2].copy_bytes_per_s / 2,
        update_s_per_element={n: 2 * s for n, s in apart[2].update_s_per_element.items()},
    )
    found = levelled(replace(profile, devices=(*apart[:2], slow))).devices
    assert found[0].timings == found[1].timings != found[2].timings


def test_one_disturbed_box_makes_no_device_another_kind() -> None:
    profile = measured(1.0, 1.01, 0.99)
    longest = max(profile.devices[2].timings, key=lambda timing: timing.forward_s)
    timings = tuple(
        timing.stretched(3.0) if timing is longest else timing
        for timing in profile.devices[2].timings
    )
    devices = (*profile.devices[:2], replace(profile.devices[2], timings=timings))
    found = levelled(replace(profile, devices=devices)).devices
    assert found[0].timings == found[1].timings == found[2].timings
    kept = next(timing for timing in found[2].timings if timing.load == longest.load)
    assert kept.forward_s < 1.1 * longest.forward_s


def test_a_slower_device_takes_longer_for_what_only_others_have_timed() -> None:
    profile = measured(1.0, 1.0, 2.0)
    few = replace(profile.devices[2], timings=profile.devices[2].timings[:4])
    found = levelled(replace(profile, devices=(*profile.devices[:2], few))).devices
    usual = {timing.load: timing.forward_s for timing in found[0].timings}
    slow = {timing.load: timing.forward_s for timing in found[2].timings}
    assert slow.keys() == usual.keys()
    assert all(slow[load] == pytest.approx(2 * usual[load]) for load in usual)


def test_what_messages_take_of_processors_of_one_kind_is_equal() -> None:
    profile = measured(1.0, 1.0, 1.0)
    assert profile.network is not None
    link = profile.network.links[0]
    links = tuple(
        replace(link, message_s=n * 1e-5, up_bytes_per_s=n * link.up_bytes_per_s) for n in (1, 2, 9)
    )
    found = levelled(replace(profile, network=replace(profile.network, links=links))).network
    assert found is not None
    assert {one.message_s for one in found.links} == {2e-5}
    assert [one.up_bytes_per_s for one in found.links] == [one.up_bytes_per_s for one in links]


def test_limits_of_memory_stay_each_devices_own() -> None:
    profile = measured(1.0, 1.0)
    small = replace(profile.devices[1], memory_bytes=300 * MIB)
    found = levelled(replace(profile, devices=(profile.devices[0], small)))
    assert [device.memory_bytes for device in found.devices] == [
        profile.devices[0].memory_bytes,
        300 * MIB,
    ]
