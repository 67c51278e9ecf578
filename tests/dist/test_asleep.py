"""Connections that are hung up in the moment in which gloo begins to send: it would sleep on."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from expendable import fates

import terrazzo as tz
from terrazzo.runtime.links import connect
from terrazzo.runtime.recovery import together

pytestmark = pytest.mark.timeout(240)
TIMES = 80
"""Gloo sleeps on in about three of a hundred."""


def hung_up() -> dict[str, Any]:
    """Device 0 hangs up as it sends, and device 1 is not there yet to receive."""
    tz.init(recover=True)
    links, draw, took_s = connect(), random.Random(3), []

    def hang_up_soon() -> None:
        time.sleep(draw.uniform(0.0, 2e-3))
        links.hang_up()

    for number in range(TIMES):
        tries: list[int] = []

        def attempt(number: int = number, tries: list[int] = tries) -> float:
            tries.append(number)
            value = torch.full((30,), float(number))
            if len(tries) == 1 and links.device == 0:
                threading.Thread(target=hang_up_soon).start()
            links.broadcast(value)
            if len(tries) == 1 and links.device == 1:
                time.sleep(0.05)
            return float(links.broadcast(value)[0])

        begin_s = time.monotonic()
        assert together(links, attempt) == number
        took_s.append(time.monotonic() - begin_s)
    return {"longest_s": max(took_s), "regrouped": links.recovery.regrouped}


def test_nobody_sleeps_on_when_connections_are_hung_up() -> None:
    found = fates(3, hung_up, timeout_s=600)
    assert all(fate.what["longest_s"] < 60 for fate in found), found
    assert all(fate.what["regrouped"] >= TIMES / 2 for fate in found), "nothing was tried"
