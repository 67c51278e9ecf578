"""Plans by a profile: device 0 searches, all devices obey, and the numbers stay the same."""

from __future__ import annotations

from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from devices import run_on
from plain import assert_close, batches, gradients, state, train, twin
from torch import nn

import terrazzo as tz
from terrazzo.errors import PlanError
from terrazzo.graph.export import frozen_in
from terrazzo.planner.cost import predict
from terrazzo.planner.guess import Figures, guessed
from terrazzo.planner.prices import Prices
from terrazzo.records.profile import Own, Profile
from terrazzo.schedule.training import Training

SHAPE = (2, 3, 64, 64)


def model() -> nn.Sequential:
    """Large maps with few weights first, small maps with many weights last."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(8),
        nn.Conv2d(8, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU(),
        nn.Conv2d(96, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(96, 5),
    ).double()  # fmt: skip


def profile(devices: int) -> Profile:
    """Slow arithmetic, quick calls and fast links: spreading everything is worth it."""
    found = guessed([Figures(f"d{i}", 1e7, 1 << 30, 1e7) for i in range(devices)])
    quick = {"seconds_per_cpu_s": 1.0, "calls_s": (1e-5, 1e-5), "own": Own()}
    return replace(found, devices=tuple(replace(device, **quick) for device in found.devices))


def trained(folder: str) -> str:
    """Only device 0 knows the profile; gives the plan as text."""
    device = torch.distributed.get_rank()
    path = Path(folder) / "profile.json"
    plain, data = model(), batches(3, SHAPE)
    net = tz.parallelize(twin(plain), (data[0][0],), profile=path if device == 0 else None)
    losses = []
    for one in (plain, net):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
        losses.append(train(one, optimizer, data))
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert_close(state(net), state(plain))
    text = str(net.plan)
    for one in (plain, net):
        one.eval()
    other = batches(1, (1, 3, 40, 72))[0][0]
    assert_close({"y": net(other).detach()}, {"y": plain(other).detach()})
    return text


def test_a_searched_plan_is_shipped_and_exact(tmp_path: Path) -> None:
    profile(3).save(tmp_path / "profile.json")
    plans = run_on(3, trained, str(tmp_path))
    assert len(set(plans)) == 1
    assert "channels" in plans[0] and ("tiles" in plans[0] or "samples" in plans[0])


def refused(folder: str) -> str:
    with pytest.raises(PlanError) as failure:
        tz.parallelize(model(), (batches(1, SHAPE)[0][0],), profile=Path(folder) / "two.json")
    return str(failure.value)


def planned_for(folder: str, wishes: dict[str, str]) -> str:
    """A plan for a net, by a profile that device 0 alone has."""
    path, x = Path(folder) / "profile.json", batches(1, SHAPE)[0][0]
    net = tz.parallelize(model(), (x,), layout="tiles:3x1", groups="each")
    profile = path if net.links.device == 0 else None
    return tz.plan(net, (x,), profile=profile, **wishes).to_json()


@pytest.mark.parametrize("wishes", [{}, {"layout": "tiles:3x1"}, {"memory": "900MiB"}])
def test_all_devices_get_the_plan_that_device_0_makes(
    tmp_path: Path, wishes: dict[str, str]
) -> None:
    profile(3).save(tmp_path / "profile.json")
    assert len(set(run_on(3, planned_for, str(tmp_path), wishes))) == 1


def test_a_profile_of_other_devices_is_refused_by_all(tmp_path: Path) -> None:
    profile(2).save(tmp_path / "two.json")
    for message in run_on(3, refused, str(tmp_path)):
        assert "profile is of 2 devices, the plan is for 3" in message


def limited() -> tuple[int, str]:
    x = batches(1, SHAPE)[0][0]
    plan = tz.plan(model(), (x,), profile=profile(2), memory="18MiB")
    net = tz.parallelize(model(), (x,), profile=profile(2), memory="18MiB")
    plain = model()
    net(x).sum().backward()
    plain(x).sum().backward()
    if not net.homes:
        assert_close(gradients(net), gradients(plain))
    return len(plan.groups), str(plan == net.plan)


def test_memory_and_profile_together() -> None:
    assert {same for _, same in run_on(2, limited)} == {"True"}


def thawed(folder: str) -> tuple[str, ...]:
    """Planned with its backbone frozen, then trained as a whole; gives what device 0 said."""
    device = torch.distributed.get_rank()
    path = Path(folder) / "profile.json" if device == 0 else None
    plain, data = model(), batches(6, SHAPE)
    plain[:7].requires_grad_(False)
    x, net = data[0][0], tz.parallelize(twin(plain), (data[0][0],), profile=path)
    first = net.plan
    training = Training(frozen=frozen_in(net))
    expected = predict(net.program, Prices(profile(3), training=training), memory=False)
    assert net._plans.foreseen.compute_s == expected.net_compute_s
    assert len(training.frozen) == 8
    optimizers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in (plain, net)]

    def both(steps: slice) -> str:
        with redirect_stderr(StringIO()) as told:
            for one, optimizer in zip((plain, net), optimizers, strict=True):
                train(one, optimizer, data[steps])
        assert_close(state(net), state(plain))
        return told.getvalue()

    said = [both(slice(0, 2))]
    for one in (plain, net):
        one.requires_grad_(True)
    said.append(both(slice(2, 4)))
    net.change_plan(tz.plan(net, (x,), profile=path, delivery="uint8"), optimizers[1])
    usual = tz.parallelize(model(), (x,), profile=path).plan
    assert net.plan == usual != first
    said.append(both(slice(4, 6)))
    return tuple(said)


def test_layers_that_are_unfrozen_are_told_of_once_and_planned_for(tmp_path: Path) -> None:
    profile(3).save(tmp_path / "profile.json")
    (before, told, after), *others = run_on(3, thawed, str(tmp_path))
    assert (before, after) == ("", "")
    assert told.count("\n") == 1
    assert "call 3: 8 parameters are trained that the plan takes for frozen" in told
    assert others == [("", "", "")] * 2
