"""Public bug reports about gradients, as small inputs whose right answer is known: the backward's
part of ``test_cases_public.py``, with the same labels (``public_reports.md``)."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyflash
from cupyflash import reference
from tests.cases import Case
from tests.paths import CUPY, NUMPY, EmulatedPath, Path, every_path, numpy_and_gpu
from tests.test_cases_public import constant_rows, random, zeros


def gradients(
    path: Path,
    dout: Any,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    dlse: NDArray | None = None,
    **options: Any,
) -> list[NDArray]:
    """dq, dk and dv as float64 NumPy arrays; ``dout`` may lie on the path already."""
    inputs = [path.array(x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*inputs, return_lse=True, **options)
    given = path.array(dout) if isinstance(dout, np.ndarray) else dout
    if dlse is not None:
        options["dlse"] = path.array(dlse)
    grads = cupyflash.attention_backward(given, *inputs, out, lse, **options)
    return [path.numpy(grad).astype(np.float64) for grad in grads]


# -- masks -----------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize(
    ("seqlen", "options", "expected"),
    [
        (3, {"causal": True}, [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3]),
        (3, {}, [1, 1, 1]),
        (4, {"causal": True, "window": (1, 0)}, [1.5, 1, 1, 0.5]),
    ],
    ids=["causal", "none", "window"],
)
def test_the_backward_has_the_forward_s_mask(
    path: Path, seqlen: int, options: dict[str, Any], expected: list[float]
) -> None:
    """B49: all scores alike, so each query spreads its gradient over the keys that it sees."""
    dout = constant_rows([1] * seqlen)
    dq, dk, dv = gradients(path, dout, zeros(seqlen), zeros(seqlen), random(1, seqlen, 1, 64),
                           **options)  # fmt: skip
    np.testing.assert_allclose(dv[0, :, 0], np.tile(np.c_[expected], 64), rtol=1e-2)
    assert not dk.any(), "q is 0"
    assert not dq.any(), "k is 0"


# -- layout ----------------------------------------------------------------------------------------


@numpy_and_gpu
def test_the_gradient_of_a_plain_sum(path: Path) -> None:
    """B14: dout is one number, broadcast with stride 0 everywhere."""
    v = constant_rows(range(4), heads=2, dtype=np.float16)
    one = path.array(np.ones((1, 1, 1, 1), np.float16))
    dout = np.broadcast_to(one, v.shape) if path is NUMPY else _broadcast(one, v.shape)
    like = zeros(4, heads=2, dtype=np.float16)
    dq, dk, dv = gradients(path, dout, like, like, v)
    assert (dv == 1).all() and not dq.any() and not dk.any()


def _broadcast(one: Any, shape: tuple[int, ...]) -> Any:
    import cupy

    return cupy.broadcast_to(one, shape)


@numpy_and_gpu
def test_a_gradient_inside_of_a_wider_buffer(path: Path) -> None:
    """B14: dout is a slice of rows of heads * head_dim + 17 elements, not even 16-byte aligned."""
    seqlen, heads, head_dim = 40, 2, 64
    q, k, v = (random(1, seqlen, heads, head_dim, dtype=np.float16, seed=i) for i in range(3))
    wide = np.full((seqlen, heads * head_dim + 17), np.nan, np.float16)
    dout = random(1, seqlen, heads, head_dim, dtype=np.float16, seed=3)
    wide[:, 17:] = dout.reshape(seqlen, -1)
    slice_of_wide = path.array(wide)[:, 17:].reshape(1, seqlen, heads, head_dim)
    if path is not NUMPY:
        assert not slice_of_wide.flags.c_contiguous, "a view"
    options = {"deterministic": True}
    for grad, same in zip(
        gradients_of_view(path, slice_of_wide, q, k, v, **options),
        gradients_of_view(path, path.array(dout), q, k, v, **options),
    ):
        np.testing.assert_array_equal(grad, same)


def gradients_of_view(
    path: Path, dout: Any, q: NDArray, k: NDArray, v: NDArray, **options: Any
) -> list[NDArray]:
    inputs = [path.array(x) for x in (q, k, v)]
    out, lse = cupyflash.attention(*inputs, return_lse=True)
    grads = cupyflash.attention_backward(dout, *inputs, out, lse, **options)
    return [path.numpy(grad).astype(np.float64) for grad in grads]


# -- lse -------------------------------------------------------------------------------------------


@every_path
def test_a_loss_of_the_lse_alone(path: Path) -> None:
    """B28: with q = 0, dq is the scale times the mean of the keys; dk and dv are 0."""
    k, v = random(1, 3, 1, 64), random(1, 3, 1, 64, seed=1)
    dq, dk, dv = gradients(
        path, zeros(2), zeros(2), k, v, dlse=np.ones((1, 1, 2), np.float32)
    )  # fmt: skip
    mean = k.astype(np.float64).mean(axis=1, keepdims=True) / math.sqrt(64)
    np.testing.assert_allclose(dq, np.broadcast_to(mean, dq.shape), atol=2e-3)
    assert not dk.any() and not dv.any()


# -- packed sequences ------------------------------------------------------------------------------


@every_path
def test_rows_behind_the_last_sequence(path: Path) -> None:
    """B32: rows of no sequence hold NaN; their gradients are 0, and no other one knows of them."""
    total, cu = 160, np.array([0, 50, 131], np.int32)
    arrays = [random(total, 2, 64, seed=i) for i in range(4)]
    options = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    grads = packed_gradients(path, arrays, options)
    for x in arrays:
        x[131:] = np.nan
    for grad, same in zip(packed_gradients(path, arrays, options), grads):
        assert not grad[131:].any()
        np.testing.assert_array_equal(grad[:131], same[:131])


def packed_gradients(path: Path, arrays: list[NDArray], options: dict[str, Any]) -> list[NDArray]:
    dout, *inputs = (path.array(x) for x in arrays)
    options = {
        name: path.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    out, lse = cupyflash.attention(*inputs, return_lse=True, **options)
    grads = cupyflash.attention_backward(dout, *inputs, out, lse, deterministic=True, **options)
    return [path.numpy(grad).astype(np.float64) for grad in grads]


# -- shapes and data -------------------------------------------------------------------------------

_SMALL = [EmulatedPath(target) for target in ("sm_80", "sm_90a", "sm_100f")]


@pytest.mark.parametrize(
    ("path", "seqlen", "heads"),
    [
        (NUMPY, 384, 4),
        *(pytest.param(path, 140, 4, marks=pytest.mark.emulated) for path in _SMALL),
        pytest.param(CUPY, 384, 16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("data", ["normal", "structured", "dominant"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_every_item_of_a_batch_has_its_own_gradients(
    path: Path, seqlen: int, heads: int, data: str, head_dim: int
) -> None:
    """B50: head_dim 256, batch 2 or more, data that is not normal: cosine above 0.999, relative
    error below 2 %, and the batch is its items. Structured data has scores in the hundreds of
    thousands, of which float32 itself loses percents, as lse and as s: there the bound is that of
    the case, which counts this in, for the out and lse that it is made for."""
    if isinstance(path, EmulatedPath) and (data == "dominant" or head_dim in (64, 192)):
        pytest.skip("as the others: test_backward_emulated.py has these widths")
    case = Case(
        "batch_items", seqlen, seqlen, batch=2, heads_q=heads, heads_kv=2, head_dim=head_dim,
        causal=True, data=data,
    )  # fmt: skip
    arrays = [case.gradients[0].bshd, *(x.bshd for x in case.inputs)]
    if data == "structured":
        arrays += [case.forward_results[0].bshd, case.forward_results[1]]
    both = gradients_of(path, arrays, causal=True)
    exact = reference.attention_backward(*arrays[:4], **case.bounds)
    if data == "structured":
        comparison = reference.expect_backward(*arrays[:4], **case.bounds).compare(*both)
        assert comparison.ok, comparison.problem
    for b in range(2):
        alone = gradients_of(path, [x[b : b + 1] for x in arrays], causal=True)
        for grad, same, right in zip(both, alone, exact):
            grad, right = grad[b].ravel(), right[b].ravel()
            norm = np.linalg.norm(right)
            assert np.linalg.norm(grad - same.ravel()) < 0.005 * norm  # sums in another order
            if data != "structured":
                assert grad @ right / np.linalg.norm(grad) / norm > 0.999
                assert np.linalg.norm(grad - right) < 0.02 * norm


def gradients_of(path: Path, arrays: list[NDArray], **options: Any) -> list[NDArray]:
    """dq, dk and dv of dout, q, k, v and, unless they are made here, out and lse."""
    on_path = [path.array(np.ascontiguousarray(x)) for x in arrays]
    if len(on_path) == 4:
        on_path += cupyflash.attention(*on_path[1:], return_lse=True, **options)
    grads = cupyflash.attention_backward(*on_path, **options)
    return [path.numpy(grad).astype(np.float64) for grad in grads]


# -- on a GPU: size, and memory that others have used ----------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("wide", ["dout", "q", "k", "v", "out"])
def test_rows_beyond_2_to_the_31_elements(wide: str, poisoned_pool: Any) -> None:
    """B11: a row stride of 2**20 elements, so that the last sequence starts at element 2**31."""
    cupy = poisoned_pool
    heads, head_dim, total = 4, 64, 2112
    cu = cupy.asarray([0, 1024, 2048, total], cupy.int32)
    rng = np.random.default_rng(0)
    shape = (total, heads, head_dim)
    arrays = {
        name: cupy.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))
        for name in ("dout", "q", "k", "v")
    }
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "causal": True}
    inputs = [arrays[name] for name in ("q", "k", "v")]
    arrays["out"], lse = cupyflash.attention(*inputs, return_lse=True, **options)
    names = ("dout", "q", "k", "v", "out")
    expected = cupyflash.attention_backward(
        *(arrays[name] for name in names), lse, deterministic=True, **options
    )
    buffer = cupy.zeros((total, 1 << 20), arrays["q"].dtype)
    view = buffer[:, : heads * head_dim].reshape(shape)
    assert view.strides[0] == 1 << 21
    view[...] = arrays[wide]
    arrays[wide] = view
    grads = cupyflash.attention_backward(
        *(arrays[name] for name in names), lse, deterministic=True, **options
    )
    for grad, same in zip(grads, expected):
        assert (grad.view(np.uint16) == same.view(np.uint16)).all()


@pytest.mark.gpu
def test_used_memory_does_not_matter(family: str, poisoned_pool: Any) -> None:
    """B52: counters and sums of the workspace are set, whatever its memory held; shapes mixed."""
    cupy = poisoned_pool
    calls = []
    for seqlen, heads, head_dim in ((300, 8, 64), (1000, 4, 128), (77, 2, 256)):
        q = cupy.asarray(random(2, seqlen, heads, head_dim))
        k = cupy.asarray(random(2, seqlen, 2, head_dim, seed=1))
        out, lse = cupyflash.attention(q, k, k, causal=True, return_lse=True)
        calls.append((q, q, k, k, out, lse))
    first = [cupyflash.attention_backward(*call, causal=True, deterministic=True) for call in calls]
    for _ in range(3):
        garbage = cupy.full(1 << 28, 0xFF, cupy.uint8)
        del garbage
        for call, expected in zip(calls, first):
            grads = cupyflash.attention_backward(*call, causal=True, deterministic=True)
            for grad, same in zip(grads, expected):
                assert (grad.view(np.uint16) == same.view(np.uint16)).all()
