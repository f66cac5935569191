"""merge on every path: NumPy, the kernel on the emulator, CuPy.

The truth is reference.merge in float64; the kernel must also agree with the CPU path. Whatever lies
between the rows of strided inputs is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyflash
from cupyflash import host, merging, reference, select
from cupyflash.params import MAX_MERGE_PARTS, MERGE
from cupyflash.tensor import DType
from tests.paths import (
    CUPY,
    EVERY_PATH,
    NUMPY,
    SCHEDULES,
    TARGETS,
    EmulatedPath,
    Path,
    emulated,
    every_path,
)
from tests.test_launch import FakeArray, fake_cupy, library_path, stub, stub_path  # noqa: F401

DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
}

every_device = pytest.mark.parametrize("path", EVERY_PATH[1:], ids=str)


def log_sum_exps(rng: Any, num_parts: int, shape: tuple[int, ...], spread: float) -> NDArray:
    return rng.normal(0, spread, (num_parts, *shape)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """Parts to merge.

    Attributes:
        shape: of an out, packed if it has three dimensions.
        placed: "dense"; "bhsd" (heads before seqlen in memory; lse with heads last); "padded" (rows
            apart by 8 elements) "odd" (rows apart by one element, 16-byte loads are impossible);
            "shifted" (one element behind an aligned address); "reversed" (negative strides).
        base: of every lse.
    """

    shape: tuple[int, ...]
    num_parts: int = 2
    placed: str = "dense"
    base: float = 0.0
    spread: float = 3.0
    name: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return self.name or f"{shape}-{self.num_parts}-{self.placed}"

    def values(self, dtype: str) -> tuple[list[NDArray], list[NDArray]]:
        """outs and lses, dense."""
        rng = np.random.default_rng(len(self.shape) * 1000 + self.num_parts)
        *leading, seqlen, heads, _ = self.shape
        outs = rng.standard_normal((self.num_parts, *self.shape)).astype(DTYPES[dtype])
        lses = self.base + log_sum_exps(rng, self.num_parts, (*leading, heads, seqlen), self.spread)
        return list(outs), list(lses.astype(np.float32))

    def on(self, path: Path, dtype: str) -> tuple[list[Any], list[Any]]:
        """The same, on a path and in their places."""
        outs, lses = self.values(dtype)
        return [self._place(path, x) for x in outs], [self._place(path, x, True) for x in lses]

    def _place(self, path: Path, x: NDArray, is_lse: bool = False) -> Any:
        if self.placed == "dense":
            return path.array(x)
        if self.placed == "bhsd":
            axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2) if is_lse else (0, 2, 1, 3)
            return path.array(np.ascontiguousarray(x.transpose(axes))).transpose(*axes)
        if self.placed == "reversed":
            return path.array(np.ascontiguousarray(x[:, ::-1]))[:, ::-1]
        if self.placed == "shifted":
            buffer = np.full((*x.shape[:-1], x.shape[-1] + 8), np.nan, x.dtype)
            buffer[..., 1 : 1 + x.shape[-1]] = x
            return path.array(buffer)[..., 1 : 1 + x.shape[-1]]
        extra = {"padded": 8, "odd": 1}[self.placed]
        buffer = np.full((*x.shape[:-1], x.shape[-1] + extra), np.nan, x.dtype)
        buffer[..., : x.shape[-1]] = x
        return path.array(buffer)[..., : x.shape[-1]]


CASES = [
    *(Case((2, 13, 3, head_dim), parts) for head_dim, parts in ((8, 2), (40, 3), (64, 2))),
    *(Case((2, 13, 3, head_dim), parts) for head_dim, parts in ((128, 5), (200, 4), (5, 3))),
    Case((1, 3, 2, 300), 2, name="wider_than_a_warp"),
    Case((1, 2, 1, 1), 2),
    Case((45, 3, 64), 3, name="packed"),
    Case((45, 3, 7), 9, name="packed_odd"),
    Case((1, 9, 2, 64), 1, name="one_part"),
    Case((1, 9, 2, 64), 32, name="32_parts"),
    Case((1, 9, 2, 24), 32, name="32_parts_narrow"),
    Case((1, 5, 2, 33), 31, name="31_parts_odd"),
    Case((2, 101, 3, 16), 2, name="more_rows_than_the_grid"),
    *(Case((2, 6, 3, 64), 3, placed) for placed in ("bhsd", "padded", "odd", "reversed")),
    Case((2, 6, 3, 64), 3, "shifted"),
    Case((2, 6, 3, 128), 2, base=1e4, name="large_lse"),
    Case((2, 6, 3, 128), 2, base=-1e4, name="large_negative_lse"),
    Case((2, 6, 3, 40), 4, spread=100, name="far_apart"),
]


def merged(path: Path, outs: list[Any], lses: list[Any]) -> tuple[NDArray, NDArray]:
    out, lse = cupyflash.merge(outs, lses, return_lse=True)
    assert type(out) is type(outs[0]) and out.dtype == outs[0].dtype and lse.dtype == np.float32
    assert out.shape == outs[0].shape and lse.shape == lses[0].shape
    return path.numpy(out), path.numpy(lse)


def assert_merged(out: NDArray, lse: NDArray, outs: list[NDArray], lses: list[NDArray]) -> None:
    """Rounding once to the type of the parts, and float32's own errors."""
    expected, expected_lse = reference.merge(outs, lses)
    rtol = 1.01 * reference.unit_roundoff(out.dtype) + 2e-6
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=rtol, atol=4e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-7, atol=1e-6)


