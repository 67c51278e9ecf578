"""Progress: a training run as a whole, with what a net cannot see: optimisers, data, epochs.

A device that comes later runs the same script. At its first epoch it asks the others to be let in,
receives everything that is registered here, and goes on with them at the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from terrazzo.errors import PeerLost, RunError, UsageError
from terrazzo.feed import draws
from terrazzo.feed.alone import Alone
from terrazzo.feed.chance import draw_as, draw_but, drawn_from
from terrazzo.feed.feed import Feed
from terrazzo.feed.lift import lift_of
from terrazzo.feed.rehearsal import counted
from terrazzo.feed.sources import all_of, source_of
from terrazzo.runtime.change import say
from terrazzo.runtime.checkpoint import Checkpoint, Shelf, latest_among
from terrazzo.runtime.joining import join_later
from terrazzo.runtime.kept import forget_calls
from terrazzo.runtime.leftover import Leftover
from terrazzo.runtime.net import Net
from terrazzo.runtime.optimizer_state import load_whole, whole_state
from terrazzo.runtime.parcel import copied
from terrazzo.runtime.recovery import Recovery, give_parcel, take_parcel, tell_where, together
from terrazzo.runtime.resume import latest_of_all
from terrazzo.runtime.scribe import Scribe
from terrazzo.runtime.spare import beside, gradients, named
from terrazzo.runtime.spares import Spares


class Run:
    """``tz.Run(net, optimizer, scheduler, loader=loader, ema=ema)``.

    Whatever has ``state_dict`` and ``load_state_dict`` can be registered, by place or by name.
    ``epochs`` and ``feed`` take the place of the usual two loops, and know how far they are:

        for epoch in run.epochs(10):
            for x, y in run.feed():
                ...
    """

    def __init__(
        self,
        net: Net,
        *parts: Any,
        loader: Iterable[Any] | None = None,
        inputs: int = 1,
        reader: int | None = None,
        feeding: Mapping[str, Any] | None = None,
        every: int | None = None,
        copies: int = 2,
        checkpoints: str | Path | None = None,
        neighbours: int = 1,
        spare_every: int | None = None,
        **named: Any,
    ) -> None:
        """``feeding`` are further options of ``tz.feed``. ``every`` so many steps of ``feed`` a
        checkpoint is written by ``copies`` devices, the first ones. ``checkpoints`` is the folder
        of this device for them; by default it lies in the folder of the run.

        Where weights are cut and the loss of a device is survived, ``neighbours`` devices keep a
        copy of each one's parts in memory (0: nobody does), made ``spare_every`` so many steps;
        left open, so seldom that it takes 0.5 % of the time.
        """
        self.net, self.loader, self.inputs = net, loader, inputs
        self.reader = net.links.reader if reader is None else reader
        self.feeding = dict(feeding or {})
        if (every is not None and every < 1) or copies < 1:
            raise UsageError(f"every={every}, copies={copies}: give at least 1 of each")
        self.every, self.copies = every, copies
        folder = checkpoints or (None if every is None else self._folder())
        self.scribe = None if folder is None else Scribe(Shelf(Path(folder)))
        self.steps = self._first = 0
        """Batches that were used up; and those of earlier runs that this one goes on with."""
        self.parts: dict[str, Any] = {}
        for number, part in enumerate(parts):
            self._register(f"{number} {type(part).__name__}", part)
        for name, part in named.items():
            self._register(name, part)
        self._optimizers = [part for part in self.parts.values() if isinstance(part, Optimizer)]
        self._leftover = Leftover(net, self._optimizers)
        self.epoch = 0
        """The epoch that is under way, or comes next."""
        self.spares: Spares | None = None
        self._feed: Alone | Feed | None = None
        self._begun: Mapping[str, Any] | None = None
        if neighbours < 0 or (spare_every is not None and spare_every < 1):
            raise UsageError(f"neighbours={neighbours}, spare_every={spare_every}: too few")
        self._border: tuple[int, int] | None = None  # calls and commits before the batch in use
        self._drawn: tuple[tuple[int, int], draws.States] | None = None
        """Before which way through the data and batch generators were last looked at, and what they
        were: making a batch and computing with it may draw."""
        self._feeds, self._saved = 0, (0, net.links.epoch)
        recovery: Recovery | None = net.links.recovery
        if recovery is not None:
            recovery.host = self
        if neighbours and (recovery is not None or net.links.later is not None):
            self.spares = net._weights.spares = Spares(
                net, self._optimizers, neighbours=neighbours, every=spare_every
            )

    def _folder(self) -> Path:
        links = self.net.links
        if links.recorder is None:
            raise UsageError(
                "tz.Run(every=...) has no folder to save to: start the script with terrazzo run, "
                "which records, or give checkpoints="
            )
        return Path(links.recorder.folder) / "checkpoints" / str(links.recorder.device)

    def _register(self, name: str, part: Any) -> None:
        lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(part, m)]
        if lacks:
            raise UsageError(
                f"tz.Run cannot keep {name} ({type(part).__name__}): it has no {lacks[0]}. Give "
                "the loader as loader=, and anything else as an object with both methods"
            )
        self.parts[name] = part

    # ---- the two loops -------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of so many; who comes later begins where the others are."""
        links = self.net.links
        if links.later is not None:
            join_later(links, self)
        elif links.resume_from is not None and not self.steps:
            self._resume_from(links.resume_from)
        tell_where(links)
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1

    def feed(self) -> Iterator[Any]:
        """The batches of this epoch that are left, as ``tz.feed`` gives them."""
        links, source = self.net.links, None
        options = {name: value for name, value in self.feeding.items() if name != "device"}
        if self.loader is not None:
            source = source_of(self.loader, self.net, **options)
        feed: Alone | Feed
        if links.devices == 1 and links.recovery is None:
            if source is None:
                raise UsageError("tz.Run has no loader: give it one, loader=")
            feed = Alone(all_of(source))
        else:
            feed = Feed(source, self.net, inputs=self.inputs, reader=self.reader, host=self)
            feed.offers(options.get("cache"))
        if self._begun is not None:
            feed.go_on_from(self._begun)
            self._begun = None
        self._feed = feed
        self._feeds += 1
        device = self.feeding.get("device")
        batches = feed if device is None else lift_of(self.net, device).batches(feed)
        for batch in counted(links, batches, reader=self.reader):
            if self.spares is not None:
                self.spares.is_touched = True
            self._border = (self.net.calls, self.net.commits)
            yield batch
            self._border = None
            self.steps += 1
            if isinstance(feed, Alone):
                self._save_if_due()
        self.reader = feed.reader
        self._feed = None

    # ---- between two batches, on all devices together ----------------------------------------

    def before_batch(self, feed: Feed) -> None:
        """Goes back where a part of a weight was lost, and puts aside what may be lost next."""
        self._mend(feed)
        self._keep(feed, at_border=feed.position == 0)
        self._save_if_due()
        if self.scribe is not None:
            self._drawn = ((self._feeds, feed.position), draws.states())

    def _save_if_due(self) -> None:
        # Some may have done it when members change: then all do it again.
        now = (self.steps, self.net.links.epoch)
        if self.every and self.steps and self.steps % self.every == 0 and now != self._saved:
            self.save()
            self._saved = now

    def after_last(self, feed: Feed) -> None:
        """What follows, a validation say, is no step: there must be no way back before it."""
        self._keep(feed, at_border=True, at_end=True)

    @property
    def admits(self) -> bool:
        return self.spares is not None or not self.net.homes

    def before_joining(self, feed: Feed) -> None:
        """Parts of weights move to those who come from copies, as after a loss."""
        self._keep(feed, at_border=True)

    def _keep(self, feed: Feed, *, at_border: bool, at_end: bool = False) -> None:
        spares = self.spares
        if spares is None or not spares.is_due(self.steps, at_border=at_border):
            return
        key = (self.net.links.epoch, self.steps, 2 * self._feeds + at_end)
        spares.keep(key, copied(self._rest(feed), name="the run"))
        feed.keep_from_here()

    def _mend(self, feed: Feed) -> None:
        spares = self.spares
        if spares is None or not spares.is_astray:
            return
        if spares.mend():
            spare = spares.kept
            assert spare is not None
            if spare.key[2] // 2 != self._feeds:
                raise PeerLost(
                    f"a part of a weight is gone, and its copy is of step {spare.key[1]}, before "
                    "this way through the data: the loop has left run.feed() before its end. Start "
                    "again from the last checkpoint"
                )
            lost = self.steps - spare.rest["steps"]
            self._load_rest(spare.rest)
            feed.go_back_to(spare.rest["data"]["position"])
            draw_but(spare.rest["drawn"], feed.draws)
            if lost:
                say(self.net, f"back to step {self.steps}: {lost} steps are made again")

    # ---- state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, to be loaded into a run of the same script; call it between two steps."""
        return together(self.net.links, self._state)

    def _state(self) -> dict[str, Any]:
        net = self.net
        return {
            "net": net.state_dict(),
            "parts": {name: self._state_of(part) for name, part in self.parts.items()},
            **self._place(self._feed),
            "beside": {n: p.detach() for n, p in beside(net._model, self._optimizers).items()},
            "grads": self._leftover.whole(),
        }

    def _place(self, feed: Alone | Feed | None) -> dict[str, Any]:
        """How far the run has come, in steps, data and random numbers."""
        net = self.net
        return {
            "calls": net.calls,
            "commits": net.commits,
            "seed": net.seed,
            "steps": self.steps,
            "epoch": self.epoch,
            "feeds": self._feeds,
            "unused": self._leftover.unused,
            "data": None if feed is None else feed.where(),
            "drawn": drawn_from(None),
        }

    def _rest(self, feed: Feed) -> dict[str, Any]:
        """The same without weights and what optimisers keep for them."""
        net = self.net
        groups = {
            name: part.state_dict()["param_groups"]
            for name, part in self.parts.items()
            if isinstance(part, Optimizer)
        }
        others = {n: p.state_dict() for n, p in self.parts.items() if n not in groups}
        return {
            "groups": groups,
            "parts": others,
            "buffers": dict(net.named_buffers()),
            **self._place(feed),
        }

    def _load_rest(self, rest: Mapping[str, Any]) -> None:
        rest = copied(rest, name="the run")
        net = self.net
        for name, groups in rest["groups"].items():
            for group, told in zip(self.parts[name].param_groups, groups, strict=True):
                group.update((key, value) for key, value in told.items() if key != "params")
        for name, told in rest["parts"].items():
            self.parts[name].load_state_dict(told)
        with torch.no_grad():
            for name, buffer in net.named_buffers():
                buffer.copy_(rest["buffers"][name])
        net.calls, net.commits, net.seed = rest["calls"], rest["commits"], rest["seed"]
        self.steps, self.epoch, self._feeds = rest["steps"], rest["epoch"], rest["feeds"]
        self._leftover.unused = rest["unused"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; call it before ``epochs``."""
        others, kept = beside(self.net._model, self._optimizers), state.get("beside", {})
        missing = {*self.parts, *others} ^ {*state["parts"], *kept}
        if missing:
            raise UsageError(
                f"the state and this run do not hold the same parts ({', '.join(sorted(missing))}):"
                " register the same objects in the same order"
            )
        net = self.net
        net.load_state_dict(state["net"])
        for name, part in self.parts.items():
            if isinstance(part, Optimizer):
                load_whole(part, state["parts"][name])
            else:
                part.load_state_dict(state["parts"][name])
        net.calls, net.commits, net.seed = state["calls"], state["commits"], state["seed"]
        with torch.no_grad():
            for name, parameter in others.items():
                parameter.copy_(kept[name])
        self._leftover.load(state.get("grads", {}))
        self._leftover.unused = state.get("unused", self._leftover.unused)
        self.steps, self.epoch, self._begun = state["steps"], state["epoch"], state["data"]
        self._feeds = state.get("feeds", 1) - (self._begun is not None)
        self._first = self.steps
        draw_as(state.get("drawn", {}), None)
        self._saved = (self.steps, net.links.epoch)

    def _state_of(self, part: Any) -> Any:
        if isinstance(part, Optimizer):
            return whole_state(part, self.net.links)
        return part.state_dict()

    # ---- checkpoints -----------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint beside the training; all devices call it between two steps."""
        if self.scribe is None:
            raise UsageError("tz.Run was not told where to: give it every= or checkpoints=")
        if self.spares is not None and self.spares.is_astray and self.spares.is_touched:
            return  # these steps are made again, and then it comes
        self._write(together(self.net.links, self.state_dict))

    def _write(self, state: dict[str, Any], *, alone: bool = False) -> None:
        assert self.scribe is not None
        self.scribe.begin(self._first)
        if alone or self.net.links.device < self.copies:
            self.scribe.write(self.steps, state.pop("net"), state)

    def save_last(self, *, alone: bool = False) -> str:
        """There is no going on with those who are left; gives what was saved, in words.

        ``alone``: without a word to the others, which only whole weights can be saved by.
        """
        if self.scribe is None:
            return "Nothing was saved: tz.Run(..., every=100) would have"
        state = self._last_state() if not alone or self._is_whole else None
        if state is not None and self.steps:
            self._write(state, alone=alone)
        self.scribe.finish()
        steps, folder = self.scribe.shelf.steps, self.scribe.shelf.folder
        if not steps:
            return f"There is no checkpoint in {folder}"
        where = "" if alone else " with more or larger devices"
        last = f"The last checkpoint here is of step {steps[-1]} in {folder}"
        return f"{last}: terrazzo run --resume goes on{where} from the latest that any device has"

    @property
    def _is_whole(self) -> bool:
        """Whether this device has all of every weight."""
        return not self.net.homes and self.net._weights.homes is not None

    def _last_state(self) -> dict[str, Any] | None:
        """As it was before the batch in use; None, where that cannot be told any more."""
        net, border, feed = self.net, self._border, self._feed
        if self.spares is not None and self.spares.is_astray:
            net._weights.homes = self.spares.restore({})
            kept = self.spares.kept
            if kept is None or kept.rest is None:
                return None
            self._load_rest(kept.rest)
            return {**self.state_dict(), "data": kept.rest["data"], "drawn": kept.rest["drawn"]}
        if feed is None or feed.position <= (border is not None):
            return None  # what a loop does before and behind its batches would be done twice
        if border is not None and (
            net.commits != border[1] or not forget_calls(net, since=border[0])
        ):
            return None
        where = feed.where()
        where["position"] -= border is not None
        state = {**self.state_dict(), "data": where}
        if self._drawn is not None and self._drawn[0] == (self._feeds, where["position"]):
            return {**state, "drawn": drawn_from(None, self._drawn[1])}
        return None if border is not None else state

    def resume(self) -> int:
        """Goes on from the latest checkpoint that any device has; gives its steps, 0 for none.

        All devices call it before ``epochs``; there may be more or fewer of them than before.
        """
        if self.scribe is None:
            raise UsageError("tz.Run was not told where from: give it every= or checkpoints=")
        return self._resume(self.scribe.shelf.latest())

    def _resume_from(self, folder: Path) -> None:
        if not self._resume(latest_among(folder)):
            raise RunError(
                f"no device has a checkpoint in {folder} that can be read: see what was said of "
                "them, or start anew without --resume"
            )

    def _resume(self, found: Checkpoint | None) -> int:
        state = latest_of_all(self.net.links, found)
        if state is not None:
            self.load_state_dict(state)
        return self.steps

    # ---- those who come later ------------------------------------------------------------

    def give(self, source: int) -> None:
        """Sends all this to devices that have just joined."""
        if self.spares is not None and self.spares.is_astray:
            state = {"spare": self.spares.told()}
        else:
            state = {**self.state_dict(), "grads": gradients(self.net._model, self._optimizers)}
        give_parcel(self.net.links, state, source, name="the run")

    def take(self, source: int) -> None:
        state = take_parcel(self.net.links, source)
        if "spare" in state:
            assert self.spares is not None
            rest = self.spares.hear(state["spare"]).rest
            self._load_rest(rest)
            self._begun, self._feeds = rest["data"], rest["feeds"] - 1
            draw_as(rest["drawn"], None)
            return
        self.net._weights.homes = {}  # those who were here have cut none, and will not
        self.load_state_dict(state)
        for name, parameter in named(self.net._model, self._optimizers).items():
            parameter.grad = state["grads"].get(name)
