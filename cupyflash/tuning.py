"""The table of tiles: which shapes each kernel family is built in, and why.

Every choice that a measurement could change is a row here, with its reason and date, and nowhere
else. ``select.py`` turns rows into candidates; rows of one family are tried in the order of the
table, so of two rows that serve a problem the first wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupyflash.tensor import DType

MASKS = ("none", "causal", "window")
"""Mask kinds of a kernel: only the end of the keys; right bound only; left and right bounds."""

DTYPES = (DType.bfloat16, DType.float16)
"""Element types that kernels exist for."""


@dataclass(frozen=True)
class Option:
    """A family's own compile-time parameter, ``static constexpr int k<name>`` of its Config.

    ``tag`` spells a value in kernel names where it differs from ``default``; None where another
    part of the name already tells (the number of threads, say).
    """

    name: str
    default: int
    tag: str | None = None


@dataclass(frozen=True)
class Tile:
    """One row: a tile shape of one family, for one padded head dimension.

    Attributes:
        head_dim_qk, head_dim_v: padded widths that the tile is built for.
        block_m, block_n: queries and keys of one tile.
        stages: slots of the K and V rings.
        threads: threads of a block.
        min_blocks: blocks that must fit on an SM: a bound for the register allocator, and a row
            serves only devices whose shared memory has room for that many.
        cluster: blocks that share K and V by multicast.
        scheduler: ``single`` (one tile a block) or ``persistent`` (tiles dealt out statically).
        options: the family's own parameters that differ from their defaults.
        masks, dtypes: mask kinds and element types that this row serves.
        max_seqlen: longest queries and keys that it serves, for tiles that win where there are few
            blocks; None: any.
        reason: why this row and not another: what was measured, on what.
        date: when that was.
    """

    head_dim_qk: int
    head_dim_v: int
    block_m: int
    block_n: int
    stages: int
    threads: int
    reason: str
    date: str
    min_blocks: int = 1
    cluster: int = 1
    scheduler: str = "single"
    options: tuple[tuple[str, int], ...] = ()
    masks: tuple[str, ...] = MASKS
    dtypes: tuple[DType, ...] = DTYPES
    max_seqlen: int | None = None


DQ_ORDER = ("DqUnitRows", "DqUnitColumns", "DqTransposed", "DqVector")
"""Options of every backward tile that say how it leaves the sums of dq (``DqOrder`` of
``kernels_cu/attn/query_slots.cuh``)."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """More kernels of a family: those of ``kernels_cu/<family>/backward.cuh``, and those of
    ``forward_fp8.cuh`` (8-bit floats).

    Attributes:
        options: parameters of their Config beyond the common ones; of a backward those of
            ``DQ_ORDER`` first.
        tiles: rows in order of preference; of a backward ``block_m`` queries and ``block_n`` keys,
            ``stages`` of the rings of queries and of output gradients.
        shared_bytes: dynamic shared memory of a tile, ``BackwardLayout<Config>::kBytes`` or
            ``ForwardLayout<Config>::kBytes``.
    """

    options: tuple[Option, ...]
    tiles: tuple[Tile, ...]
    shared_bytes: Callable[[Tile], int]

    def option_values(self, tile: Tile) -> tuple[tuple[str, int], ...]:
        """All parameters for a row, defaults filled in, in order."""
        given = dict(tile.options)
        return tuple(
            (option.name, given.get(option.name, option.default)) for option in self.options
        )


@dataclass(frozen=True, eq=False)
class Family:
    """A kernel family: the code in ``kernels_cu/<name>/`` and the tiles it is built in.

    Attributes:
        name: sm80, sm90 or sm100.
        options: parameters of its Config beyond the common ones.
        tiles: rows in order of preference.
        shared_bytes: dynamic shared memory of a tile; asserted against the kernel's own
            ``ForwardLayout<Config>::kBytes`` in every translation unit.
        uses_tma: whether tensors travel by TMA (and so must be legal for it).
        map_rows: rows of the q and out boxes; k and v boxes have ``block_n`` rows.
        general: whether it comes in general kernels too, which read lengths on the device and cap
            scores.
        claims_tiles: whether blocks of its persistent kernels can claim tiles from a counter.
        sets_registers: whether the kernel moves registers between its warps (setmaxnreg), which
            hangs unless ptxas gave it exactly what its launch bounds allow.
        backward: its backward kernels.
        fp8: its forward kernels of 8-bit floats.
    """

    name: str
    options: tuple[Option, ...]
    tiles: tuple[Tile, ...]
    shared_bytes: Callable[[Tile], int]
    uses_tma: bool = False
    map_rows: int = 0
    general: bool = False
    claims_tiles: bool = False
    sets_registers: bool = False
    backward: Kernels | None = None
    fp8: Kernels | None = None

    def device_bytes(self, tile: Tile) -> int:
        """Shared memory of a block that a device must offer for a row:
        ``device_bytes`` of the kernels of the forward."""
        return device_bytes(self.shared_bytes(tile), tile.min_blocks)

    def option(self, tile: Tile, name: str) -> int:
        """The value of one of the family's parameters for a row."""
        return dict(self.option_values(tile))[name]

    def option_values(self, tile: Tile) -> tuple[tuple[str, int], ...]:
        """All of the family's parameters for a row, defaults filled in, in the family's order."""
        given = dict(tile.options)
        return tuple(
            (option.name, given.get(option.name, option.default)) for option in self.options
        )


