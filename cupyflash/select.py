"""Which kernel serves a problem on a device: candidates, rules and choice as data.

``candidates`` lists every kernel that could be considered, in order of preference. Two lists of
named rules say what each must satisfy; ``select`` returns the first that satisfies all, with the
first broken rule of every other, and ``explain`` prints that. Nothing here touches a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cupyflash.errors import UnsupportedError
from cupyflash.problem import DeviceInfo, Problem
from cupyflash.tensor import FP8_DTYPES, DType
from cupyflash.tuning import (
    BACKWARD_CONVERT_BLOCKS,
    BACKWARD_CONVERT_THREADS,
    BACKWARD_DELTA_THREADS,
    DQ_ORDER,
    DTYPES,
    FAMILIES,
    MERGE_BLOCKS,
    MERGE_THREADS,
    QUANTIZE_BLOCKS,
    QUANTIZE_THREADS,
    SM90_FP8_BACKWARD,
    Family,
    Tile,
    device_bytes,
    quantize_bytes,
    query_tile,
    query_tile_bytes,
)

logger = logging.getLogger("cupyflash")

FORWARD_KERNELS = ("forward", "forward_fp8")
"""Kernels of a forward; the second of 8-bit floats."""

TILED_KERNELS = (
    *FORWARD_KERNELS, "backward", "backward_keys", "backward_queries", "backward_fp8"
)  # fmt: skip
"""Kernels that are made of the rows of ``tuning.py``."""

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
MAX_TILES = 2**31 - 2**16  # 32-bit tile indices that a persistent block steps past the last one

# Blocks at work for each idle one of a cluster; multicast gains about as much (tuning.py).
_LEAST_BUSY = 16

_DEFAULT_TARGET = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100f"}


@dataclass(frozen=True)
class KernelSpec:
    """One compiled kernel, completely: everything that its translation unit depends on.

    Attributes:
        kernel: what it computes ("forward", "backward", "backward_delta", "backward_convert",
            "merge", "quantize"; "forward_fp8", the forward of 8-bit floats; "backward_keys" and
            "backward_queries", which share the work of "backward"; "backward_fp8" and
            "backward_delta_fp8", over 8-bit floats).
        family: the code that it is made of ("sm80", "sm90", "sm100"; "any": one for all, which has
            no tiles: widths, tile and stages are 0).
        target: what it is compiled for ("sm_80", "sm_90a", "sm_100f", "sm_120", ...).
        dtype: element type of q, k, v and out.
        head_dim_qk, head_dim_v: padded tile widths.
        mask: "none" (only the end of the keys), "causal" (right bound), "window" (both bounds).
        block_m, block_n, stages: queries and keys of a tile, slots of the K and V rings.
        threads, min_blocks, cluster: launch bounds.
        scheduler: "single" (one tile a block) or "persistent".
        shared_bytes: dynamic shared memory of a block.
        options: the family's own parameters, (name, value).
        general: whether it reads lengths on the device and caps scores.
    """

    kernel: str
    family: str
    target: str
    dtype: DType
    head_dim_qk: int
    head_dim_v: int
    mask: str
    block_m: int
    block_n: int
    stages: int
    threads: int
    min_blocks: int
    cluster: int
    scheduler: str
    shared_bytes: int
    options: tuple[tuple[str, int], ...]
    general: bool = False

    @functools.cached_property
    def name(self) -> str:
        """Readable name, also the kernel's symbol: forward_sm90_bf16_d128_m128n128s2_causal."""
        if self.kernel == "backward_convert":
            order = "x".join(str(value) for _, value in self.options)
            tile = f"d{self.head_dim_qk}_m{self.block_m}_{order}"
            return "_".join([self.kernel, self.family, self.dtype.short, tile])
        if self.kernel == "quantize":
            how = [f"p{self.option('Pieces')}", *["rotated"] * self.option("Rotate")]
            return "_".join([self.kernel, self.family, self.dtype.short, *how])
        if self.kernel not in TILED_KERNELS:
            return "_".join([self.kernel, self.family, self.dtype.short])
        width = f"d{self.head_dim_qk}"
        if self.head_dim_v != self.head_dim_qk:
            width += f"v{self.head_dim_v}"
        tile = f"m{self.block_m}n{self.block_n}s{self.stages}"
        if self.cluster != 1:
            tile += f"c{self.cluster}"
        parts = [self.kernel, self.family, self.dtype.short, width, tile]
        family = FAMILIES[self.family]
        options = family.options
        if self.kernel != "forward":
            more = family.fp8 if self.kernel == "forward_fp8" else family.backward
            assert more is not None
            options = more.options
        defaults = {option.name: option for option in options}
        for name, value in self.options:
            option = defaults.get(name)
            if option is not None and option.tag is not None and value != option.default:
                parts.append(f"{option.tag}{value}")
        if self.general:
            parts.append("general")
        return "_".join([*parts, self.mask])

    def option(self, name: str) -> int:
        """The value of one of the family's own parameters; 0 where the family has none of it."""
        return dict(self.options).get(name, 0)

    def m_blocks(self, problem: Problem) -> int:
        """Query blocks of a head, in all sequences where they are packed: at least as many."""
        if problem.is_packed:
            assert problem.rows_q is not None  # for the type checker: a Problem sets it
            return problem.rows_q // self.slot_rows + problem.batch
        return -(-problem.seqlen_q // self.slot_rows)

    @property
    def slot_heads(self) -> int:
        """Query heads that the blocks of a cluster work on together."""
        return self.cluster if self.option("PairHeads") else 1

    @property
    def slot_rows(self) -> int:
        """Queries of one head that the blocks of a cluster work on together."""
        return self.block_m * self.cluster // self.slot_heads


@dataclass(frozen=True)
class MapPlan:
    """How one tensor map of a kernel is cut: boxes of ``rows`` x ``chunk`` elements.

    Attributes:
        field: member of the parameter struct.
        tensor: "q", "k", "v" or "out".
        chunk: elements of head_dim in a box, one swizzle span.
        rows: sequence positions in a box.
        swizzle: span in bytes.
        ragged: whether it has rows twice (Note [Ragged maps] in ``kernels_cu/attn/ragged.cuh``).
        transposed: whether ``chunk`` counts sequence positions and ``rows`` elements of head_dim.
    """

    field: str
    tensor: str
    chunk: int
    rows: int
    swizzle: int
    ragged: bool
    transposed: bool = False


@dataclass(frozen=True)
class Candidate:
    """A kernel that may serve a problem, with the row of ``tuning.py`` that it is made from."""

    family: Family
    tile: Tile
    spec: KernelSpec


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a problem, and why no other does.

    Attributes:
        spec: the chosen kernel.
        rejections: (candidate, first condition that ruled it out) for every other.
    """

    spec: KernelSpec
    rejections: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rule:
    """A named condition: ``broken_by`` returns None when it holds, otherwise why it does not."""

    name: str
    broken_by: Callable[[Problem, DeviceInfo, Candidate], str | None]


@functools.lru_cache(maxsize=4096)
def spec_for(
    family: Family, tile: Tile, target: str, dtype: DType, mask: str, general: bool = False
) -> KernelSpec:
    """The kernel of one row of ``tuning.py``, for an element type, a mask kind and a target."""
    return KernelSpec(
        kernel="forward",
        family=family.name,
        target=target,
        dtype=dtype,
        head_dim_qk=tile.head_dim_qk,
        head_dim_v=tile.head_dim_v,
        mask=mask,
        block_m=tile.block_m,
        block_n=tile.block_n,
        stages=tile.stages,
        threads=tile.threads,
        min_blocks=tile.min_blocks,
        cluster=tile.cluster,
        scheduler=tile.scheduler,
        shared_bytes=family.shared_bytes(tile),
        options=family.option_values(tile),
        general=general,
    )


@functools.lru_cache(maxsize=4096)
def fp8_spec_for(
    family: Family, tile: Tile, target: str, out_dtype: DType, mask: str, general: bool = False
) -> KernelSpec:
    """The forward kernel of 8-bit floats of one row of ``tuning.py``, for a type of its output."""
    assert family.fp8 is not None
    options = dict(family.fp8.option_values(tile))
    options["Float16Out"] = int(out_dtype is DType.float16)
    return KernelSpec(
        kernel="forward_fp8",
        family=family.name,
        target=target,
        dtype=DType.float8_e4m3fn,
        head_dim_qk=tile.head_dim_qk,
        head_dim_v=tile.head_dim_v,
        mask=mask,
        block_m=tile.block_m,
        block_n=tile.block_n,
        stages=tile.stages,
        threads=tile.threads,
        min_blocks=tile.min_blocks,
        cluster=tile.cluster,
        scheduler=tile.scheduler,
        shared_bytes=family.fp8.shared_bytes(tile),
        options=tuple(options.items()),
        general=general,
    )


@functools.lru_cache(maxsize=4096)
def backward_spec_for(
    family: Family, tile: Tile, target: str, dtype: DType, mask: str, general: bool = False
) -> KernelSpec:
    """The main backward kernel of one row of ``tuning.py``."""
    assert family.backward is not None
    return KernelSpec(
        kernel="backward_keys" if dict(tile.options).get("Split") else "backward",
        family=family.name,
        target=target,
        dtype=dtype,
        head_dim_qk=tile.head_dim_qk,
        head_dim_v=tile.head_dim_v,
        mask=mask,
        block_m=tile.block_m,
        block_n=tile.block_n,
        stages=tile.stages,
        threads=tile.threads,
        min_blocks=tile.min_blocks,
        cluster=tile.cluster,
        scheduler=tile.scheduler,
        shared_bytes=family.backward.shared_bytes(tile),
        options=family.backward.option_values(tile),
        general=general,
    )


@functools.lru_cache(maxsize=256)
def backward_fp8_spec(head_dim: int, dtype: DType, mask: str, target: str) -> KernelSpec | None:
    """The main backward kernel over 8-bit floats for a head_dim, or None.

    Args:
        head_dim: of all tensors.
        dtype: of out, and of the gradients unless they are float32.
        mask: the kind of the mask.
        target: what it is built for; "sm_90a".
    """
    for tile in SM90_FP8_BACKWARD.tiles:
        if head_dim <= tile.head_dim_qk:
            spec = backward_spec_for(FAMILIES["sm90"], tile, target, dtype, mask)
            return dataclasses.replace(
                spec,
                kernel="backward_fp8",
                shared_bytes=SM90_FP8_BACKWARD.shared_bytes(tile),
                options=SM90_FP8_BACKWARD.option_values(tile),
            )
    return None


@functools.lru_cache(maxsize=256)
def backward_delta_fp8_spec(dtype: DType, target: str) -> KernelSpec:
    """The kernel that runs before ``backward_fp8``; ``dtype`` is that of out."""
    return _helper_spec("backward_delta_fp8", dtype, target, BACKWARD_DELTA_THREADS)


@functools.lru_cache(maxsize=256)
def backward_delta_spec(dtype: DType, target: str) -> KernelSpec:
    """The kernel that runs before a main backward kernel."""
    return _helper_spec("backward_delta", dtype, target, BACKWARD_DELTA_THREADS)


@functools.lru_cache(maxsize=256)
def backward_convert_spec(main: KernelSpec, target: str) -> KernelSpec:
    """The kernel that runs after ``main`` and makes dq of its sums."""
    return dataclasses.replace(
        _helper_spec("backward_convert", main.dtype, target, BACKWARD_CONVERT_THREADS),
        head_dim_qk=main.head_dim_qk,
        block_m=main.block_m,
        min_blocks=BACKWARD_CONVERT_BLOCKS,
        options=tuple((name, main.option(name)) for name in DQ_ORDER),
    )


@functools.lru_cache(maxsize=256)
def backward_queries_spec(main: KernelSpec) -> KernelSpec:
    """The kernel that makes dq beside ``main``, which makes dk and dv only."""
    tile = query_tile(main.head_dim_qk, main.head_dim_v)
    return dataclasses.replace(
        main,
        kernel="backward_queries",
        block_m=tile.block_m,
        block_n=tile.block_n,
        stages=tile.stages,
        threads=tile.threads,
        scheduler=tile.scheduler,
        shared_bytes=query_tile_bytes(tile),
        options=tile.options,
    )


def _helper_spec(kernel: str, dtype: DType, target: str, threads: int) -> KernelSpec:
    """A kernel of all families, which has no tiles and no shared memory."""
    return dataclasses.replace(merge_spec(dtype, target), kernel=kernel, threads=threads)


@functools.lru_cache(maxsize=256)
def merge_spec(dtype: DType, target: str) -> KernelSpec:
    """The kernel that merges parts of an element type (``MERGE_DTYPES``)."""
    return KernelSpec(
        kernel="merge",
        family="any",
        target=target,
        dtype=dtype,
        head_dim_qk=0,
        head_dim_v=0,
        mask="none",
        block_m=0,
        block_n=0,
        stages=0,
        threads=MERGE_THREADS,
        min_blocks=MERGE_BLOCKS,
        cluster=1,
        scheduler="persistent",
        shared_bytes=0,
        options=(),
    )


@functools.lru_cache(maxsize=256)
def quantize_spec(dtype: DType, target: str, pieces: int, rotate: bool) -> KernelSpec:
    """The kernel that quantizes an element type (``QUANTIZE_DTYPES``), with (pieces, rotate) of
    ``QUANTIZE_BLOCKS``."""
    return dataclasses.replace(
        _helper_spec("quantize", dtype, target, QUANTIZE_THREADS),
        min_blocks=QUANTIZE_BLOCKS[pieces, rotate],
        scheduler="single",
        shared_bytes=quantize_bytes(pieces),
        options=(("Pieces", pieces), ("Rotate", int(rotate))),
    )


def siblings(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The kernels that may serve the same dtype, head dimensions and mask at other lengths."""
    if spec.kernel != "forward":
        return ()
    family = FAMILIES[spec.family]
    return tuple(
        other
        for tile in family.tiles
        if (tile.head_dim_qk, tile.head_dim_v) == (spec.head_dim_qk, spec.head_dim_v)
        and spec.mask in tile.masks
        and spec.dtype in tile.dtypes
        and (not spec.general or family.general)
        and (other := spec_for(family, tile, spec.target, spec.dtype, spec.mask, spec.general))
        != spec
    )


def target_for(family: str, capability: tuple[int, int]) -> str | None:
    """What ``family`` is compiled for on a device, or None when it cannot run there.

    A cubin runs on its own capability and on later minors of the same major; ``a`` targets on
    theirs alone, ``f`` targets on the later minors of their family.
    """
    major, minor = capability
    if family == "sm90":
        return "sm_90a" if capability == (9, 0) else None
    if family == "sm100":
        return "sm_100f" if capability in ((10, 0), (10, 3)) else None
    if major < 8:
        return None
    if major in (8, 12):
        return f"sm_{major}0"
    return f"sm_{major}{minor}"


def native_target(capability: tuple[int, int]) -> str | None:
    """What a kernel for all architectures is compiled for on a device, or None where none runs."""
    targets = (target_for(family, capability) for family in FAMILIES)
    return next((target for target in targets if target is not None), None)


def candidates(
    problem: Problem, device: DeviceInfo, kernel: str = "forward"
) -> tuple[Candidate, ...]:
    """Every kernel that could be considered, the preferred first, whether it fits or not."""
    found = []
    for family in FAMILIES.values():
        target = target_for(family.name, device.capability) or _DEFAULT_TARGET[family.name]
        make, tiles, dtype = spec_for, family.tiles, problem.dtype
        if kernel == "forward" and dtype in FP8_DTYPES and family.fp8 is not None:
            make, tiles = fp8_spec_for, family.fp8.tiles
            assert problem.out_dtype is not None  # a Problem sets it
            dtype = problem.out_dtype
        if kernel == "backward":
            if family.backward is None:
                continue
            make, tiles = backward_spec_for, family.backward.tiles
        for tile in tiles:
            spec = make(family, tile, target, dtype, problem.mask_kind, problem.is_general)
            found.append(Candidate(family, tile, spec))
    return tuple(found)


def select(problem: Problem, device: DeviceInfo, kernel: str = "forward") -> Choice:
    """The preferred kernel that satisfies every rule.

    Args:
        problem: what is to be computed; for a backward pass also what is wrong with the addresses
            of dk and dv.
        device: where.
        kernel: "forward" or "backward".

    Raises:
        UnsupportedError: there is none; the message lists each candidate with the first condition
            that ruled it out.
    """
    chosen: KernelSpec | None = None
    rejections: list[tuple[str, str]] = []
    for label, spec, reason in _judge(problem, device, kernel):
        if reason is None and chosen is None:
            chosen = spec
        elif reason is None:
            assert chosen is not None  # for the type checker: the branch above has run
            rejections.append((label, f"preference: {chosen.name} comes first"))
        else:
            rejections.append((label, reason))
    if chosen is None:
        raise UnsupportedError(_unsupported_message(problem, device, kernel), rejections)
    forced = forced_family()
    if forced is not None:
        logger.info("CUPYFLASH_FAMILY=%s: %s", forced, chosen.name)
    return Choice(chosen, tuple(rejections))


def explain(
    problem: Problem,
    device: DeviceInfo,
    cubin: Callable[[KernelSpec], str],
    work: Callable[[Problem, KernelSpec], str],
) -> str:
    """The problem, the chosen kernel, whence its cubin, and what ruled out every other candidate.

    Args:
        problem: what is to be computed.
        device: where.
        cubin: says in words where the cubin of a kernel comes from (``CubinCache.locate``).
        work: says in words what a kernel will visit (``schedule.describe_work``).
    """
    lines = [f"problem  {describe_problem(problem)}", f"device   {describe_device(device)}"]
    if problem.is_empty:
        return "\n".join([*lines, "kernel   none: the output is empty, nothing is launched"])
    try:
        choice = select(problem, device)
    except UnsupportedError as error:
        rejections = error.rejections
        others = "candidates"
        lines.append("kernel   none")
    else:
        rejections = choice.rejections
        others = "other candidates"
        name, *details = describe_spec(choice.spec)
        lines += [f"kernel   {name}", *(f"         {line}" for line in details)]
        lines.append(f"cubin    {cubin(choice.spec)}")
        lines.append(f"work     {work(problem, choice.spec)}")
    lines.append(f"{others}, each with the first condition that ruled it out:")
    width = max((len(name) for name, _ in rejections), default=0)
    lines += [f"  {name:<{width}}  {reason}" for name, reason in rejections]
    return "\n".join(lines)


def describe_problem(problem: Problem, lengths: str | None = None, kernel: str = "forward") -> str:
    """One line: shapes, type, mask, scale. ``lengths`` stands for batch and lengths of packed
    sequences, which a ``Problem`` does not know."""
    bounds = []
    if problem.mask.left is not None:
        bounds.append(f"left {problem.mask.left}")
    if problem.mask.right is not None:
        bounds.append(f"right {problem.mask.right}")
    mask = f"window {', '.join(bounds)} ({problem.mask.align})" if bounds else "no mask"
    if bounds and problem.position_offset:
        mask += f" offset {problem.position_offset}"
    width = f"{problem.head_dim_qk}"
    if problem.head_dim_v != problem.head_dim_qk:
        width += f"/{problem.head_dim_v}"
    if lengths is None and problem.is_packed:
        lengths = f"packed, batch {problem.batch}, total {problem.rows_q} x {problem.rows_kv}"
    if lengths is None:
        lengths = f"batch {problem.batch}, seqlen {problem.seqlen_q} x {problem.seqlen_kv}"
    parts = [
        f"{kernel}, {lengths}, heads {problem.heads_q}/{problem.heads_kv}, head_dim {width}",
        f"{problem.dtype}, {mask}, softmax_scale {problem.softmax_scale:.6g}",
    ]
    if problem.scaling is not None:
        parts.append(f"out {problem.out_dtype}, {problem.scaling}")
    if problem.softcap:
        parts.append(f"softcap {problem.softcap:.6g}")
    if problem.want_lse:
        parts.append("lse")
    if problem.lengths:
        parts.append(f"on the device {', '.join(problem.lengths)}")
    return ", ".join(parts)


def describe_device(device: DeviceInfo) -> str:
    """One line: name, capability, multiprocessors, shared memory."""
    major, minor = device.capability
    return (
        f"{device.name}, compute capability {major}.{minor}, {device.num_sms} SMs, "
        f"{device.shared_memory_per_block} bytes of shared memory a block"
    )


def describe_spec(spec: KernelSpec) -> list[str]:
    """Name and target; tile and launch; the family's own parameters."""
    lines = [
        f"{spec.name} for {spec.target}",
        f"{spec.block_m} queries x {spec.block_n} keys a tile, {spec.stages} stages, "
        f"{spec.threads} threads, {spec.shared_bytes} bytes of shared memory, {spec.scheduler}",
    ]
    if spec.options:
        lines.append(", ".join(f"{name} {value}" for name, value in spec.options))
    return lines


def tensor_maps(spec: KernelSpec) -> tuple[MapPlan, ...]:
    """The tensor maps that a kernel's parameters hold; none for kernels without TMA.

    Each block of a cluster loads its share of a K and V tile, into all of them.
    """
    family = FAMILIES[spec.family]
    if not family.uses_tma:
        return ()

    def plan(tensor: str, width: int, rows: int) -> MapPlan:
        # A box is one swizzle span wide: 128 bytes where that divides the tile, else 64.
        chunk = 64 if width % 64 == 0 else 32
        swizzle = chunk * spec.dtype.itemsize
        return MapPlan(f"{tensor}_map", tensor, chunk, rows, swizzle, ragged=spec.general)

    def byte_plan(tensor: str, width: int, rows: int) -> MapPlan:
        span = next(span for span in (128, 64, 32) if width % span == 0)
        return MapPlan(f"{tensor}_map", tensor, span, rows, span, ragged=spec.general)

    if spec.kernel == "forward_fp8":
        chunk = 64 if spec.head_dim_v % 64 == 0 else 32
        value_rows = spec.head_dim_v // spec.cluster
        return (
            byte_plan("q", spec.head_dim_qk, family.map_rows),
            byte_plan("k", spec.head_dim_qk, spec.block_n // spec.cluster),
            MapPlan("v_map", "v", spec.block_n, value_rows, spec.block_n, False, transposed=True),
            MapPlan("out_map", "out", chunk, family.map_rows, 2 * chunk, ragged=spec.general),
        )
    return (
        plan("q", spec.head_dim_qk, family.map_rows),
        plan("k", spec.head_dim_qk, spec.block_n // spec.cluster),
        plan("v", spec.head_dim_v, spec.block_n // spec.cluster),
        plan("out", spec.head_dim_v, family.map_rows),
    )


def forced_family() -> str | None:
    """The family named by CUPYFLASH_FAMILY, or None.

    Raises:
        ValueError: the variable names no family.
    """
    forced = os.environ.get("CUPYFLASH_FAMILY") or None
    if forced is not None and forced not in FAMILIES:
        raise ValueError(f"CUPYFLASH_FAMILY={forced}: expected one of {', '.join(FAMILIES)}")
    return forced


# --- rules: of a whole family, then of one tile ------------------------------------------------


def _device_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    if target_for(candidate.family.name, device.capability) is not None:
        return None
    needs = {"sm100": "10.0 or 10.3", "sm90": "9.0", "sm80": "8.0 or later"}[candidate.family.name]
    major, minor = device.capability
    return f"needs compute capability {needs}, {device.name} has {major}.{minor}"


def _forced_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    forced = forced_family()
    return None if forced in (None, candidate.family.name) else f"CUPYFLASH_FAMILY={forced} is set"


def _fp8_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    if problem.dtype not in FP8_DTYPES:
        return None
    scaling, scale = problem.scaling, problem.softmax_scale
    if candidate.spec.kernel != "forward_fp8":
        return "has no fp8 kernel yet"
    if problem.dtype is not DType.float8_e4m3fn:
        return f"serves float8_e4m3fn, got {problem.dtype}"
    if scaling is None or not scaling.v_slot:
        return "takes values that quantize has transposed, not row-major ones yet"
    if scaling.out:
        return "writes no 8-bit output yet"
    if scale is not None and scale <= 0:
        return f"needs a softmax_scale above 0, got {scale:.6g}"
    if "seqused_kv" in problem.lengths:
        return "does not read seqused_kv yet"
    return None


def _dtype_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    if candidate.spec.kernel == "forward_fp8":
        if problem.out_dtype in DTYPES:
            return None
        return f"writes float16 and bfloat16, {problem.out_dtype} was asked for"
    if problem.dtype not in DTYPES:
        return f"serves float16 and bfloat16, got {problem.dtype}"
    if problem.out_dtype != problem.dtype:
        return f"writes the inputs' dtype, {problem.out_dtype} was asked for"
    return None


def _general_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    if candidate.family.general or not problem.is_general:
        return None
    if problem.softcap:
        return "has no softcap yet"
    return f"does not read {problem.lengths[0]} yet"


def _head_dim_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    for name, head_dim in _head_dims(problem):
        if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
            return (
                f"{name} must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {head_dim}"
            )
    return None


def _address_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    if candidate.family.uses_tma:
        unit, why = "TMA", problem.why_no_tma
    else:
        unit, why = "cp.async", problem.why_unaligned
    for tensor in ("q", "k", "v", "out", "dq", "dk", "dv"):
        reason = why(tensor)
        if reason is not None:
            return f"{unit} cannot address {tensor}: {reason}"
    return None


def _width_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    widths = (candidate.spec.head_dim_qk, candidate.spec.head_dim_v)
    for (name, head_dim), width in zip(_head_dims(problem), widths):
        if head_dim > width:
            return f"{name} is {head_dim}, the tile is {width} wide"
    return None


def _head_dims(problem: Problem) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("head_dim of q and k", problem.head_dim_qk), ("head_dim of v", problem.head_dim_v)


def _mask_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    served = candidate.tile.masks
    if problem.mask_kind in served:
        return None
    return f"mask kind is {problem.mask_kind}, the tile serves {', '.join(served)}"


def _tile_dtype_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    served = candidate.tile.dtypes
    if problem.dtype in served or candidate.spec.kernel == "forward_fp8":
        return None
    return f"this tile serves {', '.join(map(str, served))}, got {problem.dtype}"


def _length_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    limit = candidate.tile.max_seqlen
    longest = max(problem.seqlen_q, problem.seqlen_kv)
    if limit is None or longest <= limit:
        return None
    return f"the tile is for at most {limit} queries and keys, got {longest}"


def _shared_memory_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    needed, available = candidate.spec.shared_bytes, device.shared_memory_per_block
    if needed > available:
        return f"needs {needed} bytes of shared memory a block, the device has {available}"
    blocks = candidate.spec.min_blocks
    if device_bytes(needed, blocks) > available:
        return f"{blocks} blocks of {needed} bytes of shared memory do not fit on a multiprocessor"
    return None


def _cluster_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    cluster = candidate.spec.cluster
    if cluster > 1 and not problem.clusters:
        return "the launch has no clusters of blocks"
    if candidate.spec.slot_heads > 1:
        if problem.group % candidate.spec.slot_heads == 0:
            return None
        return f"{problem.group} query heads share a key head, its blocks take them in pairs"
    blocks = -(-problem.seqlen_q // candidate.spec.block_m)
    idle = -blocks % cluster
    if idle * _LEAST_BUSY <= blocks:
        return None
    return f"{idle} of the {blocks + idle} blocks of a head, {cluster} in a cluster, would be idle"


def _num_sms_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    if problem.num_sms is None or candidate.spec.scheduler == "persistent":
        return None
    return "the kernel runs one block a tile, its grid cannot be limited"


def _tiles_rule(problem: Problem, device: DeviceInfo, candidate: Candidate) -> str | None:
    batch = 1 if problem.is_packed else problem.batch
    tiles = candidate.spec.m_blocks(problem) * problem.heads_q * batch
    if candidate.spec.kernel not in FORWARD_KERNELS:  # its workspace has a row for every query
        rows = tiles * candidate.spec.block_m
        return None if rows <= MAX_TILES else f"{rows} rows exceed the workspace's {MAX_TILES}"
    return None if tiles <= MAX_TILES else f"{tiles} tiles exceed the grid's {MAX_TILES}"


FAMILY_RULES = (
    Rule("device", _device_rule),
    Rule("forced family", _forced_rule),
    Rule("fp8", _fp8_rule),
    Rule("dtype", _dtype_rule),
    Rule("lengths", _general_rule),
    Rule("head_dim", _head_dim_rule),
    Rule("addresses", _address_rule),
)
TILE_RULES = (
    Rule("width", _width_rule),
    Rule("dtype", _tile_dtype_rule),
    Rule("mask", _mask_rule),
    Rule("lengths", _length_rule),
    Rule("shared memory", _shared_memory_rule),
    Rule("cluster", _cluster_rule),
    Rule("num_sms", _num_sms_rule),
    Rule("tiles", _tiles_rule),
)


def _judge(
    problem: Problem, device: DeviceInfo, kernel: str
) -> Iterator[tuple[str, KernelSpec, str | None]]:
    """(label, candidate, first broken rule) in order; one entry for a family ruled out whole."""
    for family, group in itertools.groupby(
        candidates(problem, device, kernel), key=lambda candidate: candidate.family
    ):
        members = list(group)
        reason = _first_broken(FAMILY_RULES, problem, device, members[0])
        if reason is not None:
            yield f"{family.name} (all {len(members)} tiles)", members[0].spec, reason
            continue
        for candidate in members:
            reason = _first_broken(TILE_RULES, problem, device, candidate)
            yield candidate.spec.name, candidate.spec, reason


def _first_broken(
    rules: tuple[Rule, ...], problem: Problem, device: DeviceInfo, candidate: Candidate
) -> str | None:
    for rule in rules:
        reason = rule.broken_by(problem, device, candidate)
        if reason is not None:
            return f"{rule.name}: {reason}"
    return None


def _unsupported_message(problem: Problem, device: DeviceInfo, kernel: str) -> str:
    return (
        f"no kernel serves {describe_problem(problem, kernel=kernel)} on "
        f"{describe_device(device)}. Supported on GPUs: float16 and bfloat16, head_dim a multiple "
        f"of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, 16-byte aligned addresses and strides. "
        "Candidates, each with the first condition that "
        "ruled it out:"
    )
