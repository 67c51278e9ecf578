"""What each device runs for ``terrazzo check``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

import terrazzo
from terrazzo.cli.check_job import CheckJob
from terrazzo.cli.model import ModelReference
from terrazzo.cli.tensor import TensorSpec
from terrazzo.errors import TerrazzoError
from terrazzo.records import document
from terrazzo.records.check import CheckReport


def main() -> int:
    folder, device = Path(sys.argv[1]), int(os.environ["RANK"])
    try:
        report = _check(CheckJob.read(folder))
    except TerrazzoError as error:
        # For the parent, which prints one device's message as its own.
        document.write(CheckJob.error_path(folder, device), str(error))
        return 2
    if device == 0:
        document.write(CheckJob.report_path(folder), report.to_json())
    return 0


def _check(job: CheckJob) -> CheckReport:
    torch.manual_seed(job.seed)
    model = ModelReference.parse(job.model).build().double().train(job.training)
    generator = torch.Generator().manual_seed(job.seed)
    inputs = tuple(TensorSpec.parse(text).draw(generator) for text in job.inputs)
    terrazzo.init()
    chosen: dict[str, Any] = {}
    if job.layout is not None:
        chosen["layout"] = job.layout
    if job.groups is not None:
        chosen["groups"] = _groups(job.groups)
    return terrazzo.check(model, inputs, tolerance=job.tolerance, **chosen)


def _groups(text: str) -> str | int | tuple[str, ...]:
    """``each`` and ``one`` as they are, a number, or the names of layers that end groups."""
    if text in ("auto", "each", "one"):
        return text
    if text.isdigit():
        return int(text)
    return tuple(name.strip() for name in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
