"""Times of calls: bursts of back-to-back calls, taken in turns, with the clock they ran at.

A GPU that is kept busy runs at the clock that its power limit allows, well below the one of a
single call after a pause. So a sample is a burst: after a warm-up of half its calls, about 60 ms of
calls without a gap, the L2 cache overwritten before each (not timed), CUDA events around each.
Implementations that are to be compared take turns, and each round begins with another one: what
drifts with temperature then meets all alike, and a ratio is taken within a round.

Two timers do this, :class:`WallTimer` for the CPU and :class:`CudaTimer` for the current GPU of
PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

Call = Callable[[], Any]

MIN_CALL_MS = 0.01
"""What one call is taken for at least when the calls of a burst are counted."""
MIN_FLUSH_BYTES = 128 << 20
CLOCK_PERIOD_MS = 20


@dataclass(frozen=True)
class Burst:
    """How long a sample is.

    Attributes:
        milliseconds: duration aimed at, from the time of the first call.
        min_calls, max_calls: bounds on the number of calls.
    """

    milliseconds: float = 60.0
    min_calls: int = 3
    max_calls: int = 200

    def num_calls(self, first_ms: float) -> int:
        """Calls of a burst whose first took ``first_ms``."""
        wanted = int(self.milliseconds / max(first_ms, MIN_CALL_MS))
        return max(self.min_calls, min(self.max_calls, wanted))


@dataclass(frozen=True)
class Clock:
    """What a GPU ran at.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        watts: power drawn by the board.
    """

    sm_mhz: float
    watts: float


@dataclass(frozen=True)
class Sample:
    """One burst.

    Attributes:
        milliseconds: the time of every call.
        clock: read while the burst ran, None where it cannot be read.
    """

    milliseconds: tuple[float, ...]
    clock: Clock | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes:
        call: what is timed.
        returned: what the call returns; of a graph, the arrays that every replay writes.
        graph: whether ``call`` replays a CUDA graph.
    """

    call: Call
    returned: Any
    graph: bool


class Timer(Protocol):
    """Runs calls and takes their times."""

    clock_source: str

    def prepare(self, call: Call) -> Prepared:
        """The call with as little host cost as can be had."""

    def run(self, call: Call, count: int) -> Sample:
        """Times ``count`` calls one after the other."""