ELEMENT_BYTES = 2  # bf16 and fp16
FLOAT_BYTES = 4
BARRIER_BYTES = 8
KIB = 1024


def device_bytes(shared_bytes: int, blocks: int) -> int:
    """Shared memory of a block that a device must offer so that an SM holds ``blocks`` blocks of
    ``shared_bytes``: an SM holds 1 KB more than a block may use and spends 1 KB on each block."""
    return blocks * (shared_bytes + KIB) - KIB


def _tile_bytes(rows: int, width: int) -> int:
    return rows * width * ELEMENT_BYTES


def _kv_ring_bytes(tile: Tile) -> int:
    return tile.stages * _tile_bytes(tile.block_n, tile.head_dim_qk + tile.head_dim_v)


# --- sm80: cp.async, mma.sync ------------------------------------------------------------------


def _sm80_shared_bytes(tile: Tile) -> int:
    """Q, later the output in its place, then the K and V rings."""
    widest = max(tile.head_dim_qk, tile.head_dim_v)
    return _tile_bytes(tile.block_m, widest) + _kv_ring_bytes(tile)


def _sm80(
    qk_width: int,
    v_width: int,
    m: int,
    n: int,
    warps: int,
    blocks: int,
    date: str,
    reason: str,
    masks: tuple[str, ...] = MASKS,
    **options: int,
) -> Tile:
    given = (("Warps", warps), *options.items())
    return Tile(
        *(qk_width, v_width, m, n, 1, 32 * warps, reason, date),
        min_blocks=blocks,
        options=given,
        masks=masks,
    )


def _sm80_backward_bytes(tile: Tile) -> int:
    """K, V, the stages of Q with rows of lse and those of dO with rows of delta, P and dS."""
    dout_stages = dict(_SM80_BACKWARD.option_values(tile))["DoutStages"]
    return (
        _tile_bytes(tile.block_n, tile.head_dim_qk + tile.head_dim_v)
        + tile.stages * _tile_bytes(tile.block_m, tile.head_dim_qk)
        + dout_stages * _tile_bytes(tile.block_m, tile.head_dim_v)
        + 2 * _tile_bytes(tile.block_m, tile.block_n)
        + FLOAT_BYTES * (tile.stages + dout_stages) * tile.block_m
    )


def _sm80_backward(
    qk_width: int,
    v_width: int,
    m: int,
    n: int,
    stages: tuple[int, int],
    warps: tuple[int, int, int, int],
    date: str,
    reason: str,
    masks: tuple[str, ...] = MASKS,
    **options: int,
) -> Tile:
    """``stages`` of Q and of dO; ``warps`` in all, then along the queries of the scores, the keys
    of dk and dv and the queries of dq."""
    names = ("ScoreWarps", "GradWarps", "SumWarps")
    given = (("DoutStages", stages[1]), *zip(names, warps[1:]), *options.items())
    return Tile(
        *(qk_width, v_width, m, n, stages[0], 32 * warps[0], reason, date),
        options=given,
        masks=masks,
    )


