"""Loaded by the server that devices are forked from: what takes long is done once, here.

With one thread: threads do not survive a fork.
"""

import torch

torch.set_num_threads(1)

import torch._dynamo  # noqa: E402
import torch.export._trace  # noqa: E402
from chaos_job import SHAPE, model  # noqa: E402

import terrazzo.api  # noqa: E402, F401
from terrazzo.graph.export import export  # noqa: E402

export(model(), (torch.zeros(SHAPE, dtype=torch.float64),))
