"""Where devices live, and how one process is started on each of them."""

from terrazzo.cluster.hosts import Hosts, LocalHosts
from terrazzo.cluster.launch import LaunchResult, launch
from terrazzo.cluster.process import Failure

__all__ = ["Failure", "Hosts", "LaunchResult", "LocalHosts", "launch"]
