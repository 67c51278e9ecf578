"""The lab's network: a switch, one cable per device, and the air that Wi-Fi devices share.

    device's namespace          the switch's namespace
    eth0 ──(tbf: up)───────────▶ port0 ──▶ ┐
    eth0 ◀───────────(tbf: down)── port0 ◀── bridge ── port1 ... portN
                                 port0 ──▶ air (htb, one for all) ──▶ bridge     with Wi-Fi

Each end shapes what it sends. The switch has a namespace of its own, so that this machine's
network is never touched, and no address or name can collide with anything.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.errors import LabError
from terrazzo.lab import kernelfile
from terrazzo.lab.namespace import close_namespace, inside, make_namespace, open_namespace
from terrazzo.lab.preset import LinkSpeed
from terrazzo.lab.topology import NETWORK, PREFIX_BITS, EmulatedDevice, Topology

BRIDGE, AIR, CABLE = "switch", "air", "eth0"
SWITCH_ADDRESS = f"{NETWORK}.254"
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full frame as the kernel's shaper counts it, and the TCP payload in it."""
BURST_S = 1e-3
LEAST_BURST_BYTES = 16_384
"""What may pass at once: a millisecond's worth, so that timers neither starve a long flow nor let
a burst of small messages through for nothing."""
LARGEST_BUNDLE = 65_536
QUEUE_BYTES = 512 << 10
"""As much as a cheap switch holds back for a slow port, and drops beyond."""
CONGESTION_RULE, LINK_SCOPE = "cubic", 253
ROOT, TBF_HANDLE, INGRESS = 0xFFFFFFFF, 0x10000, 0xFFFF0000
ALL_PROTOCOLS, IP_PROTOCOL = 0x0003, 0x0800
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a device's interface has sent and received."""

    sent_bytes: int
    received_bytes: int


