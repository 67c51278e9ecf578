"""A profile: what devices and their links were measured to do, for planning without running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError
from terrazzo.records import document
from terrazzo.records.bounds import (
    MEMORY_BYTES,
    RATE_BYTES_PER_S,
    STRETCH,
    WAIT_S,
    WORK_S,
    within_bounds,
)
from terrazzo.records.graph import fingerprint
from terrazzo.records.machine import Machine

KIND, VERSION = "profile", 3

OPERATOR, SUMMED = "Operator", "Summed"
"""Own parts besides those of kinds of steps: of each operator in a Compute; and of a Spread over
whose gradient all devices meet, unlike one of weights, which travel in buckets."""


@dataclass(frozen=True, slots=True)
class Load:
    """One operator on one box, as the sizes that its time depends on.

    A product (convolution, linear, attention) multiplies a matrix of ``rows`` by ``inner`` with
    one of ``inner`` by ``outer``: positions of all samples, weights per output channel, output
    channels. Anything else has an ``inner`` of 0; its ``rows`` are positions, ``outer`` channels.
    ``reads`` and ``writes`` are elements of maps, weights not among them; ``window`` is how many
    positions a convolution's kernel has.
    """

    family: str
    rows: int
    inner: int
    outer: int
    reads: int
    writes: int
    window: int = 1

    @property
    def is_product(self) -> bool:
        return self.inner > 0

    @property
    def weights(self) -> int:
        return self.inner * self.outer

    @property
    def flops(self) -> int:
        """Of the forward pass; each of the two gradients takes as many."""
        return 2 * self.rows * self.inner * self.outer


@dataclass(frozen=True, slots=True)
class Timing:
    """One load as measured; what it has no gradient of is None.

    ``backward_input_s`` is the gradient of what it reads, ``backward_weight_s`` that of a
    product's weights. A norm's gradients come out together, as the first.
    """

    load: Load
    forward_s: float
    backward_input_s: float | None = None
    backward_weight_s: float | None = None

    def stretched(self, factor: float) -> Timing:
        """The same load where everything takes so many times as long."""

        def longer(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        by_input, by_weight = longer(self.backward_input_s), longer(self.backward_weight_s)
        return Timing(self.load, self.forward_s * factor, by_input, by_weight)


@dataclass(frozen=True, slots=True)
class Own:
    """What the runtime itself takes of a device, besides operators and messages.

    ``steps_s`` is by kind of step, forward and backward, and for an operator in a Compute.
    ``weight_s`` is for each weight of the model, ``net_s`` for a training step as a whole.
    """

    steps_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    net_s: float = 0.0
    weight_s: float = 0.0

    def stretched(self, factor: float) -> Own:
        """The same where everything takes so many times as long."""
        steps_s = {kind: (there * factor, back * factor) for kind, (there, back) in self}
        return Own(steps_s, self.net_s * factor, self.weight_s * factor)

    def __iter__(self) -> Iterator[tuple[str, tuple[float, float]]]:
        return iter(self.steps_s.items())


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What one device does by itself, measured while the others did the same.

    ``calls_s`` is what an operator costs however small it is, forward and backward.
    ``update_s_per_element`` is an optimiser's step by its name: sgd, momentum, adam.
    ``fresh_s_per_byte`` is what memory costs that was never touched before, on top of writing.
    ``seconds_per_cpu_s`` is how long the device takes for a second of one core's time: 1 for a
    core of its own, more under a quota or beside others. ``saved_s`` is how much computing a device
    under a quota makes up for at once after it has waited long enough; 0 for a core of its own.
    ``accelerator`` is the GPU that its net lies on, with what drives it; empty for a CPU. Then
    ``memory_bytes`` is what a net may take there, otherwise all memory of the device.
    """

    name: str
    machine: Machine
    power: str
    threads: int
    memory_bytes: int
    seconds_per_cpu_s: float
    calls_s: tuple[float, float]
    copy_bytes_per_s: float
    fresh_s_per_byte: float
    update_s_per_element: Mapping[str, float]
    timings: tuple[Timing, ...]
    took_s: float = 0.0
    left_out: int = 0
    """Boxes that were not measured because time was up."""
    busy_w: float = 0.0
    """What it drew meanwhile, and before while it waited; 0: not known."""
    idle_w: float = 0.0
    is_metered: bool = False
    """Whether these watts were measured, and not estimated."""
    own: Own = field(default_factory=Own)
    saved_s: float = 0.0
    accelerator: str = ""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A device's way to the others, measured while all were sending and receiving.

    For a net on a GPU the copies between its memory and the host's are a part of all figures.
    ``latency_s`` is half the round trip of a small message between idle devices.
    ``cpu_s_per_byte`` is processor time for a byte sent and a byte received, halved;
    ``message_s`` the same for a message however small, ``summed_cpu_s_per_byte`` that for a byte
    of a sum that travels while the device computes, and looks at its connections less often.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    cpu_s_per_byte: float
    message_s: float
    summed_cpu_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Network:
    """The links together.

    ``alone_bytes_per_s`` is what one pair gets in one direction while the others are silent,
    ``together_bytes_per_s`` what all devices get at once, added up; ``shared`` says that all use
    one medium. ``sums_s`` is by payload bytes of one device, of devices that have nothing else to
    do.
    """

    links: tuple[LinkProfile, ...]
    shared: bool
    alone_bytes_per_s: float
    together_bytes_per_s: float
    sums_s: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """Devices, their links (none for a device alone), and what this holds for.

    ``key`` names all that a profile depends on: another value of any of them is another profile.
    """

    key: Mapping[str, str]
    devices: tuple[DeviceProfile, ...]
    network: Network | None
    measured_s: float
    """When, in seconds since the epoch."""

    @property
    def digest(self) -> str:
        return fingerprint(sorted(self.key.items()))

    def of(self, places: Sequence[int]) -> Profile:
        """The same of some devices; what all did together stays as it was with all."""
        network = self.network
        if network is not None and len(places) > 1:
            network = replace(network, links=tuple(network.links[place] for place in places))
        return replace(
            self,
            devices=tuple(self.devices[place] for place in places),
            network=network if len(places) > 1 else None,
        )

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            network = body["network"]
            found = cls(
                key={str(name): str(value) for name, value in body["key"].items()},
                devices=tuple(device_from(table) for table in body["devices"]),
                network=None if network is None else network_from(network),
                measured_s=float(body["measured_s"]),
            )
        _check(found)
        return found

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"profile {path} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            document.write(path, self.to_json() + "\n")
        except OSError as error:
            raise UsageError(f"profile {path} cannot be written: {error}") from error


