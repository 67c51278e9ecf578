"""What a user calls: init, plan, parallelize, feed, check, agree."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

import terrazzo
from terrazzo.checking import compare_with_plain
from terrazzo.errors import UsageError
from terrazzo.feed.feed import feed
from terrazzo.feed.rehearsal import Rehearsal
from terrazzo.graph.export import export, frozen_in, wants_inputs
from terrazzo.measure.accelerator import can_measure, lies_on, title
from terrazzo.measure.known import given_profile
from terrazzo.optimizers import spare_compiler
from terrazzo.planner import Groups, Wishes
from terrazzo.planner.retarget import retarget
from terrazzo.planner.wishes import delivered_bytes
from terrazzo.planning import PLANNED, Planner, informed, shipped
from terrazzo.records import CheckReport, Layout, Plan
from terrazzo.records.event import EVERY_CALL
from terrazzo.records.graph import fingerprint
from terrazzo.records.profile import Profile
from terrazzo.records.trial import Trial
from terrazzo.runtime.agreement import AGREE, FORWARD, NOTHING, PLAN, Note, compare
from terrazzo.runtime.ceiling import is_small
from terrazzo.runtime.credentials import Credentials
from terrazzo.runtime.energy import open_log
from terrazzo.runtime.joining import Later
from terrazzo.runtime.links import Links, connect
from terrazzo.runtime.net import Net
from terrazzo.runtime.recorder import EVERY_CALL_UNTIL, Recorder
from terrazzo.runtime.recovery import together, watch
from terrazzo.runtime.start import join, tell_losses_shortly, told_without
from terrazzo.schedule.training import EVERYTHING, Training
from terrazzo.seating import take_seat

__all__ = ["agree", "check", "feed", "init", "parallelize", "plan"]

TIMEOUT_S = 300.0
RUN_FOLDER = "TERRAZZO_RUN"
RESUME = "TERRAZZO_RESUME"
"""The variable that names the folder in which a run is recorded; unset: it is not."""
RECOVER = "TERRAZZO_RECOVER"
"""The variable that says whether the starter lets the others go on when a device is lost; who is
started by somebody else has none."""
MEMBERS, JOIN, NAME = "TERRAZZO_MEMBERS", "TERRAZZO_JOIN", "TERRAZZO_NAME"
"""The file in which the devices of a run write down where they are, for those who come later;
the variable that is 1 for such a one; and the one that has what people call this device."""
TRIAL = "TERRAZZO_TRIAL"
"""The variable that says under which condition a script is fed for some steps, and then ended."""
ALIGN_EVERY = 50

Value = TypeVar("Value", int, float, bool)


def init(
    *, timeout_s: float = TIMEOUT_S, recover: bool | None = None, reader: int | None = None
) -> int:
    """Joins the other devices, from the environment that ``terrazzo run`` or torchrun sets.

    Gives this device's number; one that was lost and comes back has the number it had. Alone, it
    does nothing and gives 0. ``timeout_s`` bounds every wait for another device. With ``recover``
    the loss of a device is survived (docs/recovery.md); left open, it is where ``terrazzo run`` has
    started the devices. ``reader`` is the device that reads the data where nothing else is said, by
    default 0; where two halves of the devices lose each other, the half with it goes on.
    """
    if is_small():
        spare_compiler()  # a script may make its optimiser before it wraps the model
    members, credentials = os.environ.get(MEMBERS), Credentials.read(os.environ)
    name = os.environ.get(NAME, "")
    if members and os.environ.get(JOIN) == "1":
        links = connect()
        links.later = links.later or Later.read(
            Path(members), timeout_s=timeout_s, credentials=credentials, name=name
        )
    else:
        has_joined = join(os.environ, timeout_s=timeout_s)
        links = connect()
        if reader is not None and not 0 <= reader < links.devices:
            raise UsageError(f"reader={reader}: devices are numbered from 0 to {links.devices - 1}")
        if os.environ.get(RECOVER) == "1" if recover is None else recover:
            watch(links, tie=reader or 0, credentials=credentials, name=name)
        elif has_joined and links.device == 0 and recover is None and RECOVER not in os.environ:
            say = told_without(os.environ, links.devices)
            print(f"terrazzo: {say}", file=sys.stderr, flush=True)
    if links.devices > 1 or links.later is not None:
        tell_losses_shortly()
    links.members_file = Path(members) if members else None
    links.reader = links.reader if reader is None else reader
    if os.environ.get(RESUME):
        links.resume_from = Path(os.environ[RESUME])
    folder, trial = os.environ.get(RUN_FOLDER), os.environ.get(TRIAL)
    if folder and trial and links.rehearsal is None:
        links.rehearsal = Rehearsal(Trial.from_text(trial), Path(folder))
    if folder and links.recorder is None:
        # Who comes later has no number yet, but may be one that was here before.
        number = links.device if links.later is None else int(os.environ.get("RANK", os.getpid()))
        energy = open_log(os.environ, number)
        every = int(os.environ.get(EVERY_CALL, EVERY_CALL_UNTIL))
        recorder = Recorder(Path(folder), number, every_until=every)
        links.recorder = recorder.with_energy(energy)
    own = links.device if links.later is None else int(os.environ.get("RANK", links.device))
    take_seat(links, os.environ, int(os.environ.get("RANK", links.device)))
    return own


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _links() -> Links:
    """The links to the other devices; a script that forgot to join them is told."""
    if not _together() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"this process is one of {os.environ['WORLD_SIZE']} but has not joined the others: "
            "call tz.init() first"
        )
    return connect()


def _devices() -> int:
    return torch.distributed.get_world_size() if _together() else 1


def plan(
    model: nn.Module,
    example: Sequence[Any],
    *,
    devices: int | None = None,
    layout: str | Layout = "auto",
    groups: Groups = "auto",
    passes: int = 0,
    memory: str | int | Sequence[str | int] | None = None,
    objective: str = "time",
    profile: Profile | str | Path | None = None,
    delivery: str = "uint8",
    optimizer: str = EVERYTHING.optimizer,
) -> Plan:
    """A plan for a model on inputs like ``example``.

    ``layout``: "tiles:2x3", uneven "tiles:3,2,1x1", "samples", "channels", "whole", a Layout, or
    "auto". ``groups``: "each" (exchange at every operator), "one" (recompute everything), a
    number, layers that end groups, or "auto". Where both are left open, the plan with the least
    predicted time (or, with ``objective="memory"``, memory) is searched for, by a ``profile`` of
    the devices (a Profile or its file; default: the newest one that ``terrazzo cluster profile``
    has kept for this model and number of devices). Without any profile it is the grid of tiles
    with the shortest borders. ``passes`` and ``memory`` are those of ``parallelize``. ``delivery``
    is how the input travels from the device that reads it, as ``tz.feed`` sends it, in the
    predicted time of a step: "uint8", "float32", or "none" where every device has its own.
    Parameters that do not require gradients now are taken to stay frozen. ``optimizer`` ("sgd",
    "momentum", "adam") says what is kept of the others, in memory, and how long its step takes. A
    net is planned for too, by all devices at once (what is left open by device 0 for all);
    ``net.change_plan`` goes on by such a plan.
    """
    if isinstance(model, Net):  # whose weights may live in parts
        graph = together(model.links, lambda: model.prepare(_checked(example)).graph)
    else:
        graph = export(model, _checked(example)).graph
    own = torch.distributed.get_rank() if _together() else 0
    accelerators = {own: title(lies_on(model, example))}  # of others a script knows nothing here
    delivered = delivered_bytes(delivery)
    wishes = Wishes(
        layout, groups, passes, memory, objective, delivered=delivered,
        training=Training(optimizer, frozen_in(model), wants_inputs(model, example)),
    )  # fmt: skip

    def make() -> Plan:
        known = given_profile(profile, graph)
        if isinstance(model, Net):
            here = model.links.devices
        else:
            here = _devices() if known is None or _together() else len(known.devices)
        count = devices or here
        asked = informed(wishes, known, graph=graph, devices=count, accelerators=accelerators)
        return asked.plan(graph, count)

    if isinstance(model, Net) and model.links.devices > 1 and wishes.is_open:
        return together(model.links, lambda: _planned_by_one(model.links, make))
    return make()


def _planned_by_one(links: Links, make: Callable[[], Plan]) -> Plan:
    """By device 0 for all: profiles are kept where it is, and others may have none."""
    compare(links, Note(PLAN, 0, "", NOTHING), explain="tz.plan(net, ...)")
    _, (made,) = shipped(links, lambda: (PLANNED, (make(),)))
    return made


def parallelize(
    model: nn.Module,
    example: Sequence[Any],
    plan: Plan | None = None,
    *,
    layout: str | Layout = "auto",
    groups: Groups = "auto",
    passes: int = 0,
    memory: str | int | Sequence[str | int] | None = None,
    objective: str = "time",
    profile: Profile | str | Path | None = None,
    delivery: str = "uint8",
    optimizer: str = EVERYTHING.optimizer,
    seed: int | None = None,
    nan: str = "raise",
    align_every: int = ALIGN_EVERY,
) -> Net:
    """A net that computes what ``model`` computes, spread over all devices.

    All devices call it with the same model; device 0's weights are taken. Random operators draw
    from ``seed`` (default: torch's initial seed). ``nan="allow"`` lets NaN pass as PyTorch does.
    With ``passes`` of 1 or more only what enters each group is kept for the backward pass, and
    groups are computed in that many strips: less memory, more time, the same numbers; also alone.
    ``memory`` ("700MiB", bytes, or one for each device) chooses groups and passes so that a step
    fits: weights, their gradients, what the ``optimizer`` keeps and everything between, on top of
    the idle process.
    ``layout``, ``groups``, ``objective``, ``profile``, ``delivery`` and ``optimizer`` are those of
    ``tz.plan``;
    what is left open is planned by device 0 for all. Devices on several machines that have no
    profile yet measure themselves first, once, for about half a minute
    (``TERRAZZO_MEASURE=off``: they don't).
    Every ``align_every`` training calls, weights are compared bit by bit between devices (0:
    never).
    """
    _refuse_wrapped(model)
    if nan not in ("raise", "allow"):
        raise UsageError(f'nan={nan!r}: say "raise" or "allow"')
    links = _links()
    if plan is not None and (memory is not None or passes):
        raise UsageError("a plan says what to keep already: give memory= or passes= to tz.plan")
    delivered = delivered_bytes(delivery)
    wishes = Wishes(
        layout, groups, passes, memory, objective, delivered=delivered,
        training=Training(optimizer, inputs=wants_inputs(model, example)),
    )  # fmt: skip
    if plan is None:
        plan = _handed_over(links, wishes)
    torch_device = lies_on(model, example)
    planner = Planner(
        links,
        wishes,
        plan=plan if links.later is None else None,
        profile=profile,
        measures=can_measure(model, torch_device) if links.later is None else None,
        torch_device=torch_device,
        frozen=partial(frozen_in, model),
    )
    if small := is_small():
        spare_compiler()
    short = small or memory is not None or objective == "memory" or passes > 0
    lean = short or (plan is not None and any(group.passes for group in plan.groups))
    own = (torch.initial_seed() if seed is None else seed) % (1 << 63)
    net = Net(model, links, planner, seed=own, nan=nan, align_every=align_every, lean=lean)
    if links.later is not None:  # those who are here already have the graph
        net.expect(_checked(example))
        return net

    def begin() -> None:
        _same_model(model, links)
        net.seed = int(links.broadcast(torch.tensor([own])))
        net.prepare(_checked(example))

    together(links, begin)
    return net


def _handed_over(links: Links, wishes: Wishes) -> Plan | None:
    """The plan of ``terrazzo run --plan``, for a script that leaves it open."""
    if links.given is None or wishes == Wishes(
        delivered=wishes.delivered, training=wishes.training
    ):
        return links.given
    if links.device == 0:
        words = "the script says how to plan: of --plan only the power modes hold"
        print(f"terrazzo: {words}", file=sys.stderr)
    return None


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, Net):
        raise UsageError("the model is a net already: tz.parallelize was called on it before")
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel, Net)):
            where = f"its part {name!r}" if name else "the model"
            raise UsageError(
                f"{where} is wrapped in {type(module).__name__}, which spreads work and sums "
                "gradients itself: give tz.parallelize the bare model"
            )


def _same_model(model: nn.Module, links: Links) -> None:
    """Checks that all devices hold the same architecture, and gives all device 0's weights."""
    if links.devices == 1:
        return
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()]
    subject = fingerprint(str(model), shapes)
    links.where = "comparing models"
    story = f"{type(model).__name__} with {len(shapes)} parameters and buffers ({subject})"
    compare(links, Note(FORWARD, 0, subject, NOTHING), explain=story)
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(links.broadcast(tensor.detach().clone().contiguous()))


def _checked(example: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(example, (tuple, list)):
        raise UsageError("the example input is a tuple of what the model takes: (x,) for one")
    return tuple(example)


def check(
    model: nn.Module,
    example: Sequence[Any],
    plan: Plan | None = None,
    *,
    layout: str | Layout = "auto",
    groups: Groups = "auto",
    passes: int = 0,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> CheckReport:
    """The promise, tested: one step in float64 on all devices against plain PyTorch.

    The model itself is not changed. Outputs, input gradients, parameter gradients and buffers are
    compared; see ``CheckReport``.
    """
    _refuse_wrapped(model)
    exact = copy.deepcopy(model).double()
    inputs = tuple(_double(x) for x in _checked(example))
    links = _links()
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):  # drawn at random, it may differ between devices
            leaf.copy_(links.broadcast(leaf.detach().clone().contiguous()))
    _same_model(exact, links)
    plan = links.given if plan is None else plan
    if plan is not None:
        plan = retarget_precision(plan, model, example, exact, inputs)
    net = parallelize(
        copy.deepcopy(exact), inputs, plan, layout=layout, groups=groups, passes=passes, seed=seed
    )
    return compare_with_plain(exact, net, inputs, tolerance=tolerance)


def retarget_precision(
    plan: Plan, model: nn.Module, example: Sequence[Any], exact: nn.Module, inputs: Sequence[Any]
) -> Plan:
    """A plan made for a float32 model, for the same model in float64."""
    old = export(model, tuple(example)).graph
    if old.digest != plan.graph:
        return plan  # made for another model: parallelize says so
    return retarget(plan, old, export(exact, tuple(inputs)).graph)


def _double(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().double().clone() if x.is_floating_point() else x.clone()
    if isinstance(x, Mapping):
        return {key: _double(part) for key, part in x.items()}
    return x


def agree(value: Value) -> Value:
    """Device 0's value on all devices: one decision for all (early stopping, a learning rate)."""
    if not _together():
        return value
    links = connect()

    def attempt() -> float:
        compare(links, Note(AGREE, 0, "", NOTHING), explain="tz.agree")
        kind = torch.float64 if isinstance(value, float) else torch.int64
        return links.broadcast(torch.tensor([value], dtype=kind)).item()

    return type(value)(together(links, attempt))


# Importing the subpackage bound its name in the package; the name belongs to the function.
terrazzo.feed = feed
