"""Terrazzo trains one CNN across several small devices and gives the numbers of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from terrazzo.api import agree, check, feed, init, parallelize, plan
    from terrazzo.journal import log
    from terrazzo.optimizers import lean
    from terrazzo.progress import Run
    from terrazzo.records import CheckReport, Layout, Plan

__all__ = [
    "CheckReport",
    "Layout",
    "Plan",
    "Run",
    "__version__",
    "agree",
    "check",
    "feed",
    "init",
    "lean",
    "log",
    "parallelize",
    "plan",
]

_RECORDS = ("CheckReport", "Layout", "Plan")


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is asked for: the command line starts without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'terrazzo' has no attribute {name!r}")
    if name in _RECORDS:
        from terrazzo import records as module
    elif name == "log":
        from terrazzo import journal as module  # type: ignore[no-redef]
    elif name == "lean":
        from terrazzo import optimizers as module  # type: ignore[no-redef]
    elif name == "Run":
        from terrazzo import progress as module  # type: ignore[no-redef]
    else:
        from terrazzo import api as module  # type: ignore[no-redef]
    return getattr(module, name)
