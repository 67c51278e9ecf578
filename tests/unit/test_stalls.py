"""Stalls: attributed to the stage that caused them, and predictions that come true."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from terrazzo.errors import RunError
from terrazzo.feed.advice import LINK, MEDIA, MEMORY, NONE, Facts, advise
from terrazzo.feed.cores import allowed_cores
from terrazzo.feed.diagnosis import Seen, diagnose, unsettled
from terrazzo.feed.pipeline import CPU, LOOP, STORAGE, Pipeline, fewest_workers, slowdown
from terrazzo.feed.stalls import Stalls, fed_steps, stalls_of
from terrazzo.records.event import Event
from terrazzo.records.stage import COPY, DELIVER, IN_LOOP, PHASE
from terrazzo.records.storage import Reads, Storage
from terrazzo.records.trial import COLD, FILE, MODES, SYNTHETIC, USUAL, WARM, Trial, TrialFacts

sys.path.insert(0, str(Path(__file__).parent))
from rehearsed import World, run

MS = 1e-3
TRUE_WITHIN = 0.15
STEPS = 160


def seen(world: World, *, steps: int = STEPS) -> Stalls:
    """An average step in the second half, when queues have filled or run dry."""
    found = stalls_of(fed_steps(run(world, steps)), skip=steps // 2)
    assert found is not None
    return found


def pipeline(world: World) -> Pipeline:
    shared = tuple((readers, world.reading(readers)) for readers in (1, 2, 4, 8))
    return Pipeline(
        loop_s=world.loop_s,
        loop_cpu_s=world.loop_s * world.threads,
        fetch_s=world.fetch_s,
        prepare_s=world.prepare_s + world.collate_s,
        workers=world.workers,
        cores=world.cores,
        sharing=shared,
    )


class TestAttribution:
    """An injected cost is found where it was put, and all of a step is accounted for."""

    BASE = World(loop_s=40 * MS, threads=1, fetch_s=5 * MS, prepare_s=5 * MS, collate_s=1 * MS)

    @pytest.mark.parametrize("workers", [0, 1, 2, 4])
    @pytest.mark.parametrize("stage", ["fetch_s", "prepare_s", "loop_s"])
    def test_a_cost_in_one_stage(self, stage: str, workers: int) -> None:
        world = replace(self.BASE, workers=workers, **{stage: 300 * MS})
        found = seen(world)
        assert sum(seconds for _, seconds in found.parts) == pytest.approx(found.step_s)
        parts = {
            "fetch_s": found.wait_fetch_s, "prepare_s": found.wait_prepare_s,
            "loop_s": found.compute_s,
        }  # fmt: skip
        cause_s = found.step_s - (0 if stage == "loop_s" else found.compute_s)
        assert parts[stage] == pytest.approx(cause_s, rel=0.1)
        costs = {"fetch_s": found.fetch_s, "prepare_s": found.prepare_s, "loop_s": found.compute_s}
        assert costs[stage] == pytest.approx(300 * MS, rel=0.01)

    def test_copying_and_sending_are_the_loops_own(self) -> None:
        events = run(self.BASE, 4)
        told = (("epoch", 0.0), ("batch", 1.0))
        wait = next(e for e in events if e.name == "wait" and dict(e.values)["batch"] == 1)
        at = wait.end_s
        events += [
            Event(0, 1, PHASE, IN_LOOP, COPY, at, at + 2 * MS, 10, told),
            Event(0, 1, PHASE, IN_LOOP, DELIVER, at + 2 * MS, at + 9 * MS, 10, told),
        ]
        found = stalls_of(fed_steps(events)[1:2], skip=0)
        assert found is not None
        assert (found.copy_s, found.deliver_s) == pytest.approx((2 * MS, 7 * MS))
        assert found.compute_s == pytest.approx(31 * MS)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_epochs_of_one_number_are_told_apart_by_time(self, workers: int) -> None:
        """As of a script that makes a loader for each epoch."""
        world = replace(self.BASE, workers=workers, fetch_s=100 * MS)
        once = run(world, 8)
        after_s = max(event.end_s for event in once) + 10 * MS
        again = [
            replace(event, begin_s=event.begin_s + after_s, end_s=event.end_s + after_s)
            for event in once
        ]
        steps = fed_steps(once + again)
        assert len(steps) == 2 * len(fed_steps(once))
        found, alone = stalls_of(steps, skip=0), stalls_of(fed_steps(once), skip=0)
        assert found is not None
        assert alone is not None
        assert dict(found.parts) == pytest.approx(dict(alone.parts))

    def test_sending_counts_in_its_own_step_whatever_its_epoch(self) -> None:
        events = [
            replace(event, values=tuple({**dict(event.values), "epoch": 3.0}.items()))
            for event in run(self.BASE, 4)
        ]
        at = next(e for e in events if e.name == "wait" and dict(e.values)["batch"] == 1).end_s
        told = (("epoch", 0.0), ("batch", 1.0))
        events.append(Event(0, 1, PHASE, IN_LOOP, DELIVER, at, at + 7 * MS, 10, told))
        found = stalls_of(fed_steps(events)[1:2], skip=0)
        assert found is not None
        assert found.deliver_s == pytest.approx(7 * MS)

    def test_nothing_recorded_is_nothing_known(self) -> None:
        assert stalls_of(fed_steps([])) is None

    def test_workers_and_bytes_are_counted(self) -> None:
        found = seen(replace(self.BASE, workers=3, fetch_s=200 * MS))
        assert (found.workers, found.samples, found.read_bytes) == (3, 4, 40_000)


def alone(readers: int) -> float:
    return 1.0


def shared(readers: int) -> float:
    """One medium for all: who reads with another gets half."""
    return float(readers)


def two_at_once(readers: int) -> float:
    return max(1.0, readers / 2)


def worlds(count: int) -> list[World]:
    """Of all kinds: fast and slow stages, few and many cores, media that are shared or not."""
    draw = random.Random(7)
    found = []
    for _ in range(count):
        loop_s, fetch_s, prepare_s = (draw.uniform(2.0, 200.0) * MS for _ in range(3))
        cores, reading = draw.choice([1, 2, 4]), draw.choice([alone, shared, two_at_once])
        threads = min(draw.choice([1, 2, 4]), cores)
        workers = draw.choice([0, 1, 2, 4])
        world = World(loop_s, threads, fetch_s, prepare_s, cores=cores, workers=workers, varies=0.2)
        found.append(replace(world, reading=reading))
    return found


class TestPredictions:
    """What was predicted beside what then happened, in virtual time."""

    @pytest.mark.parametrize("workers", [0, 1, 2, 3, 4, 6, 8])
    def test_other_workers(self, workers: int) -> None:
        for world in worlds(8):
            predicted = pipeline(world).with_workers(workers).step_s
            happened = seen(replace(world, workers=workers)).step_s
            assert predicted == pytest.approx(happened, rel=TRUE_WITHIN), world

    @pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
    def test_a_cache(self, share: float) -> None:
        for world in worlds(8):
            predicted = pipeline(world).with_cache(share).step_s
            happened = seen(replace(world, fetch_s=max(world.fetch_s * (1 - share), 1e-9))).step_s
            assert predicted == pytest.approx(happened, rel=TRUE_WITHIN), world

    @pytest.mark.parametrize("times", [0.1, 0.5, 2.0, 10.0])
    def test_other_storage(self, times: float) -> None:
        for world in worlds(8):
            predicted = pipeline(world).with_storage(times).step_s
            happened = seen(replace(world, fetch_s=world.fetch_s * times)).step_s
            assert predicted == pytest.approx(happened, rel=TRUE_WITHIN), world

    @pytest.mark.parametrize(("fetch", "prepare"), [(0.5, 0.5), (0.25, 0.6)])
    def test_smaller_pictures(self, fetch: float, prepare: float) -> None:
        for world in worlds(8):
            predicted = pipeline(world).with_pictures(fetch, prepare).step_s
            after = replace(
                world, fetch_s=world.fetch_s * fetch, prepare_s=world.prepare_s * prepare
            )
            assert predicted == pytest.approx(seen(after).step_s, rel=TRUE_WITHIN), world

    def test_decoded_samples_need_no_preparing(self) -> None:
        before = Pipeline(10.0, 10.0, 20.0, 30.0, 0, 2)
        assert before.with_cache(0.5).step_s == 10 + 10 + 30
        assert before.with_cache(0.5, decoded=True).step_s == 10 + 10 + 15
        assert before.with_cache(2.0, decoded=True).step_s == 10

    def test_part_of_a_core_is_a_slow_core(self) -> None:
        """A loop that computes all the time leaves nothing to a worker, but its waiting."""
        quarter = Pipeline(1.0, 0.25, 0.5, 1.0, 0, 0.25)
        one = replace(quarter, loop_cpu_s=1.0, cores=1.0)
        assert quarter.step_s == one.step_s == 2.5
        assert quarter.with_workers(2).step_s == one.with_workers(2).step_s
        assert quarter.with_workers(2).step_s == pytest.approx(2.0, rel=0.05)

    def test_no_step_is_shorter_than_its_bytes_take(self) -> None:
        found = Pipeline(1.0, 1.0, 1.5, 0.1, 4, 4, floor_s=3.0)
        assert found.step_s == 3.0
        assert found.limit == STORAGE
        assert found.with_workers(8).step_s == 3.0
        assert found.with_cache(0.5).step_s == 1.5
        assert found.with_storage(0.1).step_s == pytest.approx(1.0, rel=0.02)
        assert found.with_pictures(0.5, 1.0).step_s == 1.5

    def test_readers_between_those_that_were_tried(self) -> None:
        rows = ((1, 1.0), (4, 2.5), (8, 8.5))
        assert [slowdown(rows, n) for n in (1, 2, 4, 6, 8, 16)] == [1, 1.5, 2.5, 5.5, 8.5, 17]

    def test_no_more_workers_than_help(self) -> None:
        """Fetching overlaps for free; preparing has one core beside the loop's."""
        found = Pipeline(100.0, 100.0, 700.0, 100.0, 0, 2)
        assert 8 <= fewest_workers(found, most=16) <= 12, "8 just keep up, if all goes well"
        assert fewest_workers(replace(found, fetch_s=0.0, prepare_s=80.0), most=16) == 1
        assert fewest_workers(replace(found, fetch_s=0.0, prepare_s=0.0), most=16) == 0


