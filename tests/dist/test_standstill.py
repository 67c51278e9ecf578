"""All devices live and wait, because what one has sent never arrives: they connect anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expendable import fates
from plain import cnn, train
from test_recovery import DATA, Found, X, agreed, told

import terrazzo as tz
from terrazzo.members import health

pytestmark = pytest.mark.timeout(240)


class Hole:
    """A connection that takes everything and carries nothing."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, data: Any, *how: Any) -> int:
        return len(data)

    def sendmsg(self, parts: Any, *how: Any) -> int:
        return sum(map(len, parts))


def stalled() -> Found:
    """From the third step on nothing reaches device 0; ``timeout_s`` would be ten minutes."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def after(step: int) -> None:
        if step != 2:
            return
        health.LEAST_STUCK_S, health.STRETCHES, health.KNOWN_AFTER = 3.0, 1, 0
        if net.links.device == 1:
            end = net.links._wire._ends[0]
            end.socket = Hole(end.socket)

    losses = train(net, optimizer, DATA, after=after)
    return told(net, losses) | {"regrouped": net.links.recovery.regrouped}


def test_a_connection_that_carries_nothing_is_made_anew() -> None:
    found = fates(2, stalled, timeout_s=600)
    agreed(found, (0, 1))
    assert all(fate.what["regrouped"] for fate in found)
