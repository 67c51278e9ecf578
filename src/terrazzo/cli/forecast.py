"""A forecast on a screen: what a step will take, why, what was rejected, and what would help."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

from terrazzo.errors import PlanError
from terrazzo.planner.cost import predict
from terrazzo.planner.feedback import slowed
from terrazzo.planner.guess import is_guess
from terrazzo.planner.prediction import Prediction
from terrazzo.planner.search import TIME, Found, Tried
from terrazzo.planner.wishes import Wishes, room_bytes
from terrazzo.records import Graph, Layout, Node, Plan
from terrazzo.records.profile import Profile
from terrazzo.records.units import bytes_text, seconds_text
from terrazzo.report.planview import shortened
from terrazzo.report.screen import Screen
from terrazzo.schedule import lower
from terrazzo.schedule.tiling import group_of_nodes, owned, placements

MOST_REJECTED = 8
FASTER = 2.0


def show_forecast(
    graph: Graph,
    plan: Plan,
    found: Prediction,
    *,
    profile: Profile,
    limits: Sequence[int] | None,
    screen: Screen,
) -> None:
    """Seconds of every device and group, memory against its limit, and the bottleneck."""
    if is_guess(profile):
        basis = "guessed from the figures of these devices; terrazzo cluster profile measures them"
    else:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(profile.measured_s))
        basis = f"from what was measured on {when}"
    screen.title(f"Predicted: {seconds_text(found.step_s)} a training step")
    screen.line(f"{basis[0].upper()}{basis[1:]}.", "dim")
    _devices(found, profile, limits, screen)
    _groups(graph, plan, found, screen)
    sent, summed = max(found.sent_bytes), max(found.summed_bytes)
    screen.line(
        f"A device sends up to {bytes_text(sent)} of maps and their gradients a step, and has part "
        f"in sums over {bytes_text(summed)}."
    )
    if found.delivery_s:
        screen.line(
            f"Of a step {seconds_text(found.delivery_s)} are for the input: "
            f"{bytes_text(found.delivered_bytes)} from {profile.devices[0].name}, which reads it, "
            "to the others."
        )
    screen.line(f"Bottleneck: {found.bottleneck}.", "bold")


def _devices(
    found: Prediction, profile: Profile, limits: Sequence[int] | None, screen: Screen
) -> None:
    heads = ("compute", "exchange", "waiting", "sums")
    wide = max(len(device.name) for device in profile.devices)
    names = "".join(f"{head:>10}" for head in heads) + f"{'memory':>12}"
    screen.raw(" " * wide + names + ("" if limits is None else "  of limit"), "dim")
    for number, device in enumerate(profile.devices):
        parts = (found.compute_s, found.exchange_s, found.waiting_s, found.sums_s)
        cells = "".join(f"{seconds_text(part[number]):>10}" for part in parts)
        row = f"{device.name:<{wide}}{cells}{bytes_text(found.memory_bytes[number]):>12}"
        screen.raw(row + ("" if limits is None else f"  {bytes_text(limits[number])}"))
    room = room_bytes(profile)
    if room:
        over = max(found.memory_bytes) > room
        verdict = ": this does NOT fit, see below." if over else "."
        screen.line(
            f"There is room for {bytes_text(room)} beside the idle process on the smallest"
            f"{verdict}",
            "bold red" if over else "dim",
        )


def _groups(graph: Graph, plan: Plan, found: Prediction, screen: Screen) -> None:
    """How each group is cut: the part of its result that every device makes."""
    _, letters = placements(graph, plan)
    members = group_of_nodes(graph, plan)
    titles = [shortened(cost.title) for cost in found.groups]
    wide = min(max(map(len, titles)), max(screen.width - 64, 12))
    layouts = [str(group.layout) for group in plan.groups]
    broad = max(map(len, layouts))
    screen.raw(
        f"{'group':<{wide + 4}} {'layout':<{broad}} {'compute':>9} {'exchange':>9}  shares", "dim"
    )
    for number, (group, cost) in enumerate(zip(plan.groups, found.groups, strict=True)):
        inside = [node for node, at in zip(graph.nodes, members, strict=True) if at == number]
        parts = shares(graph, inside, letters[group.layout.letters], group.layout)
        name = titles[number]
        title = name if len(name) <= wide else "…" + name[1 - wide :]
        screen.raw(
            f"{number:>3} {title:<{wide}} {layouts[number]:<{broad}} "
            f"{seconds_text(max(cost.compute_s)):>9} {seconds_text(max(cost.exchange_s)):>9}  "
            f"{parts}" + (f", {group.passes} passes" if group.passes else "")
        )


def shares(graph: Graph, nodes: Sequence[Node], letters: Mapping[str, str], layout: Layout) -> str:
    """``17% each``, ``30 30 40 %``, or ``all on each``, of the largest map that is cut."""
    cut = [node.output for node in nodes if letters[node.output].strip(".")]
    if layout.is_whole or not cut:
        return "all on each"
    name = max(cut, key=lambda one: graph.values[one].bytes)
    boxes = owned(graph.shape(name), letters[name], layout)
    parts = [round(100 * box.size / max(prod(graph.shape(name)), 1)) for box in boxes]
    if max(parts) - min(parts) <= 1:
        return f"{parts[0]}% each"
    return " ".join(map(str, parts)) + " %"


def show_rejected(found: Found, screen: Screen) -> None:
    """What else was simulated, how much slower it is, and what it needs where that was counted."""
    if found.misfit:
        screen.line(f"No plan fits: {found.misfit}", "bold red")
    if not found.rejected and not found.refused:
        return
    screen.title("Considered and rejected")
    best_s = found.best.prediction.step_s
    shown = _distinct(found.rejected)
    for tried in (*shown[:MOST_REJECTED], *shown[MOST_REJECTED:][-1:]):  # and the slowest
        took_s = tried.prediction.step_s
        needs = tried.prediction.memory_bytes
        most = f"{bytes_text(max(needs)):>9}  " if needs else ""
        screen.line(f"{seconds_text(took_s):>9}  {took_s / best_s:4.2f}x  {most}{tried.name}")
    for text in found.refused[:3]:
        screen.line(f"does not fit: {text}", "dim")


def _distinct(tried: Sequence[Tried]) -> list[Tried]:
    """One of those that cost the same."""
    found: dict[str, Tried] = {}
    for one in tried:
        found.setdefault(f"{one.prediction.step_s:.4g}", one)
    return list(found.values())


def show_help(
    graph: Graph, found: Found, *, wishes: Wishes, profile: Profile, screen: Screen
) -> None:
    """What would make a step faster: predicted again with one thing changed at a time."""
    screen.title("What would help")
    best_s = found.best.prediction.step_s
    gains = []
    for name, change in _changes(graph, found, wishes, profile):
        with suppress(PlanError):  # of what does not fit then, nothing is said
            gains.append((change(), name))
    for after_s, name in sorted(gains):
        gain = 1 - after_s / best_s
        words = f"{gain:.0%} less time" if gain >= 0.01 else "next to nothing"
        screen.line(f"{name}: {seconds_text(after_s)} a step, {words}")


Change = tuple[str, Callable[[], float]]


def _changes(graph: Graph, found: Found, wishes: Wishes, profile: Profile) -> list[Change]:
    program = lower(graph, found.best.plan)

    def again(other: Profile) -> float:
        return predict(program, wishes.prices(other), memory=False).step_s

    devices = len(profile.devices)
    changes: list[Change] = [
        (f"devices {FASTER:g} times as fast", lambda: again(faster_devices(profile)))
    ]
    if devices > 1:
        changes.append((f"links {FASTER:g} times as fast", lambda: again(faster_links(profile))))
    if devices > 1 and wishes.is_open and wishes.layout == "auto":

        def more() -> float:
            wider = one_more(profile)
            wished = replace(wishes, profile=wider)
            return wished.search(graph, devices + 1).best.prediction.step_s

        changes.append((f"one more device like {profile.devices[-1].name}", more))
    tight = wishes.memory is not None or any(group.passes for group in found.best.plan.groups)
    if tight and wishes.is_open and wishes.objective == TIME:
        changes.append(("more memory", lambda: wishes.boundless(graph).best.prediction.step_s))
    return changes


def faster_links(profile: Profile) -> Profile:
    """Every rate higher; latency and processors stay."""
    assert profile.network is not None
    network = profile.network
    links = tuple(
        replace(
            link,
            up_bytes_per_s=FASTER * link.up_bytes_per_s,
            down_bytes_per_s=FASTER * link.down_bytes_per_s,
        )
        for link in network.links
    )
    first_s = network.sums_s[0][1] if network.sums_s else 0.0
    quicker = tuple((size, first_s + (s - first_s) / FASTER) for size, s in network.sums_s)
    return replace(
        profile,
        network=replace(
            network,
            links=links,
            together_bytes_per_s=FASTER * network.together_bytes_per_s,
            alone_bytes_per_s=FASTER * network.alone_bytes_per_s,
            sums_s=quicker,
        ),
    )


def faster_devices(profile: Profile) -> Profile:
    """Everything computed in less time, and messages too: a processor does both."""
    return slowed(profile, [1 / FASTER] * len(profile.devices))


def one_more(profile: Profile) -> Profile:
    """Another device and link like the last."""
    assert profile.network is not None
    network, count = profile.network, len(profile.devices)
    last = replace(profile.devices[-1], name=f"{profile.devices[-1].name}+")
    together = network.together_bytes_per_s
    return replace(
        profile,
        devices=(*profile.devices, last),
        network=replace(
            network,
            links=(*network.links, network.links[-1]),
            together_bytes_per_s=together if network.shared else together * (count + 1) / count,
        ),
    )
