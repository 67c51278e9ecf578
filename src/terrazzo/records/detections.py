"""Detections: what a trained network found on a few pictures, beside what is there."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.records import document

KIND, VERSION = "detections", 1


@dataclass(frozen=True, slots=True)
class Mark:
    """A box on a picture, as fractions of its width and height; a true one has score 1."""

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture by the name of its PNG file in the run folder."""

    picture: str
    found: tuple[Mark, ...]
    true: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Detections:
    """A few pictures, and in a sentence what they are."""

    scenes: tuple[Scene, ...]
    caption: str = ""

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Detections:
        body = document.parse(text, KIND, VERSION)
        return cls(
            tuple(
                Scene(
                    scene["picture"],
                    tuple(Mark(**mark) for mark in scene["found"]),
                    tuple(Mark(**mark) for mark in scene["true"]),
                )
                for scene in body["scenes"]
            ),
            body["caption"],
        )
