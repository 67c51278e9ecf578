"""Inventory: what a graph depends on in a model, looked at before every call.

A layer may be set to another mode, replaced, frozen or given a hook between two calls. Reading all
of that takes longer than a small layer computes, so a second look only compares dictionaries with
their copies, and everything is read again only where one differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from terrazzo.errors import UsageError
from terrazzo.records.graph import fingerprint

PLAIN = (bool, int, float, str, tuple, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Inventory:
    """The layers of a model, their settings and the precision of their weights, at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = [_Seen(module) for module in model.modules()]
        self._parameters = tuple(model.parameters())
        with torch._C.DisableTorchFunctionSubclass():
            self._dtypes = [parameter.dtype for parameter in self._parameters]
        precision = tuple(dict.fromkeys(map(str, self._dtypes)))
        settings = tuple(_settings(*named) for named in model.named_modules())
        self.modules = tuple(id(seen.module) for seen in self._seen)
        """A layer put in place of another needs a graph of its own."""
        self.digest = fingerprint((settings, precision))
        """Of what a graph is made for."""

    def holds(self) -> bool:
        """Whether the model is still as it was."""
        for seen in self._seen:
            if not seen.same():
                return False
        with torch._C.DisableTorchFunctionSubclass():
            return self._dtypes == [parameter.dtype for parameter in self._parameters]

    @property
    def trained(self) -> list[bool]:
        """Which parameters ask for gradients, at this moment."""
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.requires_grad for parameter in self._parameters]


class _Seen:
    """One layer as it was: its attributes, and what is in those that are dictionaries."""

    __slots__ = ("attributes", "children", "hooks", "module", "parameters")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.children = list(module._modules.values())
        self.parameters = [id(parameter) for parameter in module._parameters.values()]
        self.hooks = [vars(module).get(name) for name in HOOKS]

    def same(self) -> bool:
        module = self.module
        try:
            if vars(module) != self.attributes:  # equal objects count without being compared
                return False
        except (RuntimeError, ValueError):  # another tensor or array: no single truth
            return False
        return (
            not any(self.hooks)
            and list(module._modules.values()) == self.children
            and [id(parameter) for parameter in module._parameters.values()] == self.parameters
        )


def _settings(layer: str, module: nn.Module) -> tuple[object, ...]:
    """The plain attributes of a layer: a graph is made for their values."""
    attributes: dict[str, Any] = vars(module)
    for hooks in HOOKS:
        if attributes.get(hooks):
            raise UsageError(
                f"{layer or 'the model'} ({type(module).__name__}) has a hook ({hooks[1:]}), which "
                "a net would not call: remove it, or leave the layer out of what is parallelized"
            )
    plain = tuple(
        (name, repr(value) if isinstance(value, tuple) else value)
        for name, value in attributes.items()
        if isinstance(value, PLAIN) and name[0] != "_"
    )
    return type(module).__name__, plain
