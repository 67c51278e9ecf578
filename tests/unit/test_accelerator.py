"""What a net lies on is part of its profile: named, kept apart, timed to the end, planned for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.graph.export import export
from terrazzo.measure import stopwatch
from terrazzo.measure.accelerator import CPU, can_measure, identity, lies_on, room_bytes, title
from terrazzo.measure.job import MeasureJob, parse_lie_on
from terrazzo.measure.key import ACCELERATORS, MODEL, difference, moved, profile_key
from terrazzo.measure.known import given_profile, kept_profile
from terrazzo.measure.stopwatch import Launches, Stopwatch, backward_thread, processor_clock
from terrazzo.measure.store import ProfileStore
from terrazzo.planner import Wishes
from terrazzo.planner.alike import levelled
from terrazzo.planner.wishes import rooms_bytes
from terrazzo.records import Graph
from terrazzo.records.machine import Machine
from terrazzo.records.profile import Profile
from terrazzo.runtime.links import Links
from terrazzo.schedule import Compute, lower

sys.path.insert(0, str(Path(__file__).parent))
from clusters import GFLOPS, device, profile

GPU, OTHER = "A GPU, CUDA 12.8, driver 570.1", "A GPU, CUDA 12.8, driver 575.2"
CUDA = torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(scope="module")
def graph() -> Graph:
    layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3))
    return export(layers, (torch.zeros(2, 3, 96, 96),)).graph


def on(*accelerators: str, graph: Graph | None = None, when: float = 1.0) -> Profile:
    """Devices whose nets lie on these; the faster ones on GPUs."""
    plain = profile([GFLOPS * (50 if name else 1) for name in accelerators], mbit_per_s=10000.0)
    devices = [
        replace(one, accelerator=name)
        for one, name in zip(plain.devices, accelerators, strict=True)
    ]
    key: dict[str, str] = {}
    if graph is not None:
        key = dict(profile_key(graph, place="here", threads=[1], accelerators=accelerators))
    return replace(plain, devices=tuple(devices), key=key, measured_s=when)


class TestLying:
    def test_a_model_lies_where_its_weights_do(self) -> None:
        model = nn.Conv2d(1, 1, 1)
        assert lies_on(model) == CPU
        assert can_measure(model, CPU)
        assert not can_measure(model, CUDA), "its weights are elsewhere"
        assert lies_on(nn.ReLU(), ({"x": torch.zeros(1, device="meta")},)).type == "meta"
        assert not can_measure(nn.ReLU(), torch.device("meta"))

    def test_a_cpu_is_no_accelerator(self) -> None:
        assert title(CPU) == identity(CPU) == ""
        assert room_bytes(Links(), CPU) == 0


class TestRecord:
    def test_it_is_written_and_read_back(self) -> None:
        mixed = on("", GPU)
        assert Profile.from_json(mixed.to_json()) == mixed
        assert [one.accelerator for one in mixed.devices] == ["", GPU]

    def test_a_job_says_where_nets_lie(self, graph: Graph, tmp_path: Path) -> None:
        job = MeasureJob(("a", "b"), (0, 0), 1.0, ("cpu", "cuda:1"))
        job.write(tmp_path, graph)
        assert MeasureJob.read(tmp_path)[0] == job

    def test_one_is_for_all_or_there_is_one_for_each(self) -> None:
        assert parse_lie_on("cuda", 3) == ("cuda",) * 3
        assert parse_lie_on("cpu, cuda:1", 2) == ("cpu", "cuda:1")
        with pytest.raises(UsageError, match="names 2, there are 3 devices"):
            parse_lie_on("cpu,cuda", 3)
        with pytest.raises(UsageError, match="say cpu, cuda, or a GPU by number"):
            parse_lie_on("cuda:x", 1)


class TestKept:
    def test_a_driver_that_changed_is_named(self, graph: Graph, tmp_path: Path) -> None:
        store = ProfileStore(tmp_path)
        store.keep(on("", GPU, graph=graph))
        found = store.find(on("", OTHER, graph=graph).key)
        assert found.profile is None
        assert found.reason == f"accelerators was its CPU; {GPU}, is its CPU; {OTHER}"

    def test_those_of_cpus_are_kept_beside(self, graph: Graph, tmp_path: Path) -> None:
        store, cpus, gpus = (
            ProfileStore(tmp_path),
            on("", "", graph=graph),
            on(GPU, GPU, graph=graph),
        )
        assert cpus.key[ACCELERATORS] == "none"
        assert difference(cpus.key, gpus.key)
        for one in (cpus, gpus):
            store.keep(one)
        assert store.find(cpus.key).profile == cpus
        assert store.find(gpus.key).profile == gpus

    def test_only_one_of_the_same_accelerators_is_taken(self, graph: Graph, tmp_path: Path) -> None:
        folder = tmp_path / "terrazzo" / "profiles"
        for when, names in enumerate((("", GPU), (GPU, ""), (GPU, GPU), ("", ""), ("", OTHER))):
            on(*names, graph=graph, when=float(when)).save(folder / f"{when}.json")

        def taken(*names: str) -> float | None:
            found = kept_profile(
                graph,
                2,
                environment={"XDG_CACHE_HOME": str(tmp_path)},
                fits=lambda one: not moved(one, dict(enumerate(names))),
            )
            return found and found.measured_s

        assert taken() == 4.0
        assert [taken("", GPU), taken(GPU, ""), taken("", "")] == [0.0, 1.0, 3.0]
        assert taken(OTHER, OTHER) is None

    def test_one_that_was_given_for_another_is_refused(self, graph: Graph) -> None:
        mixed = on("", GPU, graph=graph)
        assert given_profile(mixed, graph, {0: "", 1: GPU}) == mixed
        assert given_profile(mixed, graph, {0: ""}) == mixed, "of the other nothing is known"
        with pytest.raises(UsageError, match=rf"d1 was measured on {GPU}, its net lies on its CPU"):
            given_profile(mixed, graph, {0: "", 1: ""})
        guess = replace(mixed, key={})
        assert MODEL in mixed.key
        assert given_profile(guess, graph, {0: "", 1: ""}) == guess, "a guess is of nothing"

    def test_a_net_refuses_it_when_it_is_made(self) -> None:
        model, x = nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)
        known = replace(on(GPU, graph=export(model, (x,)).graph), network=None)
        key = {**known.key, "torch": Machine.here().torch}
        with pytest.raises(UsageError, match="was measured on A GPU"):
            tz.parallelize(model, (x,), profile=replace(known, key=key))


class TestPlans:
    def test_a_faster_gpu_beside_a_cpu_gets_more(self, graph: Graph) -> None:
        program = lower(graph, Wishes(profile=on("", GPU)).search(graph, 2).best.plan)
        work = [0, 0]
        for step in program.steps:
            for apply in step.applies if isinstance(step, Compute) else ():
                boxes = program.arrays[apply.outputs[0]].boxes
                assert boxes is not None, "it computes what the CPU does too"
                work = [done + box.size for done, box in zip(work, boxes, strict=True)]
        assert work[1] > 3 * work[0]

    def test_a_gpu_has_what_was_free_on_it(self) -> None:
        cpu, gpu = device("c", memory_bytes=4 * GIB), device("g", memory_bytes=4 * GIB)
        known = replace(on("", GPU), devices=(cpu, replace(gpu, accelerator=GPU)))
        rooms = rooms_bytes(known)
        assert rooms is not None
        assert rooms[0] < rooms[1] == 4 * GIB, "an idle process takes nothing of it"

    def test_a_gpu_and_a_cpu_of_one_machine_are_not_of_one_kind(self) -> None:
        nearly = profile([GFLOPS, 1.05 * GFLOPS])
        assert len({one.timings for one in levelled(nearly).devices}) == 1
        one, other = nearly.devices
        mixed = replace(nearly, devices=(one, replace(other, accelerator=GPU)))
        assert len({one.timings for one in levelled(mixed).devices}) == 2


class Ahead:
    """Something that is launched into: calls return at once, and who waits for their work spins."""

    def __init__(self, launch_s: float, work_s: float, first_s: float) -> None:
        self.launch_s, self.work_s, self.pending_s = launch_s, work_s, first_s

    def call(self) -> None:
        spin(self.launch_s)
        self.pending_s += self.work_s

    def settle(self, torch_device: torch.device) -> None:
        assert torch_device == CUDA
        spin(self.pending_s)
        self.pending_s = 0.0


class TestStopwatch:
    @pytest.fixture
    def ahead(self, monkeypatch: pytest.MonkeyPatch) -> Ahead:
        found = Ahead(1e-4, 1e-3, 0.1)
        monkeypatch.setattr(stopwatch, "settle", found.settle)
        monkeypatch.setattr(stopwatch, "backward_thread", lambda place: threading.get_ident())
        return found

    def test_work_that_is_only_launched_is_waited_for(self, ahead: Ahead) -> None:
        watch = Stopwatch(1, CUDA)
        assert 1e-3 <= watch.seconds(ahead.call) < 50e-3, "and what loads it does not count"
        assert not watch.by_cpu and watch.stretch == 1.0
        assert ahead.pending_s == 0.0

    def test_launches_alone_are_the_processors(self, ahead: Ahead) -> None:
        assert 1e-4 <= Launches(CUDA).seconds(ahead.call) < 5e-4

    def test_the_thread_of_gradients_counts_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ready, done = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: (spin(0.05), ready.set(), done.wait()))
        other.start()
        assert other.ident is not None
        monkeypatch.setattr(stopwatch, "backward_thread", lambda place: other.ident)
        clock = processor_clock(CUDA)
        ready.wait()
        assert clock() >= time.thread_time() + 0.04
        done.set()
        other.join()

    def test_on_a_cpu_gradients_are_made_by_who_asks(self) -> None:
        assert backward_thread(CPU) == threading.get_ident()
        assert processor_clock(CPU) is time.thread_time


def spin(seconds: float) -> None:
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < seconds:
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = "cluster profile no.such:net --input 1x3x8x8 --device"
    assert main([*words.split(), "cuda"]) == 2
    said = capsys.readouterr().err
    assert "--device cuda: " in said and "measure the CPU" in said
    assert main([*words.split(), "tpu"]) == 2
    assert "say cpu, cuda, or a GPU by number" in capsys.readouterr().err


def test_emulated_boards_have_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = "cluster profile no.such:net --input 1x3x8x8 --on 2xpi3 --device cuda"
    assert main(words.split()) == 2
    assert "emulated boards have no GPU" in capsys.readouterr().err


def test_a_gpu_in_a_profile_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("", GPU).save(tmp_path / "profile.json")
    assert main(["cluster", "profile", "--show", str(tmp_path / "profile.json")]) == 0
    shown: Callable[[str], bool] = " ".join(capsys.readouterr().out.split()).__contains__
    assert shown(f"Its net lies on {GPU}")
