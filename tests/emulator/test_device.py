"""The emulated device and its memory, and the cache of built kernels."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cupyflash import emulate, gxx
from cupyflash.errors import CompileError, EmulationError
from tests.emulator.harness import Kernel, Launch, run

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]

DTYPES = (
    np.float16,
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.int32,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("guard", ["after", "before"])
def test_arrays_keep_their_contents(dtype: type, guard: str) -> None:
    device = emulate.device("sm_80", guard=guard)
    values = np.arange(30).reshape(2, 3, 5).astype(dtype)
    array = device.array(values)
    np.testing.assert_array_equal(array.numpy(), values)
    assert (array.shape, array.dtype, array.strides) == (values.shape, values.dtype, values.strides)
    assert array.pointer % 16 == 0
    assert not array.readonly
    view = array[1:, ::2, ::-1]
    np.testing.assert_array_equal(view.numpy(), values[1:, ::2, ::-1])
    assert view.pointer == array.pointer + array.strides[0] + 4 * array.strides[2]
    np.testing.assert_array_equal(array.transpose(2, 0, 1).numpy(), values.transpose(2, 0, 1))


def test_fresh_arrays_are_nan() -> None:
    array = emulate.device("sm_80").empty((3, 1000), ml_dtypes.bfloat16)
    assert np.isnan(array.numpy().astype(np.float32)).all()


def test_empty_arrays_exist() -> None:
    array = emulate.device("sm_80").array(np.zeros((0, 4), np.float32))
    assert array.shape == (0, 4)
    assert array.pointer % 16 == 0


def test_only_views_by_index() -> None:
    array = emulate.device("sm_80").array(np.zeros(4, np.float32))
    with pytest.raises(IndexError, match="basic indexing"):
        array[[0, 1]]


def test_a_view_keeps_the_memory_alive() -> None:
    device = emulate.device("sm_80")
    view = device.array(np.arange(5000, dtype=np.float32))[4990:]
    for _ in range(10):
        device.empty(5000, np.float32)
    np.testing.assert_array_equal(view.numpy(), np.arange(4990, 5000))


def test_writes_beside_an_array_are_seen() -> None:
    kernel = Kernel("if (tid() == 0) stg_f32(params.out - 1, 0.0f);")
    with pytest.raises(EmulationError, match="wrote beside an array"):
        run(kernel, Launch(out=np.zeros(1000, np.float32)))


def test_device_options_are_checked() -> None:
    with pytest.raises(ValueError, match="schedule: expected one of early, late"):
        emulate.device("sm_80", "sometimes")
    with pytest.raises(ValueError, match="guard"):
        emulate.device("sm_80", guard="around")
    assert emulate.device("sm_90a", seed=4) is emulate.device("sm_90a", seed=4)
    assert emulate.device("sm_90a", seed=4).index != emulate.device("sm_90a", seed=5).index
    assert emulate.device("sm_103a").info.capability == (10, 3)


def test_launches_are_checked() -> None:
    kernel = Kernel("stg_f32(params.out, 1.0f);").build()
    with pytest.raises(ValueError, match="schedule"):
        emulate.run(kernel, 1, bytes(448), schedule="backwards")
    with pytest.raises(EmulationError, match="parameters of 100 bytes, the kernel takes 448"):
        emulate.run(kernel, 1, bytes(100))
    with pytest.raises(EmulationError, match="200000 bytes of shared memory: sm_80 has 166912"):
        emulate.run(kernel, 1, bytes(448), shared_bytes=200_000)
    with pytest.raises(EmulationError, match="a grid of 0 CTAs"):
        emulate.run(kernel, 0, bytes(448))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that holds the emulator itself and no kernel."""
    library = gxx.emulator_library()
    folder = tmp_path / "emulate"
    folder.mkdir()
    shutil.copy(library, folder)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    return folder


def test_a_kernel_is_compiled_once(empty_cache: Path) -> None:
    kernel = Kernel("stg_f32(params.out, float(kMutant));")
    first = kernel.build()
    second = kernel.build()
    assert first.seconds > 0
    assert second.seconds == 0
    assert first.path == second.path
    mutant = Kernel(kernel.body, defines=("CF_MUTANT=7",))
    assert mutant.build().path != first.path
    assert run(mutant)[0][0] == 7
    assert {path.suffix for path in empty_cache.iterdir()} == {".so", ".lock"}


def _build(_: int) -> str:
    return str(Kernel("stg_f32(params.out, 3.5f);").build().path)


def test_processes_share_the_cache(empty_cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = set(pool.map(_build, range(3)))
    assert len(paths) == 1
    assert len(list(empty_cache.glob("test-*.so"))) == 1


def test_a_compile_error_shows_what_g_plus_plus_says() -> None:
    with pytest.raises(CompileError, match="no_such_instruction"):
        Kernel("no_such_instruction();").build()


def test_the_report_counts() -> None:
    _, report = run(Kernel("stg_f32(params.out + tid(), 1.0f); vote_any(true);"))
    assert report.bytes_to_global == 128
    assert report.switches >= 31
    assert report.mma == report.operations == 0
    assert report.seconds > 0
