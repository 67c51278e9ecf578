"""One process in a race: joins, builds a peer's training, warms up, and is timed.

Between the phases it stands still until whoever holds the race has looked at the meters:

    ready ─▶ begin ─▶ end ─▶ begin ─▶ end ...      a pair for each choice that is tried
      │        │       └ traffic and peak memory are read; the devices go at full speed again
      │        └ the devices fall to their own speed, meters start
      └ memory of the process before it holds a model
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from terrazzo.bench.turn import BEGIN, END, MARK, READY, Job, gradient_file

POLL_S = 0.05
MOST_STEPS = 20
TIMED_PARTS = 2
LIMIT_S = 90.0


def main() -> None:
    job = Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.alarm(int(job.limit_s))  # a peer that hangs is ended, and its row says so
    _Worker(job, int(os.environ["RANK"])).run()
    sys.stdout.flush()
    os._exit(0)  # torch takes its time to say goodbye, and nobody waits for it


class _Worker:
    def __init__(self, job: Job, device: int) -> None:
        self.job = job
        self.device = device
        self.together = job.workers > 1
        self.said = ""

    def run(self) -> None:
        import terrazzo as tz
        from terrazzo.bench import peers

        if self.together:
            tz.init(timeout_s=LIMIT_S)
        else:
            import torch
        peer = peers.find(self.job.peer)
        if peer.compiles:
            import torch._dynamo  # noqa: F401 - the same for it
        _pause(self.job, READY, rss_bytes=_memory_bytes("VmRSS"))
        self.trainer = peer.build(peers.Work(self.job.case, self.device, self.job.workers))
        self._try_choices()

    def _try_choices(self) -> None:
        """Each choice in its order, until time is up; where they have a slope, until one is slower
        than the best before it."""
        from terrazzo.runtime.allocator import trim

        job, best, tried_s = self.job, float("inf"), 0.0
        choices = self.trainer.choices if job.choice is None else [job.choice]
        for number, choice in enumerate(choices):
            began_s = time.perf_counter()
            if len(self.trainer.choices) > 1:
                self.trainer.use(choice)
            self.trainer.step()
            if job.keep_gradients and number == 0:
                self._save_gradients()
                trim()  # whole gradients lay here, which no training asks for
            self.trainer.update()
            if self.together:  # only now buckets, connections and free memory are as they stay
                self.trainer.step()
                self.trainer.update()
            _forget_peak()
            _pause(job, f"{BEGIN}-{number}")
            self.said = self.trainer.choice_text(choice)
            share = len(choices) if self.trainer.has_a_slope else min(2, len(choices))
            seconds = self._measure(job.seconds / share)
            _pause(
                job, f"{END}-{number}", seconds=seconds, choice=choice,
                peak_bytes=_memory_bytes("VmHWM"), choice_text=self.said,
            )  # fmt: skip
            tried_s += self._agreed(time.perf_counter() - began_s)
            is_behind = self.trainer.has_a_slope and min(seconds) > best
            if is_behind or tried_s > job.patience_s:
                break
            best = min(best, *seconds)

    def _measure(self, seconds: float) -> list[float]:
        first = self._timed_step() if self.trainer.parts <= TIMED_PARTS else self._by_parts(seconds)
        count = max(1, min(MOST_STEPS, round(seconds / first)))
        return [first, *(self._timed_step() for _ in range(count - 1))]

    def _by_parts(self, seconds: float) -> float:
        """A step of equal parts: where it is long, from its first ones, and it is said."""
        trainer, parts_s = self.trainer, []
        for number in range(trainer.parts):
            begin = time.perf_counter()
            trainer.part(number)
            parts_s.append(time.perf_counter() - begin)
            if number + 1 == TIMED_PARTS and sum(parts_s) * trainer.parts / TIMED_PARTS > seconds:
                self.said = f"{TIMED_PARTS} of {trainer.parts} timed"
                break
        begin = time.perf_counter()
        trainer.update()
        update_s = time.perf_counter() - begin
        return sum(parts_s) / len(parts_s) * trainer.parts + update_s

    def _timed_step(self) -> float:
        """Until the last device is done; all devices get device 0's figure."""
        begin = time.perf_counter()
        self.trainer.step()
        self.trainer.update()
        if self.together:
            import torch.distributed as dist

            dist.barrier()
        return self._agreed(time.perf_counter() - begin)

    def _agreed(self, elapsed_s: float) -> float:
        """The first process's figure: what follows from it must be the same for all."""
        if not self.together:
            return elapsed_s
        import torch
        import torch.distributed as dist

        elapsed = torch.tensor([elapsed_s], dtype=torch.float64)
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
