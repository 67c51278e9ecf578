"""Cut weights: parameters of which a device holds one box, and what is computed from them.

To an optimiser a cut weight is a smaller tensor: whatever works element by element works on it.
Sums and norms run over the whole weight, on all devices at once, so that clipping by a global norm
means what it says. Anything else would need the elements that are elsewhere, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.errors import UsageError
from terrazzo.geometry import Box
from terrazzo.graph.rules.pointwise import BINARY, UNARY
from terrazzo.records.graph import fingerprint
from terrazzo.runtime.agreement import NOTHING, WEIGHT, Note, compare
from terrazzo.runtime.links import Links
from terrazzo.runtime.recovery import give_tensors, perform, take_tensors
from terrazzo.schedule.homes import owners


@dataclass(frozen=True)
class Home:
    """Where the parts of one weight live."""

    name: str
    shape: torch.Size
    boxes: tuple[Box, ...]
    links: Links
    place: int = field(init=False)
    """The number of this device when weights came to live there; it may be another by now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", self.links.device)

    @property
    def box(self) -> Box:
        return self.boxes[self.place]

    @property
    def counts(self) -> bool:
        """Of devices that hold the same part, the first speaks for all."""
        return owners(self.boxes)[self.place] == self.box

    def part(self, whole: Tensor) -> Tensor:
        return whole[self.box.slices()].clone()

    def marked(self, part: Tensor) -> Tensor:
        """Something with the shape of this part, with the manners of a cut weight."""
        found = part.as_subclass(CutTensor)
        found.home = self
        return found

    def gather(self, part: Tensor) -> Tensor:
        """The whole weight, on every device."""
        whole = torch.empty(self.shape, dtype=part.dtype, device=part.device)
        for device, box in enumerate(owners(self.boxes)):
            if not box.is_empty:
                mine = device == self.place
                piece = part if mine else torch.empty(box.shape, dtype=part.dtype)
                whole[box.slices()] = self.links.broadcast(piece.clone().contiguous(), device)
        return whole

    def everywhere(self, number: float, what: str) -> list[float]:
        """One number of every device, 0 from those that another speaks for."""

        def attempt() -> list[float]:
            own = number if self.counts else 0.0
            note = Note(WEIGHT, 0, fingerprint(self.name, what), NOTHING, flag=own)
            return compare(self.links, note, explain=f"{what} of the cut weight {self.name}")

        return perform(
            self.links,
            attempt,
            take=lambda source: list(take_tensors(self.links, source)[1]),
            give=lambda told: lambda source: give_tensors(self.links, [], source, told),
        )


