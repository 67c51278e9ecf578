"""Models and synthetic data that demo, tests, examples and benchmarks share."""

from terrazzo.zoo.registry import NAMES, build
from terrazzo.zoo.resnet import resnet18, resnet50

__all__ = ["NAMES", "build", "resnet18", "resnet50"]
