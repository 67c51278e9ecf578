"""What crosses borders: frozen dataclasses with versioned JSON."""

from terrazzo.records.check import CheckReport, CheckRow
from terrazzo.records.graph import Argument, Dtype, Graph, Node, Ref, Value
from terrazzo.records.layout import Layout
from terrazzo.records.plan import Group, Plan

__all__ = [
    "Argument",
    "CheckReport",
    "CheckRow",
    "Dtype",
    "Graph",
    "Group",
    "Layout",
    "Node",
    "Plan",
    "Ref",
    "Value",
]
