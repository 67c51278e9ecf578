"""Synthetic pictures on disk: shapes on textured ground, the same bits from run to run."""

from terrazzo.zoo.data.make import make_classification, make_detection, make_segmentation
from terrazzo.zoo.data.paint import CLASSES
from terrazzo.zoo.data.sets import ClassificationSet, DetectionSet, SegmentationSet

__all__ = [
    "CLASSES",
    "ClassificationSet",
    "DetectionSet",
    "SegmentationSet",
    "make_classification",
    "make_detection",
    "make_segmentation",
]
