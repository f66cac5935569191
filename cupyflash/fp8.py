"""Scaled 8-bit floats: what ``quantize`` computes, defined to the bit, for NumPy arrays.

A tensor becomes numbers of four exponent and three fraction bits (e4m3) and one float32 scale for
every block of it, value = data * scale. All arithmetic is float32, rounded to nearest even, in an
order that is fixed here; the CUDA kernel (``kernels_cu/any/quantize.cuh``) makes the same bits.

For every block, with the largest magnitude ``amax`` of its finite values:

    scale = 1                                    if amax = 0
    scale = max(amax / 448, 2^-126)              otherwise: 448 is the largest number of e4m3
    data  = e4m3(value * (1 / scale))            the quotient is rounded, then the product

``e4m3`` rounds to nearest even and saturates: an infinity, and what exceeds 448, becomes 448. A NaN
stays NaN (0x7f). Neither counts for amax: one bad value does not take the bits of its neighbours.

Note [The order of transposed tokens]
The second product of attention multiplies probabilities, which a warpgroup holds in registers as
the accumulators of its first product, with V. For an m64nNk8 fragment pair of accumulators, thread
t, with q = t % 4, holds of each row the columns 2q, 2q + 1 of every eight; of sixteen columns that
is 2q, 2q + 1, 8 + 2q, 9 + 2q (PTX ISA, wgmma.m64nNk* accumulators D). As the A operand of a product
of 8-bit numbers it must hold the columns 4q to 4q + 3 of every sixteen (matrix A of m64nNk32, which
has them from k = 0 and from k = 16). If it packs what it has in the order in which it has it, then
what stands in place 4q + e of A is key 2q + e for e < 2, and 8 + 2q + e - 2 for the others: keys

    0 1 8 9  2 3 10 11  4 5 12 13  6 7 14 15.

A sum over keys may be taken in any order that both operands agree on, so the other operand, V
transposed, has its keys in this order, and nothing is shuffled (``MMA_ORDER``). The same holds for
dout and Q, transposed, of the gradients dV = P^T dO and dK = dS^T Q, whose sums are over queries.

The sum of dQ = dS K is over keys, while dS^T is what the accumulators hold. A thread has rows n and
n + 8 of each sixteen in the same column; both as one 16-bit element, written by stmatrix with
.trans, put keys 0 8 1 9 ... 7 15 next to each other in a row of dS. So the transposed copy of K has
them in that order (``ROW_PAIR_ORDER``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash.errors import UnsupportedError

ROLES = ("q", "k", "v", "dout")
MAX_E4M3 = 448.0
MIN_SCALE = 2.0**-126
WIDTH_STEP = 16
"""Columns of ``data`` are a multiple of this: TMA wants rows of whole 16 bytes."""
MMA_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
ROW_PAIR_ORDER = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
DEFAULT_SLOT = 128

Block = tuple[int | None, int | None] | None


# --- numbers --------------------------------------------------------------------------------------


def round_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bits of the nearest e4m3 number, ties to even; saturating; 0x7f for NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    sign = (bits >> 24 & 0x80).astype(np.uint8)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    clipped = np.minimum(magnitude, np.float32(MAX_E4M3).view(np.uint32))
    # Below 2^-6 numbers are multiples of 2^-9, and so are float32 numbers from 2^14 on.
    anchor = np.float32(2.0**14)
    small = (clipped.view(np.float32) + anchor).view(np.uint32) - anchor.view(np.uint32)
    rounded = clipped + (0x7FFFF + (clipped >> 20 & 1))  # 20 of the 23 fraction bits go
    large = (rounded >> 20) - ((127 - 7) << 3)
    is_small = clipped < np.float32(2.0**-6).view(np.uint32)
    result = np.where(is_small, small, large).astype(np.uint8) | sign
    return np.where(is_nan, np.uint8(0x7F), result)


def widen_e4m3(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of e4m3 numbers, exactly."""
    return _VALUES[np.asarray(bits, np.uint8)]


def _all_values() -> NDArray[np.float32]:
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    normal = np.ldexp(1.0 + fraction / 8, exponent - 7)
    value = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


_VALUES = _all_values()


