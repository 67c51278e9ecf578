"""Pictures to files and back, by Pillow, which only those need who keep pictures on disk."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terrazzo.errors import UsageError
from terrazzo.zoo.data.paint import Pixels

QUALITY = 92


def pillow() -> Any:
    """Pillow's Image module."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            "reading and writing pictures needs Pillow, which is not installed: "
            "pip install terrazzo[data]"
        ) from error
    return Image


def write(path: Path, pixels: Pixels) -> int:
    """Writes a JPEG or PNG, by the name of the file; gives its size in bytes."""
    stream = io.BytesIO()
    kind = "JPEG" if path.suffix == ".jpg" else "PNG"
    options: dict[str, Any] = {"quality": QUALITY, "subsampling": 0} if kind == "JPEG" else {}
    pillow().fromarray(pixels).save(stream, kind, **options)
    return path.write_bytes(stream.getvalue())


def read_picture(path: Path) -> Tensor:
    """uint8, (3, H, W)."""
    with pillow().open(path) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def read_mask(path: Path) -> Tensor:
    """uint8, (H, W)."""
    with pillow().open(path) as image:
        return torch.from_numpy(np.array(image))
