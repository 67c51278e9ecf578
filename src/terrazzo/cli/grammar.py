"""The command line as data: its commands, their options, and what may follow each.

Read off the argparse parser, so it can't fall behind it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOTHING, WORDS, FILES, FOLDERS, SCRIPTS = "nothing", "words", "files", "folders", "scripts"

# Values that argparse knows only as text, though some words are always possible.
KNOWN_WORDS = {"layout": ("auto", "whole", "tiles:"), "groups": ("auto", "each", "one")}
KNOWN_KINDS = {
    "DIR": FOLDERS,
    "FOLDER": FOLDERS,
    "FILE": FILES,
    "MODEL": SCRIPTS,
    "script": SCRIPTS,
}


@dataclass(frozen=True, slots=True)
class Values:
    """What may stand in one place: nothing to suggest, words, or files of some kind."""

    kind: str = NOTHING
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """An option with all its spellings; ``values`` is None for a plain switch."""

    flags: tuple[str, ...]
    help: str
    values: Values | None


@dataclass(frozen=True, slots=True)
class Command:
    """A command, its path from the top without the program's name, and the commands below it."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    places: tuple[Values, ...]
    passes_on: bool
    """Whether all that follows the places belongs to somebody else."""
    commands: tuple[Command, ...]

    def walk(self) -> Iterator[Command]:
        """This command and all below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


def grammar(
    parser: argparse.ArgumentParser, *, path: tuple[str, ...] = (), about: str = ""
) -> Command:
    """The commands below a parser."""
    commands: list[Command] = []
    options: list[Option] = []
    places: list[Values] = []
    passes_on = False
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands += [
                grammar(below, path=(*path, name), about=helps.get(name, ""))
                for name, below in action.choices.items()
            ]
        elif action.option_strings:
            values = None if action.nargs == 0 else _values(action)
            text = formatter._expand_help(action) if action.help else ""
            options.append(Option(tuple(action.option_strings), text, values))
        elif action.nargs == argparse.REMAINDER:
            passes_on = True
        else:
            places.append(_values(action))
    return Command(path, about, tuple(options), tuple(places), passes_on, tuple(commands))


def _values(action: argparse.Action) -> Values:
    if action.choices is not None:
        return Values(WORDS, tuple(map(str, action.choices)))
    if action.dest in KNOWN_WORDS:
        return Values(WORDS, KNOWN_WORDS[action.dest])
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return Values(KNOWN_KINDS.get(name, FILES if action.type is Path else NOTHING))
