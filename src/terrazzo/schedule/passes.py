"""Passes: a group computed strip by strip, keeping only what enters it.

In such a group only the results of heavy operators (convolutions, pools) and what leaves the group
become arrays. Cheap operators between them (norms with known statistics, activations, additions,
concatenations) are computed again wherever they are read, one strip at a time: forwards without
autograd, and once more in the backward pass, where each strip is differentiated and forgotten.
"""

from __future__ import annotations

from terrazzo.geometry import Box, cut
from terrazzo.graph.rules import LOCAL, Letters, Local, place, rule_for
from terrazzo.graph.rules.windows import pair
from terrazzo.records import Graph, Node, Ref
from terrazzo.records.graph import BYTES
from terrazzo.schedule.program import Strip
from terrazzo.schedule.tiling import Tiling, letters_under, widened

HEAVY = frozenset(
    "conv2d linear max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d".split()
)
STRIP_BYTES = 2 << 20
"""A strip of less is not worth a pass of its own: small maps are cheap to hold."""


def is_heavy(node: Node, graph: Graph) -> bool:
    """Whether computing a result twice costs more than keeping it for a while."""
    kind = node.op.split(".")[1]
    if kind == "conv_transpose2d":  # without overlap each output has one tap: cheap
        return pair(node.args[3]) != tuple(graph.shape(node.refs[1])[2:])
    return kind in HEAVY


def materialised(tiling: Tiling, index: int) -> bool:
    """Whether the result of a split node of a group with passes becomes an array.

    Alone, nothing is ever exchanged, so a cheap result is computed again in other groups too.
    """
    node, group = tiling.graph.nodes[index], tiling.groups[index]
    if is_heavy(node, tiling.graph) or Ref(node.output) in tiling.graph.outputs:
        return True
    return any(
        tiling.placed[reader].role != LOCAL or not _shares(tiling, tiling.groups[reader], group)
        for reader in tiling.graph.consumers.get(node.output, ())
    )


def _shares(tiling: Tiling, one: int, other: int) -> bool:
    """Whether a chain may run from one group into another."""
    if one == other:
        return True
    groups = tiling.plan.groups
    return tiling.plan.devices == 1 and groups[one].passes > 0 and groups[other].passes > 0


def chain(tiling: Tiling, index: int) -> tuple[int, ...]:
    """A node and the cheap nodes that it reads, directly or not, in order."""
    graph, group = tiling.graph, tiling.groups[index]
    found, waiting = {index}, [index]
    while waiting:
        for name in graph.nodes[waiting.pop()].refs:
            producer = graph.producer.get(name)
            if producer is None or producer in found:
                continue
            inlined = tiling.placed[producer].role == LOCAL and not materialised(tiling, producer)
            if inlined and _shares(tiling, tiling.groups[producer], group):
                found.add(producer)
                waiting.append(producer)
    return tuple(sorted(found))


def strips(tiling: Tiling, nodes: tuple[int, ...], *, box: Box, passes: int) -> tuple[Strip, ...]:
    """Cuts the box a device computes into strips along the rows, and walks each backwards."""
    target = tiling.graph.nodes[nodes[-1]].output
    if box.is_empty:
        return ()
    letters = _letters(tiling, nodes)
    rows = letters[target].find("h")
    if rows < 0:
        rows = max(range(box.rank), key=lambda dim: box.shape[dim])
    start, extent = box.spans[rows][0], box.shape[rows]
    count = min(passes, extent, max(_widest(tiling, nodes, letters, box) // STRIP_BYTES, 1))
    parts = (box.replace(rows, (start + a, start + b)) for a, b in cut(extent, (1,) * count))
    return tuple(_strip(tiling, nodes, letters, part) for part in parts)


def _letters(tiling: Tiling, nodes: tuple[int, ...]) -> Letters:
    """Along which dimensions a chain can be cut: rows too, where images or channels are cut.

    Only if every operator of the chain can; else strips stop at its last one.
    """
    letters = tiling.plan.groups[tiling.groups[nodes[-1]]].layout.letters
    finer = letters + "".join(axis for axis in "hw" if axis not in letters)
    if finer not in tiling.letters:
        tiling.letters[finer] = letters_under(tiling.graph, finer)
    found = tiling.letters[finer]
    local = (place(tiling.graph.nodes[i], tiling.graph, found).role == LOCAL for i in nodes)
    return found if all(local) else tiling.letters[letters]


def _widest(tiling: Tiling, nodes: tuple[int, ...], letters: Letters, box: Box) -> int:
    """The bytes of the largest map that a chain makes or reads for a box: a pool reads more."""
    graph, whole = tiling.graph, _strip(tiling, nodes, letters, box)
    sizes = []
    for index, local, made in zip(nodes, whole.locals, whole.boxes, strict=True):
        node = graph.nodes[index]
        sizes.append(made.size * BYTES[graph.values[node.output].dtype])
        for name, read in zip(node.refs, local.reads, strict=True):
            if graph.values[name].kind in ("node", "input"):
                sizes.append(read.box.size * BYTES[graph.values[name].dtype])
    return max(sizes)


def _strip(tiling: Tiling, nodes: tuple[int, ...], letters: Letters, box: Box) -> Strip:
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
                wanted = widened(read.box, letters[name], graph.shape(name))
                boxes[name] = boxes.get(name, Box.empty(wanted.rank)).hull(wanted)
    order = tuple(boxes[graph.nodes[index].output] for index in nodes)
    return Strip(box, tuple(reversed(locals_)), order)
