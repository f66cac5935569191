"""Whether a result is right, before its time counts.

Some rows of some heads of some sequences are held against the float64 definition in
:mod:`cupyflash.reference`: the first and the last of each, where masks and tails go wrong, and
others at random, the same for every implementation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from cupyflash import reference
from cupyflash.bench.cases import Case

TOLERANCE = {"bf16": 5 * 2.0**-8, "f16": 5 * 2.0**-11, "f32": 1e-5}
"""Largest relative error of a row: 5 roundings of a 16-bit input. For float32 inputs the order of
the additions decides; the CPU path's are off by about 1e-6."""

RANDOM_PLACES = 2
RANDOM_ROWS = 14


class WrongResultError(Exception):
    """An implementation's result is not the attention of its inputs."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of one case, in the array type of the machine that runs it.

    Attributes:
        q, k, v: [batch, seqlen, heads, head_dim], or [total, heads, head_dim] packed.
        cu_seqlens: int32 [batch + 1], where each packed sequence starts; None for a dense batch.
    """

    q: Any
    k: Any
    v: Any
    cu_seqlens: Any = None


def check_out(case: Case, inputs: Inputs, out: Any) -> float:
    """Holds an output against the definition.

    Args:
        case: what was computed.
        inputs: from what.
        out: shaped as q, with head_dim_v; a NumPy array or a torch tensor.

    Returns:
        The largest |out - expected| / |expected| of the rows looked at, norms over head_dim.

    Raises:
        WrongResultError: it is above ``TOLERANCE``, or not a number, or out's shape is wrong.
    """
    shape = (*inputs.q.shape[:-1], case.head_dim_v)
    if tuple(out.shape) != shape:
        raise WrongResultError(f"out: shape {list(out.shape)}, expected {list(shape)}")
    worst = 0.0
    for sequence, head in _places(case):
        rows, expected = _expected_rows(case, inputs, sequence, head)
        got = to_numpy(_sequence(case, inputs, out, sequence)[rows, head])
        scale = numpy.maximum(numpy.linalg.norm(expected, axis=-1), 1e-6)
        error = float((numpy.linalg.norm(got - expected, axis=-1) / scale).max())
        if not error <= TOLERANCE[case.dtype]:
            raise WrongResultError(
                f"relative error {error:.3g} of a row of sequence {sequence}, head {head}; "
                f"at most {TOLERANCE[case.dtype]:.3g} is right"
            )
        worst = max(worst, error)
    return worst


def to_numpy(x: Any) -> NDArray:
    """Any array, as float32 or float64 on the host."""
    if isinstance(x, numpy.ndarray):
        return x
    return x.detach().float().cpu().numpy()


def _places(case: Case) -> list[tuple[int, int]]:
    """(sequence, query head): the first, the last and some others."""
    draw = random.Random(1)
    drawn = {
        (draw.randrange(case.batch), draw.randrange(case.heads_q)) for _ in range(RANDOM_PLACES)
    }
    return sorted({(0, 0), (case.batch - 1, case.heads_q - 1), *drawn})


def _expected_rows(
    case: Case, inputs: Inputs, sequence: int, head: int
) -> tuple[list[int], NDArray]:
    """Rows of one head of one sequence, and their outputs [rows, head_dim_v]."""
    head_kv = head // (case.heads_q // case.heads_kv)
    q, k, v = (_sequence(case, inputs, x, sequence) for x in (inputs.q, inputs.k, inputs.v))
    draw = random.Random(1000 * sequence + head)
    drawn = {draw.randrange(len(q)) for _ in range(RANDOM_ROWS)}
    rows = sorted({0, len(q) - 1, *drawn})
    out, _ = reference.attention(
        *(to_numpy(x)[None, :, None] for x in (q[rows, head], k[:, head_kv], v[:, head_kv])),
        left=case.window,
        right=0 if case.causal else None,
        shift=len(k) - len(q),
        rows=numpy.array(rows),
    )
    return rows, out[0, :, 0]


def _sequence(case: Case, inputs: Inputs, x: Any, sequence: int) -> Any:
    """[seqlen, heads, head_dim] of one sequence of an input or an output."""
    if not case.lengths:
        return x[sequence]
    begin, end = list(offsets(case))[sequence : sequence + 2]
    return x[begin:end]


def offsets(case: Case) -> Iterator[int]:
    """Where each packed sequence starts, and the last one ends."""
    return itertools.accumulate(case.lengths, initial=0)
