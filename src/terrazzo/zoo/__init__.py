"""Models that tests and benchmarks share."""

from terrazzo.zoo.resnet import resnet18, resnet50

__all__ = ["resnet18", "resnet50"]