def device_from(table: Mapping[str, Any]) -> DeviceProfile:
    """The inverse of ``asdict``, from what JSON makes of it."""
    forward_s, backward_s = map(float, table["calls_s"])
    timings = tuple(
        Timing(
            load=Load(**row["load"]),
            forward_s=row["forward_s"],
            backward_input_s=row["backward_input_s"],
            backward_weight_s=row["backward_weight_s"],
        )
        for row in table["timings"]
    )
    rest = {key: value for key, value in table.items() if key not in ("timings", "calls_s", "own")}
    rest["machine"] = Machine(**table["machine"])
    rest["own"] = own_from(table["own"])
    return DeviceProfile(**rest, calls_s=(forward_s, backward_s), timings=timings)


def own_from(table: Mapping[str, Any]) -> Own:
    steps_s = {str(kind): (float(a), float(b)) for kind, (a, b) in table["steps_s"].items()}
    return Own(steps_s, float(table["net_s"]), float(table["weight_s"]))


def network_from(table: Mapping[str, Any]) -> Network:
    return Network(
        links=tuple(LinkProfile(**row) for row in table["links"]),
        shared=bool(table["shared"]),
        alone_bytes_per_s=table["alone_bytes_per_s"],
        together_bytes_per_s=table["together_bytes_per_s"],
        sums_s=_pairs(table["sums_s"]),
    )


