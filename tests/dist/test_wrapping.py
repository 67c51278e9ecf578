"""Wrapping a model, whole or in part: attributes, state, plans, and what must not be wrapped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, bits, cnn, gradients, state, train, twin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terrazzo as tz
from terrazzo.errors import TerrazzoError, UsageError

X, Y = batches(1)[0]


def refusal(kind: type[TerrazzoError], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as refused:
        act()
    return str(refused.value)


# ---- looking like the model ---------------------------------------------------------------------


class Backbone(nn.Module):
    """Has what models have: attributes, methods, constants, a nested layer, several outputs."""

    stride = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = cnn()[:5]
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.register_buffer("calls_seen", torch.zeros(()), persistent=True)
        self.title = "backbone"
        self.double()

    def sizes(self) -> list[int]:
        return [layer.out_channels for layer in self.layers if isinstance(layer, nn.Conv2d)]

    def forward(self, x: Tensor, *, gain: float = 1.0) -> dict[str, Tensor]:
        self.calls_seen += 1
        found = self.layers(x) * self.scale * gain
        return {"map": found, "mean": found.mean((2, 3))}


def attributes() -> None:
    model = Backbone()
    net = tz.parallelize(model, (X,))
    assert (net.title, net.stride, net.sizes()) == ("backbone", 4, [6, 8])
    assert net.layers.conv1 is model.layers.conv1
    assert net.scale is model.scale
    assert [name for name, _ in net.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [name for name, _ in net.named_modules()] == [name for name, _ in model.named_modules()]
    assert list(net.state_dict()) == list(model.state_dict())
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = net.nothing_such
    assert "on 2 devices" in repr(net)


def keyword_arguments_and_outputs() -> None:
    plain = Backbone()
    net = tz.parallelize(twin(plain), (X,))
    for model in (plain, net):
        found = model(X, gain=0.5)
        assert list(found) == ["map", "mean"]
        (found["map"].square().sum() + found["mean"].sum()).backward()
    assert_close(gradients(net), gradients(plain))
    assert_close(state(net), state(plain))
    assert float(net.calls_seen) == 1, "exporting must not count as a call"


class Lookup(nn.Module):
    """Takes integers beside pictures, and gives a constant among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.names = nn.Embedding(10, 4)
        self.double()

    def forward(self, x: Tensor, ids: Tensor, flip: bool) -> tuple[Tensor, None, int]:
        x = self.conv(x.flip(-1) if flip else x) + self.names(ids)[:, :, None, None]
        return torch.relu(x).mean((2, 3)), None, 7


def integer_and_constant_inputs() -> None:
    plain = Lookup()
    ids = torch.tensor([1, 5, 9])
    net = tz.parallelize(twin(plain), (X, ids, False))
    for flip in (False, True, False):
        for model in (plain, net):
            model.zero_grad()
            found, nothing, seven = model(X, ids, flip)
            assert (nothing, seven) == (None, 7)
            (found[:, 0] * 2 + found[:, 1]).sum().backward()
        assert_close(gradients(net), gradients(plain))


def integer_pictures() -> None:
    """uint8 pictures that the model itself converts."""

    class Camera(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = cnn()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.double() / 255 - 0.5)

    plain = Camera()
    x = torch.randint(256, (3, 3, 23, 17), dtype=torch.uint8)
    net = tz.parallelize(twin(plain), (x,))
    for model in (plain, net):
        F.cross_entropy(model(x), Y).backward()
    assert_close(gradients(net), gradients(plain))


@pytest.mark.parametrize(
    "scene",
    [
        attributes, keyword_arguments_and_outputs, integer_and_constant_inputs, integer_pictures,
    ],
)  # fmt: skip
def test_a_net_looks_like_its_model(scene: Callable[[], None]) -> None:
    run_on(2, scene)


# ---- state --------------------------------------------------------------------------------------


