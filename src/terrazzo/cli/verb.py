"""A verb of a noun on the command line: ``terrazzo lab verify``, ``terrazzo bench race``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_verb(below: Commands, name: str, about: str, epilog: str = "") -> argparse.ArgumentParser:
    """One more command below a noun; what it is about is its help and its description."""
    return below.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
