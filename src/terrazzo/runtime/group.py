"""Group: devices with connections of their own, over gloo.

A gloo transport has a thread that wakes up again and again, message or not (``slack.py``). So this
one shares that of the default process group, and calls gloo without the layers of
torch.distributed in between, which take longer than a small message. What steps send and sum goes
over wires; by gloo goes what is told between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def default_backend() -> Any:
    """The gloo backend of the default process group."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


class Group:
    """``members`` by their numbers among all devices; each of them makes the group at one time.

    ``limit`` bounds every wait, ``meeting`` (if it is another) the one for each other.
    """

    def __init__(
        self,
        members: Sequence[int],
        *,
        store: Store,
        limit: timedelta,
        meeting: timedelta | None = None,
    ) -> None:
        default = default_backend()
        gloo: Any = dist.ProcessGroupGloo  # its options are in no stub
        options = gloo._Options()
        options._devices = default.options._devices
        options._timeout = meeting or limit
        self.limit = limit
        prefixed = PrefixStore("terrazzo", store)
        own = list(members).index(default.rank())
        self._gloo: Any = gloo(prefixed, own, len(members), options)

    def abandon(self) -> None:
        """Lets it lie to the end of the process, with whatever its threads wait for."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.timeout = self.limit
        return self._gloo.broadcast([tensor], options)
