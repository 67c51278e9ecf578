"""A scan for SSH servers in the networks this machine is in; only when somebody asks for it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

from terrazzo.cluster.agent.look import interfaces

NETMASK = 0x891B  # SIOCGIFNETMASK
LEAST_BITS = 22
"""A larger network is not searched: it is somebody else's as well."""
TRY_S = 0.5
AT_ONCE = 128


def local_networks() -> list[ipaddress.IPv4Network]:
    """Networks of this machine's interfaces, the loopback aside."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name, address in interfaces().items():
            if not address or address.startswith("127."):
                continue
            question = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), NETMASK, question)
            except OSError:
                continue
            mask = socket.inet_ntoa(answer[20:24])
            network = ipaddress.IPv4Network(f"{address}/{mask}", strict=False)
            if network.is_private and LEAST_BITS <= network.prefixlen < 32:
                found.add(network)
    return sorted(found)


def ssh_servers(network: ipaddress.IPv4Network, port: int = 22) -> list[str]:
    """Addresses where something says that it speaks SSH."""
    own = set(interfaces().values())
    addresses = [str(host) for host in network.hosts() if str(host) not in own]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        answers = pool.map(lambda address: _speaks_ssh(address, port), addresses)
        return [address for address, yes in zip(addresses, answers, strict=True) if yes]


def _speaks_ssh(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
