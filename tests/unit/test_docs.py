"""The documents are true: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from terrazzo.cli.main import parser

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNABLE = ["README.md", "docs/your-script.md"]

# What a document takes for granted; it is run before the first block.
PREAMBLES = {
    "README.md": """
import torch
from torch import nn
x = torch.randn(2, 3, 20, 24)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 396, 5))
loader = [(torch.randn(2, 3, 20, 24), torch.tensor([1, 4])) for _ in range(2)]
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model[0].weight.clone()
""",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the document it begins on."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", read(path), flags=re.M | re.S)
    return [Block(m[1], m[2], read(path)[: m.start(2)].count("\n") + 1) for m in found]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def python_of(name: str) -> list[Block]:
    given = [Block("python", PREAMBLES[name], 1)] if name in PREAMBLES else []
    return given + [block for block in blocks(ROOT / name) if block.language == "python"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- Python ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_python_runs_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in python_of(name):
        padded = "\n" * (block.line - 1) + block.text  # so that a traceback names the line
        exec(compile(padded, str(ROOT / name), "exec"), namespace)
    if "before" in namespace:
        assert not namespace["model"][0].weight.equal(namespace["before"]), "nothing was trained"


# ---- commands -------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """The lines that call terrazzo, without comments and redirections."""
    lines = [re.sub(r"\s+#.*|\s+[>|].*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith("terrazzo ")]


def assert_understood(command: str) -> None:
    words = shlex.split(command)[1:]
    if {"--help", "--version"} & set(words):
        return
    try:
        parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"not understood: {command}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_commands_are_understood(path: Path) -> None:
    for block in blocks(path):
        if block.language == "sh":
            for command in commands(block.text):
                assert_understood(command)


def test_examples_in_the_help_are_understood() -> None:
    top = parser()
    (group,) = (action for action in top._actions if hasattr(action, "choices") and action.choices)
    for name, below in [("", top), *group.choices.items()]:
        examples = commands(below.epilog or "")
        assert examples, f"terrazzo {name} --help shows no example"
        for command in examples:
            assert_understood(command)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", read(ROOT / "Makefile"), flags=re.M))
    shell = "\n".join(block.text for block in blocks(path) if block.language == "sh")
    named = set(re.findall(r"^make ([a-z0-9-]+)", shell, flags=re.M))
    named |= set(re.findall(r"`make ([a-z0-9-]+)", read(path)))
    assert named <= targets


# ---- links ----------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors of headings, as they are made where the documents are read."""
    outside = re.sub(r"^```.*?^```$", "", read(path), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", outside, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(path)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{relative(path)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{relative(path)}: no heading for #{anchor}"
