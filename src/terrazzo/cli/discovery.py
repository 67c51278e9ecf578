"""``terrazzo cluster discover``, ``announce`` and ``pair``: finding devices, and getting let in."""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import select
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.cli.place import say
from terrazzo.cli.verb import add_verb
from terrazzo.cluster.agent.look import interfaces
from terrazzo.cluster.discovery import Announcement, Announcer, discover
from terrazzo.cluster.pairing import HOST_KEYS, Pairing, fingerprint, know_host, own_key, pair
from terrazzo.cluster.scan import local_networks, ssh_servers
from terrazzo.errors import HostError, UsageError
from terrazzo.records.cluster import NAME, Cluster, ClusterDevice
from terrazzo.records.units import count_text

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

DISCOVER_EXAMPLES = """\
examples:
  terrazzo cluster discover
      devices that run terrazzo cluster announce, on this machine's networks
  terrazzo cluster discover --write cluster.toml
      and write them down; then: terrazzo cluster check
  terrazzo cluster discover --scan --write cluster.toml
      also whatever answers as an SSH server in these networks: only where they are yours

What answers is a hint, no proof: SSH decides who is let in. A file written by hand does as well.
"""
ANNOUNCE_EXAMPLES = """\
examples, on a device:
  terrazzo cluster announce
      answer discover until Ctrl-C
  terrazzo cluster announce --pair
      also show a code; typed into terrazzo cluster pair, it lets that machine's SSH key in
"""
PAIR_EXAMPLES = """\
examples:
  terrazzo cluster pair pi1.local
      asks for the code that terrazzo cluster announce --pair shows there
"""
TICK_S = 0.5


def add_discovery(below: Commands) -> None:
    found = add_verb(below, "discover", "find devices on the local network", DISCOVER_EXAMPLES)
    found.add_argument("--write", type=Path, metavar="FILE", help="write a cluster's file")
    found.add_argument("--scan", action="store_true", help="also look for SSH servers")
    found.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="how long (default: %(default)g)"
    )
    found.set_defaults(command=discover_devices)
    told = add_verb(below, "announce", "let this device be found", ANNOUNCE_EXAMPLES)
    told.add_argument("--pair", action="store_true", help="and let somebody in who has a code")
    told.add_argument("--interface", metavar="NAME", help="only there (default: all)")
    told.add_argument("--name", help="other than this machine's")
    told.add_argument("--ssh-port", type=int, default=22, metavar="N", help="of its SSH server")
    told.add_argument(
        "--host-keys", type=Path, default=HOST_KEYS, metavar="DIR", help="of its SSH server"
    )
    told.set_defaults(command=announce)
    paired = add_verb(below, "pair", "get this machine's SSH key let in", PAIR_EXAMPLES)
    paired.add_argument("host", help="the device's name or address")
    paired.add_argument("--code", help="the code it shows (default: ask)")
    paired.add_argument("--port", type=int, default=0, metavar="N", help="where it waits")
    paired.set_defaults(command=pair_device)


# ---- discover -------------------------------------------------------------------------------


def discover_devices(options: argparse.Namespace) -> int:
    if options.write is not None and options.write.exists():
        raise UsageError(f"{options.write} exists: name another file, or remove it first")
    if not 0 < options.seconds <= 60:
        raise UsageError(f"--seconds {options.seconds:g}: give more than 0, and 60 at most")
    found = discover(seconds=options.seconds)
    devices = [
        ClusterDevice(_distinct(told.name, number, found), address, user=told.user,
                      port=0 if told.port == 22 else told.port)
        for number, (address, told) in enumerate(found.items())
    ]  # fmt: skip
    for address, told in found.items():
        print(f"{address:<15}  {told.name}  {told.system}".rstrip())
    if options.scan:
        devices += _scanned({device.host for device in devices})
    if not devices:
        say(
            "nobody answered: start terrazzo cluster announce on the devices, look for plain SSH "
            "servers with --scan, or write the file by hand (docs/clusters.md)"
        )
        return 1
    say(f"found {count_text(len(devices), 'device')}")
    if options.write is not None:
        Cluster(tuple(devices)).save(options.write)
        say(f"written to {options.write}; next: terrazzo cluster check --on {options.write}")
    return 0


