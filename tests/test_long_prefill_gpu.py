"""The prefill of one request of 120,000 tokens, which naive attention cannot hold in memory.

Its score matrix would take 230 GB (8 heads x 120,000 x 120,000 x 2 bytes). The kernel needs what it
returns and nothing that grows with the square of the length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import reference

pytestmark = pytest.mark.gpu

SEQLEN = 120_000
HEADS = 8
HEAD_DIM = 128
ROWS_CHECKED = 64
EXTRA_BYTES = 16 << 20


@pytest.fixture
def inputs(cupy: Any) -> list[Any]:
    """q, k, v, generated on the GPU head by head, so that nothing large passes over the bus."""
    generator = cupy.random.default_rng(0)
    arrays = []
    for _ in range(3):
        array = cupy.empty((1, SEQLEN, HEADS, HEAD_DIM), np.float16)
        for head in range(HEADS):
            array[0, :, head] = generator.standard_normal((SEQLEN, HEAD_DIM), dtype=np.float32)
        arrays.append(array)
    cupy.get_default_memory_pool().free_all_blocks()
    return arrays


def test_causal_prefill(cupy: Any, inputs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = inputs
    small = [x[:, :256] for x in inputs]
    cupyflash.attention(*small, causal=True)  # compiles, or reads the cubin

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    out = cupy.full(q.shape, np.nan, q.dtype)
    lse_bytes = HEADS * SEQLEN * 4
    cupy.cuda.Device().synchronize()
    free_before, held_before = cupy.cuda.runtime.memGetInfo()[0], pool.total_bytes()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    result, lse = cupyflash.attention(q, k, v, causal=True, out=out, return_lse=True)
    end.record()
    end.synchronize()
    assert result is out
    from_driver = free_before - cupy.cuda.runtime.memGetInfo()[0]
    from_pool = pool.total_bytes() - held_before
    extra = max(from_driver, from_pool)
    times = []
    for _ in range(3):
        begin.record()
        cupyflash.attention(q, k, v, causal=True, out=out)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    seconds = min(times)
    flop = 2 * HEADS * SEQLEN**2 * HEAD_DIM  # half of 4 S^2 D H
    with capsys.disabled():
        print(
            f"\n120,000-token causal prefill, {HEADS} heads, head_dim {HEAD_DIM}, float16: "
            f"{seconds * 1e3:.1f} ms, {flop / seconds / 1e12:.0f} TFLOP/s; memory beyond q, k, v "
            f"and out: {extra / 2**20:.1f} MiB (lse {lse_bytes / 2**20:.1f}), naive scores "
            f"{HEADS * SEQLEN**2 * 2 / 1e9:.0f} GB"
        )
    assert extra <= lse_bytes + EXTRA_BYTES
    assert cupy.isfinite(out).all() and cupy.isfinite(lse).all()

    rng = np.random.default_rng(1)
    for head in range(HEADS):
        rows = np.array([0, SEQLEN - 1, *rng.integers(SEQLEN, size=ROWS_CHECKED)])
        one = slice(head, head + 1)
        comparison = reference.compare(
            out[:, rows, one].get(),
            lse[:, one, rows].get(),
            q[:, rows, one].get(),
            k[:, :, one].get(),
            v[:, :, one].get(),
            right=0,
            rows=rows,
        )
        assert comparison.ok, f"head {head}, rows {rows}: {comparison.problem}"