def _pairs(rows: Any) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), float(seconds)) for size, seconds in rows)


# ---- what can be -------------------------------------------------------------------------------

REMEDY = "measure again with terrazzo cluster profile --again"


def _check(profile: Profile) -> None:
    """Refuses figures that nothing can have: plans made with them would mean nothing."""
    if not profile.devices:
        raise UsageError(f"the profile names no device: {REMEDY}")
    for device in profile.devices:
        _check_device(device)
    network, count = profile.network, len(profile.devices)
    if (network is None) != (count == 1) or (network and len(network.links) != count):
        links = len(network.links) if network else 0
        raise UsageError(f"the profile is of {count} devices and {links} links: {REMEDY}")
    if network is not None:
        _check_network(network, [device.name for device in profile.devices])


def _check_device(device: DeviceProfile) -> None:
    where, updates = f"of {device.name}", device.update_s_per_element
    for what, value, bounds, unit in (
        ("memory", device.memory_bytes, MEMORY_BYTES, "bytes"),
        ("threads", device.threads, (1, 4096), ""),
        ("seconds for a second of processor time", device.seconds_per_cpu_s, STRETCH, ""),
        ("copying", device.copy_bytes_per_s, (RATE_BYTES_PER_S[0], 1e15), "bytes/s"),
        ("new memory", device.fresh_s_per_byte, (0.0, 1.0), "s/byte"),
        *(("a call", value, WORK_S, "s") for value in device.calls_s),
        ("what it saves while it waits", device.saved_s, WAIT_S, "s"),
        *((f"a step of {k}", v, (0.0, 1.0), "s/element") for k, v in updates.items()),
        *(("the runtime's own part", v, (0.0, WORK_S[1]), "s") for v in _own_s(device.own)),
    ):
        within_bounds(value, bounds, what=f"{what} {where}", unit=unit, remedy=REMEDY)
    for timing in device.timings:
        for took_s in (timing.forward_s, timing.backward_input_s, timing.backward_weight_s):
            if took_s is not None:
                what = f"the time of {timing.load.family} {where}"
                within_bounds(took_s, WORK_S, what=what, unit="s", remedy=REMEDY)


def _own_s(own: Own) -> Iterator[float]:
    for _, ways in own:
        yield from ways
    yield from (own.net_s, own.weight_s)


def _check_network(network: Network, names: Sequence[str]) -> None:
    for name, link in zip(names, network.links, strict=True):
        for what, value, bounds, unit in (
            ("sending", link.up_bytes_per_s, RATE_BYTES_PER_S, "bytes/s"),
            ("receiving", link.down_bytes_per_s, RATE_BYTES_PER_S, "bytes/s"),
            ("the latency", link.latency_s, WAIT_S, "s"),
            ("processor time for a byte", link.cpu_s_per_byte, (0.0, 1.0), "s"),
            ("processor time for a message", link.message_s, WAIT_S, "s"),
            ("processor time for a byte of a sum", link.summed_cpu_s_per_byte, (0.0, 1.0), "s"),
        ):
            within_bounds(value, bounds, what=f"{what} of {name}", unit=unit, remedy=REMEDY)
    rates = {"one pair": network.alone_bytes_per_s, "all": network.together_bytes_per_s}
    for who, rate in rates.items():
        what = f"what {who} can send at once"
        within_bounds(rate, (RATE_BYTES_PER_S[0], 1e15), what=what, unit="bytes/s", remedy=REMEDY)
    for size, seconds in network.sums_s:
        what = f"a sum of {size} bytes"
        within_bounds(seconds, WORK_S, what=what, unit="s", remedy=REMEDY)
