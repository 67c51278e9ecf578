"""What a check found: the promise, tested on one model and one plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from terrazzo.records import document

KIND, VERSION = "check", 1


@dataclass(frozen=True, slots=True)
class CheckRow:
    """The worst relative error of one family of tensors."""

    what: str
    worst: float
    where: str
    count: int
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All families, and how much of the work truly ran split before the first global pool."""

    rows: tuple[CheckRow, ...]
    split_flops: float
    split_bytes: float
    devices: int
    plan_text: str

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_json(self) -> str:
        body = asdict(self)
        for row in body["rows"]:
            row["worst"] = repr(row["worst"])  # may be nan, which JSON has no word for
        return document.dump(KIND, VERSION, body)

    @classmethod
    def from_json(cls, text: str) -> CheckReport:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            rows = tuple(CheckRow(**{**row, "worst": float(row["worst"])}) for row in body["rows"])
            return cls(
                rows=rows,
                split_flops=body["split_flops"],
                split_bytes=body["split_bytes"],
                devices=body["devices"],
                plan_text=body["plan_text"],
            )

    def __str__(self) -> str:
        lines = [f"{'':20}{'worst':>10}{'limit':>10}  where"]
        lines += [
            f"{row.what:20}{row.worst:10.1e}{row.tolerance:10.0e}  {row.where}"
            f"{'' if row.ok else '  WRONG'}"
            for row in self.rows
        ]
        lines.append(
            f"{'exact' if self.ok else 'NOT exact'} on {self.devices} devices; split: "
            f"{self.split_flops:.1%} of FLOPs, {self.split_bytes:.1%} of activation bytes"
        )
        return "\n".join(lines)
