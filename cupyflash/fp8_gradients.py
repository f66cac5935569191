"""Gradients of attention with 8-bit products: what the fp8 backward kernel computes, in NumPy.

Two errors must not be mixed up: that of the format (weights and their gradients rounded to e4m3 as
they enter a product) and that of the kernel (a wrong index, a lost tile). ``gradients`` repeats the
kernel's arithmetic with all its roundings to e4m3, so that what is left between the two is the
order of float32 sums; ``reference.attention_backward`` of the dequantized values says what the
format costs.

q, k, v and dout come as ``Quantized``, value = number * scale, with a scale for every block of
tokens. For a query m of a block with the scales q_m of q and o_m of dout, and a key n with k_n and
v_n, the numbers of the products are (``number`` is what the tensor holds, x8 means rounded to
e4m3):

    P  = exp2(number(K) number(Q) c k_n q_m - lse_m + log2(o_m) + t)      weight * o_m * 2^t
    dS = P (number(V) number(dO) v_n q_m 2^(u-t) - delta_m q_m / o_m 2^(u-t))
    dV = 2^-t sum_m P8 number(dO)        dK = 2^-u sum_m dS8 number(Q) * softmax_scale
    dQ = sum_n dS8 number(K) k_n / q_m 2^-u * softmax_scale

Note [Scales inside weights]
A sum over queries crosses blocks with different scales, and a tensor core cannot multiply single
terms. The scales of dout and q are therefore made part of the left factors before these are
rounded: of P by an addend of the exponent, of dS by two constants that are there anyway.
Accumulators then have one unit whatever the scales are, and no block needs one of its own.

Note [Exponents of weights]
e4m3 holds 2^-9 to 448, from 2^-6 on with three bits of fraction, and P spans the size of the
sequence: its mean is 1 / seqlen. So P and dS carry factors 2^t and 2^u that bring the largest of a
block into [``LOW``, ``HIGH``]. Both are powers of two, so a change of factor multiplies what has
been added up without rounding; and they change only when the largest of the block at hand leaves
that range, then so that it lies in [2^TARGET, 2^(TARGET + 1)). Every block is looked at before it
is rounded: nothing is guessed from a former block, nothing saturates. t is a matter of 16 keys, the
rows of a warp, as no other warp's dV depends on it; u of all 128 keys, because dQ is a sum over
them.

References: Micikevicius et al. 2022, arXiv 2209.05433 (formats); Shah et al. 2024, arXiv
2407.08608, section 3.3 (blocks of scales in attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupyflash.fp8 import Quantized, kind_of, round_e4m3, widen_e4m3

KEYS = 128
"""Keys that share u: those of a CTA."""
WARP_KEYS = 16
"""Keys that share t: those of a warp."""
HIGH = 448.0
LOW = 8.0
TARGET = 6
LEAST_EXPONENT, MOST_EXPONENT = -32, 94
"""Of t and u: every product of two such factors, or of one and a weight, is a normal float32."""

_LOG2_E = np.float32(math.log2(math.e))
_FLOAT = np.float32


@dataclass(frozen=True, eq=False)
class Fp8Gradients:
    """Gradients and how their factors were chosen.

    Attributes:
        dq, dk, dv: float32, shaped as q, k and v.
        top_weight, top_gradient: the largest weight * o_m and |gradient of a score| * q_m.
        changes: blocks in which t (of any warp) and u changed.
        steps: blocks.
    """

    dq: NDArray[np.float32]
    dk: NDArray[np.float32]
    dv: NDArray[np.float32]
    top_weight: float
    top_gradient: float
    changes: tuple[int, int]
    steps: int


def gradients(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    dout: Quantized,
    lse: NDArray[np.float32],
    delta: NDArray[np.float32],
    *,
    block_m: int,
    left: int | None = None,
    right: int | None = None,
    softmax_scale: float | None = None,
    low: float = LOW,
    fixed: tuple[int, int] | None = None,
) -> Fp8Gradients:
    """The gradients as the kernel computes them.

    Args:
        q, k, v, dout: NumPy tensors of [batch, seqlen, heads, head_dim], v with ``data_t``; scales
            per tensor, head or block of at least ``block_m`` queries, 128 keys, 64 values.
        lse: [batch, heads_q, seqlen_q], natural logarithm; -inf: the query has no weights.
        delta: [batch, heads_q, seqlen_q], rowsum(dout * out).
        block_m: queries of a step.
        left, right: key j is visible to query i iff left <= j - i <= right; None: unbounded.
        softmax_scale: as ``attention`` takes it.
        low: below this largest number of a block its factor grows (the kernel has ``LOW``).
        fixed: t and u where they are not to change at all, for comparison.

    Returns:
        Gradients, float32.
    """
    tensors = _Tensors(q, k, v, dout, lse, delta, block_m, left, right, softmax_scale)
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_kv, heads_kv = k.shape[1:3]
    dq = np.zeros(q.shape, _FLOAT)
    dk, dv = np.zeros(k.shape, _FLOAT), np.zeros(v.shape, _FLOAT)
    blocks = []
    for b, head_kv, n_block in np.ndindex(batch, heads_kv, -(-seqlen_kv // KEYS)):
        keys = slice(n_block * KEYS, min((n_block + 1) * KEYS, seqlen_kv))
        block = _KeyBlock(tensors, b, head_kv, keys, low, fixed)
        group = heads_q // heads_kv
        for head, m_block in np.ndindex(group, -(-seqlen_q // block_m)):
            rows = slice(m_block * block_m, min((m_block + 1) * block_m, seqlen_q))
            block.step(head_kv * group + head, rows, dq)
        dk[b, keys, head_kv], dv[b, keys, head_kv] = block.results()
        blocks.append(block)
    return Fp8Gradients(
        dq=dq * tensors.softmax_scale,
        dk=dk,
        dv=dv,
        top_weight=max((block.top_weight for block in blocks), default=0.0),
        top_gradient=max((block.top_gradient for block in blocks), default=0.0),
        changes=(
            sum(block.t_changes for block in blocks),
            sum(block.u_changes for block in blocks),
        ),
        steps=sum(block.steps for block in blocks),
    )


class _Tensors:
    """The inputs, widened."""

    def __init__(
        self,
        q: Quantized,
        k: Quantized,
        v: Quantized,
        dout: Quantized,
        lse: NDArray[np.float32],
        delta: NDArray[np.float32],
        block_m: int,
        left: int | None,
        right: int | None,
        softmax_scale: float | None,
    ) -> None:
        self.given = {"q": q, "k": k, "v": v, "dout": dout}
        self.numbers = {name: _numbers(tensor) for name, tensor in self.given.items()}
        self.lse, self.delta, self.block_m = lse, delta, block_m
        self.left, self.right = left, right
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_scale = _FLOAT(scale)
        self.softmax_scale_log2 = _FLOAT(scale * math.log2(math.e))

    def scale(self, name: str, batch: int, head: int, token: int) -> np.float32:
        """The scale of a token."""
        tensor = self.given[name]
        kind, slot = kind_of(tensor.block, tensor.role)
        if kind == "tensor":
            return _FLOAT(tensor.scale)
        return tensor.scale[(batch, head) if kind == "head" else (batch, head, token // slot)]

    def visible(self, rows: slice, keys: slice) -> NDArray[np.bool_]:
        """[keys, rows]."""
        distance = np.arange(keys.start, keys.stop)[:, None] - np.arange(rows.start, rows.stop)
        result = np.ones(distance.shape, bool)
        if self.left is not None:
            result &= distance >= self.left
        if self.right is not None:
            result &= distance <= self.right
        return result


class _KeyBlock:
    """dk and dv of a block of keys of one head, and their exponents, from step to step."""

    def __init__(
        self,
        tensors: _Tensors,
        batch: int,
        head: int,
        keys: slice,
        low: float,
        fixed: tuple[int, int] | None,
    ) -> None:
        self.tensors, self.batch, self.span = tensors, batch, keys
        self.low, self.adapts = low, fixed is None
        count = keys.stop - keys.start
        t, self.u = (0, 0) if fixed is None else fixed
        self.t = np.full(count, t)  # of each key, alike in a warp
        self.keys = tensors.numbers["k"][batch, keys, head]
        self.values = tensors.numbers["v"][batch, keys, head]
        self.k_scale = tensors.scale("k", batch, head, keys.start)
        self.v_scale = np.array(
            [tensors.scale("v", batch, head, key) for key in range(keys.start, keys.stop)]
        )
        self.dk = np.zeros(self.keys.shape, _FLOAT)
        self.dv = np.zeros(self.values.shape, _FLOAT)
        self.top_weight = self.top_gradient = 0.0
        self.t_changes = self.u_changes = self.steps = 0

    def step(self, head: int, rows: slice, dq: NDArray[np.float32]) -> None:
        """Adds a block of queries to dk, dv and dq."""
        tensors, at = self.tensors, (self.batch, rows, head)
        visible = tensors.visible(rows, self.span)
        if not visible.any():
            return
        q_scale = tensors.scale("q", self.batch, head, rows.start)
        dout_scale = tensors.scale("dout", self.batch, head, rows.start)
        queries, grads = tensors.numbers["q"][at], tensors.numbers["dout"][at]
        lse, delta = (x[self.batch, head, rows] for x in (tensors.lse, tensors.delta))
        empty = lse == -np.inf
        lse = np.where(empty, _FLOAT(np.inf), lse * _LOG2_E) - np.log2(dout_scale)
        delta = np.where(empty, _FLOAT(0), delta * (q_scale / dout_scale))

        # A fused multiply-add rounds once: float64 holds the product of two float32 exactly.
        slope = (tensors.softmax_scale_log2 * self.k_scale) * q_scale
        addend = self.t.astype(_FLOAT)[:, None] - lse
        scores = (self.keys @ queries.T).astype(np.float64)
        with np.errstate(over="ignore"):
            weights = np.exp2((scores * slope + addend).astype(_FLOAT))
        weights = self._fit_weights(np.where(visible, weights, _FLOAT(0)))

        ahead = (self.u - self.t)[:, None]
        slopes = np.ldexp((self.v_scale * q_scale)[:, None], ahead)
        products = (self.values @ grads.T).astype(np.float64)
        ds = weights * (products * slopes - np.ldexp(delta, ahead)).astype(_FLOAT)
        ds = self._fit_gradients(np.where(visible, ds, _FLOAT(0)))

        rounded, rounded_ds = widen_e4m3(round_e4m3(weights)), widen_e4m3(round_e4m3(ds))
        self.dv += rounded @ grads
        self.dk += rounded_ds @ queries
        back = np.ldexp(self.k_scale * (_FLOAT(1) / q_scale), -self.u)
        dq[at] += (rounded_ds.T @ self.keys) * back
        self.steps += 1

    def _fit_weights(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        top_of_keys = weights.max(1)
        top = np.ldexp(top_of_keys, -self.t).max()
        self.top_weight = max(self.top_weight, float(top))
        growth = np.zeros(len(weights), np.int64)
        for first in range(0, len(weights) if self.adapts else 0, WARP_KEYS):
            warp = slice(first, first + WARP_KEYS)
            growth[warp] = growth_of(top_of_keys[warp].max(), self.t[first], self.low)
        if not growth.any():
            return weights
        self.t_changes += 1
        self.t = self.t + growth
        self.dv = np.ldexp(self.dv, growth[:, None])
        return np.ldexp(weights, growth[:, None])

    def _fit_gradients(self, ds: NDArray[np.float32]) -> NDArray[np.float32]:
        top = np.abs(ds).max()
        self.top_gradient = max(self.top_gradient, float(np.ldexp(top, -self.u)))
        growth = growth_of(top, self.u, self.low) if self.adapts else 0
        if growth == 0:
            return ds
        self.u_changes += 1
        self.u += growth
        self.dk = np.ldexp(self.dk, growth)
        return np.ldexp(ds, growth)

    def results(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """dk and dv."""
        dk = np.ldexp(self.dk, -self.u) * self.tensors.softmax_scale
        return dk, np.ldexp(self.dv, -self.t[:, None])


def growth_of(top: np.float32, exponent: int, low: float = LOW) -> int:
    """What is added to an exponent under which the largest magnitude of a block is ``top``."""
    if top == 0 or low <= top <= HIGH:
        return 0
    wanted = TARGET - (int(_FLOAT(top).view(np.uint32)) >> 23) + 127 + exponent
    return min(max(wanted, LEAST_EXPONENT), MOST_EXPONENT) - exponent


def _numbers(tensor: Quantized) -> NDArray[np.float32]:
    """[batch, seqlen, heads, head_dim], without scales."""
    data = tensor.data_t if tensor.role == "v" else tensor.data
    return widen_e4m3(data)[..., : tensor.shape[-1]]
