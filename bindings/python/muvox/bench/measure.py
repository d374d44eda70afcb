"""Time and peak memory of calls that take turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]
MIB = 2**20


@dataclass
class Measured:
    """Median milliseconds and the peak of allocated memory in MiB, or the problem that stopped it."""

    ms: float | None = None
    mib: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Calls:
    """What is timed: muvox and its peers, and a part of muvox's call whose time is to be taken off it."""

    ours: Call
    peers: dict[str, Call]
    minus: Call | None = None


class HostClock:
    """For the CPU, where a call is over when it returns. It does not know the memory."""

    def timer(self, call: Call) -> Callable[[], float]:
        """Warms up; gives what runs the call once and tells the milliseconds."""
        call()

        def timed() -> float:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)

        return timed

    def peak(self, call: Call) -> float | None:
        return None

    def clear(self) -> None:
        """Gives back what a call that failed may have left."""
        gc.collect()


class DeviceClock:
    """For a GPU: the time between two events around the call, on the current stream.

    The stream is held until the host has issued all of the call: what is measured is the device's time, not how fast
    Python calls. A peer that waits for the device in the middle is charged for that wait."""

    CYCLES = 2_000_000  # of a millisecond, at 2 GHz or below
    LONGEST = 50.0  # ms

    def timer(self, call: Call) -> Callable[[], float]:
        call()
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host = 1e3 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        hold = int(self.CYCLES * min(2 * host + 0.1, self.LONGEST))
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def timed() -> float:
            torch.cuda._sleep(hold)
            first.record()
            call()
            last.record()
            last.synchronize()
            return first.elapsed_time(last)

        return timed

    def peak(self, call: Call) -> float | None:
        """Above what was allocated before the call, results included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def clear(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def forward_backward(function: Callable, inputs: list[torch.Tensor], *fixed) -> Call:
    """The call with a gradient to every input; that of the output, all ones, is made when it is first called."""
    leaves, grad = [x.detach().requires_grad_() for x in inputs], []

    def call():
        out = function(*leaves, *fixed)
        if not grad:
            grad.append(torch.ones_like(out))
        return torch.autograd.grad(out, leaves, grad[0])

    return call


def measure(calls: Calls, clock: HostClock | DeviceClock, repeats: int) -> tuple[Measured, dict[str, Measured]]:
    """Medians of muvox and of each peer, in turn. A peer that fails keeps its problem, and is not run again."""
    ours, minus = object(), object()
    everything = {ours: calls.ours} | ({minus: calls.minus} if calls.minus else {}) | calls.peers
    timers, found = {}, {name: Measured() for name in everything}

    def attempt(name, step):
        if name in (ours, minus):
            return step()
        problem = None
        try:
            return step()
        except torch.OutOfMemoryError:
            problem = "out of memory"
        except Exception as error:  # other people's code, and whatever it refuses must not end the run
            problem = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        found[name] = Measured(problem=problem)
        timers.pop(name, None)
        clock.clear()

    for name, call in everything.items():
        timers[name] = attempt(name, lambda call=call: clock.timer(call))
        if found[name].problem is None:
            found[name].mib = attempt(name, lambda call=call: clock.peak(call))
    timers = {name: timer for name, timer in timers.items() if timer}
    times = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in list(timers.items()):
            taken = attempt(name, timer)
            if taken is not None:
                times[name].append(taken)
    for name in timers:
        found[name].ms = statistics.median(times[name])
    if calls.minus:
        found[ours] = Measured(found[ours].ms - found[minus].ms, found[ours].mib)
    return found[ours], {name: found[name] for name in calls.peers}
