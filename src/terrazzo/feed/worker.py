"""A worker: a process of its own that makes batches until nobody wants more."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from terrazzo.errors import DataError
from terrazzo.feed.arena import Arena
from terrazzo.feed.maker import Maker, make_drawn
from terrazzo.feed.task import Made, Recipe
from terrazzo.feed.trays import Trays

NOTE = struct.Struct("<q")
NOBODY = -1


class Board:
    """On which sample each worker is, for the one that dies over it."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, workers * NOTE.size)

    def write(self, worker: int, index: Any) -> None:
        number = index if isinstance(index, int) else NOBODY
        NOTE.pack_into(self._memory, worker * NOTE.size, number)

    def read(self, worker: int) -> int:
        found: int = NOTE.unpack_from(self._memory, worker * NOTE.size)[0]
        return found


def work(
    line: Connection,
    recipe: Recipe,
    arena: Arena | None,
    trays: Trays,
    board: Board,
    number: int,
) -> None:
    """Takes (ticket, tray, task) from the line and answers (ticket, made); None ends it."""
    torch.set_num_threads(1)
    maker = Maker(recipe, arena, watch=recipe.by_sample)
    maker.at = lambda index: board.write(number, index)
    with maker.watching():
        _answer(line, maker, trays)


def _answer(line: Connection, maker: Maker, trays: Trays) -> None:
    while True:
        try:
            asked = line.recv()
        except (EOFError, OSError):
            return
        if asked is None:
            return
        ticket, tray, task = asked
        made = make_drawn(maker, task)
        if made.error is not None:
            made.trace = "".join(traceback.format_exception(made.error.__cause__ or made.error))
            made.error = _portable(made.error)
        maker.at(NOBODY)
        try:
            made.batch = trays.serve(made.batch, tray)
            line.send((ticket, made))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            text = f"a batch could not be handed over: {type(error).__name__}: {error}"
            line.send((ticket, Made(error=DataError(text))))
        except (BrokenPipeError, ConnectionResetError):
            return


def _portable(error: BaseException) -> BaseException:
    """Errors of other packages do not always survive a pickle."""
    if isinstance(error, DataError):
        return DataError(str(error))
    return DataError(f"{type(error).__name__}: {error} (in worker process {os.getpid()})")
