"""Versioned JSON: how a record is written to disk and read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terrazzo.errors import UsageError


def dump(kind: str, version: int, body: Mapping[str, Any]) -> str:
    """One JSON document that says what it is."""
    return json.dumps({"terrazzo": kind, "version": version, **body}, indent=1, allow_nan=False)


def parse(text: str, kind: str, version: int) -> dict[str, Any]:
    """The body of a document, after checking that it is of this kind and version."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"this is no {kind} record: not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("terrazzo") != kind:
        seen = body.get("terrazzo", "nothing") if isinstance(body, dict) else type(body).__name__
        raise UsageError(f"this is no {kind} record: it calls itself {seen!r}")
    if body.get("version") != version:
        raise UsageError(
            f"this {kind} record has version {body.get('version')}, this Terrazzo reads version "
            f"{version}: make it again with this version"
        )
    return body


@contextmanager
def reading(kind: str) -> Iterator[None]:
    """Turns what a record lacks, or holds in a wrong shape, into an error that says so."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"this {kind} record is damaged ({what}): make it again") from error


def write(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old one or the new one, never half of one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
