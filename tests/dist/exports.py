"""Exports that are used again: one takes longer than most of what is checked with it.

Between tests, only those of models that are nothing but layers of torch.nn, or that say
``keeps_export`` of themselves, are kept. All that their export depends on is in sight: it is the
name under which the export is kept.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrazzo import api
from terrazzo.graph.export import Export, export
from terrazzo.graph.tracing import KINDS
from terrazzo.runtime import aside, shipping

PARTS = {"_parameters", "_buffers", "_modules"}


@contextmanager
def one_export(path: Path) -> Iterator[None]:
    """Inside is one model, in one mode, for inputs of one shape: exported for its first net."""
    real = shipping.export

    def first(*args: Any) -> Export:
        if not path.exists():
            path.write_bytes(pickle.dumps(real(*args)))
        found: Export = pickle.loads(path.read_bytes())
        return found

    shipping.export = aside.export = first
    try:
        yield
    finally:
        shipping.export = aside.export = real


def keep_exports(folder: Path) -> None:
    """From now on, in this process, what was exported before with this folder is read."""

    def kept(
        model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Export:
        text = description(model, args, kwargs or {})
        path = folder / hashlib.sha256(text.encode()).hexdigest()
        if text and path.exists():
            found: Export = pickle.loads(path.read_bytes())
            return found
        made = export(model, args, kwargs)
        if text and not made.constants:
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(pickle.dumps(made))
            draft.rename(path)
        return made

    shipping.export = aside.export = api.export = kept


def description(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """All that decides what the export will be; nothing where that cannot be known."""
    layers = list(model.named_modules(remove_duplicate=False))
    if not all(_plain(type(layer)) for _, layer in layers):
        return ""
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first = {id(part): name for name, part in reversed([*layers, *tensors])}  # who shares with whom
    own = [(name, first[id(layer)], type(layer), _settings(layer)) for name, layer in layers]
    state = [(name, first[id(tensor)], *_outline(tensor)) for name, tensor in tensors]
    given = [_outline(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    cast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS]
    text = repr((own, state, given, str(tree), cast, torch.is_grad_enabled()))
    return "" if " at 0x" in text else text  # a function: what it does is not in sight


def _plain(kind: type[nn.Module]) -> bool:
    return getattr(nn, kind.__name__, None) is kind or getattr(kind, "keeps_export", False)


def _settings(layer: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name not in PARTS}


def _outline(tensor: Tensor) -> tuple[Any, ...]:
    where = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return type(tensor), *where, tensor.requires_grad
