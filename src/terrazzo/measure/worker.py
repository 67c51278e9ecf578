"""What each device runs while a cluster is measured; device 0 writes down what all found."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from terrazzo.errors import TerrazzoError, UsageError
from terrazzo.measure.accelerator import absent, room_bytes
from terrazzo.measure.device import Terms, measure_device, warm_up
from terrazzo.measure.draw import with_watts
from terrazzo.measure.job import MARK, READY, MeasureJob, answer_path, error_path, go_path
from terrazzo.measure.kin import kin
from terrazzo.measure.links import measure_network
from terrazzo.measure.rehearsal import Rehearsal, rehearsed
from terrazzo.records import document
from terrazzo.runtime.links import connect
from terrazzo.runtime.start import join

TIMEOUT_S, POLL_S = 120.0, 0.05


def main() -> int:
    folder, device = Path(sys.argv[1]), int(os.environ["RANK"])
    try:
        _measure(folder)
    except TerrazzoError as error:
        document.write(error_path(folder, device), str(error))
        return 2
    return 0


def _measure(folder: Path) -> None:
    job, graph = MeasureJob.read(folder)
    torch_device = _lies_on(job)
    join(os.environ, timeout_s=TIMEOUT_S)
    links = connect()
    warm_up(torch_device)
    room = room_bytes(links, torch_device)
    rehearsal = Rehearsal(links, torch_device)
    say(READY)
    while not go_path(folder).exists():
        time.sleep(POLL_S)
    name, memory_bytes = job.names[links.device], room or job.memory_bytes[links.device]
    terms = Terms(name, memory_bytes, job.budget_s, kin(links, torch_device), torch_device)
    own = with_watts(lambda: measure_device(graph, terms, say), os.environ, links.device)
    own = rehearsed(own, rehearsal, links, say)
    network = measure_network(links, say, torch_device) if links.devices > 1 else None
    found = links.gather_text(json.dumps(asdict(own)))
    if links.device == 0:
        body = {
            "devices": [json.loads(text) for text in found],
            "network": None if network is None else asdict(network),
        }
        document.write(answer_path(folder), json.dumps(body))


def _lies_on(job: MeasureJob) -> torch.device:
    """Where this device is to be measured; who has no such thing says so."""
    device = int(os.environ["RANK"])
    found = torch.device(job.lie_on[device])
    if reason := absent(found):
        raise UsageError(f"{job.names[device]} cannot be measured on {found}: {reason}")
    return found


def say(text: str) -> None:
    print(MARK + text, flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # on a slow device torch takes longer to say goodbye than links to measure
