"""How fast quantize reads and writes memory, against a copy on the same GPU.

    python benchmarks/quantize_bandwidth.py [--tokens 16384] [--heads 32] [--rounds 9] [--json FILE]

Each row is one kind of call on a bfloat16 tensor [1, tokens, heads, head_dim]: what it must move
(the tensor once, the numbers once, for scales of whole sequences the tensor twice) in GB/s, and as
a part of what a copy of as many bytes reaches. Calls take turns with the copy, in bursts between
two CUDA events; the median of the rounds is printed. The bound is 85 % of the copy for calls of one
pass. Tensors should be far larger than the L2 cache: 134 MB with the defaults at head_dim 128.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy

import cupyflash

BURST = 20  # calls between two events
BOUND = 0.85

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "q, blocks of 128": ("q", {}),
    "q, blocks of 64": ("q", {"block": (64, None)}),
    "q, tokens": ("q", {"block": (1, None)}),
    "q, blocks of 128, rotated": ("q", {"hadamard_seed": 1}),
    "q, tokens, rotated": ("q", {"block": (1, None), "hadamard_seed": 1}),
    "v, blocks of 128": ("v", {}),
    "v, blocks of 64": ("v", {"block": (64, None)}),
    "k, blocks of 128, both ways round": ("k", {"for_backward": True}),
    "v, heads": ("v", {"block": (None, None)}),
    "v, tensor": ("v", {"block": None}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    import cupy

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    print(f"{device['name'].decode()}, {options.tokens} tokens, {options.heads} heads, bfloat16")
    figures: dict[str, dict[str, float]] = {}
    for head_dim in options.head_dim:
        shape = (1, options.tokens, options.heads, head_dim)
        numbers = cupy.random.standard_normal(shape, dtype=cupy.float32)
        x = numbers.astype(ml_dtypes.bfloat16)
        for name, (role, arguments) in CASES.items():
            figure = measure(cupy, x, role, arguments, options.rounds)
            figures[f"d{head_dim} {name}"] = figure
            is_bound = arguments.get("block", (128, None)) not in (None, (None, None))
            mark = " below the bound" if is_bound and figure["of_copy"] < BOUND else ""
            print(
                f"d{head_dim:<4} {name:<34} {figure['ms']:7.3f} ms {figure['gb_s']:6.0f} GB/s "
                f"{100 * figure['of_copy']:5.1f} % of a copy{mark}"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return 0


def measure(
    cupy: Any, x: Any, role: str, arguments: dict[str, Any], rounds: int
) -> dict[str, float]:
    """Milliseconds of a call, GB/s, and the part of a copy's GB/s, medians over rounds."""
    made = cupyflash.quantize(x, role, **arguments)
    passes = 2 if arguments.get("block", 128) in (None, (None, None)) else 1
    written = [y for y in (made.data, made.data_t, made.scale) if y is not None]
    moved = passes * x.nbytes + sum(y.nbytes for y in written)
    source = cupy.zeros(moved // 2, numpy.uint8)
    target = cupy.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {
        "quantize": lambda: cupyflash.quantize(x, role, **arguments),
        "copy": lambda: target.data.copy_from_device_async(
            source.data, source.nbytes, cupy.cuda.get_current_stream()
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in sorted(calls, reverse=index % 2 == 1):
            times[name].append(milliseconds(cupy, calls[name]))
    ratios = [copy / ours for ours, copy in zip(times["quantize"], times["copy"])]
    ms = statistics.median(times["quantize"])
    return {"ms": ms, "gb_s": moved / ms / 1e6, "of_copy": statistics.median(ratios)}


def milliseconds(cupy: Any, call: Callable[[], Any]) -> float:
    """Of one call of a burst, after one that is not timed."""
    call()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(BURST):
        call()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / BURST


if __name__ == "__main__":
    raise SystemExit(main())
