"""A vendor's presets: the power models of nvpmodel.conf as modes.

What a preset says of parts that only a reboot changes (power gating of GPU cores, say) can't be
followed. Such a preset is named, and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from terrazzo.meters.meter import text_of
from terrazzo.power.knob import nearest
from terrazzo.records.modes import Mode

CONF = "etc/nvpmodel.conf"
HEAD = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>")
STATUS = "var/lib/nvpmodel/status"
"""Which model is in force: ``pmode:0002``."""
DEFAULT = re.compile(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)\s*>")
REBOOT = ("TPC_POWER_GATING", "GPU_POWER_GATING", "FBP_POWER_GATING", "PVA_POWER_GATING")


@dataclass(frozen=True, slots=True)
class Preset:
    """One of the vendor's modes; ``mode`` is None where only a reboot gets there."""

    name: str
    mode: Mode | None
    reason: str = ""


def presets(root: Path, knobs: Mapping[str, tuple[float, ...]]) -> list[Preset]:
    """Those of this device, in terms of its knobs."""
    try:
        text = (root / CONF).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return parse(text, knobs, _present(root, text))


def _present(root: Path, conf: str) -> int | None:
    """The number of the model in force."""
    told = text_of(root / STATUS).rpartition(":")[2]
    if told.isdigit():
        return int(told)
    default = DEFAULT.search(conf)
    return int(default.group(1)) if default else None


def parse(
    text: str, knobs: Mapping[str, tuple[float, ...]], present: int | None = None
) -> list[Preset]:
    """``present`` is the number of the model in force: what is gated as there needs no reboot."""
    found: list[tuple[str, list[list[str]]]] = []
    gated: list[list[str]] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        head = HEAD.search(line)
        if head is not None:
            found.append((head.group(2), []))
            if int(head.group(1)) == present:
                gated = found[-1][1]
        elif line.lstrip().startswith("<"):
            found.append(("", []))
        elif words and found:
            found[-1][1].append(words)
    here = [row for row in gated if row[0] in REBOOT]
    return [_preset(name, rows, knobs, here) for name, rows in found if name]


def _preset(
    name: str,
    rows: list[list[str]],
    knobs: Mapping[str, tuple[float, ...]],
    here: list[list[str]],
) -> Preset:
    gated = [row for row in rows if row[0] in REBOOT]
    other = [row[0] for row in (*gated, *here) if (row in gated) != (row in here)]
    if other:
        return Preset(name, None, f"{other[0]} changes only with a reboot")
    values = {knob: choices[-1] for knob, choices in knobs.items()}
    if "cores" in knobs:
        on = [row for row in rows if row[0] == "CPU_ONLINE" and row[-1] == "1"]
        values["cores"] = nearest(float(len(on)), knobs["cores"]) if on else values["cores"]
    for knob, part, scale in (
        ("cpu_hz", "CPU_", 1e3),
        ("gpu_hz", "GPU", 1.0),
        ("mem_hz", "EMC", 1.0),
    ):
        limits = [_number(row[-1]) for row in rows if row[0].startswith(part) and "MAX_FREQ" in row]
        limits = [limit * scale for limit in limits if limit > 0]  # -1 and 0: no limit
        if knob in knobs and limits:
            values[knob] = nearest(max(limits), knobs[knob])
    return Preset(name, Mode.of({knob: values[knob] for knob in knobs}))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