# fmt: off
_SM80_BACKWARD = Kernels(
    options=(
        Option("DqUnitRows", 16),
        Option("DqUnitColumns", 16),
        Option("DqTransposed", 0),
        Option("DqVector", 1),
        Option("DoutStages", 2, "dout"),
        Option("ScoreWarps", 2),
        Option("GradWarps", 4),
        Option("SumWarps", 2),
    ),
    shared_bytes=_sm80_backward_bytes,
    tiles=(
        # The largest tile whose dk, dv, S and dP fit into registers, then what fits into the shared
        # memory of devices that have less: 227 KB (9.0, 10.x), 163 KB (8.0) or 99 KB. No row
        # spills for any target that it serves; larger ones did.
        #            widths      m    n  stages  warps         date          reason
        _sm80_backward( 64,  64, 128, 128, (2, 2), (8, 4, 4, 4), "2026-12-07", "162 KB; not timed",
                       ("none",)),
        _sm80_backward( 64,  64,  64, 128, (2, 2), (8, 2, 4, 2), "2026-12-05", "97 KB; not timed"),
        _sm80_backward( 96,  96,  64, 128, (2, 2), (8, 2, 4, 4), "2026-12-05", "129 KB; not timed"),
        _sm80_backward( 96,  96,  64,  64, (2, 2), (8, 2, 4, 4), "2026-12-05", "89 KB; not timed"),
        _sm80_backward(128, 128,  64,  64, (2, 2), (8, 2, 2, 2), "2026-12-07", "113 KB; not timed"),
        _sm80_backward(128, 128,  64,  64, (2, 1), (8, 2, 2, 2), "2026-12-05", "97 KB; not timed"),
        _sm80_backward(192, 128,  64,  64, (2, 2), (8, 2, 2, 2), "2026-12-05", "137 KB; not timed"),
        _sm80_backward(192, 128,  64,  64, (1, 1), (8, 2, 2, 2), "2026-12-05", "97 KB; not timed"),
        _sm80_backward(192, 192,  64,  64, (2, 1), (8, 2, 2, 2), "2026-12-07", "137 KB; not timed"),
        _sm80_backward(192, 192,  32,  64, (2, 1), (8, 2, 2, 2), "2026-12-05", "92 KB; not timed"),
        _sm80_backward(256, 256,  32,  64, (1, 2), (8, 2, 2, 2), "2026-12-07", "121 KB; not timed"),
        _sm80_backward(256, 256,  32,  32, (1, 1), (4, 2, 1, 1), "2026-12-07", "68 KB; not timed"),
    ),
)
# fmt: on


# fmt: off
SM80 = Family(
    name="sm80",
    options=(
        Option("Warps", 4),
        Option("QueryInRegisters", 0, "qreg"),
        Option("HideThread", 0, "hide"),
    ),
    shared_bytes=_sm80_shared_bytes,
    general=True,
    backward=_SM80_BACKWARD,
    tiles=(
        # Figures: bf16, TFLOP/s at 16k tokens, full / causal, this code on an H200 (FA2: PyTorch,
        # same run). Two blocks of 4 warps an SM beat one of 8, and then one stage is enough.
        # HideThread where a row spills without. Devices give a block 227 KB (9.0, 10.x), 163 KB
        # (8.0) or 99 KB.
        #   widths      m    n  W  blocks  date          reason
        _sm80( 64,  64, 128, 128, 4, 2, "2026-11-29", "48 KB; 350 full (FA2 307)", ("none",)),
        _sm80( 64,  64, 128, 128, 4, 2, "2026-11-29", "48 KB; 343 / 336 (FA2 307 / 296)",
              HideThread=1),
        _sm80( 96,  96, 128,  64, 4, 2, "2026-11-29", "48 KB; 346 / 352 (FA2 352 / 311)"),
        _sm80(128, 128, 128,  64, 4, 2, "2026-11-29", "64 KB; 381 / 342 (FA2 352 / 321)",
              ("none", "causal"), HideThread=1),
        _sm80(128, 128, 128,  48, 4, 2, "2026-11-29", "56 KB; 362 / 341; windows spill with 64",
              HideThread=1),
        _sm80(128, 128, 128,  32, 4, 2, "2026-11-29", "48 KB, two in 99 KB; 339 / 306"),
        _sm80(192, 128, 128,  64, 4, 2, "2026-11-29", "88 KB; 411 full; causal spills with 64",
              ("none",), HideThread=1),
        _sm80(192, 128, 128,  48, 4, 2, "2026-11-29", "78 KB, two in 163 KB; 396 / 398",
              HideThread=1),
        _sm80(192, 128, 128,  64, 8, 1, "2026-11-29", "88 KB, for 99 KB; 291 / 295"),
        _sm80(192, 192,  64,  96, 4, 2, "2026-11-29", "96 KB; 342 / 342 (FA2 324 / 299)"),
        _sm80(192, 192,  64,  64, 4, 2, "2026-11-29", "72 KB, two in 163 KB; 325 / 325"),
        _sm80(192, 192, 128,  64, 8, 1, "2026-11-29", "96 KB, for 99 KB; 309 / 306"),
        _sm80(256, 256,  64,  80, 4, 2, "2026-11-29", "112 KB; 338 / 335 (FA2 319 / 284)"),
        _sm80(256, 256, 128,  64, 8, 1, "2026-11-29", "128 KB, for 163 KB; 315 / 314"),
        _sm80(256, 256,  64,  64, 4, 1, "2026-11-29", "96 KB, for 99 KB; one an SM not timed"),
    ),
)
# fmt: on


