"""The judge: what devices left behind against what an undisturbed run has at the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaos_case import STEPS, Case
from chaos_faults import mark

TOLERANCE = 1e-10
OWN = ("reader",)
"""What a checkpoint may say that depends on who is here."""


def judged(folder: Path, told: str, right: Path) -> str:
    """What is wrong with what the devices left behind; nothing, if all is well.

    ``right`` holds a checkpoint of the undisturbed run after every step.
    """
    import torch
    from safetensors.torch import load_file

    case = Case.from_json(told)
    found = {int(p.stem): load_file(p) for p in folder.glob("*.safetensors")}
    gone = {device for device in case.loses if mark(folder, device).exists()}
    gone -= {int(p.stem) for p in folder.glob("*.joined")}
    missing = set(range(case.devices)) - gone - set(found)
    if missing:
        return f"devices {sorted(missing)} did not end well"
    wanted, first = _final(right), min(found)
    for device, state in found.items():
        wrong = differs(state, wanted, "final")
        if wrong:
            return f"device {device}: {wrong}"
        for name, tensor in state.items():
            if not torch.equal(tensor, found[first][name]):
                return f"device {device}: {name} has other bits than on device {first}"
    return _damaged(folder / "checkpoints", right)


def _final(right: Path) -> dict[str, Any]:
    from terrazzo.runtime.checkpoint import Shelf

    last = Shelf(right).load(STEPS)
    average = last.rest["parts"].get("average", {})
    return {**last.model, **{f"average {name}": tensor for name, tensor in average.items()}}


def _damaged(folder: Path, right: Path) -> str:
    """Every checkpoint that is there is whole, and what it says it is: weights, and all else."""
    from terrazzo.errors import RunError
    from terrazzo.runtime.checkpoint import Shelf

    for own in sorted(folder.glob("*")):
        for step in Shelf(own).steps:
            try:
                is_, wanted = Shelf(own).load(step), Shelf(right).load(step)
                wrong = differs(dict(is_.model), dict(wanted.model), "model")
                wrong = wrong or differs(is_.rest, wanted.rest, "rest")
            except RunError as error:
                wrong = str(error)
            if wrong:
                return f"checkpoint {step} of device {own.name}: {wrong}"
    return ""


def differs(found: Any, right: Any, path: str) -> str:
    """The first thing that is another, in words; numbers may differ in their last digits."""
    import torch

    if isinstance(right, torch.Tensor) and isinstance(found, torch.Tensor):
        if found.shape != right.shape:
            return f"{path} has shape {tuple(found.shape)}, {tuple(right.shape)} is right"
        gap = float((found.double() - right.double()).norm())
        limit = TOLERANCE * max(float(right.double().norm()), 1e-3)
        return "" if gap <= limit else f"{path} is off by {gap:.2e}, limit {limit:.2e}"
    if isinstance(right, dict) and isinstance(found, dict):
        keys = [{str(key): key for key in one if str(key) not in OWN} for one in (found, right)]
        if keys[0].keys() != keys[1].keys():
            return f"{path} has {sorted(keys[0])}, {sorted(keys[1])} is right"
        rows = ((found[keys[0][key]], right[keys[1][key]], f"{path} {key}") for key in keys[0])
    elif isinstance(right, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(right):
            return f"{path} has {len(found)} entries, {len(right)} is right"
        rows = ((a, b, f"{path} {n}") for n, (a, b) in enumerate(zip(found, right, strict=True)))
    elif isinstance(right, float) and isinstance(found, float):
        is_near = abs(found - right) <= TOLERANCE * max(abs(right), 1e-3)
        return "" if is_near else f"{path} is {found!r}, {right!r} is right"
    else:
        same = type(found) is type(right) and found == right
        return "" if same else f"{path} is {str(found)[:60]}, {str(right)[:60]} is right"
    return next((wrong for row in rows if (wrong := differs(*row))), "")
