"""Markers and fixtures shared by all tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

POISON_BYTES = 1 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds",
        type=int,
        default=0,
        help="how many more random schedules the emulated forwards run (for a night)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and CuPy; skipped without")
    config.addinivalue_line("markers", "two_gpus: needs two NVIDIA GPUs")
    config.addinivalue_line("markers", "emulated: runs kernels on the CPU emulator, needs g++")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        wanted = 2 if item.get_closest_marker("two_gpus") else 1
        if wanted == 2 or item.get_closest_marker("gpu"):
            missing = _why_no_gpu(wanted)
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=missing))


@functools.cache
def _why_no_gpu(wanted: int) -> str | None:
    try:
        import cupy

        found = cupy.cuda.runtime.getDeviceCount()
    except ImportError:
        return "no CuPy"
    except Exception as error:
        return f"no GPU: {error}"
    return None if found >= wanted else f"needs {wanted} GPUs, found {found}"


@pytest.fixture
def cupy() -> ModuleType:
    """CuPy; only for tests marked gpu."""
    import cupy

    return cupy


@pytest.fixture
def poisoned_pool(cupy: Any) -> Iterator[Any]:
    """CuPy, with a memory pool whose free blocks are full of NaN (0xFF bytes in every format).

    Whatever a kernel leaves unwritten in an output that was allocated after this is NaN, and so is
    what it reads past the end of an array.
    """
    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    # Several sizes, because the pool serves a request from a free block that it can split.
    blocks = [cupy.full(POISON_BYTES // 4, 0xFF, cupy.uint8) for _ in range(4)]
    blocks += [cupy.full(1 << bits, 0xFF, cupy.uint8) for bits in range(9, 24)]
    cupy.cuda.Device().synchronize()
    del blocks
    yield cupy
    cupy.cuda.Device().synchronize()


def pytest_make_parametrize_id(config, val, argname):
    """Names of parameters without addresses: every worker of pytest-xdist must find the same."""
    if " at 0x" in repr(val):
        return getattr(val, "__name__", type(val).__name__)
    return None


def native_family() -> str:
    """The family that serves the current GPU by itself."""
    import cupy

    major = int(cupy.cuda.Device().compute_capability) // 10
    return {8: "sm80", 9: "sm90", 10: "sm100"}.get(major, "sm80")


@pytest.fixture(params=["native", "sm80"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run with the GPU's own family, then with the one that runs everywhere."""
    name = native_family() if request.param == "native" else request.param
    if request.param == "sm80" and native_family() == "sm80":
        pytest.skip("sm80 is the GPU's own family")
    monkeypatch.setenv("CUPYFLASH_FAMILY", name)
    from cupyflash.serve import forget_configurations

    forget_configurations()
    yield name
    forget_configurations()