def check(path: Path, case: Case, dtype: str) -> None:
    outs, lses = case.values(dtype)
    out, lse = merged(path, *case.on(path, dtype))
    assert_merged(out, lse, outs, lses)
    by_host, lse_by_host = host.merge(outs, lses)
    rtol = 2.02 * reference.unit_roundoff(out.dtype) + 4e-6
    np.testing.assert_allclose(
        out.astype(np.float64), by_host.astype(np.float64), rtol=rtol, atol=8e-6
    )
    np.testing.assert_allclose(lse, lse_by_host, rtol=4e-7, atol=2e-6)


# --- every case -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy(case: Case, dtype: str) -> None:
    check(NUMPY, case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [pytest.param(t, marks=emulated) for t in TARGETS])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_emulated(target: str, dtype: str, schedule: str, seed: int) -> None:
    path = EmulatedPath(
        target,
        {"schedule": schedule, "seed": seed, "num_sms": 1, "race": "global", "window": 1 + seed},
    )
    for case in CASES:
        try:
            check(path, case, dtype)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("guard", ["before", "after"])
@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_nothing_is_read_beside_the_arrays(target: str, guard: str) -> None:
    path = EmulatedPath(target, {"guard": guard, "sanitize": True})
    for dtype in DTYPES:
        for case in CASES[:8]:
            check(path, case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu(case: Case, dtype: str, poisoned_pool: Any) -> None:
    check(CUPY, case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_at_size(dtype: str, poisoned_pool: Any) -> None:
    check(CUPY, Case((2, 2048, 16, 128), 3, name="large"), dtype)


# --- special values -------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 5])
def test_empty_parts_count_for_nothing(path: Path, dtype: str, head_dim: int) -> None:
    """A part that saw no key may hold anything; a row without any is 0 and -inf."""
    case = Case((1, 8, 2, head_dim), 3)
    outs, lses = case.values(dtype)
    for index in range(3):
        lses[index][0, :, index] = -np.inf  # of one part, in one row each
        outs[index][0, index] = np.nan
        lses[index][0, :, 6:] = -np.inf  # of all
        outs[index][0, 6] = np.nan
        outs[index][0, 7] = np.inf
    out, lse = merged(path, [path.array(x) for x in outs], [path.array(x) for x in lses])
    assert not out[0, 6:].any() and (lse[0, :, 6:] == -np.inf).all()
    assert np.isfinite(out.astype(np.float32)).all() and np.isfinite(lse[0, :, :6]).all()
    rows = slice(0, 6)
    seen = [np.where(np.isfinite(x.astype(np.float32)), x, 0).astype(x.dtype) for x in outs]
    assert_merged(
        out[:, rows], lse[..., rows], [x[:, rows] for x in seen], [x[..., rows] for x in lses]
    )


@every_path
@pytest.mark.parametrize("head_dim", [64, 5])
@pytest.mark.parametrize("others", [0.0, -np.inf])
def test_nan_lse_reaches_its_row_alone(path: Path, head_dim: int, others: float) -> None:
    outs = [np.ones((1, 4, 2, head_dim), np.float16)] * 3
    lses = [np.full((1, 2, 4), others, np.float32) for _ in range(3)]
    lses[1][0, 1, 2] = np.nan
    out, lse = merged(path, [path.array(x) for x in outs], [path.array(x) for x in lses])
    is_nan = np.zeros((1, 4, 2), bool)
    is_nan[0, 2, 1] = True
    assert (np.isnan(out) == is_nan[..., None]).all()
    assert (np.isnan(lse) == is_nan.swapaxes(1, 2)).all()


@every_path
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_parts_that_count_are_kept(path: Path, dtype: str) -> None:
    """One part: its own bits, subnormals, infinities and NaN included. Two: inf and NaN stay."""
    limits = ml_dtypes.finfo(DTYPES[dtype])
    special = np.array(
        [0, -0.0, 1, -2.5, limits.tiny, -limits.smallest_subnormal, limits.max, limits.min]
        + [np.inf, -np.inf, np.nan, 3 * float(limits.smallest_subnormal), -limits.max, 7, 8, 9],
        DTYPES[dtype],
    )
    for columns in (slice(0, 16), slice(0, 15)):
        x = np.tile(special[columns], (1, 3, 2, 1))
        lse = np.full((1, 2, 3), 2.5, np.float32)
        out, merged_lse = merged(path, [path.array(x)], [path.array(lse)])
        wide = x.astype(np.float64)
        np.testing.assert_array_equal(out.astype(np.float64), wide)
        np.testing.assert_array_equal(merged_lse, lse)
        out, _ = merged(path, [path.array(x), path.array(x)], [path.array(lse)] * 2)
        special_ones = ~np.isfinite(wide)
        np.testing.assert_array_equal(out.astype(np.float64)[special_ones], wide[special_ones])


@every_path
def test_merging_partial_results(path: Path) -> None:
    """B26: keys 0 to 63 with v = 1, keys 64 to 79 with v = 0; a mix-up of bases gives 0.8808."""
    x = np.zeros((1, 80, 1, 64), np.float16)
    v = x.copy()
    v[:, :64] = 1
    parts = [
        cupyflash.attention(*map(path.array, (x[:, :3], x[:, keys], v[:, keys])), return_lse=True)
        for keys in (slice(0, 64), slice(64, 80))
    ]
    outs, lses = zip(*parts)
    out, lse = merged(path, list(outs), list(lses))
    np.testing.assert_allclose(out.astype(np.float64), 0.8, rtol=2.0**-11)
    np.testing.assert_allclose(lse, 4.382027, rtol=1e-6)
    np.testing.assert_array_equal(path.numpy(cupyflash.merge(outs, lses)), out)


@every_path
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, -np.inf), (0, -np.inf)], (0, -np.inf)),
        ([(1, 0), (2, 200)], (2, 200)),
        ([(2, 200), (1, 0)], (2, 200)),
        ([(1, -200), (3, -200)], (2, -200 + math.log(2))),
        ([(0, -np.inf), (5, 3)], (5, 3)),
    ],
    ids=str,
)
def test_merging_extreme_parts(path: Path, parts: Any, expected: tuple[float, float]) -> None:
    """B29: -inf - -inf is NaN, and exp(200) overflows."""
    outs = [path.array(np.full((1, 1, 1, 4), out, np.float32)) for out, _ in parts]
    lses = [path.array(np.full((1, 1, 1), lse, np.float32)) for _, lse in parts]
    out, lse = merged(path, outs, lses)
    np.testing.assert_allclose(out, expected[0], rtol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


@every_path
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 32])
def test_splits_without_keys(path: Path, splits: int) -> None:
    """B41: more splits than blocks of keys; the empty ones are merged as nothing."""
    keys = 20
    q, k = np.zeros((1, 2, 1, 64), np.float16), np.zeros((1, keys, 1, 64), np.float16)
    size = -(-keys // min(splits, 4))
    parts = []
    for split in range(splits):
        part = path.array(np.ascontiguousarray(k[:, split * size : (split + 1) * size] + 1))
        parts.append(cupyflash.attention(path.array(q), part, part, return_lse=True))
    out, lse = merged(path, *map(list, zip(*parts)))
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, math.log(keys), rtol=1e-6)


