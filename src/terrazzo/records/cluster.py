"""A cluster as a person describes it: ``cluster.toml``.

version = 1
user = "pi"                       # for all devices, unless one says otherwise
python = "~/env/bin/python"
encrypt = false

[[device]]
host = "pi1.local"                # what ssh is told: a name, an address, an alias
memory = "900MiB"

[[device]]
host = "pi2.local"
address = "192.168.1.22"          # where the other devices reach it
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from terrazzo.errors import UsageError
from terrazzo.records import document
from terrazzo.records.toml import read_toml, toml_value
from terrazzo.records.units import parse_bytes

VERSION = 1
MOST_DEVICES = 64
DEFAULT_PYTHON, DEFAULT_WORKDIR = "python3", "~/.terrazzo"
LOST_AFTER_S, LEAST_LOST_S = 30.0, 3.0
COPY_LIMIT_BYTES = 256 << 20

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:%-]{0,252}")
"""No leading dash: ssh would take it for an option."""
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """One computer; what is empty or 0 is found out, or left to ssh and its configuration."""

    name: str
    host: str
    address: str = ""
    interface: str = ""
    user: str = ""
    port: int = 0
    python: str = DEFAULT_PYTHON
    workdir: str = DEFAULT_WORKDIR
    memory_bytes: int = 0
    """The most that planning may count on; 0: what the device has."""
    threads: int = 0

    @property
    def title(self) -> str:
        """As messages name it."""
        return self.name if self.name == self.host else f"{self.name} ({self.host})"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, numbered as they stand in the file."""

    devices: tuple[ClusterDevice, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    encrypt: bool = False
    ssh_config: str = ""
    """The file ssh reads in place of the user's own; relative to this one."""
    pip: tuple[str, ...] = ()
    """Options for pip where an environment is made, such as another index."""
    lost_after_s: float = LOST_AFTER_S
    copy_limit_bytes: int = COPY_LIMIT_BYTES

    @classmethod
    def load(cls, path: Path) -> Cluster:
        if not path.is_file():
            raise UsageError(
                f"no file {path}: write one (docs/clusters.md), or let terrazzo cluster discover "
                f"--write {path} look for devices"
            )
        return _cluster(read_toml(path, "cluster"), path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def to_toml(self) -> str:
        """As ``load`` reads it; what is as by default is left out."""
        lines = [f"version = {VERSION}"]
        if self.encrypt:
            lines.append("encrypt = true")
        for device in self.devices:
            lines += ["", "[[device]]"]
            for key in DEVICE_KEYS:
                value = getattr(device, "memory_bytes" if key == "memory" else key)
                if value and value != DEFAULTS.get(key):
                    lines.append(f"{key} = {toml_value(value)}")
        return "\n".join([*lines, ""])

    def save(self, path: Path) -> None:
        try:
            document.write(path, self.to_toml())
        except OSError as error:
            raise UsageError(f"cluster {path} cannot be written: {error}") from error


DEFAULTS = {"python": DEFAULT_PYTHON, "workdir": DEFAULT_WORKDIR}
DEVICE_KEYS = (
    "host", "name", "address", "interface", "user", "port", "python", "workdir", "memory",
    "threads",
)  # fmt: skip
SHARED_KEYS = ("interface", "user", "port", "python", "workdir", "memory", "threads")
"""Those that may stand above the devices, for all of them."""
TOP_KEYS = (
    "version", "device", "environment", "encrypt", "ssh_config", "pip", "lost_after_s",
    "copy_limit", *SHARED_KEYS,
)  # fmt: skip


def _cluster(table: Mapping[str, Any], path: Path) -> Cluster:
    where = str(path)
    seen = table.get("version", VERSION)
    if seen != VERSION:
        raise UsageError(
            f"{where}: version = {seen!r}, this Terrazzo reads version {VERSION}: write "
            f"version = {VERSION} and look at docs/clusters.md for what has changed"
        )
    _known(table, TOP_KEYS, where)
    rows = table.get("device")
    if not isinstance(rows, list) or not rows:
        raise UsageError(f'{where} names no device: write [[device]] and host = "pi1.local" below')
    if len(rows) > MOST_DEVICES:
        raise UsageError(f"{where} names {len(rows)} devices; {MOST_DEVICES} at most")
    shared = {key: table[key] for key in SHARED_KEYS if key in table}
    devices = tuple(_device(row, shared, f"{where}: device {n}") for n, row in enumerate(rows))
    for what in ("name", "address"):
        _different([getattr(device, what) for device in devices], what, where)
    take = _Take(table, where)
    return Cluster(
        devices=devices,
        environment=_environment(table.get("environment", {}), where),
        encrypt=take("encrypt", _flag, "true or false", default=False),
        ssh_config=take("ssh_config", _text, 'a path, such as "ssh_config"', default=""),
        pip=take("pip", _words, 'a list of options, such as ["--no-index"]', default=()),
        lost_after_s=take(
            "lost_after_s", _seconds, f"seconds, at least {LEAST_LOST_S:g}", default=LOST_AFTER_S
        ),
        copy_limit_bytes=take("copy_limit", parse_bytes, '"512MiB"', default=COPY_LIMIT_BYTES),
    )


def _device(row: Any, shared: Mapping[str, Any], where: str) -> ClusterDevice:
    if not isinstance(row, dict):
        raise UsageError(f'{where} is no table: write [[device]] and host = "pi1.local" below')
    _known(row, DEVICE_KEYS, where)
    if "host" not in row:
        raise UsageError(f'{where} has no host: write host = "pi1.local", as you would for ssh')
    take = _Take({**shared, **row}, where)
    host = take("host", _like(HOST), 'a host name or address, such as "pi1.local"', default="")
    name = host if _is_address(host) else host.partition(".")[0]
    return ClusterDevice(
        name=take("name", _like(NAME), "letters, digits, dots and dashes", default=name),
        host=host,
        address=take("address", _address, 'an IPv4 address, such as "192.168.1.21"', default=""),
        interface=take("interface", _like(INTERFACE), 'such as "eth0"', default=""),
        user=take("user", _like(USER), 'such as "pi"', default=""),
        port=take("port", _between(1, 65535), "a number from 1 to 65535", default=0),
        python=take("python", _line, f'such as "{DEFAULT_PYTHON}"', default=DEFAULT_PYTHON),
        workdir=take("workdir", _line, f'such as "{DEFAULT_WORKDIR}"', default=DEFAULT_WORKDIR),
        memory_bytes=take("memory", parse_bytes, 'such as "900MiB"', default=0),
        threads=take("threads", _between(1, 1024), "a number from 1 on", default=0),
    )


@dataclass(frozen=True, slots=True)
class _Take:
    """A value by its key: checked, or refused with the file, the key and what to write."""

    table: Mapping[str, Any]
    where: str

    def __call__(self, key: str, read: Callable[[Any], T], wanted: str, *, default: T) -> T:
        if key not in self.table:
            return default
        try:
            return read(self.table[key])
        except (TypeError, ValueError, UsageError):
            raise UsageError(
                f"{self.where} has {key} = {self.table[key]!r}; write {wanted}"
            ) from None


def _known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise UsageError(f"{where} says {unknown[0]}; known are {', '.join(keys)}")


def _different(values: list[str], what: str, where: str) -> None:
    twice = {value for value in values if value and values.count(value) > 1}
    if twice:
        raise UsageError(f"{where} has {what} {min(twice)} twice: give each device its own {what}")


def _environment(table: Any, where: str) -> dict[str, str]:
    if not isinstance(table, dict):
        raise UsageError(f'{where} has environment = {table!r}; write a table: NAME = "value"')
    for name, value in table.items():
        if not VARIABLE.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise UsageError(f'{where}: environment has {name} = {value!r}; write NAME = "value"')
        if name in OWN_VARIABLES:
            raise UsageError(f"{where}: environment sets {name}, which terrazzo run does itself")
    return dict(table)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address(value: Any) -> str:
    return str(ipaddress.IPv4Address(_text(value)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _line(value: Any) -> str:
    text = _text(value)
    if not text or not text.isprintable() or text.startswith("-"):
        raise ValueError
    return text


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(_text, value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isfinite(value) or value < LEAST_LOST_S:
        raise ValueError
    return float(value)


def _like(pattern: re.Pattern[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not pattern.fullmatch(_text(value)):
            raise ValueError
        return str(value)

    return read


def _between(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return read