# --- sm90: TMA, wgmma, warp specialisation --------------------------------------------------------


_TICKETS = 2


def _sm90_shared_bytes(tile: Tile) -> int:
    """The Q ring, the K and V rings, the output tile where it has its own, the tiles that the
    scheduler deals out, two tickets; then barriers: two a consumer warpgroup and Q stage, four a K
    and V stage, two a tile and a ticket."""
    warpgroups = SM90.option(tile, "ConsumerWarpgroups")
    q_stages = SM90.option(tile, "QStages")
    out_bytes = _tile_bytes(tile.block_m, tile.head_dim_v) * SM90.option(tile, "OutBuffer")
    slots = SM90.option(tile, "TileSlots")
    barriers = 2 * warpgroups * q_stages + 4 * tile.stages + 2 * slots + 2 * _TICKETS
    return (
        q_stages * _tile_bytes(tile.block_m, tile.head_dim_qk)
        + _kv_ring_bytes(tile)
        + out_bytes
        + slots * 48
        + 16
        + BARRIER_BYTES * barriers
    )


def _sm90(
    qk_width: int,
    v_width: int,
    m: int,
    n: int,
    stages: int,
    date: str,
    reason: str,
    cluster: int = 1,
    masks: tuple[str, ...] = MASKS,
    max_seqlen: int | None = None,
    **options: int,
) -> Tile:
    """One consumer warpgroup for every 64 queries, and the producer's."""
    warpgroups = m // 64
    return Tile(
        qk_width,
        v_width,
        m,
        n,
        stages,
        threads=128 * (warpgroups + 1),
        cluster=cluster,
        scheduler="persistent",
        options=(("ConsumerWarpgroups", warpgroups), *options.items()),
        masks=masks,
        max_seqlen=max_seqlen,
        reason=reason,
        date=date,
    )


_PAIRS: dict[str, Any] = {"cluster": 2, "masks": ("none",)}
"""Blocks in pairs, on neighbouring queries, that load K and V for each other."""
_HEADS: dict[str, Any] = {"cluster": 2, "masks": ("causal",), "PairHeads": 1}
"""Blocks in pairs, on the same queries of two heads that share K and V."""
_OWN_OUTPUT: dict[str, Any] = {"OutBuffer": 1, "QStages": 2}
"""An output tile and a second Q stage of their own: tiles of one CTA overlap."""


def query_tile(head_dim_qk: int, head_dim_v: int) -> Tile:
    """Tile of the kernel that makes dq of wide heads: 128 queries, 64 keys a block, as many stages
    of keys and of values as fit."""
    stages, value_stages = (2, 1) if head_dim_v > 192 else (3, 2)
    return Tile(
        *(head_dim_qk, head_dim_v, 128, 64, stages, 384, "not timed", "2026-12-07"),
        options=(("ValueStages", value_stages),),
    )


def query_tile_bytes(tile: Tile) -> int:
    """Shared memory of ``query_tile``: Q, dO, the stages of K and V; a barrier of the queries, two
    of each stage."""
    value_stages = dict(tile.options)["ValueStages"]
    return (
        _tile_bytes(tile.block_m, tile.head_dim_qk + tile.head_dim_v)
        + tile.stages * _tile_bytes(tile.block_n, tile.head_dim_qk)
        + value_stages * _tile_bytes(tile.block_n, tile.head_dim_v)
        + BARRIER_BYTES * (1 + 2 * tile.stages + 2 * value_stages)
    )


