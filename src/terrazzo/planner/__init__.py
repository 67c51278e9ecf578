"""Choosing a plan: records in, Plan out."""

from terrazzo.planner.explicit import plan_graph

__all__ = ["plan_graph"]