FACTS = Facts(
    samples=1000, batch=4, stored_bytes=100_000, decoded_bytes=500_000, free_bytes=1 << 30
)


def average(**costs: float) -> Stalls:
    parts = dict.fromkeys(
        ("compute_s", "wait_fetch_s", "wait_prepare_s", "copy_s", "deliver_s"), 0.0
    )
    parts |= costs
    return Stalls(
        steps=9, step_s=sum(parts.values()), fetch_s=0, prepare_s=0, collate_s=0, samples=4,
        read_bytes=0, held=0, peer=0, workers=0, device=0, **parts,
    )  # fmt: skip


class TestAdvice:
    @pytest.mark.parametrize(
        ("pipe", "step", "limit"),
        [
            (Pipeline(1, 1, 0.001, 0.001, 1, 2), {"compute_s": 1.0}, NONE),
            (Pipeline(1, 1, 3, 1, 0, 2), {"compute_s": 1, "wait_fetch_s": 3}, STORAGE),
            (Pipeline(1, 1, 1, 3, 0, 2), {"compute_s": 1, "wait_prepare_s": 3}, CPU),
            (Pipeline(1, 1, 9, 1, 2, 4), {"compute_s": 1, "wait_fetch_s": 4}, STORAGE),
            (Pipeline(1, 2, 0, 1, 4, 2), {"compute_s": 1, "wait_prepare_s": 0.5}, CPU),
            (Pipeline(1, 1, 0, 0, 1, 2), {"compute_s": 1, "deliver_s": 1}, LINK),
            (Pipeline(1, 1, 0, 0, 1, 2), {"compute_s": 1, "copy_s": 1}, MEMORY),
        ],
    )
    def test_the_limit(self, pipe: Pipeline, step: dict[str, float], limit: str) -> None:
        assert advise(pipe, average(**step), FACTS).limit == limit

    def test_workers_hide_a_slow_card(self) -> None:
        found = advise(Pipeline(1, 1, 3, 0.1, 0, 4), average(compute_s=1, wait_fetch_s=3), FACTS)
        assert found.settings[0].startswith("workers=")
        gains = {gain.change: gain.step_s for gain in found.gains}
        assert gains["4 workers"] == pytest.approx(1, rel=0.02)
        assert gains["2 workers"] == pytest.approx(1.55, rel=0.02)
        assert gains["storage 10 times as fast"] == pytest.approx(1 + 0.3 + 0.1)
        assert gains["64.0 MiB of cache, 67% of the data set"] == pytest.approx(
            1 + 3 * (1 - (64 << 20) / 1e8) + 0.1
        )

    def test_no_workers_where_they_would_change_numbers(self) -> None:
        pipe, seen = Pipeline(1, 1, 0.1, 3, 0, 4), average(compute_s=1, wait_prepare_s=3)
        found = advise(pipe, seen, replace(FACTS, most_workers=0, stays="samples draw"))
        assert not any("workers=" in setting for setting in found.settings)
        assert not any(gain.change.endswith(("worker", "workers")) for gain in found.gains)
        assert {workers for _, workers, _ in found.media} == {0}
        assert "samples draw" in found.settings[0]

    def test_a_medium_that_is_shared_wants_memory(self) -> None:
        shared = ((1, 1.0), (8, 8.0))
        pipe = Pipeline(1, 1, 3, 0.1, 2, 4, shared)
        found = advise(pipe, average(compute_s=1, wait_fetch_s=2), FACTS)
        assert found.limit == STORAGE
        told = 'cache="96MiB": 100% of the data set'  # 95.4, and what holding takes besides
        assert any(setting.startswith(told) for setting in found.settings)
        assert not any("workers" in setting for setting in found.settings)
        assert "the system may hold it too" in str(found.settings)
        less = replace(FACTS, free_bytes=int(1.9e8))
        tight = advise(pipe, average(compute_s=1, wait_fetch_s=2), less)
        assert "the system may" not in str(tight.settings)
        few = advise(pipe, average(compute_s=1, wait_fetch_s=2), replace(FACTS, samples=4))
        assert any(setting.startswith('cache="1MiB"') for setting in few.settings)

    def test_what_reads_no_files_is_not_packed(self) -> None:
        pipe, seen = Pipeline(1, 1, 3, 0.1, 0, 4), average(compute_s=1, wait_fetch_s=3)
        rows = (Reads(1000, 1, 0.001, 9), Reads(1_000_000, 1, 0.1, 9))
        medium = Storage("/x", "a card", "direct", 2e7, rows, Reads(1000, 1, 0.01, 9), 0, 0.0, 0.0)
        for stored, count in ((100_000, 1), (0, 0)):
            found = advise(pipe, seen, replace(FACTS, stored_bytes=stored), storage=medium)
            assert sum("packed" in gain.change for gain in found.gains) == count

    def test_a_cheap_card_may_do(self) -> None:
        found = advise(Pipeline(1, 1, 0.1, 0.1, 0, 4), average(compute_s=1), FACTS)
        assert [name for name, _, _ in found.media] == [medium.name for medium in MEDIA]
        assert all(step_s <= 1.05 for _, _, step_s in found.media)

    def test_other_media_share_what_they_have(self) -> None:
        card = MEDIA[0]
        shares = dict(card.sharing(1e6))
        assert shares[1] == 1
        assert shares[8] == pytest.approx(8, rel=0.05), "large reads: bytes are the limit"
        assert dict(card.sharing(1.0))[2] == pytest.approx(1), "small ones: requests overlap"


