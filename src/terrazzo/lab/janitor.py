"""The janitor: waits for a lab's process to die, and cleans up after it, ``kill -9`` included.

Run as ``python -m terrazzo.lab.janitor FOLDER PROCESS`` with a pipe as its input that only the
lab's process holds open; its end is the lab's end. What a device left running must not go on
computing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from terrazzo.lab import state
from terrazzo.lab.clean import remove_dead
from terrazzo.lab.groups import find_groups


def main() -> None:
    folder, maker = Path(sys.argv[1]), int(sys.argv[2])
    closed_in_order = sys.stdin.buffer.read()
    while not closed_in_order and os.getppid() == maker:
        time.sleep(0.01)  # the files of a process close a moment before it counts as dead
    with state.alone(folder):
        remove_dead(find_groups(), folder)


if __name__ == "__main__":
    main()