def _sm90_keys_bytes(tile: Tile) -> int:
    """K, V, the rings of Q and dO with their rows of lse and delta, two tiles of weights, two
    descriptions of tiles; then barriers: three for K and V, three a stage, four for weights, four
    for tiles."""
    widths = tile.head_dim_qk + tile.head_dim_v
    return (
        _tile_bytes(tile.block_n + tile.stages * tile.block_m, widths)
        + 2 * _tile_bytes(tile.block_m, tile.block_n)
        + 2 * FLOAT_BYTES * tile.stages * tile.block_m
        + 2 * 64
        + BARRIER_BYTES * (3 + 3 * tile.stages + 4 + 4)
    )


def _sm90_backward_bytes(tile: Tile) -> int:
    """K, V, the rings of Q and dO with their rows of lse and delta, two tiles of dS, one of dQ in
    float32, two descriptions of tiles; then barriers: three for K and V, three a stage, four for
    the parts of dQ, four for tiles."""
    if dict(tile.options).get("Split"):
        return _sm90_keys_bytes(tile)
    widths = tile.head_dim_qk + tile.head_dim_v
    return (
        _tile_bytes(tile.block_n + tile.stages * tile.block_m, widths)
        + 2 * _tile_bytes(tile.block_m, tile.block_n)
        + FLOAT_BYTES * tile.block_m * tile.head_dim_qk
        + 2 * FLOAT_BYTES * tile.stages * tile.block_m
        + 2 * 64
        + BARRIER_BYTES * (3 + 3 * tile.stages + 4 + 4)
    )


def _sm90_backward(
    width: int,
    m: int,
    dq_unit: tuple[int, int],
    date: str,
    reason: str,
    masks: tuple[str, ...] = MASKS,
    **options: int,
) -> Tile:
    """Two consumer warpgroups of 64 keys each, and the producer's."""
    order = (("DqUnitRows", dq_unit[0]), ("DqUnitColumns", dq_unit[1]), ("DqVector", 4))
    return Tile(
        *(width, width, m, 128, 2, 384, reason, date),
        scheduler="persistent",
        options=(*order, *options.items()),
        masks=masks,
    )


def _sm90_split_backward(widths: tuple[int, int], stages: int, date: str, reason: str) -> Tile:
    """dk and dv of 64 keys, a warpgroup each; dq by ``query_tile``."""
    return Tile(
        *(*widths, 64, 64, stages, 384, reason, date),
        scheduler="persistent",
        options=(("Split", 1),),
    )


# fmt: off
_SM90_BACKWARD = Kernels(
    options=(
        Option("DqUnitRows", 64),
        Option("DqUnitColumns", 64),
        Option("DqTransposed", 0),
        Option("DqVector", 4),
        Option("Split", 0),
    ),
    shared_bytes=_sm90_backward_bytes,
    tiles=(
        # 80 queries where their products fit into registers: probes of the bare loop ran 3 % faster
        # than with 64 on an H200 (bf16, 2026-11-29).
        _sm90_backward( 64, 128, (64, 64), "2026-12-05", "160 KB; not timed"),
        _sm90_backward( 96,  64, (64, 32), "2026-12-05", "150 KB; not timed"),
        _sm90_backward(128,  80, (64, 80), "2026-12-05", "226 KB; not timed", ("none",),
                       DqTransposed=1),
        _sm90_backward(128,  64, (64, 64), "2026-12-05", "193 KB; not timed"),
        # Wider heads: one gradient a warpgroup.
        _sm90_split_backward((192, 128), 4, "2026-12-07", "218 KB; not timed"),
        _sm90_split_backward((192, 192), 3, "2026-12-07", "210 KB; not timed"),
        _sm90_split_backward((256, 256), 2, "2026-12-07", "210 KB; not timed"),
    ),
)
# fmt: on


# --- sm90, 8-bit floats -------------------------------------------------------------------------


def _sm90_fp8_bytes(tile: Tile) -> int:
    """Q, the K and V rings, the output in 16 bits, the scales of each stage, descriptions of tiles
    and two tickets; then barriers: two for each query tile, four a stage, two a tile slot, two a
    ticket."""
    given = {option.name: option.default for option in _SM90_FP8_OPTIONS} | dict(tile.options)
    query_tiles = given["QStages"] * given["ConsumerWarpgroups"]
    return (
        query_tiles * 64 * tile.head_dim_qk
        + tile.stages * tile.block_n * (tile.head_dim_qk + tile.head_dim_v)
        + _tile_bytes(tile.block_m, tile.head_dim_v)
        + 32 * tile.stages
        + 64 * given["TileSlots"]
        + 16
        + BARRIER_BYTES * (2 * query_tiles + 4 * tile.stages + 2 * given["TileSlots"] + 4)
    )


