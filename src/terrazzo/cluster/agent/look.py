"""Looking at a device: what it is, what it has, and what is installed on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "rich", "safetensors")
VERSIONS = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""
INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Facts of this device, cheap enough to ask for at every start."""
    workdir = Path(request["workdir"]).expanduser()
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "time_s": time.time(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "bits": struct.calcsize("P") * 8,
        "versions": versions(),
        "cores": cores(),
        "memory_bytes": meminfo("MemTotal"),
        "available_bytes": meminfo("MemAvailable"),
        "disk": disk(workdir),
        "interfaces": interfaces(),
        "reached_at": connection[2] if len(connection) == 4 else "",
        "workdir": str(workdir),
        "is_root": os.geteuid() == 0,
        "programs": [name for name in ("ip", "wg", "wireguard-go", "sudo") if which(name)],
    }


def versions() -> dict[str, str]:
    """Asked of a fresh interpreter: this one does not see packages of the user's own folder."""
    command = [sys.executable, "-c", VERSIONS, *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    try:
        found: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        return dict.fromkeys(PACKAGES, "")
    return found


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def disk(folder: Path) -> dict[str, Any]:
    """Room where Terrazzo would write, and whether it may."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    writable = os.access(there, os.W_OK | os.X_OK)
    try:
        return {"free_bytes": shutil.disk_usage(there).free, "writable": writable}
    except OSError:
        return {"free_bytes": 0, "writable": False}


def interfaces() -> dict[str, str]:
    """IPv4 addresses by interface; those without one are named with an empty address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            found[name] = address_of(name, asking)
    return found


def address_of(name: str, asking: socket.socket) -> str:
    import fcntl

    question = struct.pack("256s", name.encode()[:15])
    try:
        answer = fcntl.ioctl(asking.fileno(), INTERFACE_ADDRESS, question)
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])


def which(name: str) -> str:
    """Also where only root's path leads, as on Debian."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or ""


def free_port(address: str) -> int:
    """A port of that address that nobody listens on; OSError if the address is not here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
