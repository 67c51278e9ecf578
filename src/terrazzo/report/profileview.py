"""A profile as words: how fast each family of operators runs, what links carry, what limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.records.profile import DeviceProfile, Network, Profile, Timing
from terrazzo.records.units import bytes_text, count_text, seconds_text
from terrazzo.report.screen import Screen

ALIKE = 0.1
MOST_FAMILIES = 12
WAYS = ("forward_s", "backward_input_s", "backward_weight_s")


def show_profile(profile: Profile, screen: Screen) -> None:
    """The whole profile on a screen."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(profile.measured_s))
    place = profile.key.get("devices", "")
    screen.title(f"Profile of model {profile.key.get('model', '?')} on {place}, {when}")
    for kind in _kinds(profile.devices):
        _show_devices(kind, screen)
    if profile.network is not None:
        _show_network(profile, profile.network, screen)


def _kinds(devices: Sequence[DeviceProfile]) -> list[list[DeviceProfile]]:
    """Devices that compute alike, together."""
    kinds: list[list[DeviceProfile]] = []
    for device in devices:
        for kind in kinds:
            same = _make(kind[0]) == _make(device)
            if same and abs(overall(device) / (overall(kind[0]) or 1.0) - 1) <= ALIKE:
                kind.append(device)
                break
        else:
            kinds.append([device])
    return kinds


def _make(device: DeviceProfile) -> tuple[int, str, int]:
    """What is free on a GPU differs from device to device."""
    memory_bytes = 0 if device.accelerator else device.memory_bytes
    return device.threads, device.accelerator, memory_bytes


def overall(device: DeviceProfile) -> float:
    """Operations a second over all products that were timed, forward and backward."""
    flops = sum(t.load.flops * len(_directions(t)) for t in device.timings)
    seconds = sum(sum(_directions(t)) for t in device.timings if t.load.is_product)
    return flops / seconds if seconds else 0.0


def _directions(timing: Timing) -> list[float]:
    found = (timing.forward_s, timing.backward_input_s, timing.backward_weight_s)
    return [seconds for seconds in found if seconds is not None]


def _show_devices(kind: Sequence[DeviceProfile], screen: Screen) -> None:
    first = kind[0]
    names = first.name if len(kind) == 1 else f"{first.name} to {kind[-1].name}, {len(kind)} alike"
    screen.title(names)
    screen.line(
        f"{overall(first) / 1e9:.3g} GFLOP/s over all products, "
        f"{count_text(first.threads, 'thread')}, {bytes_text(first.memory_bytes)}, power state "
        f"{first.power}; {first.machine.processor}, torch {first.machine.torch}"
    )
    if first.accelerator:
        screen.line(f"Its net lies on {first.accelerator}; the memory is what was free there.")
    if first.own.net_s:
        screen.line(
            f"The runtime itself takes {seconds_text(first.own.net_s)} a training step, "
            f"{seconds_text(first.own.weight_s)} a weight, "
            + ", ".join(f"{seconds_text(sum(ways))} a {kind}" for kind, ways in first.own)
            + ", there and back."
        )
    if first.seconds_per_cpu_s > 1.2:
        screen.line(f"It gets a second of one core's time in {first.seconds_per_cpu_s:.3g} s.")
    screen.line()
    screen.raw(
        f"{'operator':26}{'sizes':>6}{'forward':>13}{'by input':>13}{'by weight':>13}", "dim"
    )
    for family in _families(first)[:MOST_FAMILIES]:
        screen.raw(family.row)
    forward_s, backward_s = first.calls_s
    screen.line()
    screen.line(
        f"A call costs {seconds_text(forward_s)} forward and {seconds_text(backward_s)} backward; "
        f"copying goes at {bytes_text(first.copy_bytes_per_s)}/s; "
        + ", ".join(
            f"{name} {each * 1e9:.3g} ns" for name, each in first.update_s_per_element.items()
        )
        + " per weight."
    )
    sizes = first.left_out + len(first.timings)
    timed = {timing.load for device in kind for timing in device.timings}
    if len(timed) < sizes:
        screen.line(
            f"{count_text(sizes - len(timed), 'size')} of {sizes} left out because time was up; "
            "--seconds gives more."
        )


@dataclass(frozen=True, slots=True)
class _FamilyRow:
    spent_s: float
    row: str


def _families(device: DeviceProfile) -> list[_FamilyRow]:
    """One row for each, those that took longest first; products in GFLOP/s, others in elements."""
    groups: dict[str, list[Timing]] = {}
    for timing in device.timings:
        groups.setdefault(timing.load.family, []).append(timing)
    rows = []
    for name, timings in groups.items():
        cells = [_family_rate(timings, way) for way in WAYS]
        text = f"{name:26}{len(timings):>6}" + "".join(f"{cell:>13}" for cell in cells)
        rows.append(_FamilyRow(sum(sum(_directions(t)) for t in timings), text.rstrip()))
    return sorted(rows, key=lambda row: -row.spent_s)


def _family_rate(timings: Sequence[Timing], way: str) -> str:
    """All its sizes together, so that none of them stands for the others."""
    known = [(t.load, seconds) for t in timings if (seconds := getattr(t, way)) is not None]
    if not known:
        return ""
    if known[0][0].is_product:
        work, unit = sum(load.flops for load, _ in known), "G/s"
    else:
        work, unit = sum(max(load.reads, load.writes) for load, _ in known), "Gel/s"
    return f"{work / sum(seconds for _, seconds in known) / 1e9:.3g} {unit}"


def _show_network(profile: Profile, network: Network, screen: Screen) -> None:
    screen.title("Links")
    for device, link in zip(profile.devices, network.links, strict=True):
        screen.line(
            f"{device.name}: up {_rate(link.up_bytes_per_s)}, down {_rate(link.down_bytes_per_s)} "
            f"with all busy; {seconds_text(link.latency_s)} one way; "
            f"{link.cpu_s_per_byte * 1e9:.2g} ns of a core a byte, "
            f"{seconds_text(link.message_s)} a message"
        )
    medium = "one medium that all share" if network.shared else "a way of its own for each device"
    screen.line(
        f"{medium}: one pair alone {_rate(network.alone_bytes_per_s)}, all at once "
        f"{_rate(network.together_bytes_per_s)} together"
    )
    sums = ", ".join(f"{bytes_text(size)} in {seconds_text(s)}" for size, s in network.sums_s)
    screen.line(f"summed over all devices: {sums}")
    screen.line(limit(profile.devices, network), "bold")


def limit(devices: Sequence[DeviceProfile], network: Network) -> str:
    """What a byte between devices costs in arithmetic, and what that means for plans."""
    flops = min(overall(device) for device in devices)
    share = len(devices) if network.shared else 1
    rate = min(link.up_bytes_per_s for link in network.links)
    if network.shared:
        rate = network.together_bytes_per_s / share
    each = flops / rate if rate else 0.0
    weak = "links limit: group operators and move little" if each > 200 else "computing limits"
    return f"A byte sent takes as long as {each:.0f} operations: {weak}."


def _rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8e-6
    return f"{mbit:.3g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:.3g} Gbit/s"