_SM90_FP8_OPTIONS = (
    Option("ConsumerWarpgroups", 2),
    Option("PingPong", 1),
    Option("QStages", 1),
    Option("PairHeads", 0, "heads"),
    Option("TileSlots", 3),
    Option("Overlap", 0),
    Option("TwoLevel", 0, "twolevel"),
    Option("Float16Out", 0, "outf16"),
)


def _sm90_fp8(
    widths: tuple[int, int],
    warpgroups: int,
    stages: int,
    date: str,
    reason: str,
    max_seqlen: int | None = None,
    **options: int,
) -> Tile:
    given = (("ConsumerWarpgroups", warpgroups), *options.items())
    return Tile(
        *(*widths, 64 * warpgroups, 128, stages, 128 * (1 + warpgroups), reason, date),
        scheduler="persistent",
        options=given,
        max_seqlen=max_seqlen,
    )


# Probes of the bare loop on an H200 (2026-11-29): at 128 three warpgroups without overlap reached
# 1002 to 1046 TFLOP/s, two with overlap 921 to 986; at 64 three, with overlap, 715 to 726; at 256
# two, with overlap, 1215 to 1257. Sums of two levels where there are many keys.
_MANY_KEYS = 32768
# fmt: off
_SM90_FP8 = Kernels(
    options=_SM90_FP8_OPTIONS,
    shared_bytes=_sm90_fp8_bytes,
    tiles=(
        _sm90_fp8(( 64,  64), 3, 4, "2026-12-07", "not timed", _MANY_KEYS, Overlap=1),
        _sm90_fp8(( 64,  64), 3, 4, "2026-12-07", "not timed", TwoLevel=1),
        _sm90_fp8(( 96,  96), 3, 4, "2026-12-07", "not timed", _MANY_KEYS, Overlap=1),
        _sm90_fp8(( 96,  96), 2, 4, "2026-12-07", "not timed", TwoLevel=1),
        _sm90_fp8((128, 128), 3, 4, "2026-12-07", "not timed", _MANY_KEYS),
        _sm90_fp8((128, 128), 2, 4, "2026-12-07", "not timed", TwoLevel=1),
        _sm90_fp8((192, 128), 3, 3, "2026-12-07", "not timed", _MANY_KEYS),
        _sm90_fp8((192, 128), 2, 3, "2026-12-07", "not timed", TwoLevel=1),
        _sm90_fp8((192, 192), 2, 3, "2026-12-07", "not timed", Overlap=1),
        _sm90_fp8((256, 256), 2, 2, "2026-12-07", "not timed", Overlap=1),
    ),
)
# fmt: on


def _sm90_fp8_backward_bytes(tile: Tile) -> int:
    """K, K^T and V, the rings of Q and dO, both also transposed, two tiles of dS, one of dQ in
    float32; rows of row_lse and row_delta and the scale of q a stage, two of eight largest dS, two
    descriptions of tiles; then barriers as in 16 bits."""
    width = tile.head_dim_qk
    return (
        3 * tile.block_n * width
        + 4 * tile.stages * tile.block_m * width
        + 2 * tile.block_m * tile.block_n
        + FLOAT_BYTES * tile.block_m * width
        + 2 * FLOAT_BYTES * tile.stages * tile.block_m
        + 16 * tile.stages
        + 2 * 8 * FLOAT_BYTES
        + 2 * 64
        + BARRIER_BYTES * (3 + 3 * tile.stages + 4 + 4)
    )


def _sm90_fp8_backward(width: int, m: int, stages: int, date: str, reason: str) -> Tile:
    """Two consumer warpgroups of 64 keys each, and the producer's."""
    return Tile(
        *(width, width, m, 128, stages, 384, reason, date),
        scheduler="persistent",
        options=(("DqUnitRows", 64), ("DqUnitColumns", 64), ("DqVector", 4)),
    )


