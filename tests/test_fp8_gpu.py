"""Attention of 8-bit floats on a GPU: ``test_fp8_emulated.py`` there, with what ``quantize`` makes
on the GPU itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import reference_fp8
from tests import cases, paths
from tests.cases import Fp8Case
from tests.test_fp8_emulated import SERVED

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper(cupy: Any) -> None:
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the kernel is for compute capability 9.0")


@pytest.mark.parametrize("case", SERVED, ids=str)
@pytest.mark.parametrize("given_output", [True, False])
def test_case(case: Fp8Case, given_output: bool, poisoned_pool: Any) -> None:
    out, lse = paths.run_fp8(paths.CUPY, case, given_output)
    problem = case.problem_with(out, lse, cleared=not given_output)
    assert problem is None, problem


@pytest.mark.parametrize("case", cases.tagged_fp8(cases.WRAP), ids=str)
def test_the_same_bits_every_time(case: Fp8Case, poisoned_pool: Any) -> None:
    first = paths.run_fp8(paths.CUPY, case, True)
    for _ in range(50):
        for result, same in zip(paths.run_fp8(paths.CUPY, case, True), first):
            np.testing.assert_array_equal(result, same)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [1500, 40000])
def test_quantized_on_the_gpu(head_dim: int, seqlen: int, poisoned_pool: Any) -> None:
    """Both tiles of a width: one for ordinary lengths, one for many keys, some rows of which are
    held against float64."""
    cupy, rng = poisoned_pool, np.random.default_rng(0)
    q = rng.standard_normal((1, 300, 4, head_dim)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, seqlen, 2, head_dim)).astype(np.float16)
    on_gpu = [
        cupyflash.quantize(cupy.asarray(x), role, hadamard_seed=seed)
        for x, role, seed in ((q, "q", 7), (k, "k", 7), (v, "v", None))
    ]
    on_host = [
        cupyflash.quantize(x, role, hadamard_seed=seed)
        for x, role, seed in ((q, "q", 7), (k, "k", 7), (v, "v", None))
    ]
    for made, same in zip(on_gpu, on_host):
        np.testing.assert_array_equal(made.data.get(), same.data)
        np.testing.assert_array_equal(made.scale.get(), same.scale)
    out, lse = cupyflash.attention(*on_gpu, return_lse=True, out_dtype="float16")
    operands = [
        reference_fp8.Scaled(
            values[:, rows][:, :, heads], np.ones(values[:, rows].shape[:2] + (1,), np.float32)
        )
        for values, rows, heads in (
            (on_host[0].dequantize(rotated=True), slice(0, 16), slice(3, 4)),
            (on_host[1].dequantize(rotated=True), slice(None), slice(1, 2)),
            (on_host[2].dequantize(), slice(None), slice(1, 2)),
        )
    ]
    expected = reference_fp8.expect(*operands, out_dtype=np.dtype(np.float16))
    comparison = expected.compare(out[:, :16, 3:4].get(), lse[:, 3:4, :16].get())
    assert comparison.ok, comparison.problem
