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

from terrazzo.errors import RunError, UsageError
from terrazzo.feed.feed import Alone, Feed
from terrazzo.feed.rehearsal import counted
from terrazzo.feed.sources import source_of
from terrazzo.runtime.checkpoint import Shelf
from terrazzo.runtime.cut import plain
from terrazzo.runtime.joining import join_later
from terrazzo.runtime.net import Net
from terrazzo.runtime.optimizer_state import load_whole, whole_state
from terrazzo.runtime.recovery import Recovery, give_parcel, take_parcel
from terrazzo.runtime.scribe import Scribe


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
        reader: int = 0,
        feeding: Mapping[str, Any] | None = None,
        every: int | None = None,
        copies: int = 2,
        checkpoints: str | Path | None = None,
        **named: Any,
    ) -> None:
        """``feeding`` are further options of ``tz.feed``. ``every`` so many steps of ``feed`` a
        checkpoint is written by ``copies`` devices, the first ones. ``checkpoints`` is the folder
        of this device for them; by default it lies in the folder of the run.
        """
        self.net, self.loader, self.inputs, self.reader = net, loader, inputs, reader
        self.feeding = dict(feeding or {})
        if (every is not None and every < 1) or copies < 1:
            raise UsageError(f"every={every}, copies={copies}: give at least 1 of each")
        self.every, self.copies = every, copies
        folder = checkpoints or (None if every is None else self._folder())
        self.scribe = None if folder is None else Scribe(Shelf(Path(folder)))
        self.steps = 0
        """Batches that were used up."""
        self.parts: dict[str, Any] = {}
        for number, part in enumerate(parts):
            self._register(f"{number} {type(part).__name__}", part)
        for name, part in named.items():
            self._register(name, part)
        self.epoch = 0
        """The epoch that is under way, or comes next."""
        self._feed: Alone | Feed | None = None
        self._begun: Mapping[str, Any] | None = None
        recovery: Recovery | None = net.links.recovery
        if recovery is not None:
            recovery.host = self

    def _folder(self) -> Path:
        links = self.net.links
        if links.recorder is None:
            raise UsageError(
                "tz.Run(every=...) has no folder to save to: start the script with terrazzo run, "
                "which records, or give checkpoints="
            )
        return Path(links.recorder.folder) / "checkpoints" / str(links.device)

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
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1

    def feed(self) -> Iterator[Any]:
        """The batches of this epoch that are left, as ``tz.feed`` gives them."""
        links, source = self.net.links, None
        if self.loader is not None:
            source = source_of(self.loader, self.net, **self.feeding)
        feed: Alone | Feed
        if links.devices == 1 and links.recovery is None:
            if source is None:
                raise UsageError("tz.Run has no loader: give it one, loader=")
            feed = Alone(source)
        else:
            feed = Feed(source, self.net, inputs=self.inputs, reader=self.reader, admits=True)
        if self._begun is not None:
            feed.go_on_from(self._begun)
            self._begun = None
        self._feed = feed
        for batch in counted(links, feed):
            yield batch
            self.steps += 1
            if self.every is not None and self.steps % self.every == 0:
                self.save()
        self.reader = feed.reader
        self._feed = None

    # ---- state ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, to be loaded into a run of the same script; call it between two steps."""
        net = self.net
        return {
            "net": net.state_dict(),
            "parts": {name: self._state_of(part) for name, part in self.parts.items()},
            "calls": net.calls,
            "commits": net.commits,
            "seed": net.seed,
            "steps": self.steps,
            "epoch": self.epoch,
            "data": None if self._feed is None else self._feed.where(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; call it before ``epochs``."""
        missing = set(self.parts) ^ set(state["parts"])
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
        self.steps, self.epoch, self._begun = state["steps"], state["epoch"], state["data"]

    def _state_of(self, part: Any) -> Any:
        if isinstance(part, Optimizer):
            return whole_state(part, self.net.links)
        return part.state_dict()

    # ---- checkpoints -----------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint beside the training; all devices call it between two steps."""
        if self.scribe is None:
            raise UsageError("tz.Run was not told where to: give it every= or checkpoints=")
        state = self.state_dict()
        if self.net.links.device < self.copies:
            self.scribe.write(self.steps, state.pop("net"), state)

    def resume(self) -> int:
        """Goes on from the latest checkpoint that any device has; gives its steps, 0 for none.

        All devices call it before ``epochs``; there may be more or fewer of them than before.
        """
        if self.scribe is None:
            raise UsageError("tz.Run was not told where from: give it every= or checkpoints=")
        return self._resume(self.scribe.shelf)

    def _resume_from(self, folder: Path) -> None:
        if not self._resume(Shelf(folder / str(self.net.links.device))):
            raise RunError(
                f"no device has a checkpoint in {folder} that can be read: see what was said of "
                "them, or start anew without --resume"
            )

    def _resume(self, shelf: Shelf) -> int:
        links, found = self.net.links, shelf.latest()
        own = -1.0 if found is None else float(found.step)
        steps = links.gather(torch.tensor([own], dtype=torch.float64), counted=False).flatten()
        if float(steps.max()) < 0:
            return 0
        source = int(steps.argmax())
        if found is not None and links.device == source:
            give_parcel(links, [dict(found.model), found.rest], source, name="the run")
            model, rest = found.model, found.rest
        else:
            model, rest = take_parcel(links, source)
        self.load_state_dict({**rest, "net": model})
        return self.steps

    # ---- those who come later ------------------------------------------------------------

    def give(self, source: int) -> None:
        """Sends all this to devices that have just joined."""
        state = {**self.state_dict(), "grads": self._grads()}
        give_parcel(self.net.links, state, source, name="the run")

    def take(self, source: int) -> None:
        state = take_parcel(self.net.links, source)
        self.load_state_dict(state)
        for name, parameter in self.net.named_parameters():
            parameter.grad = state["grads"].get(name)

    def _grads(self) -> dict[str, torch.Tensor]:
        """A script may clear gradients after the next batch has come."""
        return {
            name: plain(parameter.grad)
            for name, parameter in self.net.named_parameters()
            if parameter.grad is not None
        }