SM90_FP8_BACKWARD = Kernels(
    options=_SM90_BACKWARD.options[: len(DQ_ORDER)],
    shared_bytes=_sm90_fp8_backward_bytes,
    tiles=(
        # head_dim 256 does not fit: dk and dv of 64 keys would take 256 registers of a thread.
        _sm90_fp8_backward(64, 128, 3, "2026-12-07", "186 KB; not timed"),
        _sm90_fp8_backward(128, 64, 3, "2026-12-07", "194 KB; not timed"),
    ),
)
"""The backward over 8-bit floats, ``kernels_cu/sm90/backward_fp8.cuh``."""


# fmt: off
SM90 = Family(
    name="sm90",
    options=(
        Option("ConsumerWarpgroups", 2),
        Option("PingPong", 1, "pingpong"),
        Option("OutBuffer", 0),
        Option("QStages", 1),
        Option("PairHeads", 0, "heads"),
        Option("TileSlots", 3, "slots"),
    ),
    shared_bytes=_sm90_shared_bytes,
    uses_tma=True,
    map_rows=64,
    general=True,
    claims_tiles=True,
    sets_registers=True,
    backward=_SM90_BACKWARD,
    fp8=_SM90_FP8,
    tiles=(
        # Figures: bf16, TFLOP/s at 16k, 4k, 1k tokens, one sustained run on an H200. Pairs of
        # blocks on neighbouring queries gain where both visit the same keys; under a mask they wait
        # for each other. Pairs of heads always do; at head_dim 128, 64 heads over 8, causal, 16k:
        # 714 against 680 alone.
        #   widths      m    n  S  date          reason
        _sm90( 64,  64, 192, 128, 2, "2026-11-29", "564 535 458; alone 554 534 455",
              **_PAIRS, **_OWN_OUTPUT),
        _sm90( 64,  64, 128, 128, 2, "2026-11-29", "causal - 455 343; 192x128 543 486 325",
              max_seqlen=1536, masks=("causal",), **_OWN_OUTPUT),
        _sm90( 64,  64, 192, 128, 2, "2026-11-29", "pairs of heads", **_HEADS, **_OWN_OUTPUT),
        _sm90( 64,  64, 192, 128, 2, "2026-11-29", "causal 543 486 325; 128x128 457 455 343",
              **_OWN_OUTPUT),
        _sm90( 96,  96, 128, 128, 2, "2026-11-29", "causal 574 530 380; 192x96 632 549 347",
              max_seqlen=1536, masks=("causal",), **_OWN_OUTPUT),
        _sm90( 96,  96, 192,  96, 2, "2026-11-29", "pairs of heads", **_HEADS, **_OWN_OUTPUT),
        _sm90( 96,  96, 192,  96, 2, "2026-11-29", "causal 632 549 347; 128x128 574 530 380",
              **_OWN_OUTPUT),
        _sm90(128, 128, 128, 128, 2, "2026-11-29", "703 647 587; alone 20 to 40 less",
              **_PAIRS, **_OWN_OUTPUT),
        _sm90(128, 128, 128, 128, 2, "2026-11-29", "pairs of heads", **_HEADS, **_OWN_OUTPUT),
        _sm90(128, 128, 128, 128, 2, "2026-11-29", "causal 681 653 464; in pairs 671 588 438",
              **_OWN_OUTPUT),
        _sm90(192, 128, 128, 128, 2, "2026-11-29", "pairs of heads", **_HEADS),
        _sm90(192, 128, 128, 128, 2, "2026-11-29", "causal 8k 682; in pairs 688"),
        _sm90(192, 192, 128, 112, 2, "2026-11-29", "216 KB, the largest that fits; not timed"),
        _sm90(256, 256, 128,  80, 2, "2026-11-29", "767 684 597; alone 10 to 25 less",
              **_PAIRS),
        _sm90(256, 256, 128,  64, 2, "2026-11-29", "pairs of heads", **_HEADS),
        _sm90(256, 256, 128,  64, 2, "2026-11-29", "causal 713 640 460; in pairs 708 608 435",
              masks=("causal", "window")),
        _sm90(256, 256, 128,  80, 2, "2026-11-29", "224 KB, the largest that fits",
              masks=("none",)),
    ),
)
# fmt: on


# --- sm100: TMA, tcgen05, scores and output in tensor memory --------------------------------------


