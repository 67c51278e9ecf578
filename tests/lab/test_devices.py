"""Devices of a lab: hosts of their own, with limits that hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import described

from terrazzo.cluster import LaunchResult, launch
from terrazzo.errors import LabError
from terrazzo.lab import LabHosts, Topology, load_presets, state, vectors
from terrazzo.lab.hosts import disk_of
from terrazzo.lab.network import CABLE, burst_bytes
from terrazzo.lab.probes import Probes
from terrazzo.lab.start import started
from terrazzo.lab.verify import _wires, flows
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs
from terrazzo.records import Group, Layout, Plan
from terrazzo.records.modes import Mode
from terrazzo.records.seat import Seat
from terrazzo.runtime.links import Links
from terrazzo.seating import PLAN, take_seat

pytestmark = pytest.mark.timeout(120)


def gather(hosts: LabHosts, code: str) -> tuple[LaunchResult, dict[int, list[str]]]:
    lines: dict[int, list[str]] = {device: [] for device in range(len(hosts.names))}
    command = [sys.executable, "-S", "-c", code]
    result = launch(command, hosts, output=lambda device, line: lines[device].append(line))
    return result, lines


class TestHosts:
    def test_each_has_its_name_and_address_and_sees_no_other_network(self, hosts: LabHosts) -> None:
        code = (
            "import os, socket; print(socket.gethostname(), socket.gethostbyname(os.uname()[1]),"
            "*sorted(name for _, name in socket.if_nameindex()))"
        )
        result, lines = gather(hosts, code)
        assert result.ok
        assert lines == {
            device: [f"small-{device} 10.77.0.{device + 1} eth0 lo"] for device in range(3)
        }

    def test_they_have_torchruns_variables_of_separate_hosts(self, hosts: LabHosts) -> None:
        keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
        _, lines = gather(hosts, f"import os; print(*[os.environ[k] for k in {keys}])")
        assert lines[2] == ["2 0 3 10.77.0.1 eth0"]

    def test_torch_distributed_works_between_them(self, tmp_path: Path) -> None:
        code = (
            "import torch, torch.distributed as dist; dist.init_process_group('gloo')\n"
            "x = torch.ones(2); dist.all_reduce(x); print(x.tolist())\n"
            "dist.destroy_process_group()"
        )
        found: list[str] = []
        with LabHosts.open(described("2xroomy", tmp_path)) as hosts:  # at full speed
            command = [sys.executable, "-c", code]
            result = launch(command, hosts, output=lambda _, line: found.append(line))
            sent = [hosts.traffic(device).sent_bytes for device in range(2)]
            self.each_is_in_its_mode(hosts)
        assert result.ok, found
        assert found == ["[2.0, 2.0]"] * 2
        assert all(count > 1000 for count in sent)

    def each_is_in_its_mode(self, hosts: LabHosts) -> None:
        """By the knobs of boards of files, a board for each device."""
        modes = [Mode.of({"cores": 2, "cpu_hz": 1.5e9}), Mode.of({"cores": 3, "cpu_hz": 1.8e9})]
        seats = tuple(Seat(name, mode) for name, mode in zip(hosts.names, modes, strict=True))
        given = {PLAN: Plan("", 2, (Group("", Layout()),), seats).to_json()}
        panels = [Panel.find(Sysfs(hosts.trees.root(device))) for device in range(2)]
        before, links = [panel.state() for panel in panels], [Links(), Links()]
        for device, one in enumerate(links):
            take_seat(one, hosts.environment(device, port=1, base=given), device)
        assert [panel.read() for panel in panels] == modes
        assert [one.gears.close() for one in links] == ["", ""]
        assert [panel.state() for panel in panels] == before

    def test_devices_without_a_board_have_no_knobs(self, hosts: LabHosts) -> None:
        """Least of all those of this machine, as root as they are."""
        found = hosts.environment(0, port=1, base={})["TERRAZZO_KNOBS"]
        assert Path(found).is_dir() and Panel.find(Sysfs(Path(found))).parts == ()

    def test_they_send_as_boards_do_whatever_the_rule_here_is(self, hosts: LabHosts) -> None:
        code = (
            "import socket; one = socket.socket(); one.setblocking(False)\n"
            "one.connect_ex(('10.77.0.254', 9))\n"
            "rule = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)\n"
            "print(rule.rstrip(bytes(1)).decode())"
        )
        _, lines = gather(hosts, code)
        assert lines == {device: ["cubic"] for device in range(3)}

    def test_their_libraries_are_as_narrow_as_the_board(self) -> None:
        with LabHosts.open(Topology.parse("1xpi3", load_presets())) as hosts:
            told = hosts.environment(0, port=1, base={})
            asked = hosts.environment(0, port=1, base={"ATEN_CPU_CAPABILITY": "default"})
        assert told.items() >= vectors.environment(128).items()
        assert asked["ATEN_CPU_CAPABILITY"] == "default"  # who says so knows better

    def test_files_are_copied_where_all_find_them(self, hosts: LabHosts, tmp_path: Path) -> None:
        source = tmp_path / "model.bin"
        source.write_bytes(b"weights")
        hosts.copy(source, device=1, destination=tmp_path / "there" / "model.bin")
        assert (tmp_path / "there" / "model.bin").read_bytes() == b"weights"


class TestLimits:
    def test_who_asks_for_too_much_memory_is_killed_alone(self, hosts: LabHosts) -> None:
        code = (
            "import os, sys; held = b'x' * (60 << 20); print('fits', flush=True)\n"
            "if os.environ['RANK'] == '1': more = b'x' * (80 << 20)"
        )
        before = hosts.usage(1).killed
        result, lines = gather(hosts, code)
        assert result.statuses == (0, -9, 0)
        assert lines == {device: ["fits"] for device in range(3)}
        usage = hosts.usage(1)
        assert usage.killed == before + 1
        assert usage.limit_bytes == 96 << 20
        assert usage.peak_bytes > 90 << 20

    def test_peaks_are_forgotten_on_request(self, hosts: LabHosts) -> None:
        hosts.reset_peak(0)
        gather(hosts, "held = b'x' * (50 << 20)")
        assert hosts.usage(0).peak_bytes > 50 << 20
        hosts.reset_peak(0)
        assert hosts.usage(0).peak_bytes < 50 << 20

    def test_nobody_gets_more_than_the_share(self, hosts: LabHosts) -> None:
        # Processor time over wall time; on a busy machine it can only be less.
        code = (
            "import time; begin, used = time.perf_counter(), time.process_time()\n"
            "while time.perf_counter() - begin < 1.5: pass\n"
            "print((time.process_time() - used) / (time.perf_counter() - begin))"
        )
        _, lines = gather(hosts, code)
        shares = [float(lines[device][0]) for device in range(3)]
        assert all(0 < share < 0.25 for share in shares), shares

    def test_links_are_shaped_and_counted(self, hosts: LabHosts) -> None:
        with Probes.start(hosts, compute=False) as probes:
            columns: list[list] = [[], [], []]
            (counters,) = _wires(hosts, probes, columns, seconds=0.7, tolerance=0.1)
        assert counters.ok, str(counters)
        for up, down in columns:  # a busy machine can only be slower
            assert 0 < up.seen < 1.15 * 40e6, str(up)
            assert 0 < down.seen < 1.15 * 40e6, str(down)

    def test_storage_is_slowed_or_it_is_said_that_it_is_not(
        self, hosts: LabHosts, tmp_path: Path
    ) -> None:
        says = hosts.slow_storage(tmp_path)
        disk = disk_of(tmp_path)
        assert says.startswith("storage is slowed" if disk else "storage is not slowed")


class TestAir:
    def test_all_share_one_channel(self, tmp_path: Path) -> None:
        topology = described("4xsmall:wifi", tmp_path)
        assert topology.air_bits_per_s == 20e6
        with LabHosts.open(topology) as hosts, Probes.start(hosts, compute=False) as probes:
            pairs = [
                (probes.inside[source], probes.inside[target], hosts.address(target))
                for source, target in ((0, 1), (2, 3))
            ]
            found = flows(pairs, 0.8)
        rates = [flow.bits_per_s for flow in found]
        assert all(rate > 0 for rate in rates)
        assert sum(rates) < 1.15 * 20e6  # apart, each would have had all of it


class TestStarting:
    @pytest.mark.slow
    def test_calibrated_devices_say_what_they_are_not(self, tmp_path: Path) -> None:
        said: list[str] = []
        topology = described("2xroomy", tmp_path)
        with started(topology, say=said.append, check=False) as hosts:
            assert len(hosts.shares) == 2
            assert all(0 < share < 1 for share in hosts.shares)
            result, _ = gather(hosts, "pass")
        assert result.ok
        assert said[0].startswith("lab 2xroomy: 4 GFLOP/s")
        assert "not emulated: memory bandwidth" in said[1]

    @pytest.mark.slow
    def test_outside_the_tolerance_nothing_starts(self, tmp_path: Path) -> None:
        said: list[str] = []
        with (
            pytest.raises(
                LabError, match=r"outside its tolerance of 0%: .* asked for.*--no-verify"
            ),
            started(described("1xroomy", tmp_path), say=said.append, tolerance=1e-9),
        ):
            pytest.fail("a lab started that nothing on earth could be")
        assert [line.rpartition("; ")[2] for line in said] == [
            "calibrating again, 2 more to go",
            "calibrating again, 1 more to go",
        ]

    def test_more_than_this_machine_has_is_refused(self, tmp_path: Path) -> None:
        with LabHosts.open(described("2xsmall", tmp_path)) as hosts:
            with pytest.raises(LabError, match=r"2xsmall needs 200000\.00 cores.*missing"):
                hosts.throttle([1e5, 1e5])
            assert hosts.shares == ()

    def test_two_labs_do_not_know_of_each_other(self, hosts: LabHosts, tmp_path: Path) -> None:
        with LabHosts.open(described("1xsmall", tmp_path)) as other:
            assert other.name != hosts.name
            result, lines = gather(other, "import socket; print(socket.gethostname())")
        assert (result.ok, lines) == (True, {0: ["small-0"]})
        assert gather(hosts, "pass")[0].ok
        assert not any(other.name in path for path in state.names())


class TestSpeeds:
    def test_a_part_of_the_share_and_all_of_it_again(self, hosts: LabHosts) -> None:
        before = hosts.shares
        with hosts.slowed(0.5):
            assert hosts.shares == tuple(share / 2 for share in before)
            assert _busy_share(hosts) < 0.15
        assert hosts.shares == before

    def test_links_are_lifted_and_shaped_again(self, hosts: LabHosts) -> None:
        with Probes.start(hosts, compute=False) as probes:
            pairs = [(probes.inside[0], probes.inside[1], hosts.address(1))]
            with hosts.full_speed(links=True):
                (fast,) = flows(pairs, 0.4)
            (slow,) = flows(pairs, 0.4)
        assert fast.bits_per_s > 2 * 40e6
        assert slow.bits_per_s < 1.15 * 40e6

    def test_a_lifted_link_keeps_its_bundles(self, hosts: LabHosts) -> None:
        """Connections made meanwhile would keep larger ones, which a slow link takes apart."""

        def bundle_bytes(ip: Any) -> int:
            link = ip.get_links(ip.link_lookup(ifname=CABLE)[0])[0]
            return int(link.get_attr("IFLA_GSO_MAX_SIZE"))

        own = hosts.network._at_device(0, bundle_bytes)
        assert own < burst_bytes(hosts.topology.devices[0].link.bits_per_s)
        with hosts.full_speed(links=True):
            assert hosts.network._at_device(0, bundle_bytes) == own

    def test_more_threads_than_cores_are_refused(self, hosts: LabHosts) -> None:
        with pytest.raises(LabError, match=r"4096 threads a device need 4096 cores.*has \d+"):
            hosts.use_threads(4096)
        assert hosts.given_threads == 0


def _busy_share(hosts: LabHosts) -> float:
    code = (
        "import time; begin, used = time.perf_counter(), time.process_time()\n"
        "while time.perf_counter() - begin < 1: pass\n"
        "print((time.process_time() - used) / (time.perf_counter() - begin))"
    )
    return max(float(line) for (line,) in gather(hosts, code)[1].values())
