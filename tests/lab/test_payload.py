"""What a real training says it has sent, against what crossed the cables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from emulated import described

from terrazzo.cluster import launch
from terrazzo.lab import LabHosts
from terrazzo.lab.verify import COUNTER_TOLERANCE

SCRIPT = Path(__file__).with_name("counted.py")
DEVICES = 2
"""Of two, each sends a summed tensor once: payload is then what the counters add up."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_interfaces_count_what_training_sends(tmp_path: Path) -> None:
    payload: dict[str, list[int]] = {"before": [], "after": []}
    crossed: dict[str, int] = {}
    with LabHosts.open(described(f"{DEVICES}xroomy", tmp_path)) as hosts:

        def line(device: int, text: str) -> None:
            name, _, count = text.partition(" ")
            phase = name.partition("-")[0]
            if phase not in payload:
                return
            payload[phase].append(int(count))
            if len(payload[phase]) == DEVICES:  # all stand still: nothing is on its way
                crossed[phase] = sum(hosts.traffic(d).sent_bytes for d in range(DEVICES))
                for other in range(DEVICES):
                    (tmp_path / f"{phase}-{other}").touch()

        result = launch([sys.executable, str(SCRIPT), str(tmp_path)], hosts, output=line)
    assert result.ok, result.failure
    counted = sum(payload["after"]) - sum(payload["before"])
    seen = crossed["after"] - crossed["before"]
    assert counted > 10 << 20, "too little to judge by"
    assert abs(seen / counted - 1) <= COUNTER_TOLERANCE, f"{seen} bytes crossed, {counted} counted"
