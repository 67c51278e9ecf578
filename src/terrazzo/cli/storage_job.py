"""What devices run to have the medium of one of them measured: the first does it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from terrazzo.cli.recording import RUN_FOLDER
from terrazzo.errors import TerrazzoError
from terrazzo.measure.storage import measure_storage

STORAGE_FILE = "storage.json"


def main() -> int:
    if os.environ.get("RANK", "0") != "0":
        return 0
    try:
        found = measure_storage(Path(sys.argv[1]), budget_s=float(sys.argv[2]))
        found.save(Path(os.environ[RUN_FOLDER]) / STORAGE_FILE)
    except TerrazzoError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