def saved_and_loaded(folder: str) -> str:
    """Saved on one device alone, loaded on all, with and without Terrazzo."""
    model = cnn()
    net = tz.parallelize(model, (X,))
    train(net, torch.optim.SGD(net.parameters(), 0.1), batches(3))
    path, other = Path(folder) / "net.pt", Path(folder) / "net.safetensors"
    if net.links.device == 1:
        torch.save(net.state_dict(), path)
        save_file(net.state_dict(), other)
    net(X)  # no file is read before all have come this far
    plain = cnn()
    plain.load_state_dict(torch.load(path, weights_only=True))
    assert bits(plain) != bits(cnn())
    again = tz.parallelize(cnn(), (X,))
    again.load_state_dict(load_file(other))
    assert bits(again) == bits(plain)
    for one in (plain, again):
        train(one, torch.optim.SGD(one.parameters(), 0.1), batches(2))
    assert_close(state(again), state(plain))
    model.load_state_dict(again.state_dict())  # the model behind a net: the same tensors
    assert bits(net) == bits(again)
    return bits(net)


def test_saving_on_one_device_and_loading_both_ways(tmp_path: Path) -> None:
    assert len(set(run_on(2, saved_and_loaded, str(tmp_path)))) == 1


def weights_of_device_0() -> str:
    """Devices start from other weights: all get device 0's, buffers too."""
    model = cnn()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.distributed.get_rank())
    return bits(tz.parallelize(model, (X,)))


def test_all_start_from_device_0() -> None:
    assert set(run_on(2, weights_of_device_0)) == {bits(cnn())}


def copies() -> None:
    """A copy of a net is a plain model that needs no other device."""
    net = tz.parallelize(cnn(), (X,))
    copied = copy.deepcopy(net)
    assert type(copied) is nn.Sequential
    assert bits(copied) == bits(net)
    if net.links.device == 0:
        F.cross_entropy(copied(X), Y).backward()
    assert gradients(net) == {}
    assert net.conv1.weight is not copied.conv1.weight


def test_a_copy_is_a_plain_model() -> None:
    run_on(2, copies)


def pickled() -> str:
    """Either a plain model comes back or a sentence says what to save instead."""
    net = tz.parallelize(cnn(), (X,))
    try:
        back = pickle.loads(pickle.dumps(net))
    except TerrazzoError as error:
        return str(error)
    assert type(back) is nn.Sequential
    assert bits(back) == bits(net)
    return "state_dict"


def test_pickling_a_net_is_sane() -> None:
    assert all("state_dict" in message for message in run_on(2, pickled))


# ---- a part of a model --------------------------------------------------------------------------


