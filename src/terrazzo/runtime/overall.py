"""Overall: what is computed from all elements of a cut weight, on all devices at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isnan, nan
from typing import Any

import torch
from torch import Tensor

from terrazzo.records.graph import fingerprint
from terrazzo.runtime.agreement import NOTHING, WEIGHT, Note, compare
from terrazzo.runtime.links import Links
from terrazzo.runtime.recovery import give_tensors, perform, take_tensors
from terrazzo.runtime.refused import refusal


def told(links: Links, number: float, *, subject: str, explain: str) -> list[float]:
    """One number of every device."""

    def attempt() -> list[float]:
        note = Note(WEIGHT, 0, subject, NOTHING, flag=number)
        return compare(links, note, explain=explain)

    return perform(
        links,
        attempt,
        take=lambda source: list(take_tensors(links, source)[1]),
        give=lambda told: lambda source: give_tensors(links, [], source, told),
    )


class _Everywhere(torch.autograd.Function):
    """The sum over devices; each device's gradient is that of its own part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, home: Any, what: str) -> Tensor:
        return own.new_tensor(sum(home.everywhere(float(own), what)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _sum(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    x, *rest = args
    if rest or {key for key, value in kwargs.items() if value is not None} - {"input"}:
        raise refusal(x.home, "a sum along some of its dimensions")
    with torch._C.DisableTorchFunctionSubclass():
        total: Tensor = _Everywhere.apply(x.sum(), x.home, "sum")  # type: ignore[no-untyped-call]
    return total


def _norm(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = dict(zip(("x", "ord", "dim", "keepdim", "dtype"), args, strict=False))
    given |= {{"p": "ord", "input": "x", "A": "x"}.get(key, key): v for key, v in kwargs.items()}
    x, order = given.pop("x"), given.pop("ord", 2)
    if any(value not in (None, False) for value in given.values()):
        raise refusal(x.home, "a norm along some of its dimensions")
    if isinstance(order, str) and order != "fro":
        raise refusal(x.home, f"the norm {order!r}")
    order = 2.0 if order in (None, "fro") else float(order)
    if order in (inf, -inf):
        return _extreme(x.abs(), largest=order > 0)
    with torch._C.DisableTorchFunctionSubclass():
        if order == 0:
            return x.new_tensor(sum(x.home.everywhere(float(x.count_nonzero()), "norm 0")))
        power = x.abs().pow(order).sum()
        total: Tensor = _Everywhere.apply(power, x.home, f"norm {order:g}")  # type: ignore[no-untyped-call]
        return total.pow(1.0 / order) if total.detach() != 0 else total * 0.0


def _foreach_norm(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


def _mean(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    return _sum(function, args, kwargs) / args[0].home.shape.numel()


def _extreme(x: Any, *, largest: bool) -> Any:
    """The largest or smallest element; equal ones share the gradient, as in torch."""
    what, none = ("largest", -inf) if largest else ("smallest", inf)
    with torch._C.DisableTorchFunctionSubclass():
        own = float(x.max() if largest else x.min()) if x.numel() else none
        every = x.home.everywhere(own, f"{what} element", silent=none)
        found = nan if any(map(isnan, every)) else (max if largest else min)(every)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x.new_tensor(found)
        chosen = x.detach().isnan() if isnan(found) else x.detach() == found
        count = sum(x.home.everywhere(float(chosen.sum()), f"count of the {what}"))
        part = torch.where(chosen, x, 0).sum() / max(count, 1)
        return _Everywhere.apply(part, x.home, what)  # type: ignore[no-untyped-call]


def _most(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    return _extreme(_alone(function, args, kwargs), largest=function.__name__ in ("max", "amax"))


def _any(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    x = _alone(function, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        found = any(x.home.everywhere(float(bool(x.any())), "any element"))
        return torch.tensor(found, device=x.device)


def _all(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    x = _alone(function, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        missing = any(x.home.everywhere(float(not x.all()), "all elements"))
        return torch.tensor(not missing, device=x.device)


def _alone(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The one argument of something that looks at all elements."""
    given = [*args, *kwargs.values()]
    if len(given) != 1:
        raise refusal(given[0].home, f"torch's {function.__name__} with more than one argument")
    return given[0]


def _numel(function: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Of the whole, as norms are: a mean square is one over the other."""
    x = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        return int(x.home.shape.numel() if x.shape == x.home.box.shape else x.numel())


def _unscale(function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """What ``GradScaler`` does: all devices leave a step out, or none."""
    gradients, found_inf, inverse = args
    links = next(one.home.links for one in gradients if hasattr(one, "home"))
    with torch._C.DisableTorchFunctionSubclass():
        function(gradients, found_inf, inverse)
        subject = fingerprint("GradScaler", len(gradients))
        every = told(links, float(found_inf), subject=subject, explain="GradScaler.unscale_")
        found_inf.fill_(max(every))


REDUCTIONS: dict[str, Callable[[Any, Any, Mapping[str, Any]], Any]] = {
    "sum": _sum,
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    "mean": _mean,
    "max": _most,
    "amax": _most,
    "min": _most,
    "amin": _most,
    "any": _any,
    "all": _all,
    "numel": _numel,
    "nelement": _numel,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
