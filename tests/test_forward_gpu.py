"""The forward on a GPU, on every case of the common list, with the code of each family it can run.

Outputs start as NaN, free memory is full of NaN and so is what lies between the arrays. The sm80
family runs on any newer GPU (``CUPYFLASH_FAMILY=sm80``): that is how its code is tested on one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import reference, select
from tests import cases, paths

pytestmark = pytest.mark.gpu


def check(case: cases.Case) -> None:
    out, lse = paths.run(paths.CUPY, case)
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("case", cases.FORWARD, ids=str)
def test_case(case: cases.Case, family: str, poisoned_pool: Any) -> None:
    check(case)


@pytest.mark.parametrize("case", cases.tagged(cases.EMULATED)[::3], ids=str)
def test_output_allocated_here(case: cases.Case, family: str, poisoned_pool: Any) -> None:
    """Without out=: memory from the poisoned pool, in the caller's layout, without lse."""
    arrays = [paths.CUPY.place(x) for x in case.inputs]
    out = cupyflash.attention(*arrays, **case.options)
    assert out.dtype == arrays[0].dtype and out.flags.c_contiguous
    values = out.get()
    if case.layout == "bhsd":
        values = values.transpose(0, 2, 1, 3)
    comparison = case.compare(values, None)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("case", cases.tagged(cases.WRAP), ids=str)
def test_bytes_around_the_output_stay(case: cases.Case, family: str, poisoned_pool: Any) -> None:
    """Rows and columns next to the output are not written, ragged tiles included."""
    import dataclasses

    case = dataclasses.replace(case, padded=True)
    placed = case.nan_output()
    buffer = paths.CUPY.array(placed.buffer)
    arrays = [paths.CUPY.place(x) for x in case.inputs]
    cupyflash.attention(*arrays, out=buffer[placed.index], **case.options)
    after = buffer.get().astype(np.float32)
    assert np.isfinite(after[placed.index]).all()
    after[placed.index] = np.nan
    assert np.isnan(after).all()


@pytest.mark.parametrize("case", cases.tagged(cases.WRAP), ids=str)
def test_the_same_bits_every_time(case: cases.Case, family: str, poisoned_pool: Any) -> None:
    arrays = [paths.CUPY.place(x) for x in case.inputs]
    first, first_lse = cupyflash.attention(*arrays, return_lse=True, **case.options)
    for _ in range(300):
        out, lse = cupyflash.attention(*arrays, return_lse=True, **case.options)
        # Compared as bytes on the device: a NaN would differ from itself.
        assert (out.view(np.uint16) == first.view(np.uint16)).all()
        assert (lse.view(np.uint32) == first_lse.view(np.uint32)).all()


def test_few_multiprocessors_give_the_same_bits(poisoned_pool: Any) -> None:
    """num_sms changes which CTA computes a tile, not how."""
    case = cases.Case("few_sms", 700, 700, batch=2, heads_q=4, head_dim=128, causal=True)
    arrays = [paths.CUPY.place(x) for x in case.inputs]
    expected = cupyflash.attention(*arrays, **case.options)
    for num_sms in (1, 2, 7, 100_000):
        try:
            out = cupyflash.attention(*arrays, num_sms=num_sms, **case.options)
        except cupyflash.UnsupportedError as error:
            assert "num_sms" in str(error)
            pytest.skip("this family's grid cannot be limited")
        assert (out.view(np.uint16) == expected.view(np.uint16)).all()


def test_every_family_that_is_forced_is_the_one_that_serves(family: str) -> None:
    import cupy

    x = cupy.zeros((1, 64, 1, 64), np.float16)
    assert f"_{family}_" in cupyflash.explain(x, x, x)
    assert select.forced_family() == family


@pytest.mark.parametrize("seqlen_kv", [1, 64, 65, 127, 128, 129, 255, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_one_after_the_other(
    seqlen_kv: int, causal: bool, family: str, poisoned_pool: Any
) -> None:
    """A short problem after a long one sees nothing of what the long one left in shared memory."""
    long = cases.Case("before", 600, 2000, heads_q=4, head_dim=128, data="large")
    paths.run(paths.CUPY, long)
    check(cases.Case(f"after_{seqlen_kv}", 50, seqlen_kv, heads_q=2, head_dim=128, causal=causal))


def test_raw_kernel_gives_the_same_bits(family: str, poisoned_pool: Any) -> None:
    case = cases.Case("raw", 300, 500, heads_q=4, heads_kv=2, head_dim=128, causal=True)
    arrays = [paths.CUPY.place(x) for x in case.inputs]
    expected, expected_lse = cupyflash.attention(*arrays, return_lse=True, **case.options)
    raw = cupyflash.raw_kernel(*arrays, return_lse=True, **case.options)
    raw()
    np.testing.assert_array_equal(raw.out.get(), expected.get())
    np.testing.assert_array_equal(raw.lse.get(), expected_lse.get())
    raw.out.fill(np.nan)
    raw.kernel(raw.grid, raw.block, raw.args, shared_mem=raw.shared_bytes)
    np.testing.assert_array_equal(raw.out.get(), expected.get())


def test_against_the_reference_at_a_size_where_every_multiprocessor_works(
    family: str, poisoned_pool: Any
) -> None:
    """Batch 4, 16 heads, 2048: rows drawn at random are compared, all are checked for NaN."""
    import cupy

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 2048, 16, 128), dtype=np.float32) for _ in range(3))
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    out, lse = cupyflash.attention(*map(cupy.asarray, (q, k, v)), causal=True, return_lse=True)
    assert cupy.isfinite(out).all() and cupy.isfinite(lse).all()
    out, lse = out.get(), lse.get()
    for b, h in zip(rng.integers(4, size=8), rng.integers(16, size=8)):
        rows = rng.integers(2048, size=40)
        one = slice(h, h + 1)
        comparison = reference.compare(
            out[b : b + 1, rows, one],
            lse[b : b + 1, one, rows],
            q[b : b + 1, rows, one],
            k[b : b + 1, :, one],
            v[b : b + 1, :, one],
            right=0,
            rows=rows,
        )
        assert comparison.ok, f"batch {b}, head {h}: {comparison.problem}"
