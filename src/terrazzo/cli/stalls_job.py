"""What each device runs for ``terrazzo data stalls --model --data``: a plain training loop."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

import terrazzo as tz
from terrazzo.cli.model import ModelReference
from terrazzo.errors import TerrazzoError, UsageError

EPOCHS = 1000
"""A trial ends by itself, long before."""


def main() -> int:
    model_text, data_text, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        _train(model_text, data_text, batch)
    except TerrazzoError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _train(model_text: str, data_text: str, batch: int) -> None:
    device = tz.init()
    model = ModelReference.parse(model_text).build().train()
    data = _data(data_text, batch)
    is_loader = isinstance(data, DataLoader)
    options: dict[str, Any] = {} if is_loader else {"batch_size": batch, "drop_last": True}
    x = _picture(next(iter(data if is_loader else DataLoader(data, batch))))
    net = tz.parallelize(model, (_scaled(x),))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for _ in range(EPOCHS):
        for fed in tz.feed(data if device == 0 else None, net, **options):
            output = net(_scaled(_first(fed)))
            loss = sum(leaf.float().square().mean() for leaf in pytree.tree_leaves(output))
            assert isinstance(loss, torch.Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


def _data(text: str, batch: int) -> Any:
    """What the name stands for: a loader, or a data set of either kind, which tz.feed takes."""
    data = ModelReference.parse(text).value()
    if isinstance(data, DataLoader | IterableDataset):
        return data
    is_map = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, nn.Module) or not is_map:
        raise UsageError(
            f"{text} is a {type(data).__name__}: --data wants a data set (with a length and "
            "numbered samples, or an IterableDataset) or a DataLoader"
        )
    if len(data) < batch:
        raise UsageError(
            f"data set {text} has {len(data)} samples, --batch is {batch}: give no more than that"
        )
    return data


def _first(batch: Any) -> Any:
    return pytree.tree_leaves(batch)[0]


def _picture(batch: Any) -> torch.Tensor:
    first = _first(batch)
    if not isinstance(first, torch.Tensor) or first.ndim < 2:
        raise UsageError(
            f"the data set gives {type(first).__name__} first: --data wants pictures as tensors, "
            "and targets after them"
        )
    return first


def _scaled(x: Any) -> Any:
    return x.float() / 255 if x.dtype == torch.uint8 else x


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
