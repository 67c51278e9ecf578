"""A plan for another input size or mode of the same model."""

from __future__ import annotations

from dataclasses import replace

from terrazzo.planner.borders import heads
from terrazzo.records import Graph, Group, Plan


def retarget(plan: Plan, old: Graph, new: Graph) -> Plan:
    """The same layouts, with groups ending after as many products, windows and pools as before.

    Names of values differ between train and eval mode, and operators may come and go with the
    input size; these are what the borders of groups are about.
    """
    if old.digest == new.digest:
        return plan
    before, after = heads(old), heads(new)
    groups: dict[int, Group] = {}
    for group in plan.groups:
        end = old.producer[group.last]
        done = sum(index <= end for index in before)
        if done and before[done - 1] == end and done <= len(after):
            last = after[done - 1]  # right behind a convolution, as groups with passes end
        else:
            last = after[done] - 1 if done < len(after) else len(new.nodes) - 1
        if last >= 0:
            groups[last] = replace(group, last=new.nodes[last].output)
    final = len(new.nodes) - 1
    if final not in groups:
        groups[final] = replace(plan.groups[-1], last=new.nodes[final].output)
    return Plan(new.digest, plan.devices, tuple(groups[end] for end in sorted(groups)))
