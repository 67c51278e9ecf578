"""One device in a race: joins, builds a peer's training, warms up, tunes, and is timed.

Between the phases it stands still until whoever holds the race has looked at the meters:

    ready ─▶ built ─▶ begin ─▶ end
      │        │        │       └ traffic and peak memory are read
      │        │        └ meters start
      │        └ the device falls to its own speed
      └ memory of the process before it holds a model
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from terrazzo.bench.turn import MARK, PHASES, Job, gradient_file

POLL_S = 0.05
MOST_STEPS = 20
LONG_TRIAL_S = 3.0
LIMIT_S = 90.0


def main() -> None:
    job = Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    device = int(os.environ["RANK"])
    signal.alarm(int(job.limit_s))  # a peer that hangs is ended, and its row says so
    if job.alone_on is not None and device != job.alone_on:
        for phase in PHASES:
            _pause(job, phase)
        return
    _Worker(job, device).run()


class _Worker:
    def __init__(self, job: Job, device: int) -> None:
        self.job = job
        self.device = device
        self.together = job.alone_on is None and job.devices > 1

    def run(self) -> None:
        import terrazzo as tz
        from terrazzo.bench import peers

        if self.together:
            tz.init(timeout_s=LIMIT_S)
        else:
            import torch  # noqa: F401 - what it takes belongs to the process, not to the step
        peer = peers.find(self.job.peer)
        _pause(self.job, "ready", rss_bytes=_memory_bytes("VmRSS"))
        work = peers.Work(self.job.case, 0 if peer.alone else self.device, self.job.devices)
        self.trainer = peer.build(work)
        choice = self.job.choice
        if choice is not None and len(self.trainer.choices) > 1:
            self.trainer.use(choice)
        self.trainer.step()
        if self.job.keep_gradients:
            self._save_gradients()
        self.trainer.update()
        _pause(self.job, "built")
        choice = self._tune() if choice is None else choice
        _forget_peak()
        _pause(self.job, "begin")
        seconds = self._measure()
        _pause(
            self.job, "end", seconds=seconds, peak_bytes=_memory_bytes("VmHWM"), choice=choice,
            choice_word=self.trainer.choice_word,
        )  # fmt: skip

    def _tune(self) -> int:
        """The choice with the fastest step."""
        choices = self.trainer.choices
        if len(choices) == 1:
            return choices[0]
        found: dict[int, float] = {}
        for choice in choices:
            self.trainer.use(choice)
            found[choice] = self._settled_step()
        best = min(found, key=lambda choice: found[choice])
        self.trainer.use(best)
        self._settled_step()
        return best

    def _settled_step(self) -> float:
        """The second step, where it is short: the first still makes buffers and connections."""
        first = self._timed_step()
        return first if first > LONG_TRIAL_S else self._timed_step()

    def _measure(self) -> list[float]:
        first = self._timed_step()
        count = max(1, min(MOST_STEPS, round(self.job.seconds / first)))
        return [first, *(self._timed_step() for _ in range(count - 1))]

    def _timed_step(self) -> float:
        """Until the last device is done; all devices get device 0's figure."""
        begin = time.perf_counter()
        self.trainer.step()
        self.trainer.update()
        if not self.together:
            return time.perf_counter() - begin
        import torch
        import torch.distributed as dist

        dist.barrier()
        elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.broadcast(elapsed, 0)
        return float(elapsed)

    def _save_gradients(self) -> None:
        import torch

        gradients = {name: g.detach().clone() for name, g in self.trainer.gradients().items()}
        if not gradients:
            return
        with gradient_file(self.job, self.device).open("wb") as file:
            torch.save(gradients, file)
            file.flush()
            os.fsync(file.fileno())
            # Pages of the file would count as memory of this device.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _pause(job: Job, phase: str, **facts: object) -> None:
    print(MARK + json.dumps({"phase": phase, **facts}), flush=True)
    sign = job.sign(phase)
    while not sign.exists():
        time.sleep(POLL_S)


def _memory_bytes(field: str) -> int:
    """A line of this process's status; 0 where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak then covers the whole life of the process, which is never too little


if __name__ == "__main__":
    main()
