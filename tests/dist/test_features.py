"""What PyTorch users do around a model, done around a net: the same numbers as plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, bits, cnn, gradients, state, train, twin
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import RunError

EXAMPLE = (3, 3, 23, 17)
OPTIONS: dict[str, Any] = {}


def pair(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and a net with the same weights."""
    model = cnn() if model is None else model
    example = torch.zeros(EXAMPLE, dtype=next(model.parameters()).dtype)
    return twin(model), tz.parallelize(model, (example,), **{**OPTIONS, **options})


def both(models: tuple[nn.Module, nn.Module], act: Callable[[nn.Module], Any]) -> list[Any]:
    """Does the same to both."""
    return [act(model) for model in models]


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x, y = batches(step + 1)[step]
    return F.cross_entropy(model(x), y)


def assert_same(models: tuple[nn.Module, nn.Module], **options: Any) -> None:
    plain, net = models
    assert_close(gradients(net), gradients(plain), **options)
    assert_close(state(net), state(plain), **options)


# ---- gradients ----------------------------------------------------------------------------------


def frozen_layers() -> tuple[int, int]:
    """Bytes summed in one backward pass with everything trained, and with the first half frozen."""
    models = pair()
    net = models[1]
    counters = net.links.counters

    def summed_bytes() -> int:
        before = counters.summed_bytes
        both(models, lambda model: loss_of(model).backward())
        return counters.summed_bytes - before

    everything = summed_bytes()
    for model in models:
        model.zero_grad()
        for layer in (model.conv1, model.norm1, model.conv2):
            layer.requires_grad_(False)
    part = summed_bytes()
    assert model.conv1.weight.grad is None
    assert net.conv2.weight.grad is None
    assert_same(models)
    # Unfrozen mid-run: gradients are back, and training goes on as in PyTorch.
    for model in models:
        model.requires_grad_(True)
        model.zero_grad()
    assert summed_bytes() == everything
    assert_same(models)
    return everything, part


def test_frozen_layers_get_no_gradient_and_send_nothing() -> None:
    model = cnn()
    weights = sum(
        p.numel() for layer in (model.conv1, model.norm1, model.conv2) for p in layer.parameters()
    )
    backward_statistics = 2 * (6 + 8)  # nothing trained lies before either norm
    for everything, part in run_on(3, frozen_layers):
        assert everything - part == 8 * (weights + backward_statistics)


def frozen_all_but_the_head() -> int:
    models = pair()
    for model in models:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    net = models[1]
    loss = loss_of(net)
    sent = net.links.counters.sent_bytes, net.links.counters.summed_bytes
    loss.backward()
    loss_of(models[0]).backward()
    assert_same(models)
    now = net.links.counters.sent_bytes, net.links.counters.summed_bytes
    return now[0] - sent[0] + now[1] - sent[1]


def test_a_frozen_backbone_sends_nothing_in_backward() -> None:
    assert run_on(2, frozen_all_but_the_head) == [0, 0]


