"""``python -m terrazzo.bench`` and ``terrazzo bench core``: the core, beside its limits."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from terrazzo.bench.core import Finding, measure_all
from terrazzo.records import document


def main() -> int:
    return run(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


def run(target: Path | None) -> int:
    """Measures, prints, and writes JSON if a file is named; 0 if all limits are kept."""
    console = Console()
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    console.print(f"core benchmarks on {machine}\n")
    findings: list[Finding] = []
    for measure in measure_all():
        with console.status(f"measuring {measure.what} ..."):
            findings += measure.run()
    table = Table("what", "case", "measured", "limit", "")
    for finding in findings:
        verdict = "[green]ok[/]" if finding.ok else "[red]missed[/]"
        table.add_row(finding.what, finding.case, finding.text, finding.limit_text, verdict)
    console.print(table)
    if target is not None:
        body = {"machine": machine, "findings": [finding.to_dict() for finding in findings]}
        document.write(target, document.dump("bench", 1, body) + "\n")
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
