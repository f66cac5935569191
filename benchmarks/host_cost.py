"""What one attention call costs the host: the time until it returns, the GPU not waited for.

    python benchmarks/host_cost.py [--calls 2000] [--seqlen 128] [--json FILE]

Measured on arrays so small that the GPU keeps up (a full queue would make the host wait for it),
in steady state: median over rounds of the mean time of a call. Rows: CuPy and PyTorch arrays, with
and without a log-sum-exp, into the caller's out, on a given stream, and the same plan launched
directly; for comparison an empty CuPy RawKernel, which is what any launch from Python costs. "New
shape" is a call of a shape never seen before, which chooses its kernel and settles a plan. The
backward launches three kernels; "autograd" is PyTorch's forward and backward of a sum. The last
lines are of fresh processes whose kernel is compiled and on disk (or in the package): importing the
package, loading its modules, and the first call until it returns.

Bounds: 25 us on CuPy arrays, 35 us on PyTorch tensors; 30 ms from a cubin on disk to the first
launch; 50 ms for the import beyond that of NumPy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy

import cupyflash
from cupyflash import serve

ROUNDS = 11
BOUNDS_US = {
    "cupy attention": 25.0,
    "torch attention": 35.0,
    "first call": 30e3,
    "import": 50e3,
}

FIRST_CALL = """
import json, time
import numpy
start = time.perf_counter()
import cupyflash
imported = time.perf_counter()
cupyflash.attention
loaded = time.perf_counter()
import {library} as library
x = {array}
{wait}
ready = time.perf_counter()
cupyflash.attention(x, x, x)
done = time.perf_counter()
print(json.dumps([imported - start, loaded - imported, done - ready]))
"""
LIBRARIES = {
    "cupy": (
        "library.zeros({shape}, numpy.float16)",
        "library.cuda.Device().synchronize()",
    ),
    "torch": (
        "library.zeros({shape}, dtype=library.float16, device='cuda')",
        "library.cuda.synchronize()",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls of a round")
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    shape = (1, options.seqlen, options.heads, options.head_dim)
    figures: dict[str, float] = {}
    for name, call, wait in cases(shape):
        figures[name] = cost_us(call, wait, options.calls)
        print(f"{name:<32} {figures[name]:7.2f} us", flush=True)
    for name, cost in first_calls(shape).items():
        figures[name] = cost
        print(f"{name:<32} {cost / 1e3:7.2f} ms", flush=True)
    missed = []
    for name, bound in BOUNDS_US.items():
        if name in figures:
            held = figures[name] <= bound
            print(
                f"{name}: {figures[name]:.2f} us, bound {bound:.0f}: {'ok' if held else 'MISSED'}"
            )
            missed += [] if held else [name]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"shape": shape, "us": figures}, file, indent=1)
    return 1 if missed else 0


def cost_us(call: Callable[[], Any], wait: Callable[[], Any], calls: int) -> float:
    """Microseconds a call, the median of rounds; batches are short enough for the GPU's queue."""
    batch = 200
    for _ in range(batch):
        call()
    wait()
    rounds = []
    for _ in range(ROUNDS):
        spent = 0.0
        for _ in range(max(calls // batch, 1)):
            started = time.perf_counter()
            for _ in range(batch):
                call()
            spent += time.perf_counter() - started
            wait()
        rounds.append(spent / (max(calls // batch, 1) * batch) * 1e6)
    return statistics.median(rounds)


def first_calls(shape: tuple[int, int, int, int], processes: int = 5) -> dict[str, float]:
    """Microseconds of import, of loading modules and of the first call; medians over processes."""
    for library, (array, wait) in LIBRARIES.items():
        code = FIRST_CALL.format(library=library, array=array.format(shape=shape), wait=wait)
        rows = []
        for turn in range(processes + 1):
            command = [sys.executable, "-c", code]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode:
                break
            if turn:  # the first may compile
                rows.append(json.loads(process.stdout.splitlines()[-1]))
        if rows:
            medians = [statistics.median(column) * 1e6 for column in zip(*rows)]
            return dict(zip(("import", "load modules", "first call"), medians))
    return {}


Case = tuple[str, Callable[[], Any], Callable[[], Any]]


def cases(shape: tuple[int, int, int, int]) -> Iterator[Case]:
    """(name, call, wait for the GPU) of every row."""
    attention = cupyflash.attention
    yield from cupy_cases(shape)
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed")
        return
    if not torch.cuda.is_available():
        print("PyTorch has no CUDA")
        return
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    wait = torch.cuda.synchronize
    yield "torch attention", lambda: attention(q, k, v), wait
    yield "torch attention, lse", lambda: attention(q, k, v, return_lse=True), wait
    yield "torch attention, causal, out", lambda: attention(q, k, v, causal=True, out=out), wait
    yield from backward_cases("torch", (q, k, v), torch.empty_like, wait)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ones = torch.ones_like(q)
    yield (
        "torch autograd",
        lambda: torch.autograd.grad(attention(*leaves, causal=True), leaves, ones),
        wait,
    )
    yield "torch new shape", new_shapes(q, k, v), wait
    yield "torch empty_like (for scale)", lambda: torch.empty_like(q), wait


def backward_cases(
    library: str,
    inputs: tuple[Any, Any, Any],
    empty_like: Callable[[Any], Any],
    wait: Callable[[], Any],
) -> Iterator[Case]:
    """Rows of attention_backward, the gradient of out being out."""
    backward = cupyflash.attention_backward
    out, lse = cupyflash.attention(*inputs, causal=True, return_lse=True)
    own = {f"d{name}": empty_like(x) for name, x in zip("qkv", inputs)}
    given = (out, *inputs, out, lse)
    yield f"{library} backward", lambda: backward(*given, causal=True), wait
    yield f"{library} backward, own arrays", lambda: backward(*given, causal=True, **own), wait
    yield (
        f"{library} backward, deterministic",
        lambda: backward(*given, causal=True, deterministic=True),
        wait,
    )


def cupy_cases(shape: tuple[int, int, int, int]) -> Iterator[Case]:
    attention = cupyflash.attention
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        print("CuPy is not installed")
        return
    except cupy.cuda.runtime.CUDARuntimeError as error:
        print(f"CuPy has no GPU: {error}")
        return
    generator = numpy.random.default_rng(0)
    q, k, v = (
        cupy.asarray(generator.standard_normal(shape).astype(ml_dtypes.bfloat16)) for _ in range(3)
    )
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    wait = cupy.cuda.Device().synchronize
    yield "cupy attention", lambda: attention(q, k, v), wait
    yield "cupy attention, lse", lambda: attention(q, k, v, return_lse=True), wait
    yield "cupy attention, causal, out", lambda: attention(q, k, v, causal=True, out=out), wait
    yield "cupy attention, stream", lambda: attention(q, k, v, stream=stream), wait
    settings = (False, "bottom_right", None, None, 0.0, None, None, "bshd", False, None)
    _, configuration, pointers = serve.lookup((q, k, v, None), settings)
    assert configuration is not None, "the calls above have made it known"
    handle = stream.ptr
    yield (
        "cupy plan only",
        lambda: configuration.plan.run(handle, *pointers[0][:3], out.data.ptr, 0, *pointers[1]),
        wait,
    )
    raw = cupyflash.raw_kernel(q, k, v)
    yield "cupy raw_kernel()", raw, wait
    yield from backward_cases("cupy", (q, k, v), cupy.empty_like, wait)
    yield "cupy new shape", new_shapes(q, k, v), wait
    yield "cupy empty (for scale)", lambda: cupy.empty(shape, q.dtype), wait
    try:
        empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
        empty((1,), (32,), ())
    except Exception as error:  # CuPy compiles with toolkit headers, which may be absent
        print(f"empty RawKernel: {type(error).__name__}")
    else:
        yield "cupy empty RawKernel", lambda: empty((1,), (32,), ()), wait


def new_shapes(q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """A call with a seqlen_kv that the library has not seen since it last forgot all."""
    lengths = iter(range(1 << 60))

    def call() -> Any:
        length = next(lengths) % (k.shape[1] - 1) + 1
        if length == 1:
            cupyflash.forget_configurations()
        return cupyflash.attention(q, k[:, :length], v[:, :length])

    return call


if __name__ == "__main__":
    sys.exit(main())