class TestDiagnosis:
    WORLD = World(loop_s=20 * MS, threads=1, fetch_s=60 * MS, prepare_s=30 * MS, workers=2)

    def trials(self, folder: Path) -> dict[str, Seen]:
        inline = replace(self.WORLD, workers=0)
        worlds = {
            SYNTHETIC: replace(inline, fetch_s=1e-6, prepare_s=1e-6),
            WARM: replace(inline, fetch_s=1 * MS),
            COLD: inline,
            USUAL: self.WORLD,
        }
        found = {}
        for mode in MODES:
            (folder / mode).mkdir()
            lines = [event.to_line() for event in run(worlds[mode], STEPS)]
            (folder / mode / "events-0.jsonl").write_text("\n".join(lines))
            facts = TrialFacts(
                mode, STEPS, 20 * MS, 4.0, 1000, 4, 4_000_000, 1 << 30, "/data", 8, ""
            )
            (folder / mode / FILE).write_text(facts.to_json())
            found[mode] = Seen.read(folder / mode)
        return found

    def test_both_ways_agree(self, tmp_path: Path) -> None:
        found = diagnose(self.trials(tmp_path))
        assert found.fetch_stall_s == pytest.approx(59 * MS, rel=0.01)
        assert found.prepare_stall_s == pytest.approx(31 * MS, rel=0.01)
        assert found.pipeline.loop_s == pytest.approx(20 * MS, rel=0.01)
        assert found.pipeline.fetch_s == pytest.approx(60 * MS)
        assert found.pipeline.workers == 2
        assert found.predicted_s == pytest.approx(found.usual.step_s, rel=TRUE_WITHIN)
        assert found.advice.limit == STORAGE
        assert found.facts.stored_bytes == 10_000
        assert found.facts.decoded_bytes == 1_000_000
        assert not found.doubt
        found.save(tmp_path / "stalls.json")

    def test_trials_that_do_not_agree_are_not_trusted(self, tmp_path: Path) -> None:
        found = diagnose(self.trials(tmp_path))
        slow = replace(found.usual, step_s=2 * found.usual.step_s)
        assert "by the trials alone" in replace(found, usual=slow).doubt
        assert "longer with files in memory" in replace(found, warm_s=2 * found.cold_s).doubt

    @pytest.mark.parametrize(
        ("alone", "apart", "skips"),
        [(0, 20, 10), (20, 0, 10), (4, 16, 10), (14, 6, 17), (18, 2, 10)],
        ids=["workers", "none", "from early on", "from late on", "from the very end on"],
    )
    def test_steps_before_there_were_workers_do_not_count(
        self, alone: int, apart: int, skips: int
    ) -> None:
        """A short trial may have its first worker in the second half."""
        inline = fed_steps(run(World(20 * MS, 1, 60 * MS, 30 * MS), 24))
        by_worker = fed_steps(run(World(20 * MS, 1, 60 * MS, 30 * MS, workers=1), 24))
        assert unsettled([*inline[:alone], *by_worker[:apart]]) == skips

    def test_a_script_without_a_feed_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=r"was not fed by tz.feed, or by less than two"):
            Seen.read(tmp_path)

    def test_a_trial_in_the_environment(self) -> None:
        trial = Trial(COLD, 7)
        assert Trial.from_text(trial.to_text()) == trial


def test_a_quota_is_fewer_cores(tmp_path: Path) -> None:
    assert 0 < allowed_cores() <= 4096
    (tmp_path / "cpu.max").write_text("15000 100000\n")
    text = Path("/proc/self/cgroup").read_text()
    if any(line.startswith("0::") for line in text.splitlines()):
        assert allowed_cores(tmp_path) == 0.15


def test_the_loop_alone_is_a_limit_too() -> None:
    assert Pipeline(1, 1, 0.1, 0.1, 2, 4).limit == LOOP
    assert Pipeline(1, 1, 0.001, 0.001, 0, 4).limit == LOOP
