"""A model as data: values, the operators between them, and what they weigh.

Operators are named as ATen names them (``aten.conv2d.default``). An argument is a plain Python
value, a ``Ref`` to a tensor, a ``Dtype``, or a tuple of these.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from terrazzo.records import document

KIND, VERSION = "graph", 1


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor used as an argument, by the name of its value."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype used as an argument, by name: ``float32``."""

    name: str


Argument = None | bool | int | float | str | Ref | Dtype | tuple["Argument", ...]

BYTES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: where it comes from and what shape it has.

    ``kind`` is input, parameter, buffer, constant or node; ``target`` is the name in the model's
    state_dict (or of the constant), empty for inputs and nodes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    target: str = ""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES.get(self.dtype, 4)

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class Node:
    """One operator: its arguments in the order of its schema, and the values it makes.

    An output that nobody uses has an empty name. ``layer`` is the module it came from, as
    ``named_modules`` calls it. ``refs`` are the tensors it reads, in order of appearance, repeats
    included.
    """

    op: str
    args: tuple[Argument, ...]
    outputs: tuple[str, ...]
    layer: str = ""
    flops: int = 0
    gradient: bool = True
    refs: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "refs", tuple(ref.name for ref in walk(self.args)))

    @property
    def output(self) -> str:
        """The main output, or the first that anybody uses."""
        return next((name for name in self.outputs if name), "")

    @property
    def title(self) -> str:
        """How a person would name it."""
        return f"{self.layer or self.output} ({self.op})"


@dataclass(frozen=True)
class Graph:
    """A model in one mode (train or eval) for one set of input shapes.

    ``mutations`` maps the state_dict name of a buffer to the value that replaces it after the
    call; ``output_tree`` is the serialised structure the outputs are put back into.
    """

    values: Mapping[str, Value]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Argument, ...]
    mutations: Mapping[str, str]
    output_tree: str = ""

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """The index of the node that makes a value."""
        return {
            name: index for index, node in enumerate(self.nodes) for name in node.outputs if name
        }

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """The indices of the nodes that read a value."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.refs):
                found.setdefault(name, []).append(index)
        return {name: tuple(readers) for name, readers in found.items()}

    @cached_property
    def digest(self) -> str:
        """Equal for equal graphs."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def to_json(self) -> str:
        return document.dump(
            KIND,
            VERSION,
            {
                "values": [
                    [v.name, v.kind, list(v.shape), v.dtype, v.target] for v in self.values.values()
                ],
                "nodes": [
                    [n.op, encode(n.args), list(n.outputs), n.layer, n.flops, n.gradient]
                    for n in self.nodes
                ],
                "inputs": list(self.inputs),
                "outputs": encode(self.outputs),
                "mutations": dict(self.mutations),
                "output_tree": self.output_tree,
            },
        )

    @classmethod
    def from_json(cls, text: str) -> Graph:
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            values = [
                Value(name, kind, tuple(shape), dtype, target)
                for name, kind, shape, dtype, target in body["values"]
            ]
            return cls(
                values={value.name: value for value in values},
                nodes=tuple(
                    Node(op, decode(args), tuple(outputs), layer, flops, gradient)
                    for op, args, outputs, layer, flops, gradient in body["nodes"]
                ),
                inputs=tuple(body["inputs"]),
                outputs=decode(body["outputs"]),
                mutations=body["mutations"],
                output_tree=body["output_tree"],
            )


def walk(argument: Argument) -> Iterator[Ref]:
    """The references inside an argument, in order."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from walk(part)


def encode(argument: Argument) -> Any:
    """An argument as JSON: tuples are lists, what JSON cannot say is an object with one key."""
    if isinstance(argument, tuple):
        return [encode(part) for part in argument]
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Dtype):
        return {"dtype": argument.name}
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


def decode(data: Any) -> Any:
    """The inverse of ``encode``."""
    if isinstance(data, list):
        return tuple(decode(part) for part in data)
    if isinstance(data, dict):
        ((key, text),) = data.items()
        return {"ref": Ref, "dtype": Dtype, "float": float}[key](text)
    return data


def fingerprint(*parts: object) -> str:
    """A short digest of plain values, for comparing plans and calls between devices."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
