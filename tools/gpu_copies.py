"""Ways of a batch from the host onto a GPU, beside each other: which one pays.

    python tools/gpu_copies.py [--json FILE]

A step is: fill the batch on the host (uint8, as a decoder does), bring it over, convolve. Ways:

- pageable: an ordinary tensor and ``.to("cuda")``
- pinned: a page-locked buffer, copied asynchronously; the host waits before it fills it again
- pinned ahead: two of them and a stream of their own, so the next batch travels during this step
- managed: one buffer that host and GPU both see (cudaMallocManaged); pages move when touched
- managed, told: the same, moved ahead by cudaMemPrefetchAsync

For each: what making it ready costs (allocation and first use), and the median time of a step, the
ways in turn. Sizes stay far below what the GPU has free.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = {"6x3x416x416": (6, 3, 416, 416), "64x3x224x224": (64, 3, 224, 224)}
STEPS, ROUNDS = 20, 3


class Way:
    """A host's tensor to fill, and what the GPU computes with."""

    host: Tensor

    def bring(self) -> Tensor:
        raise NotImplementedError

    def before_filling(self) -> None:
        """Whoever still reads the host's tensor is waited for."""

    def close(self) -> None:
        """Gives back what torch does not know of."""


class Pageable(Way):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.host = torch.empty(shape, dtype=torch.uint8)

    def bring(self) -> Tensor:
        return self.host.to("cuda")


class Pinned(Way):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()

    def before_filling(self) -> None:
        self.copied.synchronize()

    def bring(self) -> Tensor:
        found = self.host.to("cuda", non_blocking=True)
        self.copied.record()
        return found


class Ahead(Way):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.stream, self.turn = torch.cuda.Stream(), 0

    @property
    def host(self) -> Tensor:  # type: ignore[override]
        return self.buffers[self.turn]

    def before_filling(self) -> None:
        self.copied[self.turn].synchronize()

    def bring(self) -> Tensor:
        with torch.cuda.stream(self.stream):
            found = self.host.to("cuda", non_blocking=True)
            self.copied[self.turn].record(self.stream)
        torch.cuda.current_stream().wait_event(self.copied[self.turn])
        found.record_stream(torch.cuda.current_stream())
        self.turn = 1 - self.turn
        return found


class Managed(Way):
    """Memory of cudaMallocManaged, seen as a tensor from both sides."""

    def __init__(self, shape: tuple[int, ...], *, told: bool) -> None:
        self.told, size = told, torch.Size(shape).numel()
        self.runtime = _runtime()
        pointer = ctypes.c_void_p()
        _check(self.runtime.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(size), 1))
        assert pointer.value is not None
        self.address, self.size = pointer.value, size
        room = (ctypes.c_uint8 * size).from_address(self.address)
        self.host = torch.frombuffer(room, dtype=torch.uint8).view(shape)
        self.seen = torch.as_tensor(_Seen(self.address, shape), device="cuda")

    def before_filling(self) -> None:
        torch.cuda.current_stream().synchronize()

    def bring(self) -> Tensor:
        if self.told:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self._prefetch(stream)
        return self.seen

    def _prefetch(self, stream: ctypes.c_void_p) -> None:
        address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self.size)
        if int(torch.version.cuda.split(".")[0]) < 13:  # type: ignore[union-attr]
            _check(self.runtime.cudaMemPrefetchAsync(address, size, 0, stream))
        else:  # the place became a structure: kind (1: a GPU), its number
            place = _Place(1, 0)
            _check(self.runtime.cudaMemPrefetchAsync(address, size, place, 0, stream))

    def close(self) -> None:
        torch.cuda.synchronize()
        _check(self.runtime.cudaFree(ctypes.c_void_p(self.address)))


class _Place(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Seen:
    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def _runtime() -> Any:
    """The CUDA runtime that torch has loaded already."""
    with Path("/proc/self/maps").open() as lines:
        names = {line.split()[-1] for line in lines if "libcudart" in line}
    return ctypes.CDLL(names.pop())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA runtime says {status}")


WAYS: dict[str, Callable[[tuple[int, ...]], Way]] = {
    "pageable": Pageable,
    "pinned": Pinned,
    "pinned ahead": Ahead,
    "managed": lambda shape: Managed(shape, told=False),
    "managed, told": lambda shape: Managed(shape, told=True),
}


def steps(way: Way, source: Tensor, net: nn.Module, count: int) -> float:
    """Seconds a step; the loss is read at the end, not at every step."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        way.before_filling()
        way.host.copy_(source)
        net(way.bring().float().div_(255)).mean().backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(4)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}")
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1),
    ).cuda()  # fmt: skip
    rows = []
    for title, shape in SHAPES.items():
        source = torch.randint(0, 256, shape, dtype=torch.uint8)
        net(source.cuda().float()).mean().backward()  # kernels are chosen
        ready_s, ways = {}, {}
        for kind, make in WAYS.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            ways[kind] = make(shape)
            steps(ways[kind], source, net, 1)
            ready_s[kind] = time.perf_counter() - begin
        found: dict[str, list[float]] = {kind: [] for kind in WAYS}
        for _ in range(ROUNDS):
            for kind, way in ways.items():
                found[kind].append(steps(way, source, net, STEPS))
        for kind, seconds in found.items():
            step_s = statistics.median(seconds)
            rows.append({"shape": title, "way": kind, "ready_s": ready_s[kind], "step_s": step_s})
            print(f"{title:14} {kind:14} ready {ready_s[kind] * 1e3:8.2f} ms"
                  f"   step {step_s * 1e3:8.3f} ms")  # fmt: skip
        for way in ways.values():
            way.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
