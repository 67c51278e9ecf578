"""Training in bfloat16 under autocast, also where a device has nothing to compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, bits, cnn, gradients, state, twin
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.runtime.convolutions import backward

BF16 = 2.0**-8


def cast_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y)
    loss.backward()
    return out.detach(), gradients(model)


def gap(found: Tensor, expected: Tensor, floor: float) -> float:
    difference = float((found.double() - expected.double()).norm())
    return difference / max(float(expected.double().norm()), floor)


def against_plain_autocast(shape: tuple[int, ...], layout: str, groups: str) -> str:
    plain = cnn(dtype=torch.float32, bias=False)
    x, y = batches(1, shape, dtype=torch.float32)[0]
    net = tz.parallelize(twin(plain), (x,), layout=layout, groups=groups)
    exact = cnn(bias=False)
    F.cross_entropy(exact(x.double()), y).backward()
    expected, grads = cast_step(plain, x, y)
    found, spread = cast_step(net, x, y)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert gap(found, expected, 1e-3) <= 2 * BF16
    # Bfloat16 itself is off by this much; two roundings of it may differ by no more.
    true = gradients(exact)
    floor = 1e-2 * sum(float(t.norm()) ** 2 for t in true.values()) ** 0.5
    for name, grad in grads.items():
        assert spread[name].dtype == grad.dtype, name
        own = gap(grad, true[name], floor)
        assert gap(spread[name], grad, floor) <= 2 * own + 4 * BF16, name
    for name, buffer in state(plain).items():
        assert state(net)[name].dtype == buffer.dtype, name
        assert gap(state(net)[name], buffer, 1e-3) <= 2 * BF16, name
    # Back out of autocast, the same net computes in float32 again.
    assert net(x).dtype == torch.float32
    return bits(net)


def backward_inside_autocast(options: dict[str, object]) -> None:
    """A net in float32, whose loss and its gradient are made under autocast. That of plain PyTorch
    is made outside: inside it would round the matrix products of its linear layers."""
    plain = cnn(dtype=torch.float32, bias=False)
    x, y = batches(1, (3, 3, 23, 17), dtype=torch.float32)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "is_narrow", lambda: True)
        net = tz.parallelize(twin(plain), (x,), **options)
        F.cross_entropy(plain(x), y).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                out = net(x)
            F.cross_entropy(out, y).backward()
    assert_close(gradients(net), gradients(plain), limit=1e-5)


@pytest.mark.parametrize("options", [{"layout": "tiles:2x1"}, {"groups": "one", "passes": 2}])
def test_backward_inside_autocast_of_a_net_in_float32(options: dict[str, object]) -> None:
    run_on(2, backward_inside_autocast, options)


@pytest.mark.parametrize(
    ("devices", "shape", "layout", "groups"),
    [
        (2, (3, 3, 23, 17), "tiles:1x2", "each"),
        (3, (2, 3, 40, 24), "tiles:3x1", "one"),
        (4, (3, 3, 5, 9), "tiles:4x1", "each"),  # more devices than rows in the second half
        (3, (3, 3, 23, 17), "tiles:1,0,2x1", "2"),  # one device idle on purpose
    ],
)
def test_autocast_as_plain_autocast(
    devices: int, shape: tuple[int, ...], layout: str, groups: str
) -> None:
    found = run_on(devices, against_plain_autocast, shape, layout, groups)
    assert len(set(found)) == 1


def falls_and_stays_equal() -> str:
    data = batches(1, dtype=torch.float32) * 15
    net = tz.parallelize(cnn(dtype=torch.float32), (data[0][0],))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    return bits(net)


def test_training_under_autocast_learns_and_keeps_devices_equal() -> None:
    assert len(set(run_on(2, falls_and_stays_equal))) == 1
