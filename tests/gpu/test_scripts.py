"""Training scripts on a GPU, and on a CPU beside one: the weights end where plain PyTorch ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, bits, cnn, gradients, state, train, twin
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz
from terrazzo.errors import Disagreement, RunError, UsageError

sys.path.insert(0, str(Path(__file__).parent))
from places import ALIKE, GPU, MIXED, REVERSED, here, moved

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.05),
}


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def same_start(net: nn.Module) -> nn.Module:
    """A plain model on a CPU with the weights that a net has now."""
    plain = cnn(bias=False)
    plain.load_state_dict(net.state_dict())
    return plain


# ---- runs -------------------------------------------------------------------------------------


def thirty_steps(kind: str, places: str, options: dict[str, Any]) -> str:
    """A whole run against plain PyTorch on a CPU; what is left is aligned and compared by bits."""
    data, place = batches(30), here(places)
    example = data[0][0].to(place)
    net = tz.parallelize(moved(cnn(bias=False), place), (example,), align_every=10, **options)
    plain = same_start(net)
    losses = train(net, OPTIMIZERS[kind](net.parameters()), moved(data, place))
    expected = train(plain, OPTIMIZERS[kind](plain.parameters()), data)
    assert losses == pytest.approx(expected, rel=1e-9)
    net.align()
    assert next(net.parameters()).device.type == place.type
    assert_close(on_cpu(state(net)), state(plain))
    return bits(same_start(net))


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("places", [ALIKE, MIXED, REVERSED])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "tiles:2,1x1", "groups": "each"},
        {"layout": "samples:2,1", "groups": "one", "passes": 2},
        {"layout": "channels:2", "groups": "each"},
    ],
    ids=["tiles", "samples in passes", "channels"],
)
def test_thirty_steps_end_where_a_cpu_ends(kind: str, places: str, options: dict[str, Any]) -> None:
    found = run_on(2, thirty_steps, kind, places, options)
    assert len(set(found)) == 1, "after an alignment the weights must be the same bits"


def mixed_float32(align_every: int) -> tuple[str, int, str]:
    place = here(MIXED)
    data = moved(batches(20, dtype=torch.float32), place)
    model = moved(cnn(dtype=torch.float32), place)
    net = tz.parallelize(model, (data[0][0],), align_every=align_every)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, data)
    drifted, realigned = bits(moved(twin(net), "cpu")), net.realigned
    net.align()
    return drifted, realigned, bits(moved(twin(net), "cpu"))


@pytest.mark.parametrize("align_every", [0, 4])
def test_a_cpu_and_a_gpu_drift_by_rounding_and_are_aligned(align_every: int) -> None:
    found = run_on(2, mixed_float32, align_every)
    assert all((realigned > 0) == (align_every > 0) for _, realigned, _ in found)
    if not align_every:
        assert len({drifted for drifted, _, _ in found}) == 2, "no drift: nothing was aligned"
    assert len({after for _, _, after in found}) == 1


# ---- around a net -----------------------------------------------------------------------------


def cut_and_clipped(places: str) -> None:
    """Cut weights: a global norm, a checkpoint of whole weights, loaded elsewhere and back."""
    ((x, y),), place = batches(1), here(places)
    net = tz.parallelize(moved(cnn(bias=False), place), (x.to(place),), layout="channels:2")
    plain = same_start(net)
    assert net.homes, "no weight is cut: nothing was tested"
    norms = []
    for model, given in ((plain, (x, y)), (net, moved((x, y), place))):
        F.cross_entropy(model(given[0]), given[1]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        OPTIMIZERS["sgd"](model.parameters()).step()
    assert norms[1] == pytest.approx(norms[0], rel=1e-10)
    assert_close(on_cpu(net.state_dict()), state(plain))
    doubled = {name: tensor.cpu() * 2 for name, tensor in net.state_dict().items()}
    net.load_state_dict(doubled)
    assert_close(on_cpu(state(net)), doubled)


@pytest.mark.parametrize("places", [ALIKE, MIXED])
def test_cut_weights(places: str) -> None:
    run_on(2, cut_and_clipped, places)


def fed(places: str, reader: int) -> list[float]:
    """One device reads on its CPU; each takes its part to where its model is."""
    place = here(places)
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randint(256, (7, 3, 23, 17), generator=draw, dtype=torch.uint8)
    data = TensorDataset(pictures, torch.arange(7) % 5)
    model = moved(cnn(), place)
    net = tz.parallelize(model, (torch.zeros(3, 3, 23, 17, dtype=torch.float64, device=place),))
    plain = cnn()
    plain.load_state_dict(net.state_dict())
    losses = []
    loader = DataLoader(data, batch_size=3)  # and one picture is left over
    for x, y in tz.feed(loader if net.links.device == reader else None, net, reader=reader):
        loss = F.cross_entropy(net(x.to(place).double() / 255), y.to(place))
        loss.backward()
        losses.append(loss.item())
    expected = [F.cross_entropy(plain(x.double() / 255), y) for x, y in loader]
    sum(expected).backward()
    assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-9)
    assert_close(on_cpu(gradients(net)), gradients(plain))
    return losses


@pytest.mark.parametrize(("places", "reader"), [(ALIKE, 0), (MIXED, 1), (REVERSED, 1)])
def test_feed(places: str, reader: int) -> None:
    run_on(2, fed, places, reader)


def agreed() -> tuple[bool, float]:
    return tz.agree(here(MIXED).type == "cpu"), tz.agree(float(here(MIXED).type == GPU))


def test_a_decision_is_one_devices() -> None:
    assert run_on(2, agreed) == [(True, 0.0), (True, 0.0)]


# ---- autocast ---------------------------------------------------------------------------------


def autocast(places: str) -> float:
    ((x, y),), place = batches(1, dtype=torch.float32), here(places)
    x, y = moved((x, y), place)
    plain = moved(cnn(dtype=torch.float32), place)
    net = tz.parallelize(twin(plain), (x,), layout="tiles:2x1")
    plain.load_state_dict(net.state_dict())
    for model in (plain, net):
        with torch.autocast(place.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    found, expected = (
        torch.cat([gradient.flatten() for gradient in gradients(m).values()]) for m in (net, plain)
    )
    return float((found - expected).norm() / expected.norm())


def test_autocast_on_a_gpu() -> None:
    assert 0 < max(run_on(2, autocast, ALIKE)) < 0.05


def refused_autocast() -> None:
    with pytest.raises(Disagreement, match="autocast"):
        autocast(MIXED)


def test_autocast_on_a_cpu_beside_a_gpu_is_refused() -> None:
    """Their lists of operators differ, so messages would differ in size."""
    run_on(2, refused_autocast)


# ---- what goes wrong --------------------------------------------------------------------------


def left_behind() -> str:
    """The input of one device stays on its CPU: it says so, and the other is told."""
    ((x, _),), place = batches(1), here(ALIKE)
    net = tz.parallelize(moved(cnn(), place), (x.to(place),))
    error = UsageError if net.links.device == 1 else RunError
    with pytest.raises(error, match=r"is on cpu and conv1\.weight is on") as caught:
        net(x if net.links.device == 1 else x.to(place))
    return str(caught.value)


def test_an_input_left_on_the_cpu_is_told_to_all() -> None:
    assert all("x.to" in text or "move" in text for text in run_on(2, left_behind))
