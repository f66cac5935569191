"""The NumPy path against PyTorch's CPU scaled_dot_product_attention, and its peak memory.

    python benchmarks/cpu_forward.py [--seqlen 4096] [--heads 8] [--head-dim 64] [--repeats 7]

Both run in one process, taking turns, float32, on the cores this process may use; the median is
printed. PyTorch is optional. Peak memory is what the call allocates beyond its arguments and its
output, for two lengths: a path with O(seqlen) memory doubles when the length does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from cupyflash import host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    shape = (options.batch, options.seqlen, options.heads, options.head_dim)
    cores = len(os.sched_getaffinity(0))
    blas_type = os.environ.get("OPENBLAS_CORETYPE", "unset")
    print(f"float32 {list(shape)}, {cores} cores, OPENBLAS_CORETYPE {blas_type}")
    for causal in (False, True):
        speed(shape, causal, cores, options.repeats)
    for seqlen in (options.seqlen // 2, options.seqlen):
        memory((options.batch, seqlen, options.heads, options.head_dim))


def speed(shape: tuple[int, int, int, int], causal: bool, cores: int, repeats: int) -> None:
    """Print the time of both, and how fast the NumPy path is as a fraction of PyTorch."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    scale, right = shape[-1] ** -0.5, 0 if causal else None
    calls: dict[str, Callable[[], object]] = {
        "cupyflash": lambda: host.attention(q, k, v, softmax_scale=scale, right=right)
    }
    try:
        import torch
    except ImportError:
        print("torch is not installed: no comparison")
    else:
        torch.set_num_threads(cores)
        tensors = [torch.from_numpy(x).transpose(1, 2).contiguous() for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch"] = lambda: sdpa(*tensors, is_causal=causal)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(values) for name, values in times.items()}
    batch, seqlen, heads, head_dim = shape
    gflop = 4 * batch * heads * seqlen**2 * head_dim / 1e9 / (2 if causal else 1)
    text = ", ".join(f"{name} {t:.3f} s ({gflop / t:.0f} GFLOP/s)" for name, t in median.items())
    if "torch" in median:
        text += f": {median['torch'] / median['cupyflash']:.2f} x torch's speed"
    print("causal:" if causal else "full:  ", text)


def memory(shape: tuple[int, int, int, int]) -> None:
    """Print the peak of what NumPy allocates during one call, output excluded."""
    q, k, v, out = (np.ones(shape, np.float32) for _ in range(4))
    tracemalloc.start()
    host.attention(q, k, v, softmax_scale=shape[-1] ** -0.5, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    scores = shape[0] * shape[2] * shape[1] ** 2 * 4
    print(f"peak extra memory at {shape[1]}: {peak / 2**20:.1f} MiB (scores {scores / 2**20:.0f})")


if __name__ == "__main__":
    main()
