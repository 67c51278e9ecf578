"""Samples that fill a device make room for a step in the middle of it: nobody is killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terrazzo.cluster import launch
from terrazzo.lab import LabHosts, Topology
from terrazzo.lab.preset import LinkSpeed, Preset

MIB = 1 << 20
JOB = Path(__file__).parent / "greedy.py"
DEVICE = Preset(
    name="tight", flops_per_s=1e12, threads=1, memory_bytes=680 * MIB, wire=LinkSpeed(94e6),
    wifi=None,
)  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[LabHosts]:
    with LabHosts.open(Topology.parse("1xtight", {"tight": DEVICE})) as found:
        yield found


def test_a_step_that_needs_much_more_than_all_before_is_made_room_for(hosts: LabHosts) -> None:
    lines: list[str] = []
    environment = {"TERRAZZO_MEASURE": "off"}
    command = [sys.executable, str(JOB), "250"]
    result = launch(command, hosts, env=environment, output=lambda _, line: lines.append(line))
    assert result.failure is None, lines
    assert hosts.usage(0).killed == 0
    told = {line.split()[0]: line.split()[1:] for line in lines if line[:1] in "hr"}
    before, after = map(int, told["held"])
    assert before > 200, "or there was no need for anything"
    assert after < before - 50
    assert told["right"] == ["120"], "every batch of four epochs"
