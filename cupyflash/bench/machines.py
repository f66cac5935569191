"""Where cases run: this CPU, or the current GPU through PyTorch. Inputs and timers of each."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy

from cupyflash.bench.cases import Case
from cupyflash.bench.check import Inputs, offsets
from cupyflash.errors import UnsupportedError
from cupyflash.timing import CudaTimer, Timer, WallTimer

SEED = 0


class Machine(Protocol):
    """What runs calls."""

    @property
    def name(self) -> str:
        """Of the processor, with the uuid of a GPU."""

    @property
    def timer(self) -> Timer:
        """Takes the times."""

    def inputs(self, case: Case) -> Inputs:
        """Random normal q, k and v of a case, the same in every run."""

    def spoil(self, out: Any) -> None:
        """Overwrites a result with NaN, so that only a new one passes a check."""

    def wait(self) -> None:
        """Returns when the machine is idle; raises what a kernel did wrong."""

    def release(self) -> None:
        """Gives back the memory that nothing refers to."""


@contextlib.contextmanager
def open_machine(device: str) -> Iterator[Machine]:
    """The machine for cases of a device, "cpu" or "cuda".

    Raises:
        UnsupportedError: there is no PyTorch, or it sees no GPU.
    """
    if device == "cpu":
        yield HostMachine()
        return
    torch = _torch_with_gpu()
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        timer = CudaTimer()
        try:
            yield GpuMachine(torch, timer, timer.gpu)
        finally:
            timer.close()


def _torch_with_gpu() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            "cases on a GPU need PyTorch, whose arrays every peer takes: pip install torch "
            f"({error}); --cases cpu needs NumPy alone"
        ) from error
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"PyTorch {torch.__version__} sees no GPU here; --cases cpu needs none"
        )
    return torch


class HostMachine:
    """NumPy arrays on this CPU."""

    def __init__(self) -> None:
        self.name = f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores"
        self.timer: Timer = WallTimer()

    def inputs(self, case: Case) -> Inputs:
        draw = numpy.random.default_rng(SEED)
        q, k, v = (draw.standard_normal(shape).astype(numpy.float32) for shape in shapes(case))
        return Inputs(
            q, k, v, numpy.array(list(offsets(case)), numpy.int32) if case.lengths else None
        )

    def spoil(self, out: Any) -> None:
        out.fill(numpy.nan)

    def wait(self) -> None:
        return None

    def release(self) -> None:
        return None


@dataclass(frozen=True)
class GpuMachine:
    """PyTorch tensors on its current GPU.

    Attributes:
        torch: the module.
        timer: takes the times.
        name: of the GPU, with its uuid.
    """

    torch: Any
    timer: Timer
    name: str

    def inputs(self, case: Case) -> Inputs:
        return torch_inputs(self.torch, case, "cuda")

    def spoil(self, out: Any) -> None:
        out.fill_(float("nan"))

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def release(self) -> None:
        self.torch.cuda.empty_cache()


def torch_inputs(torch: Any, case: Case, device: str) -> Inputs:
    """Random normal tensors of a case on a device of PyTorch."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
    draw = torch.Generator(device).manual_seed(SEED)
    q, k, v = (
        torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes(case)
    )
    starts = torch.tensor(list(offsets(case)), dtype=torch.int32, device=device)
    return Inputs(q, k, v, starts if case.lengths else None)


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """Of q, k and v: [batch, seqlen, heads, head_dim], packed [total, heads, head_dim]."""
    total = (sum(case.lengths),)
    tokens_q = total if case.lengths else (case.batch, case.seqlen_q)
    tokens_kv = total if case.lengths else (case.batch, case.seqlen_kv)
    return (
        (*tokens_q, case.heads_q, case.head_dim_qk),
        (*tokens_kv, case.heads_kv, case.head_dim_qk),
        (*tokens_kv, case.heads_kv, case.head_dim_v),
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
