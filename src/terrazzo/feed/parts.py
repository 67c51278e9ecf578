"""Parts: which samples of a data set a device has, as it says and as it tells the others."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from terrazzo.errors import UsageError
from terrazzo.feed.seeded import order_of
from terrazzo.feed.source import Source

ALL = "all"


def part_of(mine: Iterable[int], source: Source) -> Tensor:
    """For each sample whether this device has it."""
    if not is_by_row(source):
        raise UsageError(
            "mine= says that a data set lies in parts, whose samples are put together row by row: "
            'leave out sampler=, collate= and bad="skip", and let the data set be map-style'
        )
    order = order_of(source.loader)
    assert order is not None
    given = mine if isinstance(mine, (Tensor, np.ndarray)) else list(mine)
    indices = torch.as_tensor(given, dtype=torch.int64).flatten()
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < order.samples:
        raise UsageError(
            f"mine= holds samples {int(indices.min())} to {int(indices.max())}, and "
            f"{type(source.loader.dataset).__name__} has {order.samples}: they are numbered from 0 "
            "over all devices, and every device gives a data set of the full length"
        )
    found = torch.zeros(order.samples, dtype=torch.bool)
    found[indices] = True
    return found


def is_by_row(source: Source) -> bool:
    """Whether a batch is its samples row by row, whoever makes which of them."""
    recipe = source.recipe
    return (
        recipe.seed is not None
        and recipe.by_sample
        and not recipe.skip
        and recipe.collate is default_collate
        and order_of(source.loader) is not None
    )


def told(mine: Tensor | None) -> str:
    """For the other devices: a bit for each sample."""
    if mine is None:
        return ALL
    return b64encode(np.packbits(mine.numpy()).tobytes()).decode()


def heard(text: str, samples: int) -> Tensor:
    """The other side of ``told``; nothing: a device without the data set."""
    if text == ALL:
        return torch.ones(samples, dtype=torch.bool)
    if not text:
        return torch.zeros(samples, dtype=torch.bool)
    bits = np.unpackbits(np.frombuffer(b64decode(text), dtype=np.uint8))[:samples]
    return torch.from_numpy(bits.astype(bool))
