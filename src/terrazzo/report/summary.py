"""The summary: the numbers of a report as JSON, for scripts."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.records import document
from terrazzo.report.outcome import outcome
from terrazzo.report.reading import Reading
from terrazzo.report.verdict import verdict

KIND, VERSION = "summary", 1


def summary_json(reading: Reading) -> str:
    """What a report says, without words."""
    gaps, weights = reading.loss_gaps, reading.comparison
    body: dict[str, Any] = {
        "run": reading.title,
        "devices": reading.devices,
        "exact": verdict(reading)[0],
        "steps": len(reading.losses) or len(reading.steps),
        "loss_gap": _number(max(gaps.values())) if gaps else None,
        "weights_gap": _number(weights.weights_worst) if weights else None,
        "predicted": _predicted(reading),
        **_measured(reading),
        "alone": _measured(reading.alone) if reading.alone else None,
    }
    return document.dump(KIND, VERSION, body)


def _predicted(reading: Reading) -> dict[str, Any] | None:
    """What was predicted of a step, beside what it took."""
    found = outcome(reading)
    if found is None:
        return None
    return {
        "step_s": found.step.predicted_s,
        "compute_s": [figure.predicted_s for figure in found.total.compute],
        "measured_compute_s": [figure.measured_s for figure in found.total.compute],
        "steps": found.steps,
    }


def _measured(reading: Reading) -> dict[str, Any]:
    return {
        "step_s": _number(reading.step_s),
        "sent_bytes_per_step": [sum(kinds.values()) for kinds in reading.sent_bytes.values()],
        "memory": [
            {
                "device": memory.device,
                "idle_bytes": memory.idle_bytes,
                "setup_bytes": memory.setup_bytes,
                "peak_bytes": memory.peak_bytes,
            }
            for memory in reading.memory
        ],
        "energy": _energy(reading),
    }


def _energy(reading: Reading) -> dict[str, Any] | None:
    found = reading.energy
    if found is None:
        return None
    return {
        "step_j": found.step_j,
        "sample_j": found.sample_j,
        "measured": found.is_measured,
        "whole": found.is_whole,
        "devices": [
            {
                "device": row.device,
                "step_j": row.step_j,
                "mean_w": row.mean_w,
                "peak_w": row.peak_w,
                "phases_j": dict(row.phases_j),
                "measured": row.is_measured,
                "whole": row.is_whole,
                "sources": list(row.sources),
                "doubts": list(row.doubts),
            }
            for row in found.devices
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
