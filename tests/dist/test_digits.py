"""Real pictures to the end: one device and three learn the same digits, sample for sample."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from devices import run_on
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz

EPOCHS, TRAINED_ON = 4, 1000


def digits() -> tuple[Tensor, Tensor]:
    """1797 scans of 8 x 8 pixels, as uint8, and what they show."""
    found = load_digits()
    pictures = torch.from_numpy(found.images).to(torch.uint8).unsqueeze(1)
    return pictures, torch.from_numpy(found.target)


def reader() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 10),
    ).double()  # fmt: skip


def learn(wrapped: bool) -> tuple[np.ndarray, np.ndarray]:
    """Trains, then gives logits and classes for the pictures it has not seen."""
    torch.manual_seed(0)
    pictures, shown = digits()
    data = TensorDataset(pictures[:TRAINED_ON], shown[:TRAINED_ON])
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=96, shuffle=True, generator=order)  # the last: 40
    model = reader()
    if wrapped:
        model = tz.parallelize(model, (pictures[:96].double(),))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in tz.feed(loader, model) if wrapped else loader:
            loss = F.cross_entropy(model(x.double() / 16), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(pictures[TRAINED_ON:].double() / 16)
    return logits.numpy(), logits.argmax(1).numpy()


def test_one_device_and_three_read_the_same_digits() -> None:
    ((plain_logits, plain),) = run_on(1, learn, False)
    ((_, alone),) = run_on(1, learn, True)
    spread = run_on(3, learn, True)
    truth = digits()[1][TRAINED_ON:].numpy()
    assert (plain == truth).mean() > 0.9
    assert (alone == plain).all()
    for logits, classes in spread:
        assert (classes == plain).all()
        gap = np.linalg.norm(logits - plain_logits) / np.linalg.norm(plain_logits)
        assert 0 < gap < 1e-9, "the same up to the order of sums, and truly computed apart"
