"""What a peer is: can it do a case, and how does it train, on each device, in a worker process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from terrazzo.bench.cases import Case

if TYPE_CHECKING:
    from torch import Tensor

    from terrazzo.bench.task import Task


NEXT = "\n"
"""Between the files of several plans in the name of one peer: a path may have colons and blanks."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a device finds when it is its turn."""

    case: Case
    device: int
    devices: int

    def task(self) -> Task:
        """The model and its data, the same on every call and on every device."""
        from terrazzo.bench.task import Task

        return Task.make(self.case)


class Trainer(ABC):
    """A training on one device. ``step`` leaves gradients, ``update`` uses them up."""

    choices: Sequence[int] = (0,)
    """What the warm-up tries; the fastest is kept. Its meaning is the peer's own."""

    has_a_slope: bool = True
    """Whether a choice that is slower than the best means that those after it are, too."""

    parts: int = 1
    """Equal parts of a step, one after the other; where there are many, a few may be timed."""

    def choice_text(self, choice: int) -> str:
        """What a choice is called in the race's table."""
        return ""

    def use(self, choice: int) -> None:  # noqa: B027 - most have nothing to choose
        """From now on with this choice, also if that means to start again."""

    def part(self, number: int) -> None:
        """One of the parts of a step."""
        self.step()

    @abstractmethod
    def step(self) -> None:
        """Forward, loss, backward."""

    @abstractmethod
    def update(self) -> None:
        """The optimiser's step; the gradients are gone after it."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by the model's names: those this device shall report."""


class Peer(Protocol):
    """One way to train on these devices."""

    name: str
    claims_exact: bool
    """Whether it promises plain PyTorch's gradients."""
    alone: bool
    """Whether only one device works."""
    compiles: bool
    """Whether it makes torch load its compiler, as parts of torch do: 67 MiB of the process."""

    def can(self, case: Case, devices: int) -> str | None:
        """Why it can't do this; None if it can try."""

    def build(self, work: Work) -> Trainer:
        """On each device, once the devices have joined."""
