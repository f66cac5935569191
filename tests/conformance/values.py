"""Inputs of the conformance cases; what the PTX manual says of their outputs (TMA: boxes.py)."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

THREADS = 128

# -- inputs ----------------------------------------------------------------------------------------


def words(count: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: rng.integers(0, 2**32, count, dtype=np.uint32)


def small_integers(
    dtype: np.dtype, *shapes: tuple[int, ...]
) -> Callable[[np.random.Generator], NDArray]:
    """Integers from -3 to 3 as 16-bit floats."""
    count = sum(int(np.prod(shape)) for shape in shapes)
    return lambda rng: rng.integers(-3, 4, count).astype(dtype)


def vote_bits(rng: np.random.Generator) -> NDArray:
    return rng.integers(0, 64, THREADS, dtype=np.uint32) | np.uint32(128)


def floats_to_round(rng: np.random.Generator) -> NDArray:
    """Every kind of float32: random bits, ties and near ties of both 16-bit types, specials."""
    count = 64 * THREADS * 2
    values = rng.integers(0, 2**32, count, dtype=np.uint32)
    ordinary = rng.standard_normal(count // 4).astype(np.float32)
    tie_bf16 = (ordinary.view(np.uint32) & 0xFFFF0000) | 0x8000
    tie_f16 = (ordinary.view(np.uint32) & 0xFFFFE000) | 0x1000
    nudge = rng.integers(-1, 2, count // 4).astype(np.int64)
    values[: count // 4] = (tie_bf16.astype(np.int64) + nudge).astype(np.uint32)
    values[count // 4 : count // 2] = (tie_f16.astype(np.int64) + nudge).astype(np.uint32)
    special = np.array(
        [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            65504,
            65519.9,
            65520,
            6e-8,
            2.9e-8,
            3e38,
            3.4e38,
            1e-40,
        ],
        np.float32,
    )
    values[-len(special) :] = special.view(np.uint32)
    return values


def function_arguments(low: float, high: float) -> Callable[[np.random.Generator], NDArray]:
    def make(rng: np.random.Generator) -> NDArray:
        values = rng.uniform(low, high, THREADS).astype(np.float32)
        whole = np.arange(8, dtype=np.float32) + max(1, int(low))
        values[: len(whole)] = whole
        return values

    return make


# -- what the manual says --------------------------------------------------------------------------

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
CPP = {BF16: "cf::bf16_t", F16: "cf::f16_t"}
NAME = {BF16: "bf16", F16: "f16"}


def accumulator_words(d: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[64, N] as the threads hold and write it: word i of thread t at i * 128 + t."""
    columns = d.shape[1]
    warp, group, quad = np.meshgrid(range(4), range(8), range(4), indexing="ij")
    out = np.empty((columns // 2, THREADS), np.float32)
    for i in range(columns // 2):
        block, e = divmod(i, 4)
        row = 16 * warp + group + 8 * (e // 2)
        out[i] = d[row, 8 * block + 2 * quad + e % 2].ravel()
    return out.view(np.uint8).ravel()


def accumulators_before(columns: int) -> NDArray[np.float32]:
    """What ``start_accumulators`` puts into D, as a matrix [64, N]."""
    d = np.empty((64, columns), np.float32)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for i in range(columns // 2):
            block, e = divmod(i, 4)
            row = 16 * warp + lane // 4 + 8 * (e // 2)
            d[row, 8 * block + 2 * (lane % 4) + e % 2] = (thread + i) % 5
    return d


def product(
    dtype: np.dtype, n: int, k: int, b_is_kn: bool, keep: bool
) -> Callable[[NDArray], NDArray]:
    def expected(data: NDArray) -> NDArray:
        values = data.view(dtype).astype(np.float32)
        a = values[: 64 * k].reshape(64, k)
        b = values[64 * k :].reshape((k, n) if b_is_kn else (n, k))
        d = a @ (b if b_is_kn else b.T)
        return accumulator_words(d + accumulators_before(n) if keep else d)

    return expected


def twice(*loads: Callable[[NDArray], NDArray]) -> Callable[[NDArray], NDArray]:
    """Boxes one behind the other, in both CTAs of a cluster."""
    return lambda data: np.tile(np.concatenate([load(data) for load in loads]), 2)


def received(to_peer: int) -> Callable[[NDArray], NDArray]:
    """What ``store_async`` sees: [CTA, round, 2, thread] where the words go to, as they were sent
    to permuted places."""
    place = (np.arange(THREADS) * 37 + 11) % THREADS

    def expected(data: NDArray) -> NDArray:
        sent = data.view(np.uint32).reshape(2, 2, 2, THREADS)
        got = np.empty_like(sent)
        got[..., place] = sent[::-1] if to_peer else sent
        return got.view(np.uint8).ravel()

    return expected


def counted(before: NDArray[np.uint32], times: int, step: int) -> Callable[[NDArray], NDArray]:
    """Counters after ``atomic_add``, then what the additions to the first returned, in order."""
    count = 2 * THREADS * times

    def expected(data: NDArray) -> NDArray:
        out = before.copy()
        values = int(before[0].astype(np.int32)) + step * np.arange(count + 1)
        out[0], out[2:] = (values[i].astype(np.int32).view(np.uint32) for i in (-1, slice(-1)))
        out[1:2] += data.view(np.uint32).sum(dtype=np.uint32)  # an array: scalars warn of overflow
        return out.view(np.uint8)

    return expected