class Network:
    """Namespaces held open, and what is done to the links between them."""

    def __init__(self, topology: Topology, switch: int, devices: Sequence[int]) -> None:
        self.topology = topology
        self.switch = switch
        self.devices = tuple(devices)
        self.has_netem = True

    @classmethod
    def make(cls, topology: Topology) -> Network:
        held: list[int] = []
        try:
            for _ in range(len(topology.devices) + 1):
                held.append(make_namespace())
            network = cls(topology, held[0], held[1:])
            network._build()
        except BaseException:
            for number in held:
                close_namespace(number)
            raise
        return network

    @classmethod
    def attach(cls, topology: Topology, process: int, numbers: Sequence[int]) -> Network:
        """The network of a lab in another process, by the files it holds open."""
        held = [open_namespace(process, number) for number in numbers]
        return cls(topology, held[0], held[1:])

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.switch, *self.devices)

    def close(self) -> None:
        for number in self.numbers:
            close_namespace(number)

    # ---- faults -----------------------------------------------------------------------------

    def cut(self, device: int) -> None:
        """Pulls the device's cable; both ends lose their carrier."""
        self._at_switch(lambda ip: ip.link("set", index=_index(ip, f"port{device}"), state="down"))

    def mend(self, device: int) -> None:
        """The cable back in, at its full rate."""
        self._at_switch(lambda ip: ip.link("set", index=_index(ip, f"port{device}"), state="up"))
        self.slow(device, self.topology.devices[device].link.bits_per_s)

    def slow(self, device: int, bits_per_s: float) -> None:
        """Another rate for the device's link, both ways; it holds at once."""
        self._at_switch(lambda ip: _shape(ip, f"port{device}", bits_per_s, "change"))
        self._at_device(device, lambda ip: _shape(ip, CABLE, bits_per_s, "change"))

    # ---- counters ---------------------------------------------------------------------------

    def traffic(self, device: int) -> Traffic:
        def read(ip: Any) -> Traffic:
            stats = ip.get_links(_index(ip, CABLE))[0].get_attr("IFLA_STATS64")
            return Traffic(stats["tx_bytes"], stats["rx_bytes"])

        return self._at_device(device, read)

    # ---- making it --------------------------------------------------------------------------

    def _build(self) -> None:
        self._at_switch(self._build_switch)
        for device, wanted in enumerate(self.topology.devices):
            self._at_device(device, partial(self._build_device, wanted))

    def _build_switch(self, ip: Any) -> None:
        _quiet()
        ip.link("set", index=_index(ip, "lo"), state="up")
        ip.link("add", ifname=BRIDGE, kind="bridge", br_forward_delay=0)
        bridge = _index(ip, BRIDGE)
        ip.addr("add", index=bridge, address=SWITCH_ADDRESS, prefixlen=PREFIX_BITS)
        ip.link("set", index=bridge, state="up")
        _send_as_boards(ip, bridge, SWITCH_ADDRESS)
        air = self._build_air(ip)
        for device, namespace in enumerate(self.devices):
            name = f"port{device}"
            peer = {"ifname": CABLE, "net_ns_fd": namespace}
            ip.link("add", ifname=name, kind="veth", peer=peer)
            port = _index(ip, name)
            ip.link("set", index=port, master=bridge, state="up")
            self._shape_end(ip, name, self.topology.devices[device].link)
            if air is not None:
                _send_through(ip, port, air)
        # What the switch itself sends is paced by who sends it, in bundles for the link it is for.
        fastest = max(device.link.bits_per_s for device in self.topology.devices)
        ip.link("set", index=bridge, gso_max_size=_bundle_bytes(fastest))

    def _build_air(self, ip: Any) -> int | None:
        """An interface through which each frame must pass before the bridge sees it."""
        rate = self.topology.air_bits_per_s
        if rate is None:
            return None
        try:
            ip.link("add", ifname=AIR, kind="ifb")
        except Exception as error:
            raise LabError(
                f"this kernel has no ifb device ({error}): a shared Wi-Fi channel cannot be "
                "emulated here; leave :wifi out"
            ) from error
        air = _index(ip, AIR)
        ip.link("set", index=air, state="up")
        _share_out(ip, air, rate, [device.address for device in self.topology.devices])
        return air

    def _build_device(self, wanted: EmulatedDevice, ip: Any) -> None:
        _quiet()
        ip.link("set", index=_index(ip, "lo"), state="up")
        cable = _index(ip, CABLE)
        ip.addr("add", index=cable, address=wanted.address, prefixlen=PREFIX_BITS)
        ip.link("set", index=cable, state="up")
        _send_as_boards(ip, cable, wanted.address)
        self._shape_end(ip, CABLE, wanted.link)

    def _shape_end(self, ip: Any, name: str, link: LinkSpeed) -> None:
        _shape(ip, name, link.bits_per_s, "add")
        # Frames travel in bundles that pass the shaper whole: taking them apart costs the device
        # time. A connection keeps the size it began with, so a link that is fast for a while, when
        # devices connect, has the bundles of its own rate.
        ip.link("set", index=_index(ip, name), gso_max_size=_bundle_bytes(link.bits_per_s))
        if (link.delay_s or link.loss) and self.has_netem:
            self.has_netem = _delay(ip, name, link)

    def _at_switch(self, work: Callable[[Any], T]) -> T:
        return _with_netlink(self.switch, work)

    def _at_device(self, device: int, work: Callable[[Any], T]) -> T:
        return _with_netlink(self.devices[device], work)


def frame_bits_per_s(payload_bits_per_s: float) -> float:
    """What the shaper must let through, headers included, for that much payload."""
    return payload_bits_per_s * FRAME_BYTES / PAYLOAD_BYTES


def burst_bytes(payload_bits_per_s: float) -> int:
    return max(LEAST_BURST_BYTES, round(frame_bits_per_s(payload_bits_per_s) / 8 * BURST_S))


