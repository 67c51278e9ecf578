"""Spares: making them every few steps, and going back to one when a device is lost.

How often: so that it takes COST of the time that training takes. That is a quarter of what recovery
may cost in all; notes, listening and checkpoints have the rest.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.errors import PeerLost, UsageError
from terrazzo.geometry import Box
from terrazzo.geometry.box import hull
from terrazzo.records.graph import fingerprint
from terrazzo.runtime.agreement import NOTHING, SPARE, Note, compare
from terrazzo.runtime.belongings import PART, Table, entries, hand_over
from terrazzo.runtime.cut import Home
from terrazzo.runtime.relocation import Relocation
from terrazzo.runtime.spare import (
    WEIGHT,
    Bundle,
    Key,
    Spare,
    marks,
    named,
    put_aside,
    put_back,
    tensors_of,
    versions,
)
from terrazzo.runtime.wire import Parcel
from terrazzo.schedule.relocation import Rescue, everywhere, rescue
from terrazzo.schedule.tiling import Boxes

if TYPE_CHECKING:
    from terrazzo.runtime.net import Net

COST = 0.005
FIRST, MOST = 8, 10_000
"""Steps from the first spare to the second, before anything was measured; and between any two."""


BEFORE_ALL = (-1, -1)
"""In the key of a spare that was made in the middle of a step: any other is later."""


class Spares:
    """The spare of this device, and the one that is being made."""

    def __init__(
        self, net: Net, optimizers: Sequence[Optimizer], *, neighbours: int, every: int | None
    ) -> None:
        self.net, self.optimizers, self.neighbours = net, tuple(optimizers), neighbours
        self.every = every
        self.interval = every or FIRST
        self.kept: Spare | None = None
        self._staged: Spare | None = None
        self.is_astray = False
        """Members have changed and parts of weights are gone: the run must go back."""
        self.is_touched = False
        """A batch was handed out since the last spare."""
        self.made = 0
        self.took_s = 0.0
        """How long the last one took."""
        self.is_restoring = False
        self._renews = False
        """Whether nobody has begun a batch since the spare that all have gone back to."""
        self._marks: tuple[Any, ...] | None = None
        """Of all weights when the last spare was made; None while they are moved."""
        self._homes: Mapping[str, Home] | None = None
        self._is_stale = True
        self._made_s = time.perf_counter()

    # ---- making --------------------------------------------------------------------------

    def is_due(self, steps: int, *, at_border: bool) -> bool:
        """``at_border``: where the data begins and ends there must be one."""
        if not self.net.homes:
            self.kept = None
            return False
        if self.kept is None or self._is_stale or self._homes is not self.net.homes:
            return True
        if self.kept.rest is None:
            return True
        return at_border or steps - self.kept.key[1] >= self.interval

    def keep(self, key: Key, rest: Any) -> None:
        """Puts aside what is here, and exchanges copies with neighbours; all devices together."""
        begin = time.perf_counter()
        links, net = self.net.links, self.net
        homes, parameters = net.homes, named(net._model, self.optimizers)
        seen = versions(parameters, homes)
        last = None if self._is_stale or self._homes is not homes else self.kept
        same = last is not None and (last.commits, last.versions) == (net.commits, seen)
        links.where = "keeping a copy of cut weights"
        note = Note(SPARE, key[1], fingerprint(key), NOTHING, flag=float(same))
        flags = compare(links, note, explain=f"keeping a copy after step {key[1]}")
        if last is not None and all(flags):
            tables, bundles = last.tables, last.bundles
        else:
            tables, bundles = self._copied(parameters)
        wholes = {
            name: put_aside(parameter, self.optimizers)
            for name, parameter in parameters.items()
            if name not in homes
        }
        self._staged = Spare(
            key, net.commits, links.members, {name: home.boxes for name, home in homes.items()},
            tables, wholes, rest, bundles, seen,
        )  # fmt: skip
        self.took_s = time.perf_counter() - begin
        self._settle(homes, reused=bundles is (last and last.bundles))

    def keep_whole(self) -> None:
        """Weights that all have are about to be cut, in the middle of a step: puts them aside.

        That is the way back until the next batch, before which there is a spare like all others.
        """
        net = self.net
        parameters = named(net._model, self.optimizers)
        wholes = {name: put_aside(one, self.optimizers) for name, one in parameters.items()}
        key = (net.links.epoch, *BEFORE_ALL)
        self.kept = Spare(key, net.commits, net.links.members, {}, {}, wholes, rest=None)
        self.is_touched = False
        self._mark()

    def _settle(self, homes: Mapping[str, Home], *, reused: bool) -> None:
        """Once all have theirs, it counts; and how often there is one is decided anew."""
        staged = self._staged
        assert staged is not None
        before = self.kept if self.kept is not None and self.kept.rest is not None else staged
        since = staged.key[1] - before.key[1]
        step_s = (time.perf_counter() - self._made_s - self.took_s) / since if since > 0 else 0.0
        ratio = 0.0 if reused or step_s <= 0 else self.took_s / step_s
        note = Note(SPARE, staged.key[1], "", NOTHING, flag=ratio)
        flags = compare(self.net.links, note, explain="having kept a copy")
        if self.every is None and max(flags) > 0:
            self.interval = min(max(1, math.ceil(max(flags) / COST)), MOST)
        self.kept, self._staged, self._homes = staged, None, homes
        self._is_stale = self.is_touched = False
        self._mark()
        self.made += 1
        self._made_s = time.perf_counter()

    def _copied(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[dict[str, Table], dict[int, Bundle]]:
        """This device's parts of cut weights and those of its neighbours."""
        links, homes = self.net.links, self.net.homes
        own = {n: entries(n, parameters[n], homes[n].shape, self.optimizers) for n in homes}
        tensors: dict[tuple[str, str], Tensor] = {}
        for name, table in own.items():
            if not homes[name].box.is_empty:
                tensors |= tensors_of(name, parameters[name], table, self.optimizers)
        bundle = Bundle.of(tensors)
        told = [json.loads(t) for t in links.gather_text(json.dumps([own, bundle.rows]))]
        tables = {
            name: _agreed(name, home.boxes, [row[0][name] for row in told])
            for name, home in homes.items()
        }
        bundles = {links.members[links.device]: bundle}
        sends, receives = [], []
        for step in range(1, min(self.neighbours, links.devices - 1) + 1):
            keeper = (links.device + step) % links.devices
            ward = (links.device - step) % links.devices
            rows = told[ward][1]
            bundles[links.members[ward]] = Bundle.room(rows)
            room = bundles[links.members[ward]].data
            if bundle.data.numel():
                sends.append((keeper, bundle.data))
            if room.numel():
                receives.append((ward, room))
        links.exchange(sends, receives)
        return tables, bundles

    # ---- going back ----------------------------------------------------------------------

    def follow(self) -> None:
        """Members have changed: who keeps what does not fit them any more."""
        self._is_stale = True

    def lose(self) -> None:
        """Parts of weights are elsewhere or gone; refused where there is no way back."""
        spare = self.kept or self._staged
        if spare is None:
            raise PeerLost("no copy of it was made yet")
        if spare.commits != self.net.commits and not self.is_touched and not self.is_astray:
            raise PeerLost("steps were made outside of run.feed(), of which there is no copy")
        if not self.is_touched and self._marks not in (None, self._seen()):
            raise PeerLost(
                "weights or gradients were changed after the last batch of run.feed(), of which "
                "there is no copy: make left-over steps of the optimiser inside the loop"
            )
        self.is_astray = True

    def _seen(self) -> tuple[Any, ...]:
        return marks(named(self.net._model, self.optimizers))

    def _mark(self) -> None:
        self._marks = self._seen()

    def moving(self, begins: bool) -> None:
        """Terrazzo itself moves weights now, or has done so."""
        if begins and self._marks == self._seen():
            self._marks = None
        elif not begins and self._marks is None:
            self._mark()

    def restore(self, wanted: Mapping[str, Boxes]) -> dict[str, Home]:
        """All weights as they were, cut as wanted; gives the homes of those that are cut."""
        self.is_restoring, self._marks = True, None
        spare, holders = self._chosen()
        links, model = self.net.links, self.net._model
        parameters = named(model, self.optimizers)
        for name, kept in spare.wholes.items():
            put_back(parameters[name], kept, self.optimizers)
        homes: dict[str, Home] = {}
        for name, boxes in spare.homes.items():
            links.where = f"bringing back {name}"
            shape = hull(boxes, boxes[0].rank).shape
            after = wanted.get(name) or everywhere(shape, links.devices)
            home = Home(name, torch.Size(shape), after, links) if name in wanted else None
            try:
                routes = rescue(boxes, spare.members, holders, after)
            except LookupError as error:
                raise _gone(name, error.args[0], self.neighbours) from error
            self._bring_back(
                name,
                parameters[name],
                spare=spare,
                routes=routes,
                home=home,
                want=after[links.device],
            )
            if home is not None:
                homes[name] = home
        rest = Relocation(
            model, links, homes=homes, wanted=wanted, optimizers=self.optimizers
        )  # fmt: skip
        rest.run()
        self._mark()
        self.is_restoring = False
        return rest.homes

    def renew(self) -> None:
        """In a validation, say, the next batch is far: who brought back a part could be lost too.

        What was kept is kept again, by the devices that are here now.
        """
        if self._renews and self.net.homes:
            assert self.kept is not None
            key = (self.net.links.epoch, *self.kept.key[1:])
            self.keep(key, self.kept.rest)

    def mend(self) -> bool:
        """Weights are those of the spare again; gives whether steps were made since.

        All devices call this between two steps.
        """
        net, was_touched = self.net, self.is_touched
        if net._weights.homes is None:
            net.place()
        elif was_touched:  # by a plan for these devices, but trained since
            net._weights.homes = self.restore(net._weights.kept or {})
        self.is_astray = self.is_touched = False
        return was_touched

    def told(self) -> dict[str, Any]:
        """What a device that joins must know, less the parts that come when weights are placed."""
        spare = self.kept
        assert spare is not None, "one is made before anybody is let in"
        homes = {name: [list(box.spans) for box in boxes] for name, boxes in spare.homes.items()}
        return {
            "key": spare.key, "commits": spare.commits, "members": spare.members, "homes": homes,
            "tables": spare.tables, "wholes": spare.wholes, "rest": spare.rest,
        }  # fmt: skip

    def hear(self, told: Mapping[str, Any]) -> Spare:
        """The other side: this device has come now, and holds no part yet."""
        homes = {
            name: tuple(Box(tuple((low, high) for low, high in spans)) for spans in boxes)
            for name, boxes in told["homes"].items()
        }
        self.kept = Spare(
            tuple(told["key"]), told["commits"], tuple(told["members"]), homes, told["tables"],
            told["wholes"], told["rest"],
        )  # fmt: skip
        self.is_astray = self.is_touched = True
        return self.kept

    def _chosen(self) -> tuple[Spare, list[list[int]]]:
        """The latest that all have; and whose parts every device holds of it."""
        mine = {json.dumps(s.key): s for s in (self.kept, self._staged) if s is not None}
        held = {key: list(spare.bundles) for key, spare in mine.items()}
        letters = self.net.links.gather_text(json.dumps([held, self.is_touched]))
        told = [json.loads(text)[0] for text in letters]
        self._renews = not any(json.loads(text)[1] for text in letters)
        common = set.intersection(*(set(row) for row in told))
        if not common:
            raise PeerLost(
                "a device with parts of cut weights was lost while copies of them were made: "
                "start again from the last checkpoint"
            )
        key = max(common, key=json.loads)
        self.kept, self._staged = mine[key], None
        return mine[key], [row[key] for row in told]

    def _bring_back(
        self,
        name: str,
        parameter: nn.Parameter,
        *,
        spare: Spare,
        routes: Sequence[Rescue],
        home: Home | None,
        want: Box,
    ) -> None:
        """One weight, with what belongs to it, in one exchange."""
        me, table = self.net.links.device, spare.tables[name]
        with torch._C.DisableTorchFunctionSubclass():
            kinds, where = {WEIGHT: parameter.dtype}, parameter.device
        for label, (kind, dtype, _) in table.items():
            if kind == PART:
                kinds[label] = getattr(torch, dtype)
        results = {label: torch.empty(want.shape, dtype=dtype) for label, dtype in kinds.items()}
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        for label, result in results.items():
            for route in routes:
                target = (
                    result[route.box.within(want).slices()] if route.destination == me else None
                )
                if route.source == me:
                    found = spare.bundles[route.member].find(name, label)
                    assert found is not None, "tables were compared when the spare was made"
                    piece = found[route.box.within(route.have).slices()]
                    if target is None:
                        sends.append((route.destination, _bytes(piece.contiguous())))
                    else:
                        target.copy_(piece)
                elif target is not None:
                    room = torch.empty(target.shape, dtype=target.dtype)
                    receives.append((route.source, _bytes(room)))
                    arrivals.append((target, room))
        self.net.links.exchange(sends, receives)
        for target, room in arrivals:
            target.copy_(room)
        arrived = {label: result.to(where) for label, result in results.items()}
        hand_over(
            parameter, home, part=arrived.pop(WEIGHT), table=table, arrived=arrived,
            optimizers=self.optimizers,
        )  # fmt: skip


def _agreed(name: str, boxes: Boxes, tables: Sequence[Mapping[str, Sequence[Any]]]) -> Table:
    """What belongs to a weight, the same on all who hold a part of it."""
    holders = [device for device, box in enumerate(boxes) if not box.is_empty]
    first = tables[holders[0]]
    for device in holders[1:]:
        if _kinds(tables[device]) != _kinds(first):
            raise UsageError(
                f"device {device} keeps {sorted(tables[device])} for {name}, device {holders[0]} "
                f"{sorted(first)}: give every device the same optimiser, and make the same steps"
            )
    return {label: (entry[0], entry[1], entry[2]) for label, entry in first.items()}


def _kinds(table: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return {label: list(entry[:2]) for label, entry in table.items()}


def _gone(name: str, member: int, neighbours: int) -> PeerLost:
    keepers = "the one that kept" if neighbours == 1 else f"the {neighbours} that kept"
    return PeerLost(
        f"the weight {name} is cut over the devices; device {member}, which held a part of it, and "
        f"{keepers} a copy are gone: start again from the last checkpoint, or let more keep one "
        f"(tz.Run(..., neighbours={neighbours + 1}))"
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