def _distinct(name: str, number: int, found: dict[str, Announcement]) -> str:
    """Names may be given twice: boards of one image often are."""
    same = [told.name for told in found.values()].count(name)
    return name if same == 1 else f"{name}-{number}"


def _scanned(known: set[str]) -> list[ClusterDevice]:
    devices = []
    for network in local_networks():
        say(f"looking for SSH servers in {network}")
        for address in ssh_servers(network):
            if address not in known:
                print(f"{address:<15}  an SSH server")
                devices.append(ClusterDevice(address, address))
    return devices


# ---- announce -------------------------------------------------------------------------------


def announce(options: argparse.Namespace) -> int:
    name = options.name or socket.gethostname().partition(".")[0]
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a device: use letters, digits, dots and dashes")
    addresses = _addresses(options.interface)
    with ExitStack() as cleanup:
        pairing: Pairing | None = None
        if options.pair:
            place = addresses[0] if options.interface else ""
            ssh = Path.home() / ".ssh"
            pairing = Pairing(place, ssh=ssh, host_keys=options.host_keys)
            cleanup.callback(pairing.close)
        told = Announcement(
            name=name,
            user=getpass.getuser(),
            port=options.ssh_port,
            pair_port=pairing.port if pairing else 0,
            system=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        )
        announcer = Announcer(told, addresses=addresses)
        cleanup.callback(announcer.close)
        say(f"{name} answers terrazzo cluster discover on {', '.join(addresses)}; Ctrl-C ends it")
        if pairing is not None:
            say(f"pairing code: {pairing.code} (port {pairing.port}, one pairing, five minutes)")
            say(f"type it on the other machine after: terrazzo cluster pair {addresses[0]}")
        _serve(announcer, pairing)
    return 0


def _serve(announcer: Announcer, pairing: Pairing | None) -> None:
    while True:
        waiting: list[Announcer | Pairing] = [announcer]
        if pairing is not None:
            if pairing.is_open:
                waiting.append(pairing)
            else:
                pairing.close()
                pairing = None
                announcer.told = replace(announcer.told, pair_port=0)
                say("pairing is over; for another one: terrazzo cluster announce --pair")
        ready = select.select(waiting, [], [], TICK_S)[0]
        if announcer in ready:
            announcer.answer()
        if pairing is not None and pairing in ready:
            key = pairing.serve()
            say(f"paired: let in the key {fingerprint(key)}" if key else "somebody did not pair")


def _addresses(interface: str | None) -> list[str]:
    there = {name: at for name, at in interfaces().items() if at and not at.startswith("127.")}
    if interface is None and there:
        return list(there.values())
    if interface not in there:
        names = ", ".join(there) or "none with an address"
        raise UsageError(f"no interface {interface or 'with an address'} here; there are: {names}")
    return [there[interface]]


# ---- pair -----------------------------------------------------------------------------------


def pair_device(options: argparse.Namespace) -> int:
    ssh = Path.home() / ".ssh"
    key = own_key(ssh)
    try:
        address = socket.gethostbyname(options.host)
    except OSError as error:
        raise HostError(f"{options.host} is not known: {error}; give its address") from error
    port, ssh_port = options.port, 22
    if not port:
        told = discover(seconds=2.0).get(address)
        if told is None or not told.pair_port:
            known = "" if options.host == address else f" ({address})"
            raise HostError(
                f"{options.host}{known} does not announce a pairing: run terrazzo cluster announce "
                "--pair there, or give the port it shows with --port"
            )
        port, ssh_port = told.pair_port, told.port
    code = options.code or input("code that the device shows: ")
    keys = pair((address, port), code=code, key=key)
    names = {options.host, address}
    shown = [name if ssh_port == 22 else f"[{name}]:{ssh_port}" for name in sorted(names)]
    know_host(ssh / "known_hosts", shown, keys)
    if not keys:
        raise HostError(
            f"{options.host} let this machine's key in, but told no key of its own: does an SSH "
            "server run there? Start it, then ssh there once by hand"
        )
    say(f"paired with {options.host}, whose key is {fingerprint(keys[0])}: SSH works now")
    return 0