def sample(timer: Timer, call: Call, burst: Burst) -> Sample:
    """One burst of a call, after its warm-up."""
    count = burst.num_calls(timer.run(call, 1).median)
    for _ in range(count // 2):
        call()
    return timer.run(call, count)


def interleave(
    timer: Timer, calls: Mapping[str, Call], rounds: int, burst: Burst
) -> dict[str, list[Sample]]:
    """Bursts of several calls in turns; every round begins with the next of them.

    Args:
        timer: takes the times.
        calls: what to time, by name.
        rounds: bursts of each.
        burst: how long each is.

    Returns:
        ``rounds`` samples by name; those of one index belong to one round.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for names in turns(list(calls), rounds):
        for name in names:
            samples[name].append(sample(timer, calls[name], burst))
    return samples


def turns(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order within each round."""
    for index in range(rounds):
        first = index % max(1, len(names))
        yield names[first:] + names[:first]


# --- the CPU --------------------------------------------------------------------------------------


class WallTimer:
    """Times calls that return when they are done, on the wall clock; no cache is flushed."""

    clock_source = "none: the clock of a CPU is not read"

    def prepare(self, call: Call) -> Prepared:
        return Prepared(call, call(), graph=False)

    def run(self, call: Call, count: int) -> Sample:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return Sample(tuple(times))


# --- the GPU --------------------------------------------------------------------------------------


class CudaTimer:
    """Times calls on PyTorch's current stream, which must not be the default one, with CUDA events.

    Holds a buffer of twice the L2 cache, and the reader of the clock until it is closed.

    Attributes:
        gpu: name and uuid.
        clock_source: by what the clock is read, or why it is not.
    """

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        properties = self._torch.cuda.get_device_properties(self._torch.cuda.current_device())
        num_bytes = max(MIN_FLUSH_BYTES, 2 * getattr(properties, "L2_cache_size", 0))
        self._flush = self._torch.empty(num_bytes, dtype=self._torch.int8, device="cuda")
        uuid = f"GPU-{properties.uuid}"
        self.gpu = f"{properties.name} {uuid}"
        self._clock = open_clock(uuid)
        self.clock_source = self._clock.source

    def prepare(self, call: Call) -> Prepared:
        """Captures the call in a CUDA graph; a call that cannot be captured stays what it is.

        Whether the graph holds all that the call does is the caller's to check: by a result that
        was spoilt before a replay.
        """
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Relaxed: libraries may load kernels and allocate while they are captured.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                returned = call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:
            torch.cuda.synchronize()
            return Prepared(call, call(), graph=False)
        return Prepared(graph.replay, returned, graph=True)

    def run(self, call: Call, count: int) -> Sample:
        torch = self._torch
        pairs = []
        for _ in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        clock = self._clock.read()  # the host is ahead: the burst still runs
        torch.cuda.synchronize()
        return Sample(tuple(begin.elapsed_time(end) for begin, end in pairs), clock)

    def close(self) -> None:
        self._clock.close()


class ClockReader(Protocol):
    """Reads the clock of one GPU."""

    source: str

    def read(self) -> Clock | None:
        """What the GPU runs at now."""

    def close(self) -> None:
        """Ends reading."""


def open_clock(uuid: str) -> ClockReader:
    """The clock of a GPU, through NVML (nvidia-ml-py) or else nvidia-smi, or else none.

    Args:
        uuid: the GPU as the driver names it, "GPU-...". An index would be wrong under
            CUDA_VISIBLE_DEVICES.
    """
    reasons = []
    for reader in (NvmlClock, SmiClock):
        try:
            return reader(uuid)
        except Exception as error:  # a clock is worth having, not worth failing for
            reasons.append(f"{reader.__name__}: {error}")
    return NoClock("; ".join(reasons))


class NoClock:
    """In place of a clock that cannot be read."""

    def __init__(self, reason: str) -> None:
        self.source = f"none: {reason}"

    def read(self) -> None:
        return None

    def close(self) -> None:
        return None


class NvmlClock:
    """The clock through NVML, by the package nvidia-ml-py."""

    source = "NVML"

    def __init__(self, uuid: str) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        if self.read() is None:
            raise RuntimeError("NVML knows the GPU but not its clock")

    def read(self) -> Clock | None:
        with contextlib.suppress(self._nvml.NVMLError):
            mhz = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            milliwatts = self._nvml.nvmlDeviceGetPowerUsage(self._handle)
            return Clock(float(mhz), milliwatts / 1e3)
        return None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class SmiClock:
    """The clock as a running nvidia-smi prints it; one that starts for each reading is too slow."""

    source = "nvidia-smi"
    max_age_seconds = 5 * CLOCK_PERIOD_MS / 1e3

    def __init__(self, uuid: str, program: str = "nvidia-smi") -> None:
        command = [program, f"--id={uuid}", "--query-gpu=clocks.sm,power.draw"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={CLOCK_PERIOD_MS}"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._latest: tuple[float, Clock] | None = None
        assert self._process.stdout is not None  # for the type checker: it is a pipe
        self._thread = threading.Thread(
            target=self._follow, args=(self._process.stdout,), daemon=True
        )
        self._thread.start()
        if not self._wait(seconds=5.0):
            self.close()
            raise RuntimeError("prints no clock")

    def _wait(self, seconds: float) -> bool:
        """Whether a first reading came in this time."""
        deadline = time.monotonic() + seconds
        while self._latest is None and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(CLOCK_PERIOD_MS / 1e3)
        return self._latest is not None

    def _follow(self, lines: IO[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):  # "[N/A]" and messages
                mhz, watts = (float(cell) for cell in line.split(","))
                self._latest = (time.monotonic(), Clock(mhz, watts))

    def read(self) -> Clock | None:
        latest = self._latest
        if latest is None or time.monotonic() - latest[0] > self.max_age_seconds:
            return None
        return latest[1]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
