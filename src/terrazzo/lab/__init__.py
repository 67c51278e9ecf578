"""Emulated devices: network namespaces with shaped links, CPU quotas and memory limits.

A description (``6xpi3``) becomes a Topology, a plain record; LabHosts makes it real and is one more
kind of hosts that ``terrazzo.cluster.launch`` starts processes on.
"""

from terrazzo.lab.hosts import LabHosts
from terrazzo.lab.preset import Preset, load_presets
from terrazzo.lab.topology import Topology

__all__ = ["LabHosts", "Preset", "Topology", "load_presets"]
