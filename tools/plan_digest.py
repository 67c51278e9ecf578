"""Prints digests of the programs that one graph is lowered to; the same on every machine.

Run as ``plan_digest.py GRAPH.json``. All of it is integer arithmetic without torch, so a board that
plans for itself must find what any other machine finds.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from terrazzo.planner import plan_graph
from terrazzo.records import Graph
from terrazzo.schedule import lower

CHOICES = ((2, "auto", "each"), (3, "tiles:3,2,1x1", "one"), (6, "tiles:2x3", 4))


def main() -> int:
    graph = Graph.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for devices, layout, groups in CHOICES:
        program = lower(graph, plan_graph(graph, devices, layout=layout, groups=groups))
        steps = re.sub(r" at 0x[0-9a-f]+", "", repr(program.steps))  # where a function lies
        digest = hashlib.sha256(steps.encode()).hexdigest()[:16]
        print(f"{devices} devices, layout {layout}, groups {groups}: {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
