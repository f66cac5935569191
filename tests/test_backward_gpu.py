"""The backward on a GPU, on every case of the common list, with the code of each family it can run:
the tests of ``test_forward_gpu.py`` for gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import reference
from tests import cases, paths
from tests.cases import Case, GeneralCase

pytestmark = pytest.mark.gpu

# The gradients are checked in float64 by the CPU, whole.
CASES = [case for case in cases.FORWARD if case.seqlen_q * case.seqlen_kv <= 1 << 22]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, family: str, poisoned_pool: Any) -> None:
    comparison = case.expected_grads.compare(*paths.run_backward(paths.CUPY, case))
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("case", cases.tagged_general(cases.EMULATED), ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_general_case(
    case: GeneralCase, deterministic: bool, family: str, poisoned_pool: Any
) -> None:
    grads = paths.run_general_backward(paths.CUPY, case, deterministic=deterministic)
    problem = case.grads_problem(grads)
    assert problem is None, problem


@pytest.mark.parametrize("case", cases.tagged(cases.WRAP), ids=str)
def test_bytes_around_the_gradients_stay(case: Case, family: str, poisoned_pool: Any) -> None:
    """Rows and columns next to a gradient are not written, ragged tiles included."""
    case = dataclasses.replace(case, padded=True)
    (dout, dlse), (out, lse) = case.gradients, case.forward_results
    placed = [case.place(np.full(x.bshd.shape, np.nan)) for x in case.inputs]
    buffers = [paths.CUPY.array(x.buffer) for x in placed]
    cupyflash.attention_backward(
        *(paths.CUPY.place(x) for x in (dout, *case.inputs, out)),
        paths.CUPY.array(lse),
        dlse=paths.CUPY.array(dlse),
        **{name: b[x.index] for name, b, x in zip(("dq", "dk", "dv"), buffers, placed)},
        **case.options,
    )
    for buffer, x in zip(buffers, placed):
        after = buffer.get().astype(np.float32)
        assert np.isfinite(after[x.index]).all()
        after[x.index] = np.nan
        assert np.isnan(after).all()


def random_call(case: Case) -> tuple[list[Any], dict[str, Any]]:
    (dout, _), arrays = case.gradients, [paths.CUPY.place(x) for x in case.inputs]
    out, lse = cupyflash.attention(*arrays, return_lse=True, **case.options)
    return [paths.CUPY.place(dout), *arrays, out, lse], case.options


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (200, 30)}], ids=str)
def test_deterministic_gradients_are_the_same_bits(
    head_dim: int, mask: dict[str, Any], family: str, poisoned_pool: Any
) -> None:
    case = Case("repeats", 1100, 1300, batch=2, heads_q=8, heads_kv=4, head_dim=head_dim, **mask)
    call, options = random_call(case)
    first = cupyflash.attention_backward(*call, deterministic=True, **options)
    for _ in range(200):
        again = cupyflash.attention_backward(*call, deterministic=True, **options)
        for grad, same in zip(again, first):
            assert (grad.view(np.uint16) == same.view(np.uint16)).all()
    for grad, other in zip(first, cupyflash.attention_backward(*call, **options)):
        difference = abs(grad.astype(np.float32) - other.astype(np.float32)).max()
        assert difference <= 2.0**-6 * abs(grad.astype(np.float32)).max()


def test_against_the_reference_at_a_size_where_every_multiprocessor_works(
    family: str, poisoned_pool: Any
) -> None:
    """Batch 4, 16 heads, 2048: some heads are compared whole, all are checked for NaN."""
    case = Case("big", 2048, 2048, batch=4, heads_q=16, head_dim=128, causal=True)
    call, options = random_call(case)
    grads = cupyflash.attention_backward(*call, **options)
    assert all(np.isfinite(grad.astype(np.float32)).all() for grad in grads)
    for b, h in ((0, 0), (1, 7), (3, 15)):
        inputs = [x[b : b + 1, :, h : h + 1].get() for x in call[:4]]
        one = [grad[b : b + 1, :, h : h + 1].get() for grad in grads]
        comparison = reference.expect_backward(*inputs, right=0).compare(*one)
        assert comparison.ok, f"batch {b}, head {h}: {comparison.problem}"
