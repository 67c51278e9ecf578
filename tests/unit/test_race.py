"""Races: cases, the choice of the baseline, who counts as beaten, gaps, and what is printed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from terrazzo.bench import paper, peers
from terrazzo.bench.cases import STANDARD_MODELS, Case, parse_batches, shares, standard_cases
from terrazzo.bench.gradients import load, worst_gap
from terrazzo.bench.page import page
from terrazzo.bench.peers.peer import NEXT
from terrazzo.bench.peers.pipeline import balanced, costs
from terrazzo.bench.record import Provenance, Race, Row, to_json
from terrazzo.bench.table import table
from terrazzo.bench.turn import Job
from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.zoo import NAMES, build

CASE = Case.of("yolov2-front", on="6xpi3", batch=6)
MIB = 1 << 20
ORIGIN = Provenance("terrazzo bench race", "abc", {"processor": "X", "cores": 2, "torch": "2"})


def row(peer: str, *step_s: float, own: int = 100, gap: float | None = 1e-6, **more: object) -> Row:
    idle, peak = (200 * MIB,), ((200 + own) * MIB,)
    body = {"claims_exact": True, "step_s": step_s, "idle_bytes": idle, "peak_bytes": peak}
    return Row(peer, **{**body, "gap": gap, **more})  # type: ignore[arg-type]


def race(*rows: Row, devices: int = 6, strength: float = 6.0) -> Race:
    return Race(CASE, devices, strength, rows, emulated=True)


class TestCases:
    def test_a_model_has_its_usual_size(self) -> None:
        assert CASE.side == 416
        assert Case.of("resnet18", on="2", batch=1).side == 224
        assert Case.of("resnet18", on="2", batch=1, side=64).side == 64

    def test_standard_cases_name_models_there_are(self) -> None:
        cases = standard_cases()
        assert {case.model for case in cases} <= set(NAMES)
        assert {case.on for case in cases if case.model == "yolov2-front"} >= {"2xpi3", "4xpi4"}
        assert {case.on for case in cases if case.model == "unet32"} == {"6xpi3"}
        assert len(set(cases)) == len(cases)

    def test_threads_are_shared_by_processes(self) -> None:
        case = Case.of("vgg", on="2", batch=1, threads=4, processes=2)
        assert "2 processes of 2 threads a device" in case.title
        assert Case.of("vgg", on="2", batch=1, processes=2).threads == 2
        assert Case.from_dict(case.to_dict()) == case
        for wrong in ({"threads": 3, "processes": 2}, {"processes": 0}, {"threads": -1}):
            with pytest.raises(UsageError, match="--threads"):
                Case.of("vgg", on="2", batch=1, **wrong)

    def test_batches(self) -> None:
        assert parse_batches("1,6, 6") == [1, 6]
        for text in ("", "0", "1,x", "-1", "1;6"):
            with pytest.raises(UsageError, match="--batch"):
                parse_batches(text)

    def test_images_are_shared_out_once_each(self) -> None:
        assert shares(6, 4) == [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
        assert shares(1, 3) == [range(0, 1), range(1, 1), range(1, 1)]

    def test_a_job_survives_its_file(self, tmp_path: Path) -> None:
        job = Job(CASE, "ddp", 6, tmp_path, 2.0, 30.0, 60.0, choice=4, keep_gradients=True)
        assert Job.from_json(job.to_json()) == job


class TestTask:
    @pytest.mark.parametrize("model", ["vgg", "convnext"])
    def test_two_steps_give_the_same_gradients(self, model: str) -> None:
        case = Case.of(model, on="1", batch=2, side=32)
        work = peers.Work(case, device=0, devices=1)
        first, second = (peers.find("alone").build(work) for _ in range(2))
        first.step()
        torch.manual_seed(99)
        second.step()
        assert worst_gap(first.gradients(), second.gradients()) == 0
        assert all(g.norm() > 0 for g in first.gradients().values())


class TestPeers:
    def test_all_are_found_by_name(self) -> None:
        for name in (*peers.NAMES, "terrazzo tiles:2x1 4", *paper.PEERS):
            assert peers.find(name).name == name
        with pytest.raises(UsageError, match="no peer 'horovod'"):
            peers.find("horovod")
        with pytest.raises(UsageError, match="is not understood"):
            peers.find("terrazzo a b c")

    def test_the_files_of_plans_may_be_called_after_layouts(self) -> None:
        one, other = Path("tiles:2x2 each.json"), Path("samples:4.json")
        assert peers.find(f"plan {one}").plans == [one]  # type: ignore[attr-defined]
        both = peers.find(f"plan {one}{NEXT}{other}")
        assert both.plans == [one, other]  # type: ignore[attr-defined]

    def test_what_cannot_be_done_is_known_before(self) -> None:
        one = Case.of("yolov2-front", on="6xpi3", batch=1)
        for name in ("ddp", "fsdp2"):
            assert "1 of at least 6 images" in (peers.find(name).can(one, 6) or "")
            assert peers.find(name).can(CASE, 6) is None
        assert peers.find("accumulate").can(one, 6)
        assert peers.find("alone").can(one, 6) is None
        assert peers.find("pipeline").can(CASE, 6) is None
        assert "layers for 999 stages" in (peers.find("pipeline").can(CASE, 999) or "")
        assert "the same as accumulate" in (peers.find("core").can(CASE, 1) or "")


class TestPipeline:
    def test_stages_are_balanced(self) -> None:
        assert balanced([1.0, 1.0, 1.0, 1.0], 2) == [2, 4]
        assert balanced([5.0, 1.0, 1.0, 1.0], 2) == [1, 4]
        assert balanced([1.0, 1.0, 9.0], 3) == [1, 2, 3]
        assert balanced([3.0, 2.0], 1) == [2]

    @pytest.mark.parametrize("name", STANDARD_MODELS)
    def test_work_is_counted_for_every_layer_of_any_model(self, name: str) -> None:
        model = build(name)
        found = costs(model, (1, 3, 64, 64))
        leaves = [
            layer
            for layer, module in model.named_modules()
            if not list(module.children()) and not getattr(module, "inplace", False)
        ]
        assert sorted(found) == sorted(leaves)
        assert min(found.values()) > 0
        assert not any(p.is_meta for p in model.parameters())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 3, 64, 64))
        counted = counter.get_total_flops()
        assert counted < sum(found.values()) < 2 * counted


class TestRecord:
    def test_the_baseline_is_the_faster_one(self) -> None:
        held = race(row("alone", 8.0), row("accumulate", 6.0, gap=0.5), row("each", 2.0, 3.0, 4.0))
        assert held.baseline is held.rows[1]
        assert held.speedup(held.rows[2]) == 2.0
        assert held.efficiency(held.rows[2]) == pytest.approx(1 / 3)
        assert held.efficiency(held.rows[0]) is None
        assert held.rows[2].spread == pytest.approx(2 / 3)

    def test_who_is_not_in_it_is_not_beaten(self) -> None:
        failed = Row("alone", True, problem="out of memory: pi3-0 has 900 MiB")
        held = race(failed, row("each", 2.0))
        assert held.baseline is None
        assert held.speedup(failed) is None
        assert held.speedup(held.rows[1]) is None

    def test_a_broken_promise_is_seen(self) -> None:
        assert row("each", 1.0, gap=1e-2).broke_promise
        assert not row("ddp", 1.0, gap=1e-2, claims_exact=False).broke_promise
        assert not row("each", 1.0, gap=1e-6).broke_promise
        assert row("each", 1.0, gap=float("nan")).broke_promise
        assert not row("each", 1.0, gap=2e-3, noise=1e-3).broke_promise
        assert row("each", 1.0, gap=4e-3, noise=1e-3).broke_promise

    def test_memory_beyond_idle_is_of_the_worst_device(self) -> None:
        found = row("each", 1.0, idle_bytes=(50, 10), peak_bytes=(60, 40))
        assert (found.most_bytes, found.most_own_bytes) == (60, 30)

    def test_json_holds_what_was_derived(self) -> None:
        held = race(row("alone", 8.0), row("each", 2.0, gap=float("inf")))
        body = json.loads(to_json([held], ORIGIN))
        assert body["races"][0]["baseline"] == "alone"
        assert body["races"][0]["rows"][1]["speedup"] == 4.0
        assert body["races"][0]["rows"][1]["exact"] is False
        assert body["commit"] == "abc"


class TestGradients:
    def test_gaps(self) -> None:
        true = {"a": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)}
        assert worst_gap(true, true) == 0
        assert worst_gap({**true, "a": torch.tensor([3.0, 4.5])}, true) == pytest.approx(0.1)
        tiny = {**true, "zero": torch.full((2,), 1e-9)}
        assert worst_gap(tiny, true) < 1e-6
        assert worst_gap({"a": true["a"]}, true) == float("inf")

    def test_stages_report_together(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(1)}, tmp_path / "gradients-0.pt")
        torch.save({"b": torch.ones(2)}, tmp_path / "gradients-1.pt")
        assert set(load(tmp_path)) == {"a", "b"}


class TestShown:
    held = race(
        row("alone", 8.0, sent_bytes=(0.0,)),
        row("each", 2.0, sent_bytes=(3.0 * MIB,)),
        row("ddp", 4.0, gap=0.3, claims_exact=False, choice="4 MB a bucket"),
        Row("pipeline", False, problem="the model is <no> chain"),
    )

    def test_the_table(self) -> None:
        console = Console(file=io.StringIO(), width=80)
        console.print(table(self.held))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        (each,) = (line for line in text.splitlines() if line.strip().startswith("each"))
        assert each.split() == "each 2.00 s 1 – 4.00x 67% 300 100 3 yes 1e-06".split()
        for words in ("4.00x", "67%", "yes 1e-06", "no 3e-01", "4 MB a bucket"):
            assert words in text
        assert "pipeline is not in the race, and not beaten: the model is <no> chain" in text
        assert "speedup over alone" in text

    def test_the_page_needs_nothing_else(self) -> None:
        fewer = Race(Case.of("yolov2-front", on="2xpi3", batch=6), 2, 2.0, self.held.rows, True)
        text = page([fewer, self.held], ORIGIN)
        assert "src=" not in text
        assert "<no>" not in text
        assert "speedup over devices" in text
        assert "Not in the race" in text


class TestPaper:
    def test_the_claims_are_measured_against(self) -> None:
        held = race(
            row("alone", 12.0, own=800),
            row("terrazzo tiles each", 6.0, own=200),
            row("terrazzo tiles 4", 3.0, own=100),
        )
        speedup, memory, grouping = paper.figures([held])
        assert "4.00x" in speedup.here
        assert "8.00x" in memory.here
        assert "2.00x" in grouping.here
        assert "4 groups" in grouping.where
        assert paper.curve(held) == [("each", 6.0), ("4", 3.0)]

    def test_one_core_is_what_speedups_are_over_where_it_was_measured(self) -> None:
        rows = (row("core", 48.0), row("alone", 12.0), row("terrazzo tiles each", 4.0))
        speedup, *_ = paper.figures([race(*rows)])
        assert speedup.here == "12.00x over one core"
        assert race(*rows).baseline is rows[1]
        record = json.loads(to_json([race(*rows)], ORIGIN, **paper.to_dict([race(*rows)])))
        assert record["published"][0]["here"] == speedup.here
        assert record["grouping"][0]["step_s"] == {"each": 4.0}

    def test_devices_of_several_threads_where_there_are_cores(self) -> None:
        assert paper.divisions(4, 16) == [(0, 1), (4, 1), (4, 4)]
        assert paper.divisions(4, 2) == paper.divisions(1, 16) == [(0, 1)]

    def test_nothing_measured_is_said(self) -> None:
        out = race(Row("alone", True, problem="out of memory"))
        assert [figure.here for figure in paper.figures([out])] == ["not measured"] * 3


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            ("--on 2 --model lenet", "no model 'lenet'"),
            ("--on 2 --model resnet18 --peers alone,horovod", "no peer 'horovod'"),
            ("--on 2 --model resnet18 --batch 0", "--batch 0"),
            ("--on 2xpi --model resnet18", "pi"),
            ("--on 2 --model resnet18 --rounds 0", "must be positive"),
            ("--model resnet18", "needs --on and --model"),
            ("--on 2 --model resnet18 --minutes 0", "must be positive"),
            ("--on 2 --model resnet18 --size 0", "--size 0"),
            ("--on 2 --model resnet18 --threads 3 --processes 2", "--threads 3 --processes 2"),
            ("--on 2 --model resnet18 --plan gone.json", "gone.json cannot be read"),
            (f"--on 2 --model resnet18 --plan {__file__}", "this is no plan record"),
            ("--on 2 --model resnet18 --peers ,", "names nobody"),
            ("--standard --model resnet18", "leave out --on"),
        ],
    )
    def test_nonsense_is_refused_before_anything_starts(
        self,
        words: str,
        complaint: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["bench", "race", *words.split()]) == 2
        assert complaint in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
