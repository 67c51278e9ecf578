"""Inventory: what a graph depends on in a model, looked at before every call.

A layer may be set to another mode, replaced, frozen or given a hook between two calls. Reading all
of that takes longer than a small layer computes, so a second look only compares dictionaries with
their copies, and everything is read again only where one differs.
"""

from __future__ import annotations

from copy import copy
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.errors import UsageError
from terrazzo.records.graph import fingerprint

PLAIN = (bool, int, float, str, tuple, type(None))
OWN = frozenset(vars(nn.Module())) - {"training"}
"""What every layer has for itself: parameters, buffers, layers within, hooks."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Inventory:
    """The layers of a model, their settings and the precision of their weights, at one time."""

    def __init__(self, model: nn.Module, before: Inventory | None = None) -> None:
        self._seen = [_Seen(module) for module in model.modules()]
        self._changes: int = 0 if before is None else before._changes_now()
        """How often a tensor that is neither parameter nor buffer was another one."""
        self._parameters = tuple(model.parameters())
        with torch._C.DisableTorchFunctionSubclass():
            self._dtypes = [parameter.dtype for parameter in self._parameters]
        precision = tuple(dict.fromkeys(map(str, self._dtypes)))
        settings = tuple(_settings(*named) for named in model.named_modules())
        self.modules = tuple(id(seen.module) for seen in self._seen)
        """A layer put in place of another needs a graph of its own."""
        self.digest = fingerprint((settings, precision, self._changes))
        """Of what a graph is made for."""

    def holds(self) -> bool:
        """Whether the model is still as it was."""
        for seen in self._seen:
            if not seen.same():
                return False
        with torch._C.DisableTorchFunctionSubclass():
            return self._dtypes == [parameter.dtype for parameter in self._parameters]

    def _changes_now(self) -> int:
        """One more if some that a graph may have taken in as constants are not what they were."""
        return self._changes + any(seen.has_other_tensors() for seen in self._seen)

    @property
    def trained(self) -> list[bool]:
        """Which parameters ask for gradients, at this moment."""
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.requires_grad for parameter in self._parameters]


class _Seen:
    """One layer as it was: its attributes, and what is in those that are dictionaries."""

    __slots__ = ("attributes", "children", "hooks", "module", "parameters", "tensors")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {
            name: copy(value) if isinstance(value, (list, dict, set)) and name not in OWN else value
            for name, value in vars(module).items()
        }
        self.tensors = self._tensors()
        self.children = list(module._modules.values())
        self.parameters = [id(parameter) for parameter in module._parameters.values()]
        self.hooks = [vars(module).get(name) for name in HOOKS]

    def _tensors(self) -> list[tuple[str, int, int]]:
        """Attributes that are tensors, and which, and how often they were written to."""
        return [
            (name, id(value), value._version)
            for name, value in vars(self.module).items()
            if isinstance(value, Tensor)
        ]

    def has_other_tensors(self) -> bool:
        return self._tensors() != self.tensors

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
            and not (self.tensors and self.has_other_tensors())
        )


def _settings(layer: str, module: nn.Module) -> tuple[object, ...]:
    """The attributes of a layer as far as they can be told: a graph is made for their values."""
    attributes: dict[str, Any] = vars(module)
    where = f"{layer or 'the model'} ({type(module).__name__})"
    for hooks in HOOKS:
        if attributes.get(hooks):
            raise UsageError(
                f"{where} has a hook ({hooks[1:]}), which "
                "a net would not call: remove it, or leave the layer out of what is parallelized"
            )
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            raise UsageError(
                f"{where} has a tensor {name} that asks for a gradient and is no parameter: a net "
                "would give it none. Make it an nn.Parameter, or detach it"
            )
    told = ((name, _told(value)) for name, value in attributes.items() if name not in OWN)
    return type(module).__name__, tuple(pair for pair in told if pair[1] is not UNTOLD)


UNTOLD = object()


def _told(value: Any) -> object:
    """A value in words that are the same on every device."""
    if isinstance(value, tuple):
        return repr(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}, line {value.__code__.co_firstlineno}"
    if isinstance(value, BuiltinFunctionType):
        return repr(value.__name__)
    if isinstance(value, (list, set, dict)):
        inner = [*value, *(value.values() if isinstance(value, dict) else ())]
        if all(isinstance(one, PLAIN) and not isinstance(one, tuple) for one in inner):
            return repr(sorted(map(repr, value)) if isinstance(value, set) else value)
    return UNTOLD
