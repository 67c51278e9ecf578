"""Passes: a group computed strip by strip, keeping only what enters it.

In such a group only the results of heavy operators (convolutions, pools) and what leaves the group
become arrays. Cheap operators between them (norms with known statistics, activations, additions,
concatenations) are computed again wherever they are read, one strip at a time: forwards without
autograd, and once more in the backward pass, where each strip is differentiated and forgotten.
"""

from __future__ import annotations

from terrazzo.geometry import Box, cut
from terrazzo.graph.rules import LOCAL, Local, rule_for
from terrazzo.records import Node, Ref
from terrazzo.schedule.program import Strip
from terrazzo.schedule.tiling import Tiling

HEAVY = frozenset(
    "conv2d conv_transpose2d linear max_pool2d avg_pool2d adaptive_avg_pool2d "
    "adaptive_max_pool2d".split()
)


def is_heavy(node: Node) -> bool:
    """Whether computing a result twice costs more than keeping it for a while."""
    return node.op.split(".")[1] in HEAVY


def materialised(tiling: Tiling, index: int) -> bool:
    """Whether the result of a split node of a group with passes becomes an array."""
    node, group = tiling.graph.nodes[index], tiling.groups[index]
    if is_heavy(node) or Ref(node.output) in tiling.graph.outputs:
        return True
    return any(
        tiling.groups[reader] != group or tiling.placed[reader].role != LOCAL
        for reader in tiling.graph.consumers.get(node.output, ())
    )


def chain(tiling: Tiling, index: int) -> tuple[int, ...]:
    """A node and the cheap nodes of its group that it reads, directly or not, in order."""
    graph, group = tiling.graph, tiling.groups[index]
    found, waiting = {index}, [index]
    while waiting:
        for name in graph.nodes[waiting.pop()].refs:
            producer = graph.producer.get(name)
            if producer is None or producer in found or tiling.groups[producer] != group:
                continue
            if tiling.placed[producer].role == LOCAL and not materialised(tiling, producer):
                found.add(producer)
                waiting.append(producer)
    return tuple(sorted(found))


def strips(tiling: Tiling, nodes: tuple[int, ...], *, box: Box, passes: int) -> tuple[Strip, ...]:
    """Cuts the box a device computes into strips along the rows, and walks each backwards."""
    target = tiling.graph.nodes[nodes[-1]].output
    if box.is_empty:
        return ()
    rows = tiling.axes[target].find("h")
    if rows < 0:
        rows = max(range(box.rank), key=lambda dim: box.shape[dim])
    start, extent = box.spans[rows][0], box.shape[rows]
    spans = [span for span in cut(extent, (1,) * min(passes, extent)) if span[0] < span[1]]
    return tuple(
        _strip(tiling, nodes, box.replace(rows, (start + low, start + high))) for low, high in spans
    )


def _strip(tiling: Tiling, nodes: tuple[int, ...], box: Box) -> Strip:
    """What every node of a chain computes for one strip of its last result."""
    graph = tiling.graph
    boxes: dict[str, Box] = {graph.nodes[nodes[-1]].output: box}
    locals_: list[Local] = []
    inside = {graph.nodes[index].output for index in nodes}
    for index in reversed(nodes):
        node = graph.nodes[index]
        rule = rule_for(node.op)
        assert rule is not None and rule.local is not None
        local = rule.local(node, graph, boxes[node.output])
        locals_.append(local)
        for name, read in zip(node.refs, local.reads, strict=True):
            if name in inside:
                wanted = tiling.widened(name, read.box)
                boxes[name] = boxes.get(name, Box.empty(wanted.rank)).hull(wanted)
    order = tuple(boxes[graph.nodes[index].output] for index in nodes)
    return Strip(box, tuple(reversed(locals_)), order)
