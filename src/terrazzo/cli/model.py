"""A model named on the command line: ``file.py:callable``, ``module:callable``, or of the zoo."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.errors import ModelError

if TYPE_CHECKING:
    import argparse

    from torch import nn

FORM = "write FILE.py:CALLABLE or PACKAGE.MODULE:CALLABLE, such as net.py:build"
FILE_MODULE = "terrazzo_checked_model"


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a model and say what it takes."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="FILE.py:CALLABLE, MODULE:CALLABLE, or a model of the zoo such as resnet18",
    )
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="SHAPE[:TYPE]",
        help="shape of an input, such as 2x3x224x224; again for each further input",
    )


@dataclass(frozen=True, slots=True)
class ModelReference:
    """Where a model comes from: a file or module, and the name in it that builds the model.

    Without a file or module it is the name of a model in the zoo.
    """

    source: str
    name: str

    @classmethod
    def parse(cls, text: str) -> ModelReference:
        """Reads the reference and finds what is wrong with it without importing anything."""
        if re.fullmatch("[a-z][a-z0-9-]*", text):
            return cls("", text)
        source, colon, name = text.rpartition(":")
        if not colon or not source or not name:
            raise ModelError(f"model {text!r} names no callable; {FORM}")
        reference = cls(source, name)
        if reference.is_file and not Path(source).is_file():
            raise ModelError(f"model {text!r}: there is no file {source}; check the path")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ModelError(f"model {text!r}: {name!r} is no Python name; {FORM}")
        return reference

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py") or "/" in self.source

    def __str__(self) -> str:
        return f"{self.source}:{self.name}" if self.source else self.name

    def build(self) -> nn.Module:
        """Imports the source and calls the name, or takes it as it is if it is a module."""
        from torch import nn

        if not self.source:
            return self._of_zoo()
        found = self._find(self._import())
        if isinstance(found, nn.Module):
            return found
        if not callable(found):
            raise ModelError(
                f"model {self}: {self.name} is a {type(found).__name__}; it must be an nn.Module "
                "or a function without arguments that returns one"
            )
        try:
            model = found()
        except Exception as error:
            raise ModelError(
                f"model {self}: calling {self.name}() raised {_one_line(error)}; it must work "
                "without arguments"
            ) from error
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"model {self}: {self.name}() returned a {type(model).__name__}; it must return "
                "an nn.Module"
            )
        return model

    def _of_zoo(self) -> nn.Module:
        from terrazzo import zoo

        if self.name not in zoo.NAMES:
            raise ModelError(
                f"no model {self.name!r} in the zoo; there are {', '.join(zoo.NAMES)}. For a model "
                f"of your own, {FORM}"
            )
        return zoo.build(self.name)

    def value(self) -> Any:
        """What the name stands for; a function or class without arguments is called."""
        if not self.source:
            raise ModelError(f"{self.name!r} names no callable; {FORM}")
        found = self._find(self._import())
        is_there = hasattr(found, "__getitem__") and not isinstance(found, type)
        if is_there or not callable(found):
            return found
        try:
            return found()
        except Exception as error:
            raise ModelError(
                f"{self}: calling {self.name}() raised {_one_line(error)}; it must work without "
                "arguments"
            ) from error

    def _import(self) -> ModuleType:
        try:
            return _import_file(Path(self.source)) if self.is_file else self._import_module()
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"model {self}: importing {self.source} raised {_one_line(error)}; make "
                "`python -c 'import ...'` of it work first"
            ) from error

    def _import_module(self) -> ModuleType:
        try:
            return importlib.import_module(self.source)
        except ModuleNotFoundError as error:
            # Only the named module itself: one missing deeper down is the model's own affair.
            if error.name and (self.source + ".").startswith(error.name + "."):
                raise ModelError(
                    f"model {self}: there is no module {error.name}; install it, or run from the "
                    "folder that holds it"
                ) from error
            raise

    def _find(self, module: ModuleType) -> Any:
        try:
            return attrgetter(self.name)(module)
        except AttributeError as error:
            names = [key for key, value in vars(module).items() if _is_offer(value, module)]
            offers = f"it has {', '.join(sorted(names)[:8])}" if names else "it defines no callable"
            raise ModelError(f"model {self}: {self.source} has no {self.name}; {offers}") from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(FILE_MODULE, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"model file {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as running the file would, for its neighbours
    sys.modules[FILE_MODULE] = module
    spec.loader.exec_module(module)
    return module


def _is_offer(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
