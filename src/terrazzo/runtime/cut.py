"""Cut weights: parameters of which a device holds one box, and what is computed from them.

To an optimiser a cut weight is a smaller tensor: whatever works element by element works on it.
Sums and norms run over the whole weight, on all devices at once, so that clipping by a global norm
means what it says. Anything else would need the elements that are elsewhere, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.errors import UsageError
from terrazzo.geometry import Box
from terrazzo.graph.rules.pointwise import BINARY, UNARY
from terrazzo.records.graph import fingerprint
from terrazzo.runtime.links import Links
from terrazzo.runtime.overall import REDUCTIONS, told
from terrazzo.runtime.refused import left_behind, refusal, story, stranger
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

    def everywhere(self, number: float, what: str, *, silent: float = 0.0) -> list[float]:
        """One number of every device, ``silent`` from those that another speaks for."""
        own, explain = number if self.counts else silent, f"{what} of the cut weight {self.name}"
        return told(self.links, own, subject=fingerprint(self.name, what), explain=explain)


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
        if name in REDUCTIONS:
            return REDUCTIONS[name](function, args, kwargs)
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(function, args, home)
        if not _is_elementwise(name):
            raise refusal(home, f"torch's {name}")
        _check_shapes(name, args, kwargs, home)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            return type(result)(_each_kept(result, args[0], home))
        return _kept(result, home)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise refusal(self.home, "a copy of it")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"{story(self.home)}, so saving it from here would lose the rest: on all devices call "
            "net.state_dict(), which holds whole weights, and save that on one"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{type(self).__name__}({self.home.box} of {self.home.name}, {plain(self)!r})"


class CutParameter(CutTensor, nn.Parameter):
    """A parameter of which this device holds one box."""


def shown_to_hooks(parameter: CutParameter, grad: Tensor) -> Tensor:
    """A gradient as hooks of its parameter meet it: one that looks at a norm looks at all of it."""
    with torch._C.DisableTorchFunctionSubclass():
        hooked = bool(parameter._backward_hooks)
    return parameter.home.marked(grad) if hooked else grad


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
        raise refusal(home, f".{descriptor}")
    if len(args) > 1 and descriptor == "data":
        _check_shapes("assignment to .data", args[1:], {}, home)
    with torch._C.DisableTorchFunctionSubclass():
        if len(args) > 1 and isinstance(args[1], CutTensor):
            args = (args[0], args[1].as_subclass(Tensor), *args[2:])
        result = function(*args)
    return _kept(result, home)


_ALIKE = frozenset(
    "detach detach_ clone to cpu cuda float double half bfloat16 type requires_grad_ zero_ copy_ "
    "fill_ contiguous size dim element_size is_floating_point is_complex stride "
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


_STEPS = frozenset(f"_fused_{name}_" for name in "sgd adam adamw adagrad".split())
_LISTS = "_foreach_"


def _is_elementwise(name: str) -> bool:
    """By name; what is not known may look at more than an element, as torch's _foreach_mm does."""
    if name in _ALIKE or name in _OPERATORS or name in _STEPS:
        return True
    single = name.removeprefix(_LISTS).removesuffix("_")
    return single in _POINTWISE or (name.startswith(_LISTS) and single in ("copy", "zero"))


def _check_shapes(name: str, args: Any, kwargs: Mapping[str, Any], home: Home) -> None:
    """A tensor of another shape would broadcast over a part as it would not over the whole."""
    if name.startswith(_LISTS) or name in _STEPS:
        _check_lists(args)
        return
    for leaf in _tensors(args, kwargs):
        with torch._C.DisableTorchFunctionSubclass():
            shape, single = tuple(leaf.shape), leaf.numel() == 1
        if not isinstance(leaf, CutTensor):
            if not single:
                raise stranger(home, f"torch's {name}", shape)
            continue
        if leaf.home.name == home.name and leaf.home.boxes != home.boxes:
            raise left_behind(home)
        if not single and (shape != home.box.shape or leaf.home.name != home.name):
            raise refusal(home, f"torch's {name} with {leaf.home.name} of shape {list(shape)}")


def _check_lists(args: Any) -> None:
    """Lists of many weights: what stands at one place in them belongs to one weight."""
    lists = [given for given in args if isinstance(given, (tuple, list))]
    for given in lists[1:]:
        for one, other in zip(lists[0], given, strict=False):
            if isinstance(one, CutTensor) and isinstance(other, CutTensor):
                same = one.home is other.home or one.home.boxes == other.home.boxes
                if one.home.name == other.home.name and not same:
                    raise left_behind(one.home)
            elif isinstance(one, CutTensor):
                _check_beside(one.home, other)
            elif isinstance(other, CutTensor):
                _check_beside(other.home, one)


def _check_beside(home: Home, other: Any) -> None:
    """A whole weight, of an average say, might broadcast over a part of it without a word."""
    if isinstance(other, Tensor) and other.numel() != 1:
        raise stranger(home, "arithmetic", other.shape)