class Detector(nn.Module):
    """An ordinary head over a varying number of boxes, with data-dependent shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone: nn.Module = cnn()[:7]
        self.head = nn.Linear(8, 3).double()

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        found = self.backbone(x)
        regions = [
            found[int(picture), :, int(top) : int(top) + 2, int(left) : int(left) + 2]
            for picture, top, left in boxes
        ]
        if not regions:
            return found.sum() * 0
        scores = self.head(torch.stack([region.mean((1, 2)) for region in regions]))
        kept = scores[scores[:, 0] > scores[:, 0].median() - 1e-9]  # how many: only data can tell
        return kept.square().sum() + scores.logsumexp(1).mean()


def partial_wrap() -> None:
    plain = Detector()
    spread = twin(plain)
    spread.backbone = tz.parallelize(spread.backbone, (X,))
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (plain, spread)]
    data = batches(4)
    all_boxes = [[(0, 0, 1)], [(0, 1, 1), (2, 3, 2), (1, 4, 0)], [], [(1, 2, 2), (2, 0, 0)]]
    for (x, _), boxes in zip(data, all_boxes, strict=True):
        for model, optimizer in zip((plain, spread), optimizers, strict=True):
            optimizer.zero_grad()
            model(x, torch.tensor(boxes).view(-1, 3)).backward()
            optimizer.step()
        assert_close(gradients(spread), gradients(plain))
    assert_close(state(spread), state(plain))
    assert list(spread.state_dict()) == list(plain.state_dict())


def test_only_the_backbone_is_wrapped() -> None:
    run_on(3, partial_wrap)


def two_nets() -> None:
    """A generator and a critic, each a net of its own, trained in turns."""
    plain = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()).double(), cnn(1)]
    nets = [tz.parallelize(twin(model), (X,)) for model in plain]
    for maker, critic in (plain, nets):
        optimizer = torch.optim.SGD([*maker.parameters(), *critic.parameters()], 0.1)
        for x, _ in batches(3):
            (critic(maker(x)).mean() - critic(x).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for net, model in zip(nets, plain, strict=True):
        assert_close(state(net), state(model))


def test_one_net_after_another() -> None:
    run_on(2, two_nets)


# ---- what must not be wrapped -------------------------------------------------------------------


def wrong_wraps() -> list[str]:
    net = tz.parallelize(cnn(), (X,))
    ddp = nn.parallel.DistributedDataParallel(cnn())
    inside = nn.Sequential(nn.DataParallel(cnn()))
    return [
        refusal(UsageError, lambda: nn.parallel.DistributedDataParallel(net)),
        refusal(UsageError, lambda: tz.parallelize(ddp, (X,))),
        refusal(UsageError, lambda: tz.parallelize(net, (X,))),
        refusal(UsageError, lambda: tz.parallelize(cnn(), X)),
        refusal(UsageError, lambda: tz.parallelize(cnn(), (X,), nan="perhaps")),
        refusal(UsageError, lambda: tz.parallelize(inside, (X,))),
        refusal(UsageError, lambda: tz.parallelize(nn.Sequential(net), (X,))),
    ]


def test_wrong_wraps_are_refused() -> None:
    for messages in run_on(2, wrong_wraps):
        for message, word in zip(
            messages,
            (
                "DistributedDataParallel", "bare model", "already", "(x,)", "allow",
                "DataParallel", "bare model",
            ),
            strict=True,
        ):  # fmt: skip
            assert word in message


def changed_behind_the_net() -> list[float]:
    """What plain PyTorch would notice: other layers, other settings."""
    gaps = []
    for change in (new_head, new_momentum, new_flag):
        model = cnn()
        net = tz.parallelize(model, (X,))
        net(X)
        plain = twin(model)
        for one in (model, plain):
            change(one)
        expected, found = plain(X), net(X)
        assert found.shape == expected.shape, change.__name__
        gaps.append(float((found - expected).detach().norm()))
        assert_close(state(net), state(plain))
    return gaps


def new_head(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.head = nn.Linear(8, 7).double()


def new_momentum(model: nn.Module) -> None:
    model.norm1.momentum = 0.5


def new_flag(model: nn.Module) -> None:
    model.pool.stride = 3


def test_changes_after_wrapping_take_effect() -> None:
    for gaps in run_on(2, changed_behind_the_net):
        assert gaps == pytest.approx([0, 0, 0], abs=1e-10)


def hooked_layer() -> str:
    model = cnn()
    net = tz.parallelize(model, (X,))
    model.conv1.register_forward_hook(lambda *_: None)
    return refusal(TerrazzoError, lambda: net(X))


def test_hooks_on_layers_are_refused() -> None:
    for message in run_on(2, hooked_layer):
        assert "hook" in message
        assert "conv1" in message


def checkpointed() -> None:
    """Recomputing around a net gives the gradients and statistics that it gives plain PyTorch."""
    plain = cnn(bias=False)
    net = tz.parallelize(twin(plain), (X,))
    for model in (plain, net):
        out = checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
        F.cross_entropy(out, Y).backward()
    assert_close(gradients(net), gradients(plain))
    assert_close(state(net), state(plain))


def hooked_saving() -> str:
    net = tz.parallelize(cnn(), (X,))
    return refusal(TerrazzoError, lambda: checkpoint(net, X, use_reentrant=False))


def test_checkpoint_around_a_net() -> None:
    run_on(2, checkpointed)
    for message in run_on(2, hooked_saving):
        assert "use_reentrant=False" in message


# ---- one decision for all -----------------------------------------------------------------------


def agreed() -> list[Any]:
    rank = torch.distributed.get_rank()
    values = [tz.agree(value) for value in (rank == 0, 10 + rank, 0.1 + rank, 2**53 + 1 + rank)]
    assert [type(value) for value in values] == [bool, int, float, int]
    return values


def test_agree_gives_device_0s_value() -> None:
    for values in run_on(2, agreed):
        assert values == [True, 10, 0.1, 2**53 + 1]
