"""The meeting point: torch's store, where only devices of this run get in.

torch's store knows neither passwords nor encryption. With credentials it listens on the loopback
alone, and a tunnel leads there; without them, on the one address that devices were given.
"""

from __future__ import annotations

import ipaddress
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore

from terrazzo.runtime.credentials import Credentials
from terrazzo.runtime.tunnel import LOOPBACK, Address, Door, Gate, listen

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

RETRY_S = 0.1


def meet(
    address: Address,
    *,
    device: int,
    devices: int,
    limit: timedelta,
    credentials: Credentials | None,
) -> Store:
    """Joins the store at that address; device 0 hosts it."""
    if credentials is None:
        return _join(address, devices, limit) if device else _host(address, devices, limit)
    if device == 0:
        store = _host((LOOPBACK, 0), devices, limit)
        Gate(address, (LOOPBACK, store.port), credentials)
        return store
    return _join((LOOPBACK, _door(address, limit, credentials).port), devices, limit)


def _join(address: Address, devices: int, limit: timedelta) -> TCPStore:
    return TCPStore(
        *address, devices, is_master=False, timeout=limit,
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


def _host(address: Address, devices: int, limit: timedelta) -> TCPStore:
    """On the address itself where it is one; a name may mean something else on its own machine."""
    host, port = address
    number = listen(address).detach() if _is_address(host) else None
    return TCPStore(
        host, port, devices, is_master=True, timeout=limit, master_listen_fd=number,
        wait_for_workers=False,  # it could not say who is missing
        multi_tenant=number is None,
    )  # fmt: skip


def _door(address: Address, limit: timedelta, credentials: Credentials) -> Door:
    """Once the gate is there: device 0 may take longer to start."""
    end_s = time.monotonic() + limit.total_seconds()
    while True:
        try:
            return Door(address, credentials)
        except PermissionError:
            raise
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(RETRY_S)


def _is_address(host: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(host), ipaddress.IPv4Address)
    except ValueError:
        return False
