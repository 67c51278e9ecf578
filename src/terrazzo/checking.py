"""Comparing a net with plain PyTorch, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrazzo.records import CheckReport, CheckRow
from terrazzo.runtime.cut import plain
from terrazzo.runtime.net import Net
from terrazzo.runtime.reference import KeyedRandom
from terrazzo.schedule import split_shares

Named = dict[str, Tensor]


def one_step(model: nn.Module, inputs: Sequence[Any]) -> tuple[Named, Named, Named, Named]:
    """Outputs, input gradients, parameter gradients and buffers of one step.

    The loss is the product of every output with fixed random numbers, so no gradient vanishes by
    symmetry.
    """
    leaves, tree = pytree.tree_flatten(tuple(inputs))
    leaves = [_fresh(leaf) for leaf in leaves]
    result = model(*pytree.tree_unflatten(leaves, tree))
    outputs = {
        f"output {index}": leaf
        for index, leaf in enumerate(pytree.tree_leaves(result))
        if isinstance(leaf, Tensor)
    }
    draw = torch.Generator().manual_seed(1)
    losses = [
        (tensor * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype).to(tensor)).sum()
        for tensor in outputs.values()
        if tensor.requires_grad
    ]
    if losses:
        torch.autograd.backward(torch.stack(losses).sum())
    gradients = {
        f"input {index}": leaf.grad
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.grad is not None
    }
    parameters = {n: plain(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return {n: t.detach() for n, t in outputs.items()}, gradients, parameters, buffers


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().clone().requires_grad_()
    return leaf


def size(tensor: Tensor) -> float:
    """The norm of what is finite: one infinity must not make every gap look small."""
    whole = float(tensor.double().norm())
    if isfinite(whole):  # nearly always: picking values out costs seconds for large tensors
        return whole
    return float(tensor[tensor.isfinite()].double().norm())


def norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(size(tensor) ** 2 for tensor in tensors.values()) ** 0.5)


def row(what: str, plain: Named, spread: Named, tolerance: float) -> CheckRow:
    """The worst of one family: the gap relative to the tensor, or to 1e-3 of the family."""
    floor = 1e-3 * norm(plain) or 1e-30
    worst, where = 0.0, ""
    for name in plain.keys() | spread.keys():
        if name not in plain or name not in spread:
            return CheckRow(what, float("inf"), f"{name} (only one side has it)", 1, tolerance)
        one, other = spread[name].double(), plain[name].double()
        apart = torch.where(one == other, torch.zeros_like(other), one - other)  # also infinities
        gap = float(apart.norm()) / max(size(other), floor)
        if not gap <= worst:
            worst, where = gap, name
    return CheckRow(what, worst, where, len(plain), tolerance)


def compare_with_plain(
    plain: nn.Module, net: Net, inputs: Sequence[Any], *, tolerance: float
) -> CheckReport:
    """One step of both; the worst errors over all devices."""
    with KeyedRandom(net.seed, net.calls + 1):
        expected = one_step(plain, inputs)
    found = one_step(net, inputs)
    families = ("outputs", "input gradients", "parameter gradients", "buffers")
    for name, home in net.homes.items():
        if name in expected[2]:
            expected[2][name] = home.part(expected[2][name])
    rows = [
        row(what, one, other, tolerance)
        for what, one, other in zip(families, expected, found, strict=True)
    ]
    worst = net.links.gather(
        torch.tensor([r.worst for r in rows], dtype=torch.float64), counted=False
    )
    shares = split_shares(net.program)
    return CheckReport(
        rows=tuple(
            CheckRow(r.what, float(w), r.where, r.count, tolerance)
            for r, w in zip(rows, worst.amax(0), strict=True)
        ),
        split_flops=shares.flops,
        split_bytes=shares.bytes,
        devices=net.links.devices,
        plan_text=str(net.plan),
    )
