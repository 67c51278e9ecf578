"""Arithmetic of a GPU: float32 means float32 inside of a net.

torch lets convolutions on a GPU round their inputs to ten bits (TF32) unless told otherwise. The
same numbers on any number of devices, or on a CPU beside a GPU, are not to be had that way. Who
wants faster arithmetic says so with autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Inside, nothing that runs on a GPU is rounded to TF32; the script's choice comes back."""
    if device.type != "cuda":
        yield
        return
    restore = _switch_off()
    try:
        yield
    finally:
        restore()


def _switch_off() -> Callable[[], None]:
    """Gives the way back. torch has two interfaces that must not be mixed: the older one is used,
    unless the script has used the newer."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    try:
        convolutions, products = cudnn.allow_tf32, torch.get_float32_matmul_precision()
        _ = matmul.allow_tf32  # raises as well where the newer interface was used
    except RuntimeError:
        parts = (cudnn.conv, cudnn.rnn, matmul)
        before = [part.fp32_precision for part in parts]
        for part in parts:
            part.fp32_precision = "ieee"

        def restore() -> None:
            for part, precision in zip(parts, before, strict=True):
                part.fp32_precision = precision

        return restore
    cudnn.allow_tf32 = False
    if products != "highest":
        torch.set_float32_matmul_precision("highest")

    def restore_older() -> None:
        cudnn.allow_tf32 = convolutions
        if products != "highest":
            torch.set_float32_matmul_precision(products)

    return restore_older
