"""TOML, the format of files that people write: presets of devices, clusters."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file; ``what`` names it in an error."""
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise UsageError(f"{what} {path} needs tomli on this Python: pip install tomli") from None
    try:
        tables: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} {path} cannot be read: {error}") from error
    return tables


def toml_value(value: str | int | float | bool) -> str:
    """A plain value as TOML writes it, which is how JSON does."""
    return json.dumps(value, ensure_ascii=False)
