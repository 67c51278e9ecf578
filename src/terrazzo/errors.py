"""Every error Terrazzo raises, in one tree.

A message says what failed, on which object, the value seen against the limit, and what to do
next. The command line prints it as one line; a script can catch the branch it cares for.

    TerrazzoError
    ├── UsageError         a call or a flag that makes no sense
    ├── ModelError         a model that cannot be loaded, exported or kept exact
    ├── DataError          data that cannot be read, is damaged, or finds no room
    ├── PlanError          a plan that does not fit the model, the input or the devices
    ├── LaunchError        processes that could not be started
    │   ├── LabError       an emulated cluster that this machine cannot make, or not as asked for
    │   └── HostError      a device that cannot be reached, or not be used as it is
    ├── PowerError         power that cannot be measured, or not be changed
    │   ├── MeterError     a sensor that is not there, may not be read, or talks nonsense
    │   └── KnobError      a knob that refuses
    └── RunError           something that went wrong while devices worked together
        ├── PeerLost       a device stopped answering
        ├── Disagreement   devices hold different batches, targets, weights or modes
        └── NotANumber     the model or its gradient produced NaN
"""

from __future__ import annotations


class TerrazzoError(Exception):
    """The root: anything that Terrazzo itself refuses or reports."""


class UsageError(TerrazzoError):
    """A call or a flag that makes no sense."""


class ModelError(TerrazzoError):
    """A model that cannot be loaded, exported or kept exact."""


class DataError(TerrazzoError):
    """Data that cannot be read, is damaged, or finds no room."""


class PlanError(TerrazzoError):
    """A plan that does not fit the model, the input or the devices."""


class LaunchError(TerrazzoError):
    """Processes that could not be started."""


class LabError(LaunchError):
    """An emulated cluster that this machine cannot make, or not as asked for."""


class HostError(LaunchError):
    """A device that cannot be reached, or not be used as it is."""


class PowerError(TerrazzoError):
    """Power that cannot be measured, or not be changed."""


class MeterError(PowerError):
    """A sensor that is not there, may not be read, or talks nonsense."""


class KnobError(PowerError):
    """A knob that refuses; ``knob`` is its name, where that is known."""

    knob = ""


class HelperGone(PowerError):
    """The process that may change power modes is not there: no other mode can be tried."""


class RunError(TerrazzoError):
    """Something that went wrong while devices worked together."""


class PeerLost(RunError):
    """A device stopped answering."""


class Disagreement(RunError):
    """Devices hold different batches, targets, weights or modes."""


class NotANumber(RunError):
    """The model or its gradient produced NaN."""