def frozen_before_a_pool(eval_norm: bool, activation: str, options: dict[str, Any]) -> None:
    """A pool that goes by the sign of a norm's weight, which alone is trained."""
    torch.manual_seed(3)
    conv, norm = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False), nn.BatchNorm2d(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -0.7, 0.0, 0.5]))
    layers = [conv, norm.train(not eval_norm), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    models = pair(nn.Sequential(*layers, getattr(nn, activation)(), *end).double(), **options)
    both(models, lambda model: loss_of(model).backward())
    assert conv.weight.grad is None
    both(models, lambda model: torch.optim.SGD(model.parameters(), 1.0).step())
    plain, net = models
    assert_close(net.state_dict(), plain.state_dict())


@pytest.mark.parametrize("eval_norm", [False, True])
@pytest.mark.parametrize("activation", ["ReLU", "GELU"])  # which has its gradient by autograd
@pytest.mark.parametrize(
    "options", [{"layout": "tiles:2x1"}, {"groups": "one", "passes": 2}, {"layout": "channels"}],
    ids=["tiles", "passes", "channels"],
)  # fmt: skip
def test_a_pool_that_goes_by_a_weight_behind_frozen_layers(
    options: dict[str, Any], activation: str, eval_norm: bool
) -> None:
    run_on(2, frozen_before_a_pool, eval_norm, activation, options)


def accumulation() -> None:
    models = pair()
    for step in range(4):
        both(models, lambda model, step=step: (loss_of(model, step) / 4).backward())
    assert_same(models)


def two_calls_before_one_backward() -> None:
    models = pair()
    both(models, lambda model: (loss_of(model, 0) + 3 * loss_of(model, 1)).backward())
    assert_same(models)


def backward_in_reverse_order() -> None:
    models = pair()
    for losses in both(models, lambda model: [loss_of(model, step) for step in range(3)]):
        for loss in reversed(losses):
            loss.backward()
    assert_same(models)


def a_call_that_never_gets_a_backward() -> None:
    """Only its running statistics stay, as in PyTorch."""
    models = pair()
    both(models, lambda model: loss_of(model, 0))
    assert_close(state(models[1]), state(models[0]))
    assert int(models[1].norm1.num_batches_tracked) == 1
    both(models, lambda model: loss_of(model, 1).backward())
    assert_same(models)


def clipping() -> None:
    models = pair()
    both(models, lambda model: loss_of(model).backward())
    limit = 0.3 * math.sqrt(sum(float(p.grad.norm()) ** 2 for p in models[0].parameters()))
    norms = both(models, lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit))
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-10)
    assert float(norms[0]) > limit
    assert_same(models)
    both(models, lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
    assert_same(models)


def penalty_in_the_loss() -> None:
    """Weights used outside of net as well: that gradient must not be counted once per device."""
    models = pair()

    def act(model: nn.Module) -> None:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (loss_of(model) + 0.1 * penalty).backward()

    both(models, act)
    assert_same(models)


def double_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def weight_hooks() -> None:
    models = pair()
    seen: list[list[float]] = [[], []]
    for model, notes in zip(models, seen, strict=True):
        model.conv1.weight.register_hook(lambda grad, notes=notes: notes.append(float(grad.norm())))
        model.conv2.weight.register_hook(lambda grad: grad * 0.5)
        model.head.bias.register_post_accumulate_grad_hook(double_gradient)
        loss_of(model).backward()
    assert seen[1] == pytest.approx(seen[0], rel=1e-10)
    assert len(seen[1]) == 1
    assert_same(models)


def input_gradients() -> None:
    models = pair()
    found = []
    for model in models:
        x, y = batches(1)[0]
        x.requires_grad_()
        F.cross_entropy(model(x * 2), y).backward()
        found.append({"x": x.grad})
    assert_close(found[1], found[0])
    assert_same(models)


def gradients_by_hand() -> None:
    """torch.autograd.grad leaves .grad alone."""
    models = pair()
    found = []
    for model in models:
        names, parameters = zip(*model.named_parameters(), strict=True)
        found.append(dict(zip(names, torch.autograd.grad(loss_of(model), parameters), strict=True)))
        assert gradients(model) == {}
    assert_close(found[1], found[0])


def partial_backward() -> None:
    """Asking for some gradients only gives those."""
    models = pair()
    for model in models:
        loss_of(model).backward(inputs=[model.conv2.weight])
    assert list(gradients(models[1])) == ["conv2.weight"]
    assert_same(models)


def backward_twice() -> str:
    net = pair()[1]
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    with pytest.raises(RunError) as refused:
        loss.backward()
    return str(refused.value)


def double_backward() -> str:
    net = pair()[1]
    loss = loss_of(net)
    first = torch.autograd.grad(loss, net.conv1.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError) as refused:
        first.square().sum().backward()
    return str(refused.value)


@pytest.mark.parametrize(
    "scene",
    [
        accumulation, two_calls_before_one_backward, backward_in_reverse_order,
        a_call_that_never_gets_a_backward, clipping, penalty_in_the_loss, weight_hooks,
        input_gradients, gradients_by_hand, partial_backward,
    ],
)  # fmt: skip
def test_gradients_as_in_plain_pytorch(scene: Callable[[], None]) -> None:
    run_on(3, scene)


def test_backward_twice_says_what_to_do() -> None:
    for message in run_on(2, backward_twice):
        assert "retain_graph" in message
        assert "once" in message


def test_a_second_derivative_is_refused() -> None:
    for message in run_on(2, double_backward):
        assert "differentiable" in message or "does not require grad" in message


# ---- modes --------------------------------------------------------------------------------------


def evaluation() -> None:
    models = pair()
    both(models, lambda model: train(model, torch.optim.SGD(model.parameters(), 0.1), batches(2)))
    before = state(models[1])
    x = batches(1)[0][0]
    both(models, lambda model: model.eval())
    with torch.no_grad():
        plain, found = both(models, lambda model: model(x))
    assert_close({"y": found}, {"y": plain})
    assert not found.requires_grad
    assert bits(models[1]) == bits_of(before), "evaluation must not change a buffer"
    both(models, lambda model: loss_of(model).backward())  # eval mode with gradients: fine-tuning
    assert_same(models)
    both(models, lambda model: model.train())
    both(models, lambda model: loss_of(model).backward())
    assert_same(models)


def bits_of(named: dict[str, Tensor]) -> str:
    holder = cnn()
    holder.load_state_dict(named)
    return bits(holder)


def no_gradients_in_train_mode() -> None:
    """Still updates running statistics, as in PyTorch; inference_mode too."""
    models = pair()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            plain, found = both(models, lambda model: model(batches(1)[0][0]))
        assert not found.requires_grad
        assert_close({"y": found.clone()}, {"y": plain.clone()})
        assert_close(state(models[1]), state(models[0]))
    both(models, lambda model: loss_of(model).backward())
    assert_same(models)


def layers_in_their_own_mode() -> None:
    """BatchNorm frozen in eval mode while the rest trains."""
    models = pair()
    for model in models:
        model.train()
        model.norm1.eval()
        loss_of(model).backward()
    assert int(models[1].norm1.num_batches_tracked) == 0
    assert int(models[1].norm2.num_batches_tracked) == 1
    assert_same(models)


def other_sizes() -> None:
    """The last, smaller batch, and pictures of other sizes, in one net."""
    models = pair(groups="2")
    for shape in ((3, 3, 23, 17), (1, 3, 23, 17), (2, 3, 30, 40), (3, 3, 23, 17), (2, 3, 9, 50)):
        x, y = batches(1, shape)[0]
        for model in models:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        assert_same(models)
    assert len(models[1]._ready) == 4, "a size that came before must not be exported again"


def double_after_wrapping() -> None:
    plain, net = pair(cnn(dtype=torch.float32))
    net.double()
    plain.double()
    both((plain, net), lambda model: loss_of(model).backward())
    assert_same((plain, net))
    net.to(torch.float32)
    x = batches(1, dtype=torch.float32)[0][0]
    assert net(x).dtype == torch.float32


@pytest.mark.parametrize(
    "scene",
    [
        evaluation, no_gradients_in_train_mode, layers_in_their_own_mode, other_sizes,
        double_after_wrapping,
    ],
)  # fmt: skip
def test_modes_as_in_plain_pytorch(scene: Callable[[], None]) -> None:
    run_on(2, scene)


# ---- the same with passes -----------------------------------------------------------------------

SCENES = (
    two_calls_before_one_backward,
    input_gradients,
    partial_backward,
    evaluation,
    layers_in_their_own_mode,
    frozen_layers,
    frozen_all_but_the_head,
)


def with_passes(options: dict[str, Any]) -> None:
    OPTIONS.update(options)
    try:
        for scene in SCENES:
            try:
                scene()
            except Exception as error:
                raise AssertionError(f"{scene.__name__} with {options}: {error!r}") from error
    finally:
        OPTIONS.clear()


@pytest.mark.parametrize(("devices", "passes", "groups"), [(3, 1, "one"), (2, 3, 2)])
def test_passes_change_nothing(devices: int, passes: int, groups: int | str) -> None:
    run_on(devices, with_passes, {"passes": passes, "groups": groups})
