"""A case of chaos: devices, what they train and how, and what happens to them.

It is drawn from a seed and a number alone, so one that failed can be had again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from chaos_faults import LOST, ONLY_AFTER, ONLY_CUT, PLACES, Strike

INSIDE = {"kill": 8, "pause": 3, "hang": 1, "break": 2, "clock": 1, "disk": 2}
"""How often each happens, of all, to processes of this machine."""
IN_LAB = {
    "kill": 8, "pause": 3, "cut": 3, "slow": 2, "fill": 2, "hang": 1, "break": 1, "clock": 1,
    "disk": 2,
}  # fmt: skip
"""To emulated devices."""
LASTS_S = (2.0, 12.0, 25.0)
"""How long a pause or a cut lasts: no loss, a loss that comes back, one that comes too late."""
ROUND_S, HUNG_S, RETURN_S = 20.0, 60.0, 10.0
"""About what a round takes, what the others wait for one that hangs, and what a return takes."""
STEPS = 12
CHANGES = {"auto": ("samples", "whole", "channels"), "channels": ("samples", "uneven")}
"""What plans change to."""


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how: the first three decide the numbers, the rest must not."""

    clip: bool = False
    accumulate: int = 1
    average: bool = False
    layout: str = "auto"
    reader: int = 0
    change: int = 0
    """The step after which plans change; 0: never."""
    change_to: str = ""
    restarts: int = 0
    pause_s: float = 0.0

    @property
    def numbers(self) -> Recipe:
        """The same on one device, with nothing that must not matter."""
        return Recipe(self.clip, self.accumulate, self.average)

    @property
    def name(self) -> str:
        return f"{int(self.clip)}-{self.accumulate}-{int(self.average)}"

    def __str__(self) -> str:
        said = [self.layout, f"device {self.reader} reads"]
        said += ["clips"] if self.clip else []
        said += [f"adds up {self.accumulate}"] if self.accumulate > 1 else []
        said += ["averages"] if self.average else []
        said += [f"{self.change_to} after step {self.change}"] if self.change else []
        said += ["restarts"] if self.restarts else []
        return ", ".join(said)


@dataclass(frozen=True)
class Case:
    devices: int
    recipe: Recipe
    strikes: tuple[Strike, ...]

    @property
    def is_cut(self) -> bool:
        return self.recipe.layout == "channels"

    @property
    def loses(self) -> set[int]:
        return {strike.device for strike in self.strikes if strike.kind in LOST}

    @property
    def expected_s(self) -> float:
        """About how long a round of it takes: so that long ones can begin first."""
        held_s = [HUNG_S if one.kind == "hang" else one.lasts_s for one in self.strikes]
        return ROUND_S + max(held_s) + (RETURN_S if self.recipe.restarts else 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        told = json.loads(text)
        strikes = tuple(Strike(**row) for row in told["strikes"])
        return cls(told["devices"], Recipe(**told["recipe"]), strikes)


def drawn(
    seed: int, number: int, *, kinds: Mapping[str, int], devices: Sequence[int] = (3, 4, 4, 5)
) -> Case:
    """Enough devices are always left to go on."""
    draw = random.Random(f"{seed} {number}")
    count = draw.choice(devices)
    restarts, layout = draw.random() < 0.3, "channels" if number % 2 else "auto"
    recipe = Recipe(
        clip=draw.random() < 0.5,
        accumulate=draw.choice((1, 1, 2)),
        average=draw.random() < 0.3,
        layout=layout,
        reader=draw.randrange(count) if draw.random() < 0.5 else 0,
        change=2 * draw.randint(1, 5) if draw.random() < 0.3 else 0,
        change_to=draw.choice(CHANGES[layout]),
        restarts=int(restarts),
        pause_s=0.25 if restarts else 0.0,
    )
    return Case(count, recipe, tuple(_strikes(draw, count, recipe, kinds)))


def _strikes(
    draw: random.Random, devices: int, recipe: Recipe, kinds: Mapping[str, int]
) -> list[Strike]:
    struck = draw.sample(range(devices), 2 if draw.random() < 0.45 else 1)
    found: list[Strike] = []
    for device in struck:
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        lost = [one.device for one in found if one.kind in LOST]
        if lost and kind in LOST and not _enough(devices, {*lost, device}, recipe.reader):
            kind = "break"
        if found and draw.random() < 0.4 and kind != "disk":  # both at once
            place, at = found[0].place, found[0].at
        else:
            places = _places(kind, recipe, found[0].kind if found else "")
            after = [place for place in places if place in ONLY_AFTER]
            place = draw.choice(after if after and draw.random() < 0.6 else places)
            at = draw.randint(*PLACES[place][2:])
        lasts_s = draw.choice(LASTS_S) if kind in ("pause", "cut") else 0.0
        found.append(Strike(kind, device, place, at, lasts_s))
    return found


def _enough(devices: int, lost: set[int], reader: int) -> bool:
    left = devices - len(lost)
    return 2 * left > devices or (2 * left == devices and reader not in lost)


def _places(kind: str, recipe: Recipe, before: str) -> list[str]:
    """Where this can happen; ``before`` is what happens to another device, if anything does."""
    if kind == "disk":
        return ["optimiser", "checkpoint"]
    cut = recipe.layout == "channels"
    never = {place for place, kinds in ONLY_AFTER.items() if before not in kinds}
    never |= set() if cut else set(ONLY_CUT)
    never |= set() if recipe.change else {"change"}
    never |= set() if recipe.restarts else {"joining"}
    if cut or kind not in ("kill", "cut", "fill"):
        never.add("start")
    return [place for place in PLACES if place not in never]