@every_path
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_of_the_keys_make_the_whole(path: Path, dtype: str) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((2, seqlen, heads, 64)).astype(DTYPES[dtype])
        for seqlen, heads in ((33, 4), (150, 2), (150, 2))
    )
    whole, whole_lse = cupyflash.attention(*map(path.array, (q, k, v)), return_lse=True)
    parts = [
        cupyflash.attention(
            *(path.array(np.ascontiguousarray(x)) for x in (q, k[:, keys], v[:, keys])),
            return_lse=True,
        )
        for keys in (slice(0, 70), slice(70, 150))
    ]
    out, lse = merged(path, *map(list, zip(*parts)))
    atol = 2 * reference.unit_roundoff(out.dtype)
    np.testing.assert_allclose(
        out.astype(np.float64), path.numpy(whole).astype(np.float64), rtol=2 * atol, atol=atol
    )
    np.testing.assert_allclose(lse, path.numpy(whole_lse), rtol=1e-5)


@every_path
@pytest.mark.parametrize(
    ("shape", "lse_shape"),
    [((0, 4, 2, 8), (0, 2, 4)), ((2, 0, 2, 8), (2, 2, 0)), ((0, 2, 8), (2, 0))],
)
def test_no_rows(path: Path, shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> None:
    outs = [path.array(np.zeros(shape, np.float16))] * 2
    lses = [path.array(np.zeros(lse_shape, np.float32))] * 2
    merged(path, outs, lses)


@every_path
def test_rows_without_columns_have_an_lse(path: Path) -> None:
    outs = [path.array(np.zeros((1, 4, 2, 0), np.float16))] * 2
    lses = [path.array(np.zeros((1, 2, 4), np.float32))] * 2
    _, lse = merged(path, outs, lses)
    np.testing.assert_allclose(lse, math.log(2), rtol=1e-6)


# --- what is refused ------------------------------------------------------------------------------


@every_device
def test_what_the_kernel_does_not_take(path: Path) -> None:
    out = path.array(np.zeros((1, 4, 2, 8), np.float16))
    lse = path.array(np.zeros((1, 2, 4), np.float32))
    with pytest.raises(ValueError, match="at most 32 parts on a GPU, got 33"):
        cupyflash.merge([out] * 33, [lse] * 33)
    with pytest.raises(cupyflash.UnsupportedError, match="float64 has no GPU kernel"):
        cupyflash.merge([path.array(np.zeros((1, 4, 2, 8)))], [lse])
    with pytest.raises(TypeError, match=r"lses\[1\]: expected float32 on a GPU, got float64"):
        cupyflash.merge([out, out], [lse, path.array(np.zeros((1, 2, 4)))])
    wide = path.array(np.zeros((1, 4, 2, 16), np.float16))[..., ::2]
    with pytest.raises(ValueError, match=r"outs\[1\]: the last dimension must be contiguous"):
        cupyflash.merge([out, wide], [lse, lse])


def test_the_cpu_takes_any_number_of_parts() -> None:
    outs, lses = Case((1, 4, 2, 8), 40).values("float32")
    assert_merged(*cupyflash.merge(outs, lses, return_lse=True), outs, lses)


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_parts_lie_on_one_device(target: str) -> None:
    here, there = (EmulatedPath(target, {"num_sms": sms}) for sms in (2, 3))
    outs, lses = Case((1, 4, 2, 8)).values("float16")
    with pytest.raises(TypeError, match=r"outs\[1\]: expected an array on emulated"):
        cupyflash.merge([here.array(outs[0]), there.array(outs[1])], [here.array(x) for x in lses])


# --- the launch -----------------------------------------------------------------------------------


def test_the_struct_fits_a_launch() -> None:
    assert MERGE.size <= 4096
    assert MERGE.offsets["parts[1].out"] - MERGE.offsets["parts[0].out"] == 64
    assert f"parts[{MAX_MERGE_PARTS - 1}].out" in MERGE.offsets


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), None),
        *(((8, minor), "sm_80") for minor in (0, 6, 9)),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100f"),
        ((10, 3), "sm_100f"),
        ((12, 0), "sm_120"),
    ],
)
def test_targets(capability: tuple[int, int], target: str | None) -> None:
    assert select.native_target(capability) == target


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16, DType.float32], ids=str)
@pytest.mark.parametrize("target", [*TARGETS, "sm_120"])
def test_no_spills(dtype: DType, target: str) -> None:
    from cupyflash import nvrtc, source

    if nvrtc.installed_version() is None:
        pytest.skip("no NVRTC")
    spec = select.merge_spec(dtype, target)
    compiled = nvrtc.compile(source.translation_unit(spec))
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert compiled.registers <= 65536 // (spec.threads * spec.min_blocks)


