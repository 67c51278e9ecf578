"""The steps of a program on this device: each has a forward and its exact reverse."""

from terrazzo.runtime.steps.combine import CombineStep
from terrazzo.runtime.steps.compute import ComputeStep
from terrazzo.runtime.steps.exchange import ArriveStep, ExchangeStep
from terrazzo.runtime.steps.moments import MomentsStep
from terrazzo.runtime.steps.passes import PassesStep
from terrazzo.runtime.steps.spread import SpreadStep
from terrazzo.runtime.steps.step import DeviceStep, Run
from terrazzo.runtime.steps.take import TakeStep

__all__ = [
    "ArriveStep",
    "CombineStep",
    "ComputeStep",
    "DeviceStep",
    "ExchangeStep",
    "MomentsStep",
    "PassesStep",
    "Run",
    "SpreadStep",
    "TakeStep",
]
