"""``terrazzo data stalls`` as a user runs it: trials of a real script, and what it says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terrazzo.cli.main import main
from terrazzo.measure.medium import medium_of

pytestmark = pytest.mark.timeout(240)

SLEEP_S = 0.02
BATCH = 4
SCRIPT = f"""
import time
import torch
from torch import nn
from torch.utils.data import DataLoader
import terrazzo as tz

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep({SLEEP_S})
        return torch.full((1, 8, 8), index % 256, dtype=torch.uint8), index

tz.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
net = tz.parallelize(model, (torch.zeros({BATCH}, 1, 8, 8),))
loader = DataLoader(Slow(), batch_size={BATCH}, shuffle=True)
for epoch in range(9):
    for x, y in tz.feed(loader, net, workers=0):
        net(x.float()).sum().backward()
        print("batch", y.tolist(), flush=True)
"""
PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

def build():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))

class Pictures(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((1, 8, 8), index, dtype=torch.uint8), index

class Stream(IterableDataset):
    def __iter__(self):
        return iter(Pictures()[index] for index in range(40))

def loader():
    return DataLoader(Pictures(), batch_size=4, num_workers=1)
"""
KEPT = f"""
import sys
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})
from exports import keep_exports

keep_exports(Path(__file__).parent)
"""
"""All trials train the same net: it is exported by the first."""
EVICTION = """
import ctypes, mmap, os, sys
from pathlib import Path
from terrazzo.feed.watch import Watch

path = Path(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def resident(number):
    size = os.fstat(number).st_size
    with mmap.mmap(number, size, flags=mmap.MAP_PRIVATE) as view:
        place = ctypes.c_char.from_buffer(view)
        flags = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(place))
        assert libc.mincore(address, ctypes.c_size_t(size), flags) == 0
        del place
    return sum(flag & 1 for flag in flags) / len(flags)

path.read_bytes()
with path.open("r+b") as file:
    before = resident(file.fileno())
own = path.with_name("run")
own.mkdir()
(own / "notes").touch()
watch = Watch(evicts=sys.argv[2] == "cold", own=own)
watch.begin()
path.open("rb").close()
(own / "notes").open("rb").close()
with path.open("r+b") as file:
    print(before > 0.9, resident(file.fileno()) < 0.5, watch.folder == str(path.parent))
"""


class Desk:
    """A folder in which a user writes files and types commands."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def stalls(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """What the command says on both of its streams."""
        assert main(["data", "stalls", *arguments]) == status
        return self._capfd.readouterr()


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, capfd)


@pytest.mark.slow
def test_a_slow_data_set_is_found_to_be_slow(desk: Desk) -> None:
    desk.write("train.py", KEPT + SCRIPT)
    out, err = desk.stalls("--steps", "3", "--save", "found.json", "train.py")
    found = json.loads((desk.folder / "found.json").read_text())
    injected_s = BATCH * SLEEP_S
    pipeline, usual = found["pipeline"], found["usual"]
    assert pipeline["fetch_s"] >= injected_s, "a sleep is waiting for something, never work"
    assert usual["wait_fetch_s"] >= 0.9 * injected_s
    assert found["cold_s"] >= injected_s
    assert found["facts"]["samples"] == 400
    assert found["facts"]["decoded_bytes"] == 64 + 8
    parts = ("compute_s", "wait_fetch_s", "wait_prepare_s", "copy_s", "deliver_s")
    assert sum(usual[part] for part in parts) == pytest.approx(usual["step_s"])
    assert "waiting in the data set" in out, "nothing was read"
    assert "Limit: data set" in out
    assert "4 workers" in out
    assert "cold: files from storage" in err
    assert "storage: the medium" not in err, "no file was read"
    (page,) = desk.folder.glob("runs/*-stalls-train/stalls.html")
    assert "<rect" in page.read_text()
    batches = [line for line in out.splitlines() if "| batch" in line]
    synthetic, warm, cold = batches[:4], batches[4:8], batches[8:12]
    assert len(set(synthetic)) == 1, "the same batch again and again"
    assert warm == cold
    assert synthetic[0] == warm[0]
    assert len(set(cold)) == 4
    assert len(batches) == 3 * 4 + 10, "every trial ends after its steps, and one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "choices"),
    [("Pictures", "8 workers"), ("Stream", "1 worker "), ("loader", "8 workers")],
)
def test_a_model_and_a_data_set_without_a_script(data: str, choices: str, desk: Desk) -> None:
    """A class, an iterable data set, a function that gives a loader; as tz.feed takes each."""
    desk.write("net.py", PARTS)
    named = ["--model", "net.py:build", "--data", f"net.py:{data}", "--batch", "4"]
    out, _ = desk.stalls("--steps", "3", *named)
    assert f"{data}: 4 samples a step" in out
    assert "Of a step of" in out
    assert "Recommended" in out
    what_if = out.partition("What if")[2]
    assert choices in what_if, "workers that could make the same batches"
    assert max(len(line) for line in out.splitlines() if "page:" not in line) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("build", "is a Sequential: --data wants a data set"),
        ("Pictures", "has 40 samples, --batch is 64"),
    ],
)
def test_data_that_is_none(data: str, words: str, desk: Desk) -> None:
    desk.write("net.py", PARTS)
    named = ["--model", "net.py:build", "--data", f"net.py:{data}", "--batch", "64"]
    _, err = desk.stalls(*named, status=2)
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("print('no net here')", "was not fed by tz.feed"),
        ("raise SystemExit(3)", "the synthetic trial failed"),
    ],
)
def test_a_script_that_is_not_fed(script: str, words: str, desk: Desk) -> None:
    desk.write("train.py", script)
    _, err = desk.stalls("train.py", status=2)
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to look at"),
        (["none.py"], "no script none.py"),
        (["--steps", "1", "train.py"], "--steps 1: give 3 to 95"),
        (["--model", "a.py:b", "train.py"], "a script brings its own"),
        (["--model", "a.py:b", "--data", "a.py:c"], "there is no file a.py"),
        (["--model", "resnet18", "--data", "pictures"], "--data pictures is no data set: write"),
    ],
)
def test_what_cannot_be_looked_at(arguments: list[str], words: str, desk: Desk) -> None:
    desk.write("train.py", "")
    _, err = desk.stalls(*arguments, status=2)
    assert words in err
    assert err.count("\n") == 1
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize("mode", ["cold", "warm"])
def test_files_are_dropped_when_they_are_opened(mode: str, tmp_path: Path) -> None:
    if medium_of(tmp_path).is_memory:
        pytest.skip("cold files were NOT tested: temporary files lie in memory")
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(4 << 20))
    done = subprocess.run(
        [sys.executable, "-c", EVICTION, str(path), mode],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", str(mode == "cold"), "True"], done.stderr
