"""Lean optimisers: torch's own, without the compiler that the first of a process would load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=type[Optimizer])

COMPILER = "torch._dynamo"
LOADERS = ("torch._compile", "torch.optim.optimizer")
"""Modules of torch whose decorators load the compiler, to keep what they wrap out of its graphs."""
WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def lean(kind: Kind) -> Kind:
    """A class of optimisers like ``kind`` that takes some 67 MiB less of a process.

    ``tz.lean(torch.optim.SGD)(model.parameters(), lr=0.1)`` makes the same steps, has the same
    state and is a ``torch.optim.SGD``. Not to be traced by ``torch.compile``. What is not torch's
    own is left as it is, so a class of your own loads the compiler if it calls torch's methods.
    On devices with less than 2 GiB all of torch's optimisers are so by themselves.
    """
    return _lean(kind)  # type: ignore[arg-type,return-value]


def spare_compiler() -> None:
    """Makes torch's own optimisers lean in this process, unless the compiler is loaded already.

    For small devices, where a script should not have to say ``tz.lean``: its optimisers, also its
    own classes that build on torch's, then do without.
    """
    if COMPILER in sys.modules:
        return
    for kind in list(vars(torch.optim).values()):
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            for name, method in _bare_methods(kind).items():
                if name in vars(kind):
                    setattr(kind, name, method)


@cache
def _lean(kind: type[Optimizer]) -> type[Optimizer]:
    body = _bare_methods(kind) | {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def _bare_methods(kind: type[Optimizer]) -> dict[str, Any]:
    """What of its methods would load the compiler, without that."""
    found = {name: _bare(getattr(kind, name)) for name in WRAPPED}
    body: dict[str, Any] = {n: bare for n, bare in found.items() if bare is not getattr(kind, n)}
    step = _bare(kind.step)
    if step is not kind.step:
        body["step"] = _without_gradients(step)
    return body


def _bare(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method as it was written, without what torch has put around it."""
    while _made_in(method) in LOADERS and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


def _made_in(method: Callable[..., Any]) -> str:
    """The module of its code: decorators copy the name of what they wrap."""
    return str(getattr(method, "__globals__", {}).get("__name__", ""))


def _without_gradients(step: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's decorator of steps is there for."""

    @wraps(step)
    def quiet(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(bool(self.defaults.get("differentiable", False))):
            return step(self, *args, **kwargs)

    return quiet
