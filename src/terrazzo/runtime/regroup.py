"""Regroup: links among the members of a new view, in place of those that broke."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from terrazzo.members.control import Control, Interrupted
from terrazzo.members.view import View
from terrazzo.runtime.board import Board
from terrazzo.runtime.links import Links, adopt
from terrazzo.runtime.slack import late_timers
from terrazzo.runtime.sockets import connections

MEETING_S = 10.0
"""How long connecting may take: all members are known to be ready for it."""


def regroup(links: Links, control: Control, view: View, *, tried: int = 0) -> None:
    """Makes the links anew; raises Interrupted where somebody is lost meanwhile.

    ``tried``: so often it did not help; devices that are slow are given longer every time.
    """
    meeting_s = MEETING_S * 2**tried
    links.hang_up()
    links.drop()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    links.epoch, links.members = view.epoch, view.members
    links.is_alone = len(view.members) == 1
    links.device, links.devices = view.members.index(control.me), len(view.members)
    try:
        if links.devices > 1:
            _connect(links, Board(control, view.epoch, meeting_s), meeting_s)
    except Exception as error:
        links.hang_up()
        control.alarm()
        raise Interrupted(f"connecting the members of epoch {view.epoch}: {error}") from error
    adopt(links)


def _connect(links: Links, board: Board, meeting_s: float) -> None:
    links.board = board  # torch keeps the half of it that is not Python's
    baseline = connections()
    links.begin(baseline)
    told_by = sys.excepthook
    with late_timers():
        dist.init_process_group(
            "gloo",
            store=PrefixStore("terrazzo", board),
            rank=links.device,
            world_size=links.devices,
            timeout=timedelta(seconds=meeting_s),
        )
    sys.excepthook = told_by  # torch has put its own before it, once more each time
    links.connect(PrefixStore("links", board), meeting_s=meeting_s)
    limit = timedelta(seconds=links.timeout_s)
    with contextlib.suppress(Exception):  # for a script that uses torch.distributed by itself
        dist.distributed_c10d._set_pg_timeout(limit)