def plain(tensor: Tensor) -> Tensor:
    """A tensor without a past, and without the manners of a cut one."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


class CutTensor(Tensor):
    """A part of a weight, of its gradient, or of something computed from them."""

    home: Home

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.__name__
        home = next(leaf.home for leaf in _tensors(args, kwargs) if isinstance(leaf, CutTensor))
        if name in _REDUCTIONS:
            return _REDUCTIONS[name](function, args, kwargs)
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(function, args, home)
        if not _is_elementwise(name):
            raise _refusal(home, f"torch's {name}")
        _check_shapes(name, args, kwargs, home)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            return type(result)(_each_kept(result, args[0], home))
        return _kept(result, home)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _refusal(self.home, "a copy of it")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"{_story(self.home)}, so saving it from here would lose the rest: on all devices call "
            "net.state_dict(), which holds whole weights, and save that on one"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{type(self).__name__}({self.home.box} of {self.home.name}, {plain(self)!r})"


class CutParameter(CutTensor, nn.Parameter):
    """A parameter of which this device holds one box."""


def taken(parameter: nn.Parameter) -> Tensor | None:
    """The gradient of a parameter, without the manners of a cut one."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def settle(
    parameter: nn.Parameter, part: Tensor, home: Home | None, *, grad: Tensor | None = None
) -> None:
    """Makes a parameter hold a part of its weight, or all of it where it has no home.

    The object stays, for optimisers that hold it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None
        # A graph that is still alive has an accumulator for gradients of the old shape, and torch
        # would use it again. It forgets it when the dtype changes.
        other = torch.float32 if part.dtype == torch.float64 else torch.float64
        parameter.data = torch.empty(0, dtype=other, device=part.device)
        parameter.data = part
        parameter.grad = grad
    if home is not None:
        parameter.__class__ = CutParameter
        parameter.home = home  # type: ignore[attr-defined]
    elif isinstance(parameter, CutParameter):
        del parameter.home
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def cut(parameter: nn.Parameter, home: Home) -> None:
    """Makes a whole parameter a cut one."""
    settle(parameter, home.part(parameter.data), home)


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also in lists; this runs for every step of an optimiser."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from _tensors(argument, {})


def _kept(leaf: Any, home: Home) -> Any:
    if not isinstance(leaf, Tensor) or leaf.shape != home.box.shape:
        return leaf
    if isinstance(leaf, CutTensor):
        return leaf
    found = leaf.as_subclass(CutTensor)
    found.home = home
    return found


def _each_kept(results: Sequence[Any], given: Any, home: Home) -> Iterator[Any]:
    """Each of a list of results belongs where what it was made from does."""
    if not isinstance(given, (tuple, list)) or len(given) != len(results):
        given = [None] * len(results)
    for result, source in zip(results, given, strict=True):
        if isinstance(source, Tensor):
            yield _kept(result, source.home) if isinstance(source, CutTensor) else result
        else:
            yield _kept(result, home)


def _attribute(function: Any, args: Any, home: Home) -> Any:
    descriptor = getattr(function.__self__, "__name__", "")
    if descriptor in ("T", "mT", "H", "mH"):
        raise _refusal(home, f".{descriptor}")
    with torch._C.DisableTorchFunctionSubclass():
        if len(args) > 1 and isinstance(args[1], CutTensor):
            args = (args[0], args[1].as_subclass(Tensor), *args[2:])
        result = function(*args)
    return _kept(result, home)


_ALIKE = frozenset(
    "detach detach_ clone to cpu cuda float double half bfloat16 type requires_grad_ zero_ copy_ "
    "fill_ contiguous size dim numel nelement element_size is_floating_point is_complex stride "
    "data_ptr untyped_storage storage_offset is_contiguous register_hook retain_grad "
    "register_post_accumulate_grad_hook __hash__ __len__ __bool__ backward get_device is_signed "
    "as_subclass _is_view has_names is_inference is_same_size view_as dequantize "
    "__torch_function__".split()
)
_POINTWISE = frozenset((UNARY + BINARY).split())
_OPERATORS = frozenset(
    f"__{reflected}{name}__"
    for name in "add sub mul truediv pow floordiv mod".split()
    for reflected in ("", "r", "i")
) | frozenset("__neg__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ multiply divide".split())


def _is_elementwise(name: str) -> bool:
    if name == "_foreach_max":  # the one of its kind that looks at more than an element
        return False
    if name in _ALIKE or name in _OPERATORS or name.startswith(("_foreach_", "_fused_")):
        return True
    return name.removesuffix("_") in _POINTWISE


def _check_shapes(name: str, args: Any, kwargs: Mapping[str, Any], home: Home) -> None:
    """A tensor of another shape would broadcast over a part as it would not over the whole."""
    if name.startswith(("_foreach_", "_fused_")):
        _check_lists(args)
        return
    for leaf in _tensors(args, kwargs):
        other = leaf.home.name if isinstance(leaf, CutTensor) else None
        with torch._C.DisableTorchFunctionSubclass():
            shape, single = tuple(leaf.shape), leaf.numel() == 1
        if isinstance(leaf, CutTensor) and other == home.name and leaf.home.boxes != home.boxes:
            raise _left_behind(home)
        if single:
            continue
        if shape != home.box.shape or (other or home.name) != home.name:
            raise _refusal(
                home, f"torch's {name} with {other or 'a tensor'} of shape {list(shape)}"
            )


def _check_lists(args: Any) -> None:
    """Lists of many weights: what stands at one place in them belongs to one weight."""
    lists = [given for given in args if isinstance(given, (tuple, list))]
    for given in lists[1:]:
        for one, other in zip(lists[0], given, strict=False):
            if isinstance(one, CutTensor) and isinstance(other, CutTensor):
                same = one.home is other.home or one.home.boxes == other.home.boxes
                if one.home.name == other.home.name and not same:
                    raise _left_behind(one.home)
            elif isinstance(one, CutTensor):
                _check_beside(one.home, other)
            elif isinstance(other, CutTensor):
                _check_beside(other.home, one)


def _check_beside(home: Home, other: Any) -> None:
    """A whole weight, of an average say, might broadcast over a part of it without a word."""
    if isinstance(other, Tensor) and other.numel() != 1 and other.shape != home.box.shape:
        raise _refusal(home, f"arithmetic with a tensor of shape {list(other.shape)}")


# ---- over the whole weight --------------------------------------------------------------------


class _Everywhere(torch.autograd.Function):
    """The sum over devices; each device's gradient is that of its own part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, home: Home, what: str) -> Tensor:
        return own.new_tensor(sum(home.everywhere(float(own), what)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _sum(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    x, *rest = args
    if rest or {key for key, value in kwargs.items() if value is not None} - {"input"}:
        raise _refusal(x.home, "a sum along some of its dimensions")
    with torch._C.DisableTorchFunctionSubclass():
        total: Tensor = _Everywhere.apply(x.sum(), x.home, "sum")  # type: ignore[no-untyped-call]
    return total


def _norm(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    given = dict(zip(("x", "ord", "dim", "keepdim", "dtype"), args, strict=False))
    given |= {{"p": "ord", "input": "x", "A": "x"}.get(key, key): v for key, v in kwargs.items()}
    x, order = given.pop("x"), given.pop("ord", 2)
    if any(value not in (None, False) for value in given.values()):
        raise _refusal(x.home, "a norm along some of its dimensions")
    order = 2.0 if order in (None, "fro") else float(order)
    with torch._C.DisableTorchFunctionSubclass():
        if order == inf:
            own = float(x.abs().max()) if x.numel() else 0.0
            largest: Tensor = x.new_tensor(max(x.home.everywhere(own, "largest element")))
            return largest
        power = x.abs().pow(order).sum()
        total: Tensor = _Everywhere.apply(power, x.home, f"norm {order:g}")  # type: ignore[no-untyped-call]
        root: Tensor = total.pow(1.0 / order)
        return root


def _foreach_norm(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


def _any(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    (x,) = args
    with torch._C.DisableTorchFunctionSubclass():
        found = any(x.home.everywhere(float(bool(x.any())), "any element"))
        return torch.tensor(found, device=x.device)


_REDUCTIONS: dict[str, Callable[[Any, Any, Mapping[str, Any]], Any]] = {
    "sum": _sum,
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    "any": _any,
}


def _story(home: Home) -> str:
    return f"the weight {home.name} is cut over the devices (here {home.box} of {list(home.shape)})"


def _left_behind(home: Home) -> UsageError:
    return UsageError(
        f"{_story(home)} since plans were changed, but something that belongs to it was left where "
        "it was before: name every optimiser in net.change_plan(plan, optimizer)"
    )


def _refusal(home: Home, what: str) -> UsageError:
    return UsageError(
        f"{_story(home)}: {what} would be wrong on a part. Element-wise arithmetic, sums and norms "
        "work; net.state_dict(), called on all devices, has the whole weights."
    )
