"""Simulated boards: models of devices with knobs and sensors, for tests and for trying things out.

Nothing here is evidence about a real board. The models hold effects that the predictor's formulas
do not (floors in the voltage curve, soft rooflines, stalls, leakage that grows with heat,
throttling, losses of regulators, noise), so that what works on them has a chance elsewhere; no
more than that.
"""

from terrazzo.boards.board import Board, Workload, load_board
from terrazzo.boards.rig import Rig

__all__ = ["Board", "Rig", "Workload", "load_board"]
