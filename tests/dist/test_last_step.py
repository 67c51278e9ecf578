"""One falls silent in the very last step: who has all of it stays until the others have it too."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from expendable import die, fates
from plain import assert_close, cnn, train
from test_recovery import DATA, Found, X, expected, told

import terrazzo as tz
from terrazzo.members import health

pytestmark = pytest.mark.timeout(240)
STOPS, MISSES = 2, 1


def ended() -> Found:
    """The device that stops has sent its last row to device 0, and not to the other one."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    health.MOST_SILENT_S = 5.0  # now that all are at work
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    wire, counts = net.links._wire, [0]
    usual = wire.gather

    def gather(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        is_last = len(counts) == len(DATA) and counts[-1] == counts[-2]
        if is_last and net.links.device == STOPS:
            wire._ends[MISSES].send_row = lambda row: die(signal.SIGSTOP)
        return usual(*args, **kwargs)

    wire.gather = gather
    losses = train(net, optimizer, DATA, after=lambda step: counts.append(0))
    found = told(net, losses)
    net.links.close()
    return found


def test_the_last_result_is_not_lost() -> None:
    found = fates(3, ended, ignoring=[STOPS], timeout_s=60)
    for device in (0, MISSES):
        assert found[device].kind == "done", found
        state = {name: torch.as_tensor(t) for name, t in found[device].what["state"].items()}
        assert_close(state, expected())
    assert found[0].what["members"] == (0, 1, 2), "it had all it needed"
    assert found[MISSES].what["members"] == (0, 1)
