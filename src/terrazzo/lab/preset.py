"""Presets: what a kind of device can do, read from a table that people can read too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError
from terrazzo.lab.vectors import WIDTHS
from terrazzo.records.toml import read_toml

BUILT_IN = Path(__file__).with_name("presets.toml")
OWN = Path("terrazzo-presets.toml")
"""Read from the current folder where it exists, over the built-in ones."""

WIRE, WIFI = "wire", "wifi"


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What one kind of link carries: TCP payload, one way."""

    bits_per_s: float
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Storage:
    """How fast its card or disk is."""

    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A kind of device."""

    name: str
    flops_per_s: float
    threads: int
    memory_bytes: int
    wire: LinkSpeed | None
    wifi: LinkSpeed | None
    storage: Storage | None = None
    watts: float | None = None
    vector_bits: int = 0
    """Of the registers its libraries compute in; 0: as wide as this machine's."""
    board: str = ""
    """The simulated board (``terrazzo.boards``) whose knobs such a device has; none: it has no."""
    about: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def link(self, kind: str | None) -> tuple[str, LinkSpeed]:
        """The link of that kind; without a wish its cable, or the air where it has none."""
        wanted = kind or (WIRE if self.wire else WIFI)
        speed = {WIRE: self.wire, WIFI: self.wifi}[wanted]
        if speed is None:
            other = WIFI if wanted == WIRE else WIRE
            raise UsageError(f"{self.name} has no {wanted}; leave :{wanted} out, it has {other}")
        return wanted, speed


def load_presets(files: Iterable[Path] = (), *, here: Path | None = None) -> dict[str, Preset]:
    """The built-in presets, those of terrazzo-presets.toml here, and those of ``files``."""
    own = (here or Path()) / OWN
    found: dict[str, Preset] = {}
    for path in (BUILT_IN, *((own,) if own.is_file() else ()), *files):
        for name, table in read_toml(path, "presets").items():
            found[name] = _preset(name, table, path)
    return found


NUMBERS = {"gflops": 1e9, "threads": 1, "memory_mib": 2**20}
MOST = {
    "gflops": 1e9, "threads": 4096, "memory_mib": 1e9, "watts": 1e5, "mbit": 1e8,
    "delay_ms": 60e3, "loss_percent": 99.0, "read_mb": 1e8, "write_mb": 1e8,
}  # fmt: skip
"""Above these something was misread, a unit perhaps."""
LEAST = {"threads": 1.0, "memory_mib": 1.0, "gflops": 1e-6, "mbit": 1e-3}
OPTIONAL = ("about", "sources", "watts", "vector_bits", "board", WIRE, WIFI, "storage")


def _preset(name: str, table: Any, path: Path) -> Preset:
    where = f"preset {name} in {path}"
    if not isinstance(table, dict):
        raise UsageError(f"{where} is no table; write [{name}] above its figures")
    if not (name.isascii() and name.isalnum() and name[0].isalpha() and len(name) <= 12):
        raise UsageError(f"{where}: a name is 1 to 12 letters and digits, such as pi3")
    unknown = sorted(set(table) - {*NUMBERS, *OPTIONAL})
    if unknown:
        raise UsageError(f"{where} says {unknown[0]}; known are {', '.join((*NUMBERS, *OPTIONAL))}")
    needed = {key: _number(table, key, where) * unit for key, unit in NUMBERS.items()}
    wire, wifi = (_speed(table.get(kind), f"{where}, {kind}") for kind in (WIRE, WIFI))
    if wire is None and wifi is None:
        raise UsageError(f"{where} has neither wire nor wifi; say wire = {{ mbit = 94.0 }}")
    return Preset(
        name=name,
        flops_per_s=needed["gflops"],
        threads=int(needed["threads"]),
        memory_bytes=int(needed["memory_mib"]),
        wire=wire,
        wifi=wifi,
        storage=_storage(table.get("storage"), f"{where}, storage"),
        watts=_number(table, "watts", where) if "watts" in table else None,
        vector_bits=_width(table, where),
        board=str(table.get("board", "")),
        about=str(table.get("about", "")),
        sources={str(key): str(value) for key, value in dict(table.get("sources", {})).items()},
    )


def _width(table: Mapping[str, Any], where: str) -> int:
    bits = table.get("vector_bits", 0)
    if "vector_bits" in table and bits not in WIDTHS:
        known = ", ".join(map(str, WIDTHS))
        raise UsageError(f"{where} has vector_bits = {bits!r}; known are {known}, or leave it out")
    return int(bits)


def _speed(table: Any, where: str) -> LinkSpeed | None:
    if table is None:
        return None
    _known(table, ("mbit", "delay_ms", "loss_percent"), where)
    delay, loss = (
        _number(table, key, where, zero=True) if key in table else 0.0
        for key in ("delay_ms", "loss_percent")
    )
    return LinkSpeed(_number(table, "mbit", where) * 1e6, delay * 1e-3, loss * 1e-2)


def _storage(table: Any, where: str) -> Storage | None:
    if table is None:
        return None
    _known(table, ("read_mb", "write_mb"), where)
    read, write = (_number(table, key, where) * 1e6 for key in ("read_mb", "write_mb"))
    return Storage(read, write)


def _known(table: Any, keys: tuple[str, ...], where: str) -> None:
    if not isinstance(table, dict) or set(table) - set(keys):
        raise UsageError(f"{where} is {table!r}; it is a table of {', '.join(keys)}")


def _number(table: Mapping[str, Any], key: str, where: str, *, zero: bool = False) -> float:
    value: Any = table.get(key)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not fits or not (value > 0 or (zero and value == 0)):
        least = "0 or more" if zero else "above 0"
        raise UsageError(f"{where} has {key} = {value!r}; it must be a number {least}")
    low, high = LEAST.get(key, 0.0), MOST[key]
    if not low <= value <= high:
        raise UsageError(f"{where} has {key} = {value!r}; possible is {low:g} to {high:g}")
    return float(value)
