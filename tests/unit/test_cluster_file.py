"""cluster.toml: read, written, and refused with the file, the key and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrazzo.errors import UsageError
from terrazzo.records.cluster import Cluster, ClusterDevice

FULL = """
version = 1
user = "pi"
python = "~/env/bin/python"
memory = "900MiB"
encrypt = true
ssh_config = "config"
lost_after_s = 5
copy_limit = "1GiB"
pip = ["--no-index"]

[environment]
KMP_BLOCKTIME = "0"

[[device]]
host = "pi1.local"
threads = 4

[[device]]
host = "192.168.1.22"
name = "second"
address = "10.0.0.2"
interface = "eth0"
user = "me"
port = 2222
memory = 500000000
"""


def load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text)
    return Cluster.load(path)


def test_what_stands_above_holds_for_all_devices(tmp_path: Path) -> None:
    found = load(tmp_path, FULL)
    assert found.names == ("pi1", "second")
    first, second = found.devices
    assert (first.user, first.memory_bytes, first.threads) == ("pi", 900 << 20, 4)
    assert (second.user, second.memory_bytes, second.port) == ("me", 500_000_000, 2222)
    assert {first.python, second.python} == {"~/env/bin/python"}
    assert found.encrypt
    assert found.lost_after_s == 5.0
    assert found.copy_limit_bytes == 1 << 30
    assert found.environment == {"KMP_BLOCKTIME": "0"}
    assert second.title == "second (192.168.1.22)"


def test_an_address_is_a_name_too(tmp_path: Path) -> None:
    assert load(tmp_path, '[[device]]\nhost = "10.0.0.7"').names == ("10.0.0.7",)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    devices = (
        ClusterDevice("a", "10.0.0.1", user="pi", memory_bytes=5 << 20),
        ClusterDevice("b", "b.local", port=23, interface="wlan0", threads=2),
    )
    path = tmp_path / "made.toml"
    Cluster(devices, encrypt=True).save(path)
    assert Cluster.load(path) == Cluster(devices, encrypt=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version = 2", r"version = 2, this Terrazzo reads version 1: write version = 1"),
        ("", r"names no device: write \[\[device\]\]"),
        ("device = 3", "names no device"),
        ("[[device]]", r'device 0 has no host: write host = "pi1.local"'),
        ('devices = 1\n[[device]]\nhost = "a"', "says devices; known are version, device"),
        ('[[device]]\nhost = "a"\nadress = "1.2.3.4"', "device 0 says adress; known are host"),
        ('[[device]]\nhost = "-oProxyCommand=x"', "device 0 has host = '-oProxyCommand=x'; write"),
        ('[[device]]\nhost = "a b"', "host = 'a b'; write a host name"),
        ('[[device]]\nhost = "a"\nuser = "-l"', "user = '-l'; write such as"),
        ('[[device]]\nhost = "a"\naddress = "a.local"', "write an IPv4 address"),
        ('[[device]]\nhost = "a"\nport = 70000', "port = 70000; write a number from 1"),
        ('[[device]]\nhost = "a"\nmemory = "lots"', "memory = 'lots'; write such as \"900MiB\""),
        ('[[device]]\nhost = "a"\nthreads = 0', "threads = 0; write a number from 1 on"),
        ('[[device]]\nhost = "a"\nthreads = true', "threads = True; write"),
        ('[[device]]\nhost = "a"\ninterface = "eth 0"', 'interface = .*; write such as "eth0"'),
        ('[[device]]\nhost = "a"\npython = ""', "python = ''; write such as"),
        ('encrypt = "yes"\n[[device]]\nhost = "a"', "encrypt = 'yes'; write true or false"),
        ('lost_after_s = 0.1\n[[device]]\nhost = "a"', r"lost_after_s = 0\.1; write seconds, at l"),
        ('[[device]]\nhost = "a"\n[[device]]\nhost = "a.b"', "has name a twice: give each"),
        ('[environment]\nRANK = "1"\n[[device]]\nhost = "a"', "sets RANK, which terrazzo run"),
        ('[environment]\nA = 1\n[[device]]\nhost = "a"', 'A = 1; write NAME = "value"'),
        ("[[device", "cannot be read"),
    ],
)
def test_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as seen:
        load(tmp_path, text)
    assert str(tmp_path / "cluster.toml") in str(seen.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*cluster discover --write"):
        Cluster.load(tmp_path / "none.toml")
