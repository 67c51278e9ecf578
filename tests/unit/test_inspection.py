"""What devices say of themselves, and what is said about it: named, with a remedy, fatal or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from terrazzo.cluster.inspection import Facts, Finding, findings
from terrazzo.cluster.veil import free_network
from terrazzo.errors import HostError, UsageError
from terrazzo.records.cluster import Cluster, ClusterDevice

BODY: dict[str, Any] = {
    "time_s": 1000.0, "python": "3.11.2", "executable": "/usr/bin/python3", "system": "Linux",
    "bits": 64, "versions": {"torch": "2.9.1+cpu", "rich": "14.0"}, "cores": 4,
    "memory_bytes": 4 << 30, "available_bytes": 3 << 30,
    "disk": {"free_bytes": 20 << 30, "writable": True},
    "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.5", "wlan0": ""},
    "reached_at": "10.0.0.5", "workdir": "/home/pi/.terrazzo", "is_root": False,
    "programs": ["ip", "wg", "sudo"],
}  # fmt: skip
PI = ClusterDevice("pi1", "pi1.local")


def facts(**other: Any) -> Facts:
    return Facts.of({**BODY, **other}, asked_s=999.9, answered_s=1000.1)


def found(device: ClusterDevice = PI, *, encrypt: bool = False, **other: Any) -> list[Finding]:
    return findings(Cluster((device,), encrypt=encrypt), [facts(**other)])


def test_a_device_that_is_ready() -> None:
    assert found() == []
    assert found(encrypt=True) == []
    assert facts().address(PI) == "10.0.0.5"
    assert facts().interface(PI) == "eth0"


@pytest.mark.parametrize(
    ("other", "says", "fatal"),
    [
        ({"python": "3.9.2"}, "has Python 3.9.2, 3.10 is needed", True),
        ({"bits": 32}, "is a 32-bit system", True),
        ({"versions": {"torch": "", "rich": "14"}}, "lacks torch in the environment of", True),
        ({"versions": {"torch": "2.5.1", "rich": "14"}}, "has torch 2.5.1, 2.6 is needed", True),
        ({"disk": {"free_bytes": 1 << 20, "writable": True}}, "64.0 MiB are needed", True),
        ({"disk": {"free_bytes": 100 << 20, "writable": True}}, "1.0 GiB are better", False),
        ({"disk": {"free_bytes": 0, "writable": False}}, "may not write to ~/.terrazzo", True),
        ({"available_bytes": 100 << 20}, "has 100 MiB of memory free", False),
        ({"time_s": 1030.0}, "has a clock 30.0 s ahead of this one", False),
        ({"time_s": 940.0}, "has a clock 60.0 s behind this one", False),
        ({"reached_at": "192.168.7.7"}, "does not have the address 192.168.7.7", True),
        ({"reached_at": "", "interfaces": {"lo": "127.0.0.1"}}, "has no IPv4 address", True),
    ],
)
def test_one_thing_at_a_time(other: dict[str, Any], says: str, fatal: bool) -> None:
    (finding,) = found(**other)
    assert f"pi1 (pi1.local) {says}" in str(finding) or says in str(finding)
    assert finding.fatal == fatal
    assert finding.remedy


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (replace(PI, interface="eth7"), "has no interface eth7. Write one of those it has: lo"),
        (replace(PI, interface="wlan0"), "has no IPv4 address on wlan0"),
        (replace(PI, address="10.0.0.9"), "does not have the address 10.0.0.9"),
        (replace(PI, address="127.0.0.1", interface="eth0"), "has 127.0.0.1 on lo, not on eth0"),
        (replace(PI, memory_bytes=8 << 30), "has 4.0 GiB of memory, its limit says 8.0 GiB"),
    ],
)
def test_what_the_file_says_and_the_device_has_not(device: ClusterDevice, says: str) -> None:
    (finding,) = found(device)
    assert says in str(finding)
    assert finding.fatal


def test_unlike_versions_of_torch() -> None:
    cluster = Cluster((PI, ClusterDevice("pi2", "pi2")))
    other = facts(versions={"torch": "2.11.0", "rich": "14.0"})
    (finding,) = findings(cluster, [facts(), other])
    assert "pi2 has torch 2.11.0, pi1 (pi1.local) has 2.9.1+cpu" in str(finding)
    assert "pip install torch==2.9.1" in str(finding)
    same = facts(versions={"torch": "2.9.0", "rich": "14.0"})  # a fix within one version
    assert findings(cluster, [facts(), same]) == []


@pytest.mark.parametrize(
    ("programs", "says"),
    [(["ip", "sudo"], "lacks wg"), (["ip", "wg"], "has neither root nor sudo")],
)
def test_encryption_needs_tools_and_rights(programs: list[str], says: str) -> None:
    (finding,) = found(encrypt=True, programs=programs)
    assert says in str(finding)
    assert finding.fatal
    assert found(programs=programs) == []


def test_an_answer_that_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="answer of a device record is damaged"):
        facts(cores="many")


def test_the_hidden_network_avoids_those_in_use() -> None:
    first = free_network([facts()])
    taken = facts(interfaces={"eth0": str(first[7])})
    assert free_network([facts(), taken]) != first
    everything = {f"e{n}": f"10.{n}.77.1" for n in range(256)}
    with pytest.raises(HostError, match="no private network is free"):
        free_network([facts(interfaces=everything)])
