"""A prediction: seconds of a training step, where they go on each device and in each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.records import document

KIND, VERSION = "prediction", 1


@dataclass(frozen=True, slots=True)
class GroupCost:
    """One group: seconds by device, and what it adds to the sums of weight gradients."""

    title: str
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    summed_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step: seconds, where they go on each device, and what limits."""

    step_s: float
    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    sums_s: tuple[float, ...]
    """Waiting at the end for sums of weight gradients."""
    groups: tuple[GroupCost, ...]
    sent_bytes: tuple[int, ...]
    summed_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    """The most of a step on each device, with the optimiser's state; empty if not asked for."""
    bottleneck: str
    delivery_s: float = 0.0
    """Of the step, until every device has its part of the input; 0: they are not sent any."""
    delivered_bytes: int = 0

    @property
    def net_compute_s(self) -> tuple[float, ...]:
        """Computing inside of net, by device: what there is besides is the optimiser's."""
        return tuple(
            sum(group.compute_s[device] for group in self.groups)
            for device in range(len(self.compute_s))
        )

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Prediction:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            names = ("compute_s", "exchange_s", "waiting_s", "sums_s", "sent_bytes",
                     "summed_bytes", "memory_bytes")  # fmt: skip
            return cls(
                step_s=float(body["step_s"]),
                groups=tuple(_group(row) for row in body["groups"]),
                bottleneck=str(body["bottleneck"]),
                delivery_s=float(body.get("delivery_s", 0.0)),
                delivered_bytes=int(body.get("delivered_bytes", 0)),
                **{name: tuple(body[name]) for name in names},
            )


def _group(row: Mapping[str, Any]) -> GroupCost:
    return GroupCost(
        title=row["title"],
        compute_s=tuple(row["compute_s"]),
        exchange_s=tuple(row["exchange_s"]),
        waiting_s=tuple(row["waiting_s"]),
        summed_bytes=row["summed_bytes"],
    )
