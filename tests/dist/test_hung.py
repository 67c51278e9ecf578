"""A device whose script hangs while it still beats is given up once, and no other with it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from expendable import fates, strike
from plain import cnn, train
from test_recovery import DATA, Found, X, agreed, told

import terrazzo as tz
from terrazzo.runtime.links import connect

pytestmark = pytest.mark.timeout(240)

LIMIT_S = 6.0


def hang() -> None:
    time.sleep(3600)


def hanging() -> Found:
    """Limits as ``tz.init(timeout_s=6)`` sets them, but not for the start; then device 2 hangs."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    links = net.links

    def after(step: int) -> None:
        if step == 1:
            links.control.limit_s = links.timeout_s = links._wire.timeout_s = LIMIT_S
            if links.device == 2:
                strike(links, "depart", hang, at=1)

    return told(net, train(net, optimizer, DATA, after=after))


def test_the_wait_for_one_that_hangs_is_not_begun_again() -> None:
    """Where a wait for it ends just before it is found out, the others connect anew with it."""
    found = fates(3, hanging, ignoring=[2])
    agreed(found[:2], (0, 1))
    for fate in found[:2]:
        assert "is stuck: it has not got on for 6 s" in fate.what["reasons"][2]


def adding_up_between() -> dict[str, bool]:
    """Device 0 waits for device 1, which comes when it was seen whether device 0 says so."""
    tz.init(recover=True)
    links, store = connect(), connect().store
    sums, found = [], {}
    ended = threading.Event()

    def work() -> None:
        sums.append(links.sum_later(torch.ones(4)))
        found["works"] = links.waits
        ended.set()

    def look() -> None:
        ended.wait(30)
        late_s = time.monotonic() + 5
        while not links.waits and time.monotonic() < late_s:
            time.sleep(0.01)
        found["waits"] = links.waits
        store.set("seen", "1")

    if links.device == 0:
        threading.Thread(target=look).start()
    else:
        store.get("seen")
    links.gather(torch.zeros(1), meanwhile=work)
    sums[0].wait()
    return found | {"after": links.waits}


def test_a_device_says_that_it_waits_after_work_in_between_too() -> None:
    """Else who waits for one that hangs, having sent something meanwhile, is given up with it."""
    found = fates(2, adding_up_between)
    assert found[0].what == {"works": False, "waits": True, "after": False}, found