def _bundle_bytes(payload_bits_per_s: float) -> int:
    return min(LARGEST_BUNDLE, burst_bytes(payload_bits_per_s) * 3 // 4)


def _with_netlink(namespace: int, work: Callable[[Any], T]) -> T:
    def talk() -> T:
        try:
            from pyroute2 import IPRoute
            from pyroute2.netlink.exceptions import NetlinkError
        except ModuleNotFoundError:
            raise LabError("the lab needs pyroute2: pip install 'terrazzo[lab]'") from None
        try:
            with IPRoute() as ip:
                return work(ip)
        except NetlinkError as error:
            raise LabError(
                f"the kernel refused a part of the lab's network: {error}. It needs root, veth, "
                "bridge and tbf; terrazzo lab clean removes what a dead lab left"
            ) from error

    return inside(namespace, talk)


def _index(ip: Any, name: str) -> int:
    found = ip.link_lookup(ifname=name)
    if not found:
        raise LabError(f"the lab's interface {name} is gone; start the lab again")
    return int(found[0])


def _shape(ip: Any, name: str, bits_per_s: float, verb: str) -> None:
    index = _index(ip, name)
    rate = round(frame_bits_per_s(bits_per_s) / 8)
    ip.tc(
        verb, "tbf", index, parent=ROOT, handle=TBF_HANDLE,
        rate=rate, burst=burst_bytes(bits_per_s), limit=QUEUE_BYTES,
    )  # fmt: skip
    seen = [
        qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]
        for qdisc in ip.get_qdiscs(index)
        if qdisc.get_attr("TCA_KIND") == "tbf"
    ]
    if seen != [rate]:
        raise LabError(f"{name} is shaped to {seen} bytes/s after {rate} was set")


def _delay(ip: Any, name: str, link: LinkSpeed) -> bool:
    """Delay and loss of one end, where the kernel can; half of the loss at each end."""
    with suppress(_errors()):
        ip.tc(
            "add", "netem", _index(ip, name), parent=TBF_HANDLE | 1, handle=2 * TBF_HANDLE,
            delay=round(link.delay_s / 2 * 1e6), loss=link.loss / 2 * 100, limit=1000,
        )  # fmt: skip
        return True
    return False


def _errors() -> type[Exception]:
    from pyroute2.netlink.exceptions import NetlinkError

    found: type[Exception] = NetlinkError
    return found


def _share_out(ip: Any, air: int, bits_per_s: float, addresses: Sequence[str]) -> None:
    """One rate for all; who sends takes turns with the others, and may have what they leave."""
    whole = {"rate": round(frame_bits_per_s(bits_per_s) / 8), "burst": burst_bytes(bits_per_s)}
    part = max(1, whole["rate"] // len(addresses))
    channel = TBF_HANDLE | 0xFFFF
    ip.tc("add", "htb", air, handle=TBF_HANDLE, default=1)  # what is no IP goes with the first
    ip.tc("add-class", "htb", air, handle=channel, parent=TBF_HANDLE, **whole)
    for number, address in enumerate(addresses, start=1):
        own = {"rate": part, "ceil": whole["rate"], "burst": whole["burst"]}
        ip.tc("add-class", "htb", air, handle=TBF_HANDLE | number, parent=channel, **own)
        source = "".join(f"{int(byte):02x}" for byte in address.split("."))
        ip.tc(
            "add-filter", "u32", air, parent=TBF_HANDLE, prio=1, protocol=IP_PROTOCOL,
            target=TBF_HANDLE | number, keys=[f"0x{source}/0xffffffff+12"],
        )  # fmt: skip


def _send_through(ip: Any, port: int, air: int) -> None:
    """Whatever comes from the device waits for the air, and goes on to the bridge from there."""
    try:
        ip.tc("add", "ingress", port)
        ip.tc(
            "add-filter", "u32", port, parent=INGRESS, prio=1, protocol=ALL_PROTOCOLS,
            target=TBF_HANDLE, keys=["0x0/0x0+0"],
            action={"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": air},
        )  # fmt: skip
    except _errors() as error:
        reason = errno.errorcode.get(getattr(error, "code", 0), str(error))
        raise LabError(
            f"this kernel cannot send frames through a shared channel (u32, mirred: {reason}); "
            "leave :wifi out"
        ) from error


def _send_as_boards(ip: Any, index: int, address: str) -> None:
    """TCP by the rule that boards' systems come with, whatever this machine's own is."""
    route = {"dst": f"{NETWORK}.0", "dst_len": PREFIX_BITS, "oif": index, "prefsrc": address}
    ip.route("replace", scope=LINK_SCOPE, metrics={"cc_algo": CONGESTION_RULE}, **route)


def _quiet() -> None:
    """No IPv6 chatter, which interface counters would count as traffic."""
    with suppress(LabError):
        for name in ("all", "default"):
            kernelfile.write(Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1")
