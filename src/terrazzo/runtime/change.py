"""Change: a net goes on by another plan, at the border between two steps.

Whatever can be refused is refused by all devices before the first weight has moved.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from terrazzo.errors import PlanError, UsageError
from terrazzo.graph.export import Export
from terrazzo.records import Plan
from terrazzo.records.graph import fingerprint
from terrazzo.records.units import count_text
from terrazzo.runtime.agreement import CHANGE, NOTHING, PACE, Note, compare
from terrazzo.runtime.recovery import together
from terrazzo.runtime.trial import Trial

if TYPE_CHECKING:
    from terrazzo.runtime.net import Net


def change_plan(net: Net, plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    """Moves weights and what belongs to them, and makes the net ready for the plan.

    Where a device is lost meanwhile, plans are made anew anyway.
    """
    _go_on(net, plan, optimizers, members=net.links.members, by_script=True)
    _end_trial(net)  # whoever asks has chosen


def _go_on(
    net: Net,
    plan: Plan,
    optimizers: Sequence[Optimizer],
    *,
    members: Sequence[int],
    by_script: bool = False,
) -> None:
    """``members`` are those who have decided it. ``by_script``: it is not one of our own plans."""

    def attempt() -> None:
        if net.links.members == members:
            _change(net, plan, optimizers, by_script=by_script)

    together(net.links, attempt)


def _change(net: Net, plan: Plan, optimizers: Sequence[Optimizer], *, by_script: bool) -> None:
    _agree(net, plan)
    key, exported = _planned(net, plan)
    weights = net._weights
    program = net._lowered(exported.graph, plan, anew=True)
    wanted = weights.wanted(program)
    if weights.spares is not None and wanted and weights.homes == {}:
        weights.spares.keep_whole()
    relocation = weights.relocation(wanted, optimizers)  # a round: by now all have put theirs aside
    weights.is_moving = bool(relocation.movers)
    if weights.spares is not None:
        weights.spares.moving(True)
    relocation.run()
    weights.homes, weights.is_moving = relocation.homes, False
    if weights.spares is not None:
        weights.spares.moving(False)
    net._plans.adopt(exported.graph, plan, by_script=by_script)
    if net.links.recorder is not None:
        net.links.recorder.note("plan", call=float(net.calls))
    net._ready.clear()
    net._ready[key] = net._make_ready(exported, program)


def keep_pace(net: Net, optimizers: Sequence[Optimizer]) -> bool:
    """Another plan, where one is faster or devices stray from the one that is; the same on all."""
    pace = net._pace
    pace.is_kept = True
    if net._trial is None and net._plans.contenders and net.links.trying is None:
        net.links.trying = net.number  # the steps of another net are the same steps
        net.__dict__["_trial"] = Trial(net._plans.contenders)
    if net._trial is not None and not net._trial.is_over:
        return _try_plans(net, net._trial, optimizers)
    if not pace.strays or not pace.is_planned:
        return False
    before, words = net.plan, pace.words(net.links.called)
    members = net.links.members
    plan = net._plans.again(pace.slowness)
    pace.be_patient()
    if plan is not None:
        _go_on(net, plan, optimizers, members=members)
    changed = bool(plan is not None and plan != before)
    say(net, f"{words}: {'planned anew' if changed else 'the plan stays, none is better'}")
    return changed


def _try_plans(net: Net, trial: Trial, optimizers: Sequence[Optimizer]) -> bool:
    """A step of a trial: device 0 says by which plan the next one is."""
    links, before, members = net.links, trial.current, net.links.members
    latest = next(reversed(net._ready.values()), None)  # none where connections were made anew
    count = (net.calls, net.commits, latest.graph.digest if latest else "")
    word = 0.0
    if links.device == 0:
        trial.lap(count)
        word = trial.word(is_free=not trial.wants_change or not unfinished(net))
    note = Note(PACE, net.calls, trial.subject, NOTHING, flag=word)

    def attempt() -> float | None:
        if links.members != members:
            return None  # with others, plans are others too
        return compare(links, note, explain="net.keep_pace")[0]

    told = together(links, attempt)
    if told is not None:
        trial.heard(told)
    if trial.current != before:
        plan = trial.plans[trial.current]
        try:
            _go_on(net, plan, optimizers, members=members)
        except UsageError as error:  # on all devices, before anything has moved
            trial.refuse(error, stay=before)
    if net._trial is not trial:
        return False  # a device was lost, and plans are made anew
    if trial.is_over:
        links.trying = None
        if links.device == 0:
            say(net, trial.words())
    trial.begin(count)
    return bool(trial.current != before)


def _end_trial(net: Net) -> None:
    if net._trial is not None and net.links.trying == net.number:
        net.links.trying = None
    net.__dict__["_trial"] = None


def tell_pace(net: Net) -> None:
    """One line about devices that are slower than planned, where nobody does anything about it."""
    pace = net._pace
    if (pace.is_kept and pace.is_planned) or not any(stray.is_slow for stray in pace.strays):
        return
    help_ = "look at its temperature and at what else runs on it"
    if pace.is_planned:
        help_ += ", or call net.keep_pace(optimizer) after every step to plan anew"
    say(net, f"{pace.words(net.links.called)}: {help_}")


def tell_outgrown(net: Net, trained: list[bool]) -> None:
    """One line where layers are trained that were frozen when the plan was made."""
    if trained == net._trained:
        return
    net.__dict__["_trained"] = trained
    count = net._plans.outgrown()
    if count:
        say(
            net,
            f"{count_text(count, 'parameter')} {'is' if count == 1 else 'are'} trained that the "
            "plan takes for frozen: numbers are right by any plan, time and memory of a step are "
            "more than planned. net.change_plan(tz.plan(net, (x,)), optimizer), with what "
            "tz.parallelize was told, plans for them too",
        )


def say(net: Net, words: str) -> None:
    """A line for people, from one device for all."""
    if net.links.device == 0:
        print(f"terrazzo: call {net.calls}: {words}", file=sys.stderr, flush=True)


def unfinished(net: Net) -> list[int]:
    """Calls that may still be asked for gradients, by number."""
    if any(call.run_state is not None for call in net._begun):
        gc.collect()  # those that nobody can ask any more
    return sorted(call.number for call in net._begun if call.run_state is not None)


def _agree(net: Net, plan: Plan) -> None:
    """The same plan on all devices, and no call of any of them on its way."""
    open_calls, links = unfinished(net), net.links
    subject = fingerprint(plan.to_json())
    links.where = "the agreement before a change of plans"
    layouts = ", ".join(dict.fromkeys(str(group.layout) for group in plan.groups))
    note = Note(CHANGE, net.calls, subject, NOTHING, flag=float(len(open_calls)))
    flags = compare(links, note, explain=f"changing to plan {subject} ({layouts})")
    if any(flags):
        device = next(number for number, flag in enumerate(flags) if flag)
        which = f"call {open_calls[0]}" if open_calls else "a call"
        raise UsageError(
            f"plans were to be changed while {which} of net waits for its backward pass (seen on "
            f"device {device}): change them between steps, after loss.backward(); call net under "
            "torch.no_grad() where no gradients are wanted"
        )


def _planned(net: Net, plan: Plan) -> tuple[object, Export]:
    """The graph that a plan is for, among those that the net has met."""
    if plan.devices != net.links.devices:
        raise PlanError(
            f"the plan is for {plan.devices} devices, {net.links.devices} are here: make one with "
            f"tz.plan(model, (x,), devices={net.links.devices})"
        )
    for key, exported in net._exports.items():
        if exported.graph.digest == plan.graph:
            return key, exported
    known = ", ".join(exported.graph.digest for exported in net._exports.values())
    raise PlanError(
        f"the plan was made for model {plan.graph}, this net has met {known}: make a plan for it "
        "with tz.plan, in the same mode and with inputs of a size that it was called with"
    )
