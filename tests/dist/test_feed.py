"""Feeding: one device reads, each gets its part, and training equals plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, batches, bits, cnn, state, twin
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import terrazzo as tz
from terrazzo.errors import Disagreement, NotANumber, RunError, TerrazzoError, UsageError
from terrazzo.runtime.part import Part

X, Y = batches(1)[0]
MEAN, STD = (
    torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1),
    torch.tensor([0.2, 0.3, 0.25]).view(3, 1, 1),
)


def pictures() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(256, (11, 3, 23, 17), generator=draw, dtype=torch.uint8)
    return TensorDataset(x, torch.randint(5, (11,), generator=draw))


def loader() -> DataLoader[Any]:
    """Eleven pictures by four: the last batch is smaller."""
    return DataLoader(pictures(), batch_size=4, shuffle=True, generator=torch.Generator())


def normalised(x: Any) -> Any:
    return (x.double() / 255 - MEAN) / STD


def epochs(model: nn.Module, data: Callable[[], Any], make: Callable[[Any], Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        for x, y in data():
            loss = F.cross_entropy(model(make(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def uint8_training(reader: int, layout: str) -> tuple[str, list[float]]:
    net = tz.parallelize(cnn(), (X,), layout=layout)
    plain = twin(net)
    mine = net.links.device == reader
    seen: list[Any] = []

    def note(x: Any) -> Any:
        seen.append((x.dtype, tuple(x.shape), type(x)))
        return normalised(x)

    def spread() -> Any:
        return tz.feed(loader() if mine else None, net, reader=reader)  # the others need no data

    losses = epochs(net, spread, note)
    assert {(dtype, kind) for dtype, _, kind in seen} == {(torch.uint8, Part)}
    assert [shape[0] for _, shape, _ in seen] == [4, 4, 3] * 2
    assert losses == pytest.approx(epochs(plain, loader, normalised), rel=1e-10)
    assert_close(state(net), state(plain))
    return bits(net), losses


@pytest.mark.parametrize(
    ("devices", "reader", "layout"),
    [(2, 0, "auto"), (3, 2, "tiles:4,1,2x1"), (3, 1, "tiles:1x3")],
)
def test_uint8_pictures_train_as_plain_pytorch(devices: int, reader: int, layout: str) -> None:
    found = run_on(devices, uint8_training, reader, layout)
    assert len({digest for digest, _ in found}) == 1


def bytes_on_the_wire() -> tuple[int, int]:
    """What this device sent for one batch, and the size of all boxes but its own."""
    net = tz.parallelize(cnn(), (X,), layout="tiles:2,1,1x1")
    before = net.links.counters.sent_bytes
    (x, y) = next(iter(tz.feed(loader(), net)))
    sent = net.links.counters.sent_bytes - before
    boxes = net.boxes([(4, 3, 23, 17)])[0]
    assert tuple(x.tensor.shape) == boxes[net.links.device].shape
    assert x.box == boxes[net.links.device]
    assert type(y) is Tensor
    assert y.shape == (4,)
    others = sum(box.size for device, box in enumerate(boxes) if device != 0)
    return sent, others if net.links.device == 0 else 0


def test_the_wire_carries_boxes_in_uint8() -> None:
    found = run_on(3, bytes_on_the_wire)
    for sent, boxes in found:
        assert sent == boxes
    whole = 4 * 3 * 23 * 17
    assert whole / 2 < found[0][0] < whole, "a bit more than the two smaller tiles"


def more_devices_than_rows() -> str:
    """A device with an empty box normalises and trains like the others."""
    plain = cnn()
    x, y = torch.randint(256, (3, 3, 2, 9), dtype=torch.uint8), torch.tensor([0, 1, 2])
    net = tz.parallelize(twin(plain), (normalised(x),), layout="tiles:4x1")
    for model, data in ((plain, [(x, y)]), (net, tz.feed([(x, y)], net))):
        for part, target in data:
            F.cross_entropy(model(normalised(part)), target).backward()
    assert_close(state(net), state(plain))
    return "empty" if net.boxes([(3, 3, 2, 9)])[0][net.links.device].is_empty else "busy"


def test_an_empty_box_can_be_fed() -> None:
    assert "empty" in run_on(4, more_devices_than_rows)


# ---- batches of other shapes --------------------------------------------------------------------


def structured_batches() -> None:
    """Dicts, strings, numbers and several tensors arrive as they were; only images are cut."""
    net = tz.parallelize(cnn(), (X,))
    mask = torch.rand(3, 23, 17) > 0.5
    batch = {
        "image": X, "target": {"label": Y, "half": X[:, 0].bfloat16(), "mask": mask},
        "names": ["a", "b", "c"], "scale": 0.5, "small": torch.arange(3, dtype=torch.int16),
        "nothing": None,
    }  # fmt: skip
    (found,) = tz.feed([batch] if net.links.device == 0 else None, net)
    assert type(found["image"]) is Part
    assert (found["names"], found["scale"], found["nothing"]) == (["a", "b", "c"], 0.5, None)
    for name, right in batch["target"].items():
        assert found["target"][name].dtype == right.dtype, name
        assert torch.equal(found["target"][name], right), name
    assert torch.equal(found["small"], batch["small"])
    net(found["image"])


class TwoEyes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(1, 4, 5, 2, 2)
        self.head = nn.Linear(4, 5)
        self.double()

    def forward(self, colour: Tensor, depth: Tensor) -> Tensor:
        return self.head(torch.relu(self.left(colour) - self.right(depth)).mean((2, 3)))


def two_inputs() -> None:
    plain = TwoEyes()
    depth = X[:, :1] * 3
    net = tz.parallelize(twin(plain), (X, depth))
    for model, data in ((plain, [(X, depth, Y)]), (net, tz.feed([(X, depth, Y)], net, inputs=2))):
        for colour, deep, y in data:
            F.cross_entropy(model(colour, deep), y).backward()
    assert_close(
        {n: p.grad for n, p in net.named_parameters()},
        {n: p.grad for n, p in plain.named_parameters()},
    )


def empty_and_repeated() -> None:
    net = tz.parallelize(cnn(), (X,))
    assert list(tz.feed([], net)) == []
    for _ in range(2):
        assert len(list(tz.feed([(X, Y)] * 2, net))) == 2
    for _ in tz.feed([(X, Y)] * 3, net):
        break  # leaving a loop early, on all devices, leaves nothing behind
    assert len(list(tz.feed([(X, Y)], net))) == 1


def evaluated() -> None:
    plain = cnn().eval()
    net = tz.parallelize(twin(plain), (X,))
    with torch.no_grad():
        for x, _ in tz.feed([(X, Y)], net):
            assert_close({"y": net(x)}, {"y": plain(X)})


@pytest.mark.parametrize("scene", [structured_batches, two_inputs, empty_and_repeated, evaluated])
def test_any_batch_can_be_fed(scene: Callable[[], None]) -> None:
    run_on(2, scene)


# ---- refused ------------------------------------------------------------------------------------


def refusal(kind: type[Exception], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as refused:
        act()
    return str(refused.value)


def broken_loader() -> Iterator[Any]:
    yield X, Y
    raise ValueError("the picture 17.jpg is no picture")


class Unopened:
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("the folder of 17.jpg is missing")


def reader_fails(at_once: bool) -> str:
    net = tz.parallelize(cnn(), (X,))
    here = net.links.device == 1
    loader = Unopened() if at_once else broken_loader()

    def read() -> None:
        for x, _ in tz.feed(loader if here else None, net, reader=1):
            net(x)

    message = refusal(ValueError if here else RunError, read)
    net(X)  # nobody was left waiting: the devices can go on
    return message


@pytest.mark.parametrize("at_once", [True, False])
def test_a_loader_that_fails_is_heard_of_everywhere(at_once: bool) -> None:
    found = run_on(3, reader_fails, at_once)
    assert all("17.jpg" in message for message in found)
    assert "device 1" in found[0]


def unreadable_batch() -> str:
    net = tz.parallelize(cnn(), (X,))
    bad = [(X, Y, object())]
    return refusal(TerrazzoError, lambda: list(tz.feed(bad, net)))


def test_a_batch_that_cannot_travel_is_refused() -> None:
    for message in run_on(2, unreadable_batch):
        assert "collate" in message


def with_nothing() -> list[Any]:
    """A collate function that finds nothing worth a batch may say so by None."""
    net = tz.parallelize(cnn(), (X,))
    batches = [(X, Y), None, (X, Y)] if net.links.device == 0 else None
    return [None if batch is None else tuple(batch[1].shape) for batch in tz.feed(batches, net)]


def test_a_batch_of_nothing_does_not_end_an_epoch() -> None:
    found = run_on(2, with_nothing)
    assert found == [[tuple(Y.shape), None, tuple(Y.shape)]] * 2


def other_options() -> tuple[list[list[int]], str]:
    net = tz.parallelize(cnn(), (X,))
    data = pictures()
    sizes = []
    for options in ({"batch_size": 4}, {"batch_size": 11, "shuffle": False}, {"batch_size": 4}):
        sizes.append([len(y) for _, y in tz.feed(data, net, **options)])
    whole = tz.feed(data, net, batch_size=11, shuffle=False)
    assert torch.equal(next(iter(whole))[1], data.tensors[1])
    sampler = [list(range(5)) for _ in range(2)]
    list(tz.feed(data, net, batch_size=2, sampler=sampler[0]))
    again = tz.feed(data, net, batch_size=2, sampler=sampler[1])
    return sizes, refusal(UsageError, lambda: next(iter(again)))


def test_of_one_data_set_there_may_be_several_feeds() -> None:
    ((sizes, message),) = run_on(1, other_options)
    assert sizes == [[4, 4, 3], [11], [4, 4, 3]]
    assert "another sampler" in message


def sharded_loader() -> str:
    net = tz.parallelize(cnn(), (X,))
    sampler = DistributedSampler(pictures())
    return refusal(
        UsageError, lambda: next(iter(tz.feed(DataLoader(pictures(), 2, sampler=sampler), net)))
    )


def test_a_distributed_sampler_is_refused() -> None:
    for message in run_on(2, sharded_loader):
        assert "DistributedSampler" in message


def wrong_shape_fed() -> str:
    net = tz.parallelize(cnn(), (X,))
    bad = torch.zeros(3, 4, 23, 17)
    message = refusal(TerrazzoError, lambda: list(tz.feed([(bad, Y)], net)))
    net(X)
    return message


def test_a_batch_of_a_wrong_shape_is_refused_on_all() -> None:
    for message in run_on(2, wrong_shape_fed):
        assert "export" in message


def targets_first() -> str:
    net = tz.parallelize(cnn(), (X,))
    return refusal(TerrazzoError, lambda: list(tz.feed([{"label": Y, "image": X}], net)))


def test_a_batch_with_its_targets_first_is_refused_with_a_remedy() -> None:
    for message in run_on(2, targets_first):
        assert "inputs come first in a batch" in message
        assert "[3]" in message


def different_readers() -> str:
    net = tz.parallelize(cnn(), (X,))
    feed = tz.feed([(X, Y)], net, reader=net.links.device)
    return refusal(Disagreement, lambda: next(iter(feed)))


def test_two_readers_are_found_out() -> None:
    for message in run_on(2, different_readers):
        assert "device 0: waiting for a batch from device 0" in message


def nan_in_a_fed_batch() -> str:
    """Only one device sees it; all are told, and none waits."""
    net = tz.parallelize(cnn(), (X,), layout="tiles:3x1")
    bad = X.clone()
    bad[1, 2, 22, 3] = float("nan")
    ((part, _),) = tz.feed([(bad, Y)], net)
    message = refusal(NotANumber, lambda: net(part))
    net(X)
    return message


def test_nan_in_a_fed_batch_is_told_on_all() -> None:
    for message in run_on(3, nan_in_a_fed_batch):
        assert "batch" in message


def part_of_another_net() -> str:
    """Fed for other boxes: refused on all devices, also where the part would do."""
    net = tz.parallelize(cnn(), (X,), layout="tiles:1,2x1")
    other = tz.parallelize(cnn(), (X,), layout="tiles:2,1x1")
    ((part, _),) = tz.feed([(X, Y)], other)
    return refusal(TerrazzoError, lambda: net(part))


def test_a_part_fed_for_another_net_is_refused() -> None:
    for message in run_on(2, part_of_another_net):
        assert "fed for another" in message
