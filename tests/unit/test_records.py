"""Records: what is written is what is read back, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.errors import UsageError
from terrazzo.records import (
    CheckReport,
    CheckRow,
    Dtype,
    Graph,
    Group,
    Layout,
    Node,
    Plan,
    Ref,
    Value,
    document,
)
from terrazzo.records.graph import decode, encode, fingerprint, walk

steady = settings(derandomize=True, deadline=None)

LAYOUT = Layout.tiles((3, 2, 1), 2)
PLAN = Plan("0123456789abcdef", 6, (Group("relu", LAYOUT, "conv1..relu1"), Group("out", Layout())))
GRAPH = Graph(
    values={
        "x": Value("x", "input", (2, 3, 8, 8), "float32"),
        "w": Value("w", "parameter", (4, 3, 3, 3), "float32", "conv.weight"),
        "y": Value("y", "node", (2, 4, 8, 8), "float32"),
        "z": Value("z", "node", (2, 4, 8, 8), "float64"),
        "s": Value("s", "node", (), "bfloat16"),
    },
    nodes=(
        Node("aten.conv2d.default", (Ref("x"), Ref("w"), None, (1, 1), "same"), ("y",), "conv", 7),
        Node("aten.clamp.default", (Ref("y"), -math.inf, 2), ("z",), gradient=False),
        Node("aten.sum.default", (Ref("z"), Dtype("bfloat16")), ("s", "")),
    ),
    inputs=("x", ""),
    outputs=(Ref("z"), 3, None, (True, Ref("s"))),
    mutations={"running": "z"},
    output_tree="[1]",
)
REPORT = CheckReport(
    rows=(
        CheckRow("outputs", 1e-16, "output 0", 2, 1e-10),
        CheckRow("buffers", math.nan, "running_mean", 1, 1e-10),
        CheckRow("gradients", math.inf, "w (only one side has it)", 1, 1e-10),
    ),
    split_flops=0.98,
    split_bytes=1.0,
    devices=3,
    plan_text="plan for 3 devices",
)
RECORDS = [(PLAN, Plan), (GRAPH, Graph), (REPORT, CheckReport)]


# ---- documents --------------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "kind"), RECORDS, ids=lambda r: getattr(r, "__name__", ""))
def test_round_trip(record: Plan | Graph | CheckReport, kind: type) -> None:
    text = record.to_json()
    again = kind.from_json(text)
    assert repr(again) == repr(record)  # nan is not equal to itself, its text is
    assert again.to_json() == text
    assert json.loads(text)["version"] >= 1


@pytest.mark.parametrize(("record", "kind"), RECORDS, ids=lambda r: getattr(r, "__name__", ""))
def test_other_kinds_and_versions_are_refused(
    record: Plan | Graph | CheckReport, kind: type
) -> None:
    body = json.loads(record.to_json())
    with pytest.raises(UsageError, match="version 99, this Terrazzo reads version"):
        kind.from_json(json.dumps({**body, "version": 99}))
    with pytest.raises(UsageError, match="calls itself 'cluster'"):
        kind.from_json(json.dumps({**body, "terrazzo": "cluster"}))
    for text, reason in {"[]": "list", "{}": "nothing", "3": "int", "{": "not JSON"}.items():
        with pytest.raises(UsageError, match=reason):
            kind.from_json(text)


@pytest.mark.parametrize(("record", "kind"), RECORDS, ids=lambda r: getattr(r, "__name__", ""))
def test_damaged_records_are_named(record: Plan | Graph | CheckReport, kind: type) -> None:
    body = json.loads(record.to_json())
    for key in body.keys() - {"terrazzo", "version"}:
        less = {name: part for name, part in body.items() if name != key}
        with pytest.raises(UsageError, match=f"damaged.*{key}"):
            kind.from_json(json.dumps(less))
    first = next(name for name, part in body.items() if isinstance(part, list))
    with pytest.raises(UsageError, match="damaged"):
        kind.from_json(json.dumps({**body, first: [3]}))


def test_json_without_a_word_for_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        document.dump("plan", 1, {"speed": math.nan})


def test_a_write_is_whole_or_did_not_happen(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == PLAN
    with pytest.raises(UnicodeEncodeError):  # fails half way, as a full disk would
        document.write(path, "x" * 100_000 + "\ud800")
    assert Plan.load(path) == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "a scratch file was left behind"
    changed = replace(PLAN, devices=2)
    changed.save(path)
    assert Plan.load(path) == changed


# ---- graphs -----------------------------------------------------------------------------------

arguments = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-9, 9),
        st.floats(allow_nan=False),
        st.text(max_size=3),
        st.builds(Ref, st.text(max_size=3)),
        st.builds(Dtype, st.sampled_from(["float32", "int64"])),
    ),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=8,
)


@steady
@given(arguments)
def test_arguments_survive_json(argument: object) -> None:
    text = json.dumps(encode(argument), allow_nan=False)
    assert repr(decode(json.loads(text))) == repr(argument)


def test_a_graph_knows_who_makes_and_who_reads() -> None:
    assert GRAPH.producer == {"y": 0, "z": 1, "s": 2}
    assert GRAPH.consumers == {"x": (0,), "w": (0,), "y": (1,), "z": (2,)}
    assert [ref.name for ref in walk(GRAPH.outputs)] == ["z", "s"]
    assert GRAPH.nodes[0].refs == ("x", "w") and GRAPH.nodes[1].title == "z (aten.clamp.default)"
    assert GRAPH.values["z"].bytes == 2 * 4 * 8 * 8 * 8 and GRAPH.values["s"].bytes == 2
    assert GRAPH.values["s"].is_floating and GRAPH.shape("s") == ()


def test_the_digest_tells_graphs_apart() -> None:
    other = replace(GRAPH, nodes=(replace(GRAPH.nodes[0], layer="conv2"), *GRAPH.nodes[1:]))
    assert replace(GRAPH).digest == GRAPH.digest != other.digest
    assert Graph.from_json(GRAPH.to_json()).digest == GRAPH.digest
    assert fingerprint(1, ["a"]) == fingerprint(1, ["a"]) != fingerprint(1, ["b"])


# ---- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rows", "cols", "devices"),
    [
        ("tiles:2x3", (1, 1), (1, 1, 1), 6),
        ("tiles:3,2,1x1", (3, 2, 1), (1,), 3),
        ("tiles:1x5,0,1", (1,), (5, 0, 1), 3),
        ("tiles:2,1x1,2", (2, 1), (1, 2), 4),
    ],
)
def test_layouts_read_and_print(
    text: str, rows: tuple[int, ...], cols: tuple[int, ...], devices: int
) -> None:
    layout = Layout.parse(text)
    assert layout == Layout((("h", rows), ("w", cols))) == Layout.tiles(rows, cols)
    assert str(layout) == text and layout.devices == devices and not layout.is_whole


def test_whole_and_even_layouts() -> None:
    assert Layout.parse("whole") == Layout() and str(Layout()) == "whole" and Layout().is_whole
    assert Layout().devices == 1
    assert str(Layout.tiles((4, 4), (7,))) == "tiles:2x1"
    assert str(Layout((("w", (1, 2)),))) == "tiles:1x1,2"


@steady
@given(*[st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)] * 2)
def test_a_printed_layout_cuts_the_same(rows: list[int], cols: list[int]) -> None:
    from terrazzo.geometry import grid

    layout = Layout.tiles(tuple(rows), tuple(cols))
    again = Layout.parse(str(layout))
    one, other = (grid((17, 23), [(0, a), (1, b)]) for (_, a), (_, b) in (layout.cuts, again.cuts))
    assert one == other and Plan.from_json(PLAN.to_json()).groups[0].layout == LAYOUT


@pytest.mark.parametrize(
    "text",
    ["", "tiles", "tiles:2", "tiles:x2", "tiles:2x", "tiles:0x2", "tiles:2x0,0", "tiles:-1x2",
     "tiles:1,x2", "tiles:,x1", "tiles:2x3x4", "tile:2x2", "2x2", "tiles:1.5x2", "Whole"],
)  # fmt: skip
def test_layouts_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match=r"layout"):
        Layout.parse(text)


@pytest.mark.parametrize(
    "cuts",
    [(("d", (1, 1)),), (("h", ()),), (("h", (0, 0)),), (("w", (1, -1)),), (("h", (0.5, 1)),),
     (("h", (1,)), ("h", (1,)))],
)  # fmt: skip
def test_cuts_that_make_no_sense(cuts: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    with pytest.raises(UsageError, match=r"layout (cuts|has shares)"):
        Layout(cuts)


# ---- reports ----------------------------------------------------------------------------------


def test_a_report_is_right_only_when_every_row_is() -> None:
    assert not REPORT.ok and [row.ok for row in REPORT.rows] == [True, False, False]
    good = replace(REPORT, rows=REPORT.rows[:1])
    assert good.ok and "exact on 3 devices" in str(good) and "98.0% of FLOPs" in str(good)
    assert "NOT exact" in str(REPORT) and str(REPORT).count("WRONG") == 2
    assert str(PLAN).splitlines()[1:] == [
        "  group 0: conv1..relu1  tiles:3,2,1x2",
        "  group 1: ... out  whole",
    ]
