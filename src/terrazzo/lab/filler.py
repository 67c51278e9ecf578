"""Takes a device's memory and holds it, as a program that nobody expected would.

Run by path inside a device as ``python -I -S filler.py BYTES``; it says ``full`` when it has them.
It asks the kernel to end others first.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from pathlib import Path

STEP = 4 << 20


def main() -> None:
    wanted = int(sys.argv[1])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000", encoding="ascii")
    held = []
    for _ in range(max(1, wanted // STEP)):
        space = mmap.mmap(-1, STEP)
        for page in range(0, STEP, mmap.PAGESIZE):
            space[page] = 1
        held.append(space)
    print("full", flush=True)
    while held:
        time.sleep(3600)


if __name__ == "__main__":
    main()
