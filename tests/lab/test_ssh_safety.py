"""What strangers on the network get from a run: nothing, and the run does not notice them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from sshd import SshDevices, missing
from torch import nn
from waiting import wait_until

from terrazzo.cli.main import main
from terrazzo.lab.namespace import inside

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=f"SSH hosts were NOT tested: {missing()}"),
]
TOLD = b"what a device says to another "
TALK = f"""
import os, socket, sys, time
address, rank = os.environ["MASTER_ADDR"], os.environ["RANK"]
if rank == "0":
    with socket.create_server((address, int(sys.argv[1]))) as one:
        connection, _ = one.accept()
        total = 0
        while data := connection.recv(65536):
            total += len(data)
    print("heard", total)
else:
    while True:
        try:
            connection = socket.create_connection((address, int(sys.argv[1])), timeout=5)
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall({TOLD!r} * 1000)
    connection.close()
"""
TRAIN = """
import pathlib, sys, time
import torch
from torch import nn
import terrazzo as tz

device = tz.init(timeout_s=60)
torch.manual_seed(0)
layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5)).double()
x, y = torch.randn(4, 3, 16, 16).double(), torch.arange(4)
net = tz.parallelize(model, (x,), layout="tiles:2x1")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
desk = pathlib.Path(sys.argv[1])
(desk / f"ready-{device}").touch()
steps = 0
rate = 0.0  # strangers come while devices are at work, but nothing is learnt yet
while rate == 0.0 or steps < 10:
    rate = 0.1 if rate or tz.agree((desk / "enough").exists()) else 0.0
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    steps += rate > 0
print(f"LOSS {loss.item():.15f}", flush=True)
"""


class Ear:
    """Hears every frame that passes the switch."""

    def __init__(self, devices: SshDevices) -> None:
        def listen() -> socket.socket:
            every = 0x0300  # ETH_P_ALL, in the network's order of bytes
            return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, every)

        self._socket = inside(devices.hosts.network.switch, listen)
        self._socket.settimeout(0.1)
        self.heard = bytearray()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                self.heard += self._socket.recv(1 << 17)

    def close(self) -> bytes:
        time.sleep(0.2)
        self._ended.set()
        self._thread.join()
        self._socket.close()
        return bytes(self.heard)


@pytest.mark.skipif(
    shutil.which("wg") is None, reason="encryption was NOT tested: apt install wireguard-tools"
)
@pytest.mark.parametrize("encrypt", [False, True])
def test_an_ear_on_the_switch_hears_nothing_of_encrypted_traffic(
    devices: SshDevices,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    encrypt: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    ear = Ear(devices)
    cluster = devices.cluster(top=[f"encrypt = {str(encrypt).lower()}"])
    status = main(["run", "--on", str(cluster), "--no-record", "talk.py", "4711"])
    heard = ear.close()
    out, err = capfd.readouterr()
    if encrypt and "has no WireGuard" in err:
        pytest.skip("encryption was NOT tested: no WireGuard in this kernel, no wireguard-go")
    assert status == 0, err
    assert f"heard {len(TOLD) * 1000}" in out
    assert len(heard) > len(TOLD) * 1000, "the ear heard nothing at all"
    assert (TOLD in heard) == (not encrypt)
    names = [name for _, name in inside(devices.hosts.network.devices[0], socket.if_nameindex)]
    assert names == ["lo", "eth0"], "an interface was left behind"


def test_strangers_at_every_port_disturb_nothing(
    devices: SshDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "terrazzo.cli", "run", "--on", str(devices.cluster())]
    run = subprocess.Popen(
        [*command, "--no-record", "train.py", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, limit_s=90), run.poll()
    seen = inside(devices.hosts.network.switch, lambda: disturb(devices))
    assert len(seen) >= 3, f"only {seen} listened"
    (tmp_path / "enough").touch()
    out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    losses = [float(line.split("LOSS")[1]) for line in out.splitlines() if "LOSS" in line]
    assert losses == pytest.approx([alone(), alone()], rel=1e-10)


def alone() -> float:
    """The same training in plain PyTorch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5)).double()
    x, y = torch.randn(4, 3, 16, 16).double(), torch.arange(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def disturb(devices: SshDevices) -> list[tuple[str, int]]:
    """Garbage, silence and floods at every port that devices offer to the network."""
    found, kept = [], []
    for device, namespace in enumerate(devices.hosts.network.devices):
        address = devices.hosts.address(device)
        for port in inside(namespace, lambda a=address: listening(a)):
            found.append((address, port))
    targets = [target for target in found if target[1] != 22]
    for target in targets:
        for words in (b"", b"\x00", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), bytes(1 << 17)):
            for _ in range(2):
                with contextlib.suppress(OSError):
                    one = socket.create_connection(target, timeout=5)
                    kept.append(one)
                    one.sendall(words)
    time.sleep(0.5)
    for one in kept:
        one.close()
    return targets


def listening(address: str) -> list[int]:
    """Ports of this namespace that others can reach; each must be on the one address."""
    found = []
    for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        host, _, port = words[1].partition(":")
        at = socket.inet_ntoa(bytes.fromhex(host)[::-1])
        if words[3] == "0A" and at != "127.0.0.1":
            assert at == address, f"port {int(port, 16)} listens on {at}"
            found.append(int(port, 16))
    wide = Path("/proc/thread-self/net/tcp6")
    if wide.exists():
        rows = [line.split() for line in wide.read_text().splitlines()[1:]]
        assert not [row for row in rows if row[3] == "0A"], "something listens on every address"
    return found
