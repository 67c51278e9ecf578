"""Gradients of convolutions: those of torch, whichever way they are computed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from terrazzo.lab.vectors import environment
from terrazzo.runtime.convolutions import backward, narrow
from terrazzo.runtime.convolutions.backward import _turned_padding, gradients
from terrazzo.runtime.convolutions.narrow import is_narrow

ONCE = ((1, 1), (1, 1))
"""Stride and dilation."""


@pytest.fixture(autouse=True)
def on_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board's processor."""
    monkeypatch.setattr(backward, "is_narrow", lambda: True)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the windows of a row."""
    for module in (backward, narrow):
        monkeypatch.setattr(module, "STRIP_BYTES", 14 * 4 * 9 * 8)


def arguments(
    kernel: tuple[int, int], padding: tuple[int, int], steps: Any = ONCE, groups: int = 1
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    stride, dilation = steps
    x = torch.randn(2, 4, 13, 14, dtype=torch.float64)
    weight = torch.randn(6, 4 // groups, *kernel, dtype=torch.float64)
    result = torch.conv2d(x, weight, None, stride, padding, dilation, groups)
    grad = torch.randn_like(result)
    return (grad, x, weight, [6], stride, padding, dilation, False, (0, 0), groups)


@pytest.mark.parametrize(
    ("kernel", "padding"),
    [((3, 3), (1, 1)), ((3, 3), (0, 0)), ((2, 3), (1, 2)), ((4, 1), (3, 0)), ((5, 5), (2, 1))],
)
@pytest.mark.parametrize("wanted", [[True, True, True], [True, False, False], [False, True, False]])
def test_windows_that_step_by_one(
    kernel: tuple[int, int], padding: tuple[int, int], wanted: list[bool]
) -> None:
    given = arguments(kernel, padding)
    assert _turned_padding(*given) is not None
    expected = torch.ops.aten.convolution_backward(*given, wanted)
    for one, other, asked in zip(gradients(given, wanted), expected, wanted, strict=True):
        assert (one is not None) == asked
        if asked:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "given",
    [
        arguments((3, 3), (1, 1), ((2, 1), (1, 1))),
        arguments((3, 3), (1, 1), ((1, 1), (1, 2))),
        arguments((3, 3), (1, 1), groups=2),
        arguments((3, 3), (3, 3)),
        arguments((1, 1), (0, 0)),
        arguments((13, 14), (1, 1)),
    ],
    ids=["stride", "dilation", "groups", "wide padding", "one pixel", "weights larger than maps"],
)
def test_others_are_left_to_torch(given: tuple[Any, ...]) -> None:
    assert _turned_padding(*given) is None
    expected = torch.ops.aten.convolution_backward(*given, [True, True, True])
    for one, other in zip(gradients(given, [True, True, True]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "given",
    [
        arguments((3, 3), (1, 1)),
        arguments((3, 3), (2, 0)),
        arguments((2, 3), (1, 2)),
        arguments((3, 3), (1, 1), ((2, 1), (1, 1))),
        arguments((3, 3), (2, 2), ((1, 2), (2, 1))),
        arguments((5, 3), (4, 1), ((3, 3), (2, 2))),
        arguments((3, 3), (1, 1), groups=2),
        arguments((1, 3), (0, 1)),
    ],
)
@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("wanted", [[False, True, True], [False, True, False], [True, True, True]])
def test_few_windows_are_written_out_at_a_time(given: tuple[Any, ...], wanted: list[bool]) -> None:
    seen: list[int] = []
    plain = torch.ops.aten.convolution_backward.default

    def watched(*all_: Any) -> Any:
        seen.append(all_[0].shape[2])
        return plain(*all_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten.convolution_backward, "default", watched)
        found = gradients(given, wanted)
    assert min(seen) < given[0].shape[2]
    for one, other in zip(found, plain(*given, wanted), strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("little_room")
def test_padding_wider_than_windows_is_left_to_torch() -> None:
    given = arguments((3, 3), (3, 3))
    expected = torch.ops.aten.convolution_backward(*given, [False, True, True])
    for one, other in zip(gradients(given, [False, True, True]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.usefixtures("little_room")
def test_wide_processors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "is_narrow", lambda: False)
    given = arguments((3, 3), (1, 1))
    expected = torch.ops.aten.convolution_backward(*given, [True, True, True])
    for one, other in zip(gradients(given, [True, True, True]), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


PEAK = """
import torch
from terrazzo.runtime.convolutions.backward import gradients
from terrazzo.runtime.convolutions.narrow import is_narrow
torch.set_num_threads(1)
x, grad = torch.randn(1, 32, 208, 208), torch.randn(1, 64, 208, 208)
weight = torch.randn(64, 32, 3, 3)
def kib(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
gradients((grad, x, weight, [64], (1, 1), (1, 1), (1, 1), False, (0, 0), 1), [False, True, True])
print(is_narrow(), kib("VmHWM") - before)
"""


def test_a_boards_processor_writes_few_windows_out() -> None:
    """All of them are 47 MiB; that libraries start takes a part of what is allowed."""
    board = {**os.environ, **environment(128)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK], env=board, capture_output=True, text=True, check=True
    )
    rule, kib = done.stdout.split()
    assert rule == "True"
    assert int(kib) < 32 << 10


def test_processors_with_wide_vectors_have_kernels_for_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rule(capability: str, limit: str) -> bool:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        is_narrow.cache_clear()
        return is_narrow()

    assert [rule("AVX2", ""), rule("AVX512", "AVX2"), rule("SVE256", "")] == [False] * 3
    assert [rule("DEFAULT", ""), rule("AVX2", "sse41")] == [True] * 2
    is_narrow.cache_clear()
