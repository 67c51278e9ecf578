"""Tracing a model with torch.export, whatever surroundings the call came from."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from terrazzo.errors import ModelError
from terrazzo.graph.regions import keep_regions

KINDS = ("cpu", "cuda")
"""Where a model may run, and autocast be switched on."""


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.export.ExportedProgram:
    """What the model calls, in order; autocast and gradient mode of the caller left out."""
    under_autocast = any(torch.is_autocast_enabled(kind) for kind in KINDS)
    with _errors_of(model, args, kwargs), _plain_context():
        program = torch.export.export(model, args, kwargs, strict=False)
        keep_regions(program, under_autocast=under_autocast)
        return program


def lower(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.export.ExportedProgram:
    """The same as functional ATen operators: most of what an export costs."""
    with _errors_of(model, args, kwargs), _plain_context():
        lowered: torch.export.ExportedProgram = program.run_decompositions({})
        return lowered


def path_taken(program: torch.export.ExportedProgram) -> str:
    """All that a trace has seen, as text: two traces that took one path give the same."""
    modules = [module for module in program.graph_module.modules() if hasattr(module, "graph")]
    nodes = [
        (node.op, node.name, node.target, node.args, node.kwargs, _seen(node))
        for module in modules
        for node in module.graph.nodes
    ]
    return f"{nodes} {program.graph_signature} {program.call_spec.out_spec}"


def _seen(node: torch.fx.Node) -> list[Any]:
    """Shapes and dtypes, or numbers as they are, and the layer that called."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    kinds = [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return [kinds, list(node.meta.get("nn_module_stack") or {})]


@contextlib.contextmanager
def _errors_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """What torch.export stumbles over is told as an error of the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModelError:
        raise
    except Exception as error:  # torch.export raises whatever the model raises
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelError(
            f"{type(model).__name__} cannot be exported for inputs {_shapes(args, kwargs)}: "
            f"{type(error).__name__}: {reason.rstrip('.')}. Check the inputs; if shapes in the "
            "model depend on data, wrap only the part with fixed shapes "
            "(model.backbone = tz.parallelize(...))."
        ) from error


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    leaves = pytree.tree_leaves((args, kwargs))
    found = ["x".join(map(str, x.shape)) for x in leaves if isinstance(x, torch.Tensor)]
    return ", ".join(found) or "without tensors"


@contextlib.contextmanager
def _plain_context() -> Iterator[None]:
    """Whatever the first call of a net was made under: a graph serves calls with gradients too.

    Under no_grad the model's own no_grad regions would not show; autocast would be baked in.
    """
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.enable_grad())
        for kind in KINDS:
            if torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A fixed seed inside, the user's random state untouched outside."""
    python, state = random.getstate(), torch.random.get_rng_state()
    try:
        random.seed(seed)
        torch.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        torch.random.set_rng_state(state)


@contextlib.contextmanager
def fixed_momentum(model: nn.Module) -> Iterator[frozenset[str]]:
    """Gives norms with a cumulative average a momentum for the export; yields their names.

    torch.export refuses momentum=None because it divides by a counter that is data.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.momentum is None
        and module.track_running_stats
        and isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    for module in found.values():
        module.momentum = 0.5
    try:
        yield frozenset(found)
    finally:
        for module in found.values():
            module.momentum = None