def _sm100_shared_bytes(tile: Tile) -> int:
    """Q and output tiles of both query stages, one ring that K and V tiles take turns in, a factor
    and a sum of every row, then barriers: eight a query stage, two a slot, and the address of the
    tensor memory."""
    slot_bytes = _tile_bytes(tile.block_n, max(tile.head_dim_qk, tile.head_dim_v))
    return (
        _tile_bytes(tile.block_m, tile.head_dim_qk + tile.head_dim_v)
        + tile.stages * slot_bytes
        + 2 * FLOAT_BYTES * tile.block_m
        + BARRIER_BYTES * (8 * 2 + 2 * tile.stages)
        + 16
    )


def _sm100(width: int, stages: int, date: str, reason: str) -> Tile:
    return Tile(width, width, 256, 128, stages, 512, reason, date, scheduler="persistent")


def _sm100_backward_bytes(tile: Tile) -> int:
    """K, V, the rings of Q and of dO, dS, two pieces of dQ, the rows of lse and delta of a stage of
    Q, then barriers: two of K and V, two a stage of each ring, seven more, and the address of the
    tensor memory."""
    dout_stages = dict(tile.options)["DoutStages"]
    return (
        _tile_bytes(tile.block_n + tile.stages * tile.block_m, tile.head_dim_qk)
        + _tile_bytes(tile.block_n + dout_stages * tile.block_m, tile.head_dim_v)
        + _tile_bytes(tile.block_n, tile.block_m)
        + 2 * FLOAT_BYTES * tile.block_m * 32
        + 2 * FLOAT_BYTES * tile.stages * tile.block_m
        + BARRIER_BYTES * (2 + 2 * tile.stages + 2 * dout_stages + 7)
        + 16
    )


def _sm100_backward(width: int, dout_stages: int, date: str, reason: str) -> Tile:
    return Tile(
        *(width, width, 128, 128, 2, 512, reason, date),
        options=(("DoutStages", dout_stages),),
    )


_SM100_BACKWARD = Kernels(
    options=(
        Option("DqUnitRows", 128),
        Option("DqUnitColumns", 32),
        Option("DqTransposed", 0),
        Option("DqVector", 4),
        Option("DoutStages", 1, "dout"),
    ),
    shared_bytes=_sm100_backward_bytes,
    tiles=(
        _sm100_backward(64, 2, "2026-12-07", "162 KB; never run on a GPU"),
        _sm100_backward(128, 1, "2026-12-07", "226 KB, all that fits; never run on a GPU"),
    ),
)

SM100 = Family(
    name="sm100",
    options=(),
    shared_bytes=_sm100_shared_bytes,
    uses_tma=True,
    map_rows=128,
    general=True,
    sets_registers=True,
    tiles=(
        _sm100(64, 4, "2026-11-29", "two key blocks, 4000 clocks of softmax; never run on a GPU"),
        _sm100(128, 3, "2026-11-29", "226 KB, all that fits; never run on a GPU"),
    ),
    backward=_SM100_BACKWARD,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (SM100, SM90, SM80)}
"""Kernel families, the preferred one first."""


# --- any: kernels without tiles -------------------------------------------------------------------

MERGE_DTYPES = (DType.bfloat16, DType.float16, DType.float32)
"""Element types of parts that ``merge`` takes on a GPU."""
MERGE_THREADS = 256
BACKWARD_DELTA_THREADS = 256  # also of that of 8-bit floats
BACKWARD_CONVERT_THREADS = 256
BACKWARD_CONVERT_BLOCKS = 2
"""Blocks an SM: with four, and 64 registers a thread, transposed sums spilled 48 bytes."""
MERGE_BLOCKS = 4
"""Threads of a block of the merge, and blocks an SM: 32 warps, 64 registers a thread; not timed."""

QUANTIZE_DTYPES = (DType.bfloat16, DType.float16)
"""Element types that ``quantize`` takes on a GPU."""
QUANTIZE_THREADS = 256
QUANTIZE_BLOCKS = {(4, False): 4, (8, False): 2, (4, True): 2, (8, True): 1}
"""(pieces of 16 channels that a thread holds, whether it rotates them) to blocks an SM: what fits
the registers without spills. Four pieces are a tile of 128 tokens and 128 channels, 32 KB of loads
in flight; with two for narrow tiles no more than four blocks would fit either. Not timed."""


def quantize_bytes(pieces: int) -> int:
    """Shared memory of a block: numbers and tops of its pieces, tops of warps."""
    return pieces * QUANTIZE_THREADS * (16 + 4) + 32 * 4