def test_a_launch_on_a_gpu(stub: Any, fake_cupy: Any) -> None:  # noqa: F811
    """On CuPy's current stream, with the addresses and strides of the parts."""
    outs = [FakeArray((2, 100, 3, 64), np.float16) for _ in range(3)]
    lses = [FakeArray((2, 3, 100), np.float32) for _ in range(3)]
    fake_cupy.cuda.streams[0] = 0x55
    stub.log.params_bytes = 1024  # all that the stub keeps
    out, lse = cupyflash.merge(outs, lses, return_lse=True)
    assert out.shape == outs[0].shape and lse.shape == lses[0].shape
    assert stub.log.launches == 1 and stub.log.stream == 0x55
    spec = select.merge_spec(DType.float16, "sm_90a")
    rows_of_block = spec.threads // 8
    assert tuple(stub.log.grid) == (-(-600 // rows_of_block), 1, 1)
    assert tuple(stub.log.block) == (spec.threads, 1, 1)
    values = MERGE.unpack(bytes(stub.log.params).ljust(MERGE.size, b"\0"))
    assert (values["out"], values["lse"]) == (out.data.ptr, lse.data.ptr)
    assert (values["num_rows"], values["num_parts"], values["vectors"]) == (600, 3, 1)
    for index in range(3):
        assert values[f"parts[{index}].out"] == outs[index].data.ptr
        assert values[f"parts[{index}].lse"] == lses[index].data.ptr
        assert values[f"parts[{index}].out_stride_batch"] == 100 * 3 * 64
        assert values[f"parts[{index}].lse_stride_head"] == 100
    cupyflash.merge(outs, lses)
    values = MERGE.unpack(bytes(stub.log.params).ljust(MERGE.size, b"\0"))
    assert stub.log.launches == 2 and values["lse"] == 0


def test_a_cold_kernel_inside_a_capture(stub: Any, fake_cupy: Any) -> None:  # noqa: F811
    out, lse = FakeArray((1, 2, 3, 8), np.float16), FakeArray((1, 3, 2), np.float32)
    fake_cupy.cuda.streams[0] = stub.log.capturing_stream = 0x66
    with pytest.raises(RuntimeError, match=r"captured.*call merge once before"):
        cupyflash.merge([out], [lse])
    stub.log.capturing_stream = 0
    cupyflash.merge([out], [lse])
    stub.log.capturing_stream = 0x66
    cupyflash.merge([out], [lse])
    assert stub.log.launches == 2


def test_a_wheel_carries_the_merges() -> None:
    from aot import recipes

    for target in recipes.RECIPES["core"]:
        carried = {spec for spec in recipes.specs("core", (target,)) if spec.kernel == "merge"}
        assert carried == {select.merge_spec(DType[dtype], target) for dtype in DTYPES}


def test_the_grid_is_a_few_blocks_an_sm() -> None:
    from tests.test_launch import H200, view

    spec = select.merge_spec(DType.bfloat16, "sm_90a")
    out = view((4, 8192, 32, 128), 0x10000)
    lse = view((4, 32, 8192), 0x20000, dtype=DType.float32)
    made = merging.merge_launch(spec, H200, [(out, lse)] * 2, (out, None))
    assert made.grid == (spec.min_blocks * H200.num_sms, 1, 1)


@pytest.mark.gpu
def test_cuda_graph(cupy: Any) -> None:
    outs, lses = Case((1, 64, 4, 64)).values("float16")
    given = [cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses]
    cupyflash.merge(*given)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out, lse = cupyflash.merge(*given, return_lse=True)
        graph = stream.end_capture()
        for x in given[0]:
            x *= 2
        graph.launch(stream)
        stream.synchronize()
    assert_merged(out.get(), lse.get(), [2 * x for x in outs], lses)


@pytest.mark.gpu
def test_cupy_stream(cupy: Any) -> None:
    """Enqueued behind what the current stream still has to do, and nothing waits."""
    outs, lses = Case((4, 512, 8, 128)).values("bfloat16")
    cupyflash.merge([cupy.asarray(x) for x in outs], [cupy.asarray(x) for x in lses])
    stream = cupy.cuda.Stream(non_blocking=True)
    sources = [cupy.asarray(x) for x in outs]
    given = [cupy.zeros_like(x) for x in sources]
    logs = [cupy.asarray(x) for x in lses]
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(50):
            busy = cupy.ones((2048, 2048), cupy.float32)
            busy @= busy
        for x, y in zip(given, sources):
            x[...] = y
        out, lse = cupyflash.merge(given, logs, return_lse=True)
        assert not stream.done
        stream.synchronize()
    assert_merged(out.get(), lse.get(), outs, lses)


@pytest.mark.gpu
def test_torch(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    outs, lses = Case((2, 40, 3, 64), 3).values("float16")
    given = [[torch.from_numpy(x).cuda() for x in part] for part in (outs, lses)]
    out, lse = cupyflash.merge(*given, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float16
    assert_merged(out.cpu().numpy(), lse.cpu().numpy(), outs, lses)


@pytest.mark.gpu
def test_jax(cupy: Any) -> None:
    jax = pytest.importorskip("jax")
    outs, lses = Case((2, 40, 3, 64), 3).values("bfloat16")
    device = jax.devices("cuda")[0]
    given = [[jax.device_put(jax.numpy.asarray(x), device) for x in part] for part in (outs, lses)]
    out, lse = cupyflash.merge(*given, return_lse=True)
    assert isinstance(out, jax.Array)
    assert_merged(np.asarray(out), np.asarray(lse), outs, lses)
