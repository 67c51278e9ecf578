"""The models of the zoo are what their names say: widths, BatchNorm, parameters, output shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from terrazzo import zoo
from terrazzo.errors import UsageError
from terrazzo.zoo.boxes import boxes_of, overlaps, split_prediction
from terrazzo.zoo.convnext import RandomDepth
from terrazzo.zoo.precision import mean_average_precision
from terrazzo.zoo.unet import unet
from terrazzo.zoo.yolo import ANCHORS_SMALL, YoloLoss, decode, yolov2, yolov2_front, yolov2_small

# Name: parameters, convolutions, BatchNorms, output for 2 pictures of 64x96. Where a published
# figure exists it is this one: MobileNetV2 3 504 872, ResNet 11 689 512 and 25 557 032, YOLOv2 for
# VOC 50 655 389.
EXPECTED = {
    "convnext": (1_926_084, 14, 0, (2, 100)),
    "darknet-small": (207_211, 12, 11, (2, 3)),
    "densenet": (280_948, 35, 36, (2, 100)),
    "mobilenetv2": (3_504_872, 52, 52, (2, 1000)),
    "mobilenetv2-se": (5_769_920, 86, 52, (2, 1000)),
    "resnet18": (11_689_512, 20, 20, (2, 1000)),
    "resnet50": (25_557_032, 53, 53, (2, 1000)),
    "unet32": (7_763_140, 19, 18, (2, 4, 64, 96)),
    "unet32-bilinear": (7_240_900, 23, 18, (2, 4, 64, 96)),
    "vgg": (454_004, 8, 0, (2, 100)),
    "yolov2": (50_655_389, 23, 22, (2, 125, 2, 3)),
    "yolov2-front": (4_604_832, 13, 13, (2, 512, 4, 6)),
    "yolov2-front-bare": (4_601_728, 13, 0, (2, 512, 4, 6)),
    "yolov2-small": (729_904, 16, 15, (2, 40, 4, 6)),
}


def on_meta(name: str) -> nn.Module:
    """Shapes only: fifty million weights need not be drawn to be counted."""
    with torch.device("meta"):
        return zoo.build(name)


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def widths(model: nn.Module) -> list[int]:
    return [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]


def test_every_name_is_pinned() -> None:
    assert set(EXPECTED) == set(zoo.NAMES)


@pytest.mark.parametrize("name", EXPECTED)
def test_model_is_what_its_name_says(name: str) -> None:
    model = on_meta(name)
    parameters, convolutions, norms, shape = EXPECTED[name]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert count(model, nn.Conv2d) == convolutions
    assert count(model, nn.BatchNorm2d) == norms
    assert tuple(model(torch.empty(2, 3, 64, 96, device="meta")).shape) == shape


def test_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(UsageError, match=r"no model 'yolov9'") as caught:
        zoo.build("yolov9")
    assert all(name in str(caught.value) for name in zoo.NAMES)


# ---- YOLOv2 ------------------------------------------------------------------------------


def test_yolov2_is_darknet_19_with_a_pass_through() -> None:
    model = on_meta("yolov2")
    front = [32, 64, 128, 64, 128, 256, 128, 256, 512, 256, 512, 256, 512]
    deep = [1024, 512, 1024, 512, 1024]
    assert widths(model) == [*front, *deep, 1024, 1024, 64, 1024, 125]
    assert isinstance(model, type(yolov2_small()))
    assert (model.stride, model.head[0][0].in_channels) == (32, 1024 + 4 * 64)
    slopes = {m.negative_slope for m in model.modules() if isinstance(m, nn.LeakyReLU)}
    assert slopes == {0.1}
    with torch.device("meta"):
        assert yolov2(classes=80)(torch.empty(1, 3, 416, 416)).shape == (1, 425, 13, 13)


def test_front_is_the_first_17_operators() -> None:
    with torch.device("meta"):
        front, whole = yolov2_front(), yolov2()
    assert len(front) == 17
    assert count(front, nn.MaxPool2d) == 4
    assert {n: p.shape for n, p in front.state_dict().items()} == {
        n: p.shape for n, p in whole.backbone.fine.state_dict().items()
    }
    kernels = sum(m.weight.numel() * 4 for m in front.modules() if isinstance(m, nn.Conv2d))
    assert round(kernels / 1e6, 1) == 18.4
    side, flops = 416, 0
    for module in front:
        if isinstance(module, nn.MaxPool2d):
            side //= 2
        else:
            flops += 2 * module[0].weight.numel() * side * side
    assert round(flops / 1e9, 1) == 13.8


def test_pass_through_carries_the_fine_maps() -> None:
    """Every 2x2 square becomes four channels, in rows."""
    torch.manual_seed(0)
    model = yolov2_small().double().eval()
    fine = torch.randn(1, 64, 8, 8, dtype=torch.float64)
    squares = model.skip(fine)
    assert squares.shape == (1, 64, 4, 4)
    one_by_one = model.skip[0](fine)
    assert torch.equal(squares[0, 4 * 5 + 2 * 1 + 0], one_by_one[0, 5, 1::2, 0::2])


def test_small_detector_starts_by_seeing_nothing() -> None:
    torch.manual_seed(0)
    model = yolov2_small().eval()
    assert all(len(found) == 0 for found in decode(model(torch.rand(2, 3, 96, 96)), model.anchors))


# ---- decode ------------------------------------------------------------------------------


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def prediction_of(
    boxes: list[tuple[int, float, tuple[float, float, float, float]]], grid: tuple[int, int]
) -> Tensor:
    """A prediction that shows exactly these (class, score, box), with anchor 3 of 5."""
    rows, columns = grid
    prediction = torch.full((1, 5, 8, rows, columns), -30.0, dtype=torch.float64)
    prediction[:, :, :4] = 0
    for label, score, (x, y, w, h) in boxes:
        column, row = int(x * columns), int(y * rows)
        cell = prediction[0, 3, :, row, column]
        cell[0], cell[1] = logit(x * columns - column), logit(y * rows - row)
        cell[2] = math.log(w * columns / ANCHORS_SMALL[3][0])
        cell[3] = math.log(h * rows / ANCHORS_SMALL[3][1])
        cell[4], cell[5 + label] = logit(score), 30.0
    return prediction.flatten(1, 2)


def test_decode_gives_back_what_was_encoded() -> None:
    shown = [(2, 0.9, (0.3, 0.21, 0.4, 0.3)), (0, 0.5, (0.77, 0.6, 0.2, 0.5))]
    (found,) = decode(prediction_of(shown, (6, 9)), ANCHORS_SMALL)
    expected = torch.tensor([[label, score, *box] for label, score, box in shown])
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=0)


def test_suppression_keeps_the_best_of_each_class() -> None:
    near, nearer = (0.26, 0.26, 0.4, 0.4), (0.36, 0.26, 0.4, 0.4)  # overlap 0.6
    shown = [(1, 0.6, near), (1, 0.8, nearer), (0, 0.5, (0.26, 0.36, 0.4, 0.4))]
    prediction = prediction_of(shown, (10, 10))
    (found,) = decode(prediction, ANCHORS_SMALL)
    assert found[:, 0].tolist() == [1, 0]
    assert found[0, 1].item() == pytest.approx(0.8)
    assert [len(f) for f in decode(prediction, ANCHORS_SMALL, overlap=0.7)] == [3]
    assert [len(f) for f in decode(prediction, ANCHORS_SMALL, threshold=0.55)] == [1]
    assert [len(f) for f in decode(prediction, ANCHORS_SMALL, overlap=0.7, limit=2)] == [2]


def test_suppressed_box_suppresses_nothing() -> None:
    """Of a chain, the middle goes because of the first, and the last stays."""
    chain = [(0, 0.9, (0.25, 0.25, 0.4, 0.4)), (0, 0.8, (0.35, 0.25, 0.4, 0.4)),
             (0, 0.7, (0.45, 0.25, 0.4, 0.4))]  # fmt: skip
    (found,) = decode(prediction_of(chain, (10, 10)), ANCHORS_SMALL)
    assert [round(score, 3) for score in found[:, 1].tolist()] == [0.9, 0.7]


def test_prediction_with_wrong_channels_is_refused() -> None:
    with pytest.raises(UsageError, match="5 anchors"):
        decode(torch.zeros(1, 41, 3, 3), ANCHORS_SMALL)


# ---- average precision -------------------------------------------------------------------

TRUE = torch.tensor([[0, 0.2, 0.2, 0.2, 0.2], [0, 0.7, 0.7, 0.2, 0.2], [-1, 0, 0, 0, 0]])
HIT = [0, 0.9, 0.2, 0.2, 0.2, 0.2]
OTHER_HIT = [0, 0.3, 0.7, 0.7, 0.2, 0.2]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([HIT, OTHER_HIT], 1.0),
        ([HIT], 0.5),
        ([], 0.0),
        ([HIT, [0, 0.8, 0.2, 0.2, 0.2, 0.2], OTHER_HIT], 0.5 + 0.5 * 2 / 3),  # seen twice
        ([[0, 0.95, 0.5, 0.1, 0.1, 0.1], HIT, OTHER_HIT], 2 / 3),  # a false one on top
        ([HIT, OTHER_HIT, [0, 0.1, 0.5, 0.1, 0.1, 0.1]], 1.0),  # a false one at the end
        ([[1, 0.9, 0.2, 0.2, 0.2, 0.2], OTHER_HIT], 0.5),  # of another class
        ([[0, 0.9, 0.29, 0.2, 0.2, 0.2], OTHER_HIT], 0.25),  # beside it
    ],
)
def test_average_precision(rows: list[list[float]], expected: float) -> None:
    found = torch.tensor(rows).reshape(-1, 6)
    assert mean_average_precision([found], [TRUE], classes=3) == pytest.approx(expected)


def test_average_precision_ranks_over_pictures_and_averages_over_classes() -> None:
    false = torch.tensor([[0, 0.95, 0.5, 0.1, 0.1, 0.1]])
    nothing, two = TRUE[2:], torch.tensor([[2, 0.5, 0.5, 0.2, 0.2]])
    found = [torch.tensor([HIT, OTHER_HIT]), false, torch.empty(0, 6)]
    assert mean_average_precision(found, [TRUE, nothing, two], classes=3) == pytest.approx(1 / 3)
    assert mean_average_precision([false], [nothing], classes=3) == 0.0


# ---- YoloLoss ----------------------------------------------------------------------------


def slow_loss(loss: YoloLoss, prediction: Tensor, targets: Tensor) -> float:
    """The same loss, box by box and slot by slot."""
    pictures, _, rows, columns = prediction.shape
    split = split_prediction(prediction, loss.anchors)
    boxes = boxes_of(split, loss.anchors, (rows, columns))
    total = 0.0
    for picture in range(pictures):
        owned: set[int] = set()
        true = [row for row in targets[picture].tolist() if row[0] >= 0]
        for label, x, y, w, h in true:
            shapes = [
                min(w * columns, a) * min(h * rows, b)
                / (w * columns * h * rows + a * b - min(w * columns, a) * min(h * rows, b))
                for a, b in loss.anchors
            ]  # fmt: skip
            anchor = shapes.index(max(shapes))
            column, row = min(int(x * columns), columns - 1), min(int(y * rows), rows - 1)
            slot = (anchor * rows + row) * columns + column
            if slot in owned:
                continue
            owned.add(slot)
            tx, ty, tw, th, sure, *names = split[picture, slot].tolist()
            a, b = loss.anchors[anchor]
            off = (1 / (1 + math.exp(-tx)) - (x * columns - math.floor(x * columns))) ** 2
            off += (1 / (1 + math.exp(-ty)) - (y * rows - math.floor(y * rows))) ** 2
            off += (tw - math.log(w * columns / a)) ** 2 + (th - math.log(h * rows / b)) ** 2
            fit = overlaps(boxes[picture, slot], targets[picture, 0].new_tensor([x, y, w, h]))
            total += loss.place * off * (2 - w * h)
            total += loss.sure * (math.log1p(math.exp(sure)) - float(fit) * sure)
            total += math.log(sum(map(math.exp, names))) - names[int(label)]
        for slot in set(range(split.shape[1])) - owned:
            met = [float(overlaps(boxes[picture, slot], targets.new_tensor(t[1:]))) for t in true]
            if max(met, default=0.0) < loss.ignore:
                total += loss.empty * math.log1p(math.exp(float(split[picture, slot, 4])))
    return total / pictures


def example() -> tuple[YoloLoss, Tensor, Tensor]:
    torch.manual_seed(0)
    prediction = torch.randn(3, 40, 5, 4, dtype=torch.float64)
    targets = torch.zeros(3, 6, 5, dtype=torch.float64)
    targets[..., 0] = -1
    for picture, boxes in enumerate((5, 2, 0)):
        targets[picture, :boxes, 0] = torch.randint(3, (boxes,)).double()
        targets[picture, :boxes, 1:] = torch.rand(boxes, 4, dtype=torch.float64) * 0.9 + 0.05
    targets[0, 3] = targets[0, 1] + targets.new_tensor([0, 1e-3, 0, 1e-3, 0])  # the same slot
    targets[0, 3, 0] = 2 - targets[0, 1, 0]
    targets[1, 1, 1:3] = 1.0  # a centre on the last edge belongs to the last cell
    return YoloLoss(ANCHORS_SMALL), prediction, targets


def test_loss_equals_the_slow_one_in_float64() -> None:
    loss, prediction, targets = example()
    met = overlaps(
        boxes_of(split_prediction(prediction, loss.anchors), loss.anchors, (5, 4))[:, :, None],
        targets[:, None, :, 1:],
    )
    loss.ignore = 0.3
    assert bool((met > loss.ignore).any()), "no slot is ignored: that branch was not tested"
    found = loss(prediction, targets)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(slow_loss(loss, prediction, targets), rel=1e-12)


def test_loss_gradient_is_the_slope() -> None:
    """Along a random direction; the fit a box is measured by is a constant, as in the paper."""
    loss, prediction, targets = example()
    loss.sure = 0.0  # its target moves with the prediction, and rightly carries no gradient
    prediction.requires_grad_()
    loss(prediction, targets).backward()
    direction = torch.randn_like(prediction)
    step = 1e-6
    with torch.no_grad():
        ahead = loss(prediction + step * direction, targets)
        behind = loss(prediction - step * direction, targets)
    slope = float((prediction.grad * direction).sum())
    assert float(ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_padding_changes_nothing() -> None:
    loss, prediction, targets = example()
    padding = torch.full((3, 4, 5), -1.0, dtype=torch.float64)
    padding[..., 1:] = torch.rand(3, 4, 4, dtype=torch.float64)  # what it holds must not matter
    padded = torch.cat([padding[:, :2], targets, padding[:, 2:]], 1)
    prediction.requires_grad_()
    (plain,) = torch.autograd.grad(loss(prediction, targets), prediction)
    (found,) = torch.autograd.grad(loss(prediction, padded), prediction)
    torch.testing.assert_close(found, plain, rtol=1e-14, atol=1e-15)
    assert bool(found.isfinite().all())


def test_loss_is_the_same_to_the_bit() -> None:
    loss, prediction, targets = example()
    runs = []
    for _ in range(3):
        leaf = prediction.clone().requires_grad_()
        value = loss(leaf, targets)
        value.backward()
        runs.append((value.detach(), leaf.grad))
    assert all(torch.equal(runs[0][0], v) and torch.equal(runs[0][1], g) for v, g in runs)


def test_right_prediction_costs_next_to_nothing() -> None:
    box = (0.32, 0.41, 0.42, 0.4)  # 2.5 cells: the shape of anchor 3
    right = prediction_of([(1, 0.999, box)], (6, 6))
    wrong = prediction_of([(1, 0.999, (0.52, 0.41, 0.42, 0.4))], (6, 6))
    targets = torch.tensor([[[1, *box]]], dtype=torch.float64)
    loss = YoloLoss(ANCHORS_SMALL)
    assert float(loss(right, targets)) < 0.01
    assert float(loss(wrong, targets)) > 1


def test_targets_of_a_wrong_shape_are_refused() -> None:
    loss, prediction, targets = example()
    with pytest.raises(UsageError, match="boxes, 5"):
        loss(prediction, targets[:2])


# ---- the others --------------------------------------------------------------------------


def test_unknown_way_up_is_refused() -> None:
    with pytest.raises(UsageError, match="bilinear"):
        unet(up="nearest")


def test_random_depth_drops_whole_pictures_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer = RandomDepth(0.25)
    kept = layer(torch.ones(4000, 2, 3, 3))
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert bool((kept.amax((1, 2, 3)) == kept.amin((1, 2, 3))).all())
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(layer.eval()(kept), kept)
