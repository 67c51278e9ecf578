"""A comparison: how far the weights of two trainings of one model lie apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.records import document

KIND, VERSION = "comparison", 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The worst relative difference among tensors, where it is, and what counts as equal."""

    weights_worst: float
    weights_where: str
    tensors: int
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.weights_worst <= self.tolerance

    def to_json(self) -> str:
        return document.dump(
            KIND, VERSION, {**asdict(self), "weights_worst": repr(self.weights_worst)}
        )

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        body = document.parse(text, KIND, VERSION)
        return cls(
            weights_worst=float(body["weights_worst"]),  # may be nan, which JSON has no word for
            weights_where=body["weights_where"],
            tensors=body["tensors"],
            tolerance=body["tolerance"],
        )
