"""What tz.feed is asked for, as a script or a command line may say it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.errors import UsageError
from terrazzo.feed.source import Source
from terrazzo.feed.sources import source_of

sys.path.insert(0, str(Path(__file__).parent))
from pictures import Numbers


def source(cache: str | int | None) -> Source:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(2, 3, 8, 8),))
    found = source_of(Numbers(), net, batch_size=4, cache=cache)
    assert isinstance(found, Source)
    return found


@pytest.mark.parametrize(
    ("cache", "found_bytes"), [(None, None), (0, 0), ("0", 0), ("2MiB", 2 << 20), (77, 77)]
)
def test_memory_for_samples(cache: str | int | None, found_bytes: int | None) -> None:
    assert source(cache).options.cache_bytes == found_bytes


@pytest.mark.parametrize("cache", ["", "much", -1])
def test_no_memory_at_all(cache: str | int) -> None:
    with pytest.raises(UsageError, match="is no amount of memory"):
        source(cache)
