"""How much arithmetic an operator is, from shapes alone: multiply and add count as two."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from terrazzo.records import Node, Value

MATRIX = ("mm", "bmm", "matmul", "addmm", "baddbmm", "linear")


def flops(node: Node, values: Mapping[str, Value]) -> int:
    """The operations of one forward call; the backward of a convolution is twice that."""
    if not node.output:
        return 0
    result = prod(values[node.output].shape)
    kind = node.op.split(".")[1]
    if kind == "conv2d":
        return 2 * result * prod(values[node.refs[1]].shape[1:])
    if kind == "conv_transpose2d":
        return 2 * prod(values[node.refs[0]].shape) * prod(values[node.refs[1]].shape[1:])
    if kind in MATRIX:
        left = node.refs[1] if kind in ("addmm", "baddbmm") else node.refs[0]
        return 2 * result * values[left].shape[-1]
    if kind == "scaled_dot_product_attention":
        query, key = values[node.refs[0]].shape, values[node.refs[1]].shape
        return 4 * prod(query) * key[-2]
    if kind in ("max_pool2d", "avg_pool2d"):
        kernel = node.args[1]
        return result * (
            prod(k for k in kernel if isinstance(k, int)) if isinstance(kernel, tuple) else 1
        )
    return max([result, *(prod(values[name].shape) for name in node.refs)])
