"""A trial: some steps of a training under one condition, and what was seen besides its spans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from terrazzo.errors import UsageError
from terrazzo.records import document

SYNTHETIC, WARM, COLD, USUAL = MODES = ("synthetic", "warm", "cold", "usual")
"""The same batch again and again; files in memory; files from storage; and the script's own way,
with files from storage. All but the last make batches in the training loop, without workers."""
KIND, VERSION = "trial", 3
FILE = "trial.json"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a script that is started for a trial shall do."""

    mode: str
    steps: int

    def to_text(self) -> str:
        """For an environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Trial:
        try:
            found = cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{text!r} describes no trial ({error})") from error
        if found.mode not in MODES or found.steps < 1:
            raise UsageError(f"{text!r} describes no trial: modes are {', '.join(MODES)}")
        return found


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """What the device that reads has seen; nothing here depends on when it was."""

    mode: str
    steps: int
    cpu_s: float
    """Processor time of the training process in a step, all its threads."""
    cores: float
    samples: int
    """In the data set; 0: it does not say."""
    batch: int
    """Samples of a batch."""
    batch_bytes: int
    """Of its tensors."""
    free_bytes: int
    folder: str
    """Where the last file lay that was opened for reading; empty: none was."""
    most_workers: int
    """That could make the same batches."""
    stays: str
    """Why no workers could; empty: they could."""
    own_workers: int = 0
    """Of a loader that goes its own way: what they do leaves no spans."""

    def to_json(self) -> str:
        return document.dump(KIND, VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrialFacts:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            names = (
                "mode", "steps", "cpu_s", "cores", "samples", "batch", "batch_bytes",
                "free_bytes", "folder", "most_workers", "stays", "own_workers",
            )  # fmt: skip
            return cls(**{name: body[name] for name in names})
