"""The store: profiles kept between commands, found again by what they hold for.

One file for each model and place, and another one where nets lie on GPUs there. A file whose key
differs in anything else (another torch, other threads, another clock) is of no use, and the store
says in what it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.measure.key import ACCELERATORS, MODEL, NONE, PLACE, difference
from terrazzo.records.graph import fingerprint
from terrazzo.records.profile import Profile


@dataclass(frozen=True, slots=True)
class Found:
    """A profile that still holds, or why there is none."""

    profile: Profile | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """A folder of profiles."""

    folder: Path

    @classmethod
    def usual(cls, environment: Mapping[str, str]) -> ProfileStore:
        """Where caches of this user live."""
        home = environment.get("XDG_CACHE_HOME") or ""
        caches = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
        return cls(caches / "terrazzo" / "profiles")

    def path(self, key: Mapping[str, str]) -> Path:
        on_gpus = key.get(ACCELERATORS, NONE) != NONE
        subject = (key[MODEL], key[PLACE], *((ACCELERATORS,) if on_gpus else ()))
        return self.folder / f"{fingerprint(*subject)}.json"

    def find(self, key: Mapping[str, str]) -> Found:
        """The profile of this key, if it was measured and nothing has changed since."""
        path = self.path(key)
        if not path.exists():
            return Found(None, "this model was not measured on these devices yet")
        try:
            profile = Profile.load(path)
        except UsageError as error:
            return Found(None, str(error))
        changed = difference(key, profile.key)
        return Found(None, changed) if changed else Found(profile)

    def keep(self, profile: Profile) -> Path:
        path = self.path(profile.key)
        profile.save(path)
        return path
