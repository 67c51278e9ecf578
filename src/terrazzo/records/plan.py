"""A plan: how a model is cut into groups of operators, and each group over the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terrazzo.records import document
from terrazzo.records.layout import Layout
from terrazzo.records.seat import Seat

KIND, VERSION = "plan", 1


@dataclass(frozen=True, slots=True)
class Group:
    """A run of operators up to and including the one that makes ``last``, in one layout.

    With ``passes`` of 1 or more, only what enters the group is kept for the backward pass, and
    the group is computed in that many strips; 0 keeps what autograd keeps.
    """

    last: str
    layout: Layout
    title: str = ""
    passes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups in execution order for one graph (by its digest) on a number of devices.

    ``seats`` names those devices, in their order, where it matters which they are and in which
    power modes; readers that know nothing of them read the rest.
    """

    graph: str
    devices: int
    groups: tuple[Group, ...]
    seats: tuple[Seat, ...] = ()

    def to_json(self) -> str:
        seats = {"seats": [seat.to_body() for seat in self.seats]} if self.seats else {}
        return document.dump(
            KIND,
            VERSION,
            {
                "graph": self.graph,
                "devices": self.devices,
                "groups": [
                    {
                        "last": group.last,
                        "title": group.title,
                        "passes": group.passes,
                        "layout": [[axis, list(shares)] for axis, shares in group.layout.cuts],
                    }
                    for group in self.groups
                ],
                **seats,
            },
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            seats = tuple(Seat.from_body(seat) for seat in body.get("seats", ()))
            if seats and len(seats) != body["devices"]:
                raise ValueError(f"{len(seats)} seats for {body['devices']} devices")
            return cls(
                graph=body["graph"],
                devices=body["devices"],
                groups=tuple(
                    Group(group["last"], _layout(group["layout"]), group["title"], group["passes"])
                    for group in body["groups"]
                ),
                seats=seats,
            )

    def save(self, path: str | Path) -> None:
        document.write(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        rows = [f"plan for {self.devices} device{'s' if self.devices != 1 else ''}"]
        rows += [
            f"  group {index}: {group.title or '... ' + group.last}  {group.layout}"
            + (f", {group.passes} passes" if group.passes else "")
            for index, group in enumerate(self.groups)
        ]
        rows += [f"  {seat.text}" for seat in self.seats]
        return "\n".join(rows)


def _layout(cuts: Sequence[tuple[str, Sequence[int]]]) -> Layout:
    return Layout(tuple((axis, tuple(shares)) for axis, shares in cuts))
