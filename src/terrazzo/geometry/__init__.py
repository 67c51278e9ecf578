"""Boxes, windows, cuts and transfers: the integer arithmetic under every layout."""

from terrazzo.geometry.box import Box, Span
from terrazzo.geometry.cuts import cut, grid
from terrazzo.geometry.transfers import Transfer, adjoint, transfers
from terrazzo.geometry.window import Adaptive, Bilinear, Nearest, Sliding, Transposed, Window

__all__ = [
    "Adaptive",
    "Bilinear",
    "Box",
    "Nearest",
    "Sliding",
    "Span",
    "Transfer",
    "Transposed",
    "Window",
    "adjoint",
    "cut",
    "grid",
    "transfers",
]
