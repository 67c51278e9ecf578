"""Plain PyTorch with our random numbers: what a check compares with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from terrazzo.geometry import Box
from terrazzo.runtime import kernels
from terrazzo.runtime.kernels import Site


class KeyedRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, PyTorch's random operators draw by seed, step, order and position, as a net does."""

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.step, self.drawn = seed, step, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = f"{func._schema.name.split('::')[1]}.{func._overloadname}"
        draw = getattr(self, "_" + name.replace(".", "_"), None)
        if draw is None:
            return func(*args, **(kwargs or {}))
        self.drawn += 1
        return draw(func, args, kwargs or {})

    def _site(self, like: Tensor) -> Site:
        shape = tuple(like.shape)
        return Site(shape, Box.whole(shape), self.seed, self.step, like.device)

    def _bernoulli__float(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        x, p = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return x.copy_(kernels.bernoulli(self._site(x), x, p, self.drawn))  # type: ignore[no-any-return]

    def _bernoulli_p(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        return kernels.bernoulli(self._site(args[0]), args[0], args[1], self.drawn)

    def _bernoulli_default(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        return kernels.bernoulli(self._site(args[0]), args[0], self.drawn)

    def _native_dropout_default(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        x, p, _ = args
        mask = kernels.bernoulli(self._site(x), x, 1.0 - p, self.drawn)
        return x * (mask / (1.0 - p)), mask.bool()

    def _rand_like_default(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        return kernels.rand_like(self._site(args[0]), func(*args, **kwargs), self.drawn)

    def _randn_like_default(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        return kernels.randn_like(self._site(args[0]), func(*args, **kwargs), self.drawn)

    def _rand_default(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        made = func(*args, **kwargs)
        return kernels.rand(self._site(made), None, made.dtype, self.drawn)

    def _randn_default(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        made = func(*args, **kwargs)
        return kernels.randn(self._site(made), None, made.dtype, self.drawn)