def scale_of(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scale of blocks whose largest finite magnitude is ``amax``."""
    amax = np.asarray(amax, np.float32)
    scale = np.maximum(amax / np.float32(MAX_E4M3), np.float32(MIN_SCALE))
    return np.where(amax == 0, np.float32(1), scale)


# --- rotation -------------------------------------------------------------------------------------

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


@functools.lru_cache(maxsize=64)
def negated_channels(seed: int, head_dim: int) -> int:
    """Which channels a rotation negates: bit c is set for channel c.

    It is the top bit of output c of the generator SplitMix64 with this seed, a function of seed and
    c (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014).
    """
    mask = 0
    for channel in range(head_dim):
        z = seed + (channel + 1) * _GAMMA & _MASK
        z = (z ^ z >> 30) * _FIRST & _MASK
        z = (z ^ z >> 27) * _SECOND & _MASK
        mask |= (z ^ z >> 31) >> 63 << channel
    return mask


def hadamard_width(head_dim: int) -> int:
    """Channels that a rotation mixes: the largest power of two that divides head_dim.

    A rotation is a Hadamard matrix of this size for every so many channels. It is orthogonal for
    any head_dim without adding a channel: 128 mixes all of 128, 96 and 192 groups of 32 and 64.
    """
    return head_dim & -head_dim


def hadamard_factor(head_dim: int) -> np.float32:
    """What a Hadamard matrix of ones and minus ones is multiplied by, to be orthogonal."""
    return np.float32(hadamard_width(head_dim) ** -0.5)


def rotate(values: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Random signs, then a Hadamard matrix, on the last dimension.

    The matrix is multiplied as a butterfly: neighbours first, then at distance 2, 4, ..., where the
    lower of two becomes their sum and the upper lower minus upper; then times ``hadamard_factor``.
    """
    return _hadamard(_with_signs(values, seed))


def rotate_back(values: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """The inverse of ``rotate`` up to rounding: the matrix is symmetric and orthogonal."""
    return _with_signs(_hadamard(np.asarray(values, np.float32)), seed)


def _with_signs(values: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    head_dim = values.shape[-1]
    mask = negated_channels(seed, head_dim)
    flips = [0x80000000 * (mask >> channel & 1) for channel in range(head_dim)]
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits ^ np.array(flips, np.uint32)).view(np.float32)


def _hadamard(values: NDArray[np.float32]) -> NDArray[np.float32]:
    head_dim = values.shape[-1]
    distance = 1
    with np.errstate(invalid="ignore", over="ignore"):
        while distance < hadamard_width(head_dim):
            pairs = values.reshape(*values.shape[:-1], -1, 2, distance)
            lower, upper = pairs[..., 0, :], pairs[..., 1, :]
            values = np.stack([lower + upper, lower - upper], -2).reshape(values.shape)
            distance *= 2
        return values * hadamard_factor(head_dim)


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor as scaled 8-bit floats: value = data * scale, block by block.

    Arrays are of the library and on the device of the tensor that was quantized. ``width`` below is
    head_dim rounded up to a multiple of 16; what is added is zero. For tokens in slots see
    ``num_slots``.

    Attributes:
        data: uint8, the bits of the numbers (no 8-bit float is common to all libraries; a view as
            ``torch.float8_e4m3fn`` or ``ml_dtypes.float8_e4m3fn`` is one). For the roles "q", "k"
            and "dout" [batch, seqlen, heads, width], packed [total, heads, width]. For "v"
            transposed, [batch, heads, width, slot tokens], packed [heads, width, slot tokens]; of
            each sixteen tokens in the order of ``MMA_ORDER``.
        scale: float32: [] per tensor, [batch, heads] per head, packed too. Per token block and per
            token [batch, heads, blocks]; packed [heads, total // tokens + batch], where block i of
            sequence b is at cu_seqlens[b] // tokens + b + i, and 1 where there is none.
        fmt: "e4m3".
        block: what shares a scale, as ``quantize`` takes it.
        role: "q", "k", "v" or "dout".
        shape: of the tensor, [batch, seqlen, heads, head_dim] or [total, heads, head_dim].
        hadamard_seed: of the rotation applied to the tensor before, or None.
        data_t: where gradients are wanted, the same numbers the other way round: transposed as "v"
            is, for "k" in ``ROW_PAIR_ORDER``; for "v" not transposed. Otherwise None.
    """

    data: Any
    scale: Any
    fmt: str
    block: Block
    role: str
    shape: tuple[int, ...]
    hadamard_seed: int | None = None
    data_t: Any = None

    def dequantize(self, cu_seqlens: Any = None, *, rotated: bool = False) -> NDArray[np.float32]:
        """data * scale as float32, in ``shape``; for NumPy arrays.

        Args:
            cu_seqlens: of packed sequences; rows behind the last are 0.
            rotated: whether a rotated tensor is left so, as a kernel sees it.

        Raises:
            TypeError: data and scale are not NumPy arrays.
            ValueError: ``cu_seqlens`` is missing, superfluous or none.
        """
        for name, array in (("data", self.data), ("scale", self.scale)):
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"dequantize: {name}: expected a NumPy array, got {type(array).__qualname__}; "
                    "put copies on the CPU in place of data and scale (dataclasses.replace)"
                )
        return _dequantize(self, cu_seqlens, rotated)


@dataclass(frozen=True)
class Arrangement:
    """Where things lie in a quantized tensor.

    Attributes:
        kind: what shares a scale: "tensor", "head" (of one sequence), "block" of tokens, "token".
        slot: tokens of a slot: those of a block, or 128.
        packed: whether sequences are packed; ``shape`` then is that of a batch of one.
        shape: [batch, seqlen, heads, head_dim] of the tensor.
        num_sequences: sequences.
    """

    kind: str
    slot: int
    packed: bool
    shape: tuple[int, int, int, int]
    num_sequences: int

    @property
    def width(self) -> int:
        """Columns of data: head_dim, rounded up."""
        return -(-self.shape[3] // WIDTH_STEP) * WIDTH_STEP

    @property
    def num_slots(self) -> int:
        """Slots along the tokens of one batch entry, or of all packed sequences.

        A slot holds tokens of one sequence; what is left of it is zero. Dense sequences have their
        own dimension. Packed sequence b has the slots from cu_seqlens[b] // slot + b on: enough,
        known on the device without a sum over sequences, and at a multiple of 16 bytes for TMA.
        """
        total = self.shape[1]
        if self.packed:
            return total // self.slot + self.num_sequences
        return -(-total // self.slot)

    @property
    def natural_shape(self) -> tuple[int, ...]:
        batch, seqlen, heads, _ = self.shape
        return self._of_batch(batch) + (seqlen, heads, self.width)

    @property
    def transposed_shape(self) -> tuple[int, ...]:
        batch, _, heads, _ = self.shape
        return self._of_batch(batch) + (heads, self.width, self.num_slots * self.slot)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        batch, seqlen, heads, _ = self.shape
        if self.kind == "tensor":
            return ()
        if self.kind == "head":
            return (self.num_sequences, heads)
        if self.kind == "block":
            return (*self._of_batch(batch), heads, self.num_slots)
        return (*self._of_batch(batch), heads, seqlen + self.num_sequences * self.packed)

    def _of_batch(self, batch: int) -> tuple[int, ...]:
        return () if self.packed else (batch,)


def order_of(role: str) -> tuple[int, ...]:
    """Tokens of each sixteen in a transposed copy, in the order in which they lie."""
    return ROW_PAIR_ORDER if role == "k" else MMA_ORDER


def kind_of(block: Any, role: str) -> tuple[str, int]:
    """(kind, slot) of an ``Arrangement``.

    Raises:
        TypeError, ValueError: not a block.
        UnsupportedError: a block that nothing makes.
    """
    if block is None:
        return "tensor", DEFAULT_SLOT
    if not isinstance(block, tuple) or len(block) != 2:
        raise TypeError(f"block: expected None or (tokens, channels), got {block!r}")
    for extent in block:
        is_int = isinstance(extent, (int, np.integer)) and not isinstance(extent, (bool, np.bool_))
        if extent is not None and not is_int:
            raise TypeError(f"block: expected counts or None in (tokens, channels), got {block!r}")
        if extent is not None and extent < 1:
            raise ValueError(f"block: expected counts of at least 1, or None, got {block!r}")
    tokens, channels = block
    if channels is not None:
        raise UnsupportedError(f"block: blocks of channels (MXFP8) are not made yet, got {block!r}")
    if tokens is None:
        return "head", DEFAULT_SLOT
    if tokens in (64, 128):
        return "block", int(tokens)
    if tokens == 1 and role == "q":
        return "token", DEFAULT_SLOT
    raise UnsupportedError(
        f"block: expected 64, 128 or None tokens, or 1 for the role q, got {tokens} for {role}"
    )


def check_starts(starts: NDArray[np.integer], total: int) -> None:
    """Raises ValueError unless sequences can start at these rows of ``total``."""
    if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > total:
        brief = np.array2string(starts, threshold=8, separator=", ")
        raise ValueError(
            f"cu_seqlens: expected 0 first, no decrease and at most {total}, the rows of x, at the "
            f"end, got {brief}"
        )


@dataclass(frozen=True)
class Rows:
    """Rows [first, first + length) of a batch entry: those of sequence ``index``, whose first slot
    there is ``slot``."""

    index: int
    batch: int
    first: int
    length: int
    slot: int


def sequences(arrangement: Arrangement, starts: NDArray[np.integer] | None) -> Iterator[Rows]:
    """The rows of every sequence; ``starts`` is cu_seqlens of packed ones."""
    if starts is None:
        for batch in range(arrangement.shape[0]):
            yield Rows(batch, batch, 0, arrangement.shape[1], 0)
        return
    rows = [int(row) for row in starts]
    for index, (first, end) in enumerate(zip(rows, rows[1:])):
        yield Rows(index, 0, first, end - first, first // arrangement.slot + index)


@dataclass(frozen=True, eq=False)
class Stored:
    """Numbers and scales as they lie in NumPy arrays: value = number * scale.

    Attributes:
        data: bits of e4m3 numbers, [batch, seqlen, heads, width], or transposed [batch, heads,
            width, slot tokens]; packed sequences are a batch of one.
        scale: as ``Quantized.scale``.
        arrangement: where things lie.
        transposed: whether data is, with tokens in ``MMA_ORDER``.
    """

    data: NDArray[np.uint8]
    scale: NDArray[np.float32]
    arrangement: Arrangement
    transposed: bool

    def numbers(self, rows: Rows, heads: slice = slice(None)) -> NDArray[np.float32]:
        """Unscaled, [length, heads, head_dim]."""
        head_dim = self.arrangement.shape[3]
        if self.transposed:
            places = rows.slot * self.arrangement.slot + _places(rows.length, MMA_ORDER)
            found = self.data[rows.batch, heads, :head_dim][..., places].transpose(2, 0, 1)
        else:
            at = slice(rows.first, rows.first + rows.length)
            found = self.data[rows.batch, at, heads, :head_dim]
        return widen_e4m3(found)

    def scales(self, rows: Rows, heads: slice = slice(None)) -> NDArray[np.float32]:
        """Of each token and head, [length, heads]."""
        shape = rows.length, self.arrangement.shape[2]
        return np.broadcast_to(_scale_of_rows(self.scale, self.arrangement, rows), shape)[:, heads]

    def values(self, rows: Rows, heads: slice = slice(None)) -> NDArray[np.float32]:
        """number * scale, [length, heads, head_dim]."""
        return self.numbers(rows, heads) * self.scales(rows, heads)[..., None]


def quantize(
    x: NDArray,
    role: str,
    block: Block,
    hadamard_seed: int | None,
    for_backward: bool,
    starts: NDArray[np.integer] | None,
) -> Quantized:
    """What ``api.quantize`` returns for a NumPy array, its arguments checked.

    Args:
        x: [batch, seqlen, heads, head_dim], or with ``starts`` [total, heads, head_dim].
        role, block, hadamard_seed, for_backward: as given.
        starts: cu_seqlens.
    """
    kind, slot = kind_of(block, role)
    with np.errstate(over="ignore"):
        values = (x if starts is None else x[None]).astype(np.float32)
    if hadamard_seed is not None:
        values = rotate(values, hadamard_seed)
    batch, seqlen, heads, head_dim = values.shape
    num_sequences = batch if starts is None else len(starts) - 1
    arrangement = Arrangement(
        kind, slot, starts is not None, (batch, seqlen, heads, head_dim), num_sequences
    )
    parts = list(sequences(arrangement, starts))
    scale = _scales(values, arrangement, parts)
    natural = np.zeros((batch, seqlen, heads, arrangement.width), np.uint8)
    for part in parts:
        rows = slice(part.first, part.first + part.length)
        inverse = np.float32(1) / _scale_of_rows(scale, arrangement, part)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = values[part.batch, rows] * inverse[..., None]
        natural[part.batch, rows, :, :head_dim] = round_e4m3(scaled)
    data = natural.reshape(arrangement.natural_shape)
    transposed = None
    if role == "v" or for_backward:
        transposed = _transpose(natural, arrangement, parts, order_of(role))
    first, second = (transposed, data) if role == "v" else (data, transposed)
    return Quantized(
        data=first,
        scale=scale,
        fmt="e4m3",
        block=block,
        role=role,
        shape=x.shape,
        hadamard_seed=hadamard_seed,
        data_t=second if for_backward else None,
    )


def _scales(
    values: NDArray[np.float32], arrangement: Arrangement, parts: list[Rows]
) -> NDArray[np.float32]:
    amax = np.zeros(arrangement.scale_shape, np.float32)
    for part in parts:
        rows = np.abs(values[part.batch, part.first : part.first + part.length])
        tops = np.where(np.isfinite(rows), rows, np.float32(0)).max(-1)  # [length, heads]
        if arrangement.kind == "tensor":
            amax = np.maximum(amax, tops.max(initial=np.float32(0)))
        elif arrangement.kind == "head":
            amax[part.index] = tops.max(0, initial=np.float32(0))
        else:
            place = _blocks_of(amax, arrangement, part)
            tokens = arrangement.slot if arrangement.kind == "block" else 1
            for block in range(-(-part.length // tokens)):
                place[:, block] = tops[block * tokens : (block + 1) * tokens].max(0)
    return np.asarray(scale_of(amax))


def _blocks_of(
    scale: NDArray[np.float32], arrangement: Arrangement, part: Rows
) -> NDArray[np.float32]:
    """The scales of a sequence's blocks or tokens, [heads, ...], a view."""
    if not arrangement.packed:
        return scale[part.batch]
    first = part.slot if arrangement.kind == "block" else part.first + part.index
    return scale[:, first:]


def _scale_of_rows(
    scale: NDArray[np.float32], arrangement: Arrangement, part: Rows
) -> NDArray[np.float32]:
    """The scale of each token and head of a sequence, [length, heads] or what broadcasts to it."""
    if arrangement.kind == "tensor":
        return scale.reshape(1, 1)
    if arrangement.kind == "head":
        return scale[part.index][None]
    tokens = arrangement.slot if arrangement.kind == "block" else 1
    return _blocks_of(scale, arrangement, part)[:, np.arange(part.length) // tokens].T


def _transpose(
    natural: NDArray[np.uint8],
    arrangement: Arrangement,
    parts: list[Rows],
    order: tuple[int, ...],
) -> NDArray[np.uint8]:
    batch, _, heads, width = natural.shape
    columns = arrangement.num_slots * arrangement.slot
    result = np.zeros((batch, heads, width, columns), np.uint8)
    for part in parts:
        places = part.slot * arrangement.slot + _places(part.length, order)
        rows = natural[part.batch, part.first : part.first + part.length]
        result[part.batch][:, :, places] = rows.transpose(1, 2, 0)
    return result.reshape(arrangement.transposed_shape)


def _places(length: int, order: tuple[int, ...]) -> NDArray[np.int64]:
    """Where in a transposed copy the tokens of a sequence lie, from its first slot on."""
    token = np.arange(length)
    return token // 16 * 16 + np.argsort(order)[token % 16]


def _dequantize(quantized: Quantized, cu_seqlens: Any, rotated: bool) -> NDArray[np.float32]:
    packed = len(quantized.shape) == 3
    if packed != (cu_seqlens is not None):
        wanted = "cu_seqlens of the packed sequences" if packed else "no cu_seqlens"
        raise ValueError(f"dequantize: expected {wanted}")
    starts = np.asarray(cu_seqlens) if packed else None
    if starts is not None:
        check_starts(starts, quantized.shape[0])
    arrangement = arrangement_of(quantized, None if starts is None else len(starts) - 1)
    data = quantized.data[None] if packed else quantized.data
    stored = Stored(data.view(np.uint8), quantized.scale, arrangement, quantized.role == "v")
    result = np.zeros(arrangement.shape, np.float32)
    for part in sequences(arrangement, starts):
        result[part.batch, part.first : part.first + part.length] = stored.values(part)
    if quantized.hadamard_seed is not None and not rotated:
        result = rotate_back(result, quantized.hadamard_seed)
    return result.reshape(quantized.shape)


def arrangement_of(quantized: Quantized, packed_sequences: int | None) -> Arrangement:
    """Where things lie in a tensor of so many packed sequences, or None for one that is not
    packed."""
    kind, slot = kind_of(quantized.block, quantized.role)
    packed = packed_sequences is not None
    batch, seqlen, heads, head_dim = (1, *quantized.shape) if packed else quantized.shape
    return Arrangement(
        *(kind, slot, packed, (batch, seqlen, heads, head_dim)),
        batch if packed_sequences is None else packed_sequences,
    )
