"""NVRTC: cubins without a GPU, errors with numbered lines, and the gates on ptxas' report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from aot import recipes
from cupyflash import nvrtc, source, tuning
from cupyflash.errors import CompileError
from cupyflash.tensor import DType

CLEAN_LOG = """\
ptxas info    : 147 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
"""


@pytest.fixture(scope="module")
def library():
    try:
        return nvrtc.library_path()
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(f"NVRTC: {error}")


def unit_of(text: str, root: Path, target: str = "sm_90a") -> source.TranslationUnit:
    """A unit of a test's own making; ``root`` holds the headers that it includes."""
    (root / "part.cuh").write_text("#pragma once\n__device__ inline int one() {\n  return 1;\n}\n")
    return source.TranslationUnit(
        name="unit",
        text=text,
        target=target,
        options=(f"--gpu-architecture={target}", "--std=c++20", "--ptxas-options=-v"),
        include_root=root,
        includes=("part.cuh",),
        registers=None,
        digest="0" * 64,
    )


GOOD = """\
#include "part.cuh"
extern "C" __global__ void unit(int* out) { out[threadIdx.x] = one(); }
"""
SYNTAX = """\
#include "part.cuh"
extern "C" __global__ void unit(int* out) {
  int* wrong = 3.5f;
  out[0] = one();
}
"""
SPILL = """\
extern "C" __global__ void __maxnreg__(24) unit(float* out) {
  float sum[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = out[i];
  for (int k = 0; k < 1000; ++k) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = sum[i] * sum[(i + 7) % 64] + out[k];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] = sum[i];
}
"""


def test_compiles_to_a_cubin(library, tmp_path):
    compiled = nvrtc.compile(unit_of(GOOD, tmp_path))
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert 0 < compiled.registers <= 32
    assert compiled.nvrtc_version == nvrtc.version()
    assert nvrtc.installed_version().startswith(nvrtc.version())


def test_errors_quote_the_source_with_line_numbers(library, tmp_path):
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(unit_of(SYNTAX, tmp_path))
    message = str(caught.value)
    assert "unit for sm_90a: NVRTC_ERROR_COMPILATION" in message
    assert "unit.cu(3): error" in message
    assert ">     3 |   int* wrong = 3.5f;" in message
    assert "      2 | extern" in message


def test_errors_in_a_header_are_quoted_too(library, tmp_path):
    unit = unit_of(GOOD, tmp_path)
    (tmp_path / "part.cuh").write_text("#pragma once\n__device__ int one() { return two; }\n")
    with pytest.raises(CompileError, match=r"(?s)part.cuh\(2\): error.*>     2 \| __device__"):
        nvrtc.compile(unit)


def test_unknown_target_is_a_compile_error(library, tmp_path):
    with pytest.raises(CompileError, match="sm_1"):
        nvrtc.compile(unit_of(GOOD, tmp_path, target="sm_1"))


def test_spills_fail_the_build(library, tmp_path):
    with pytest.raises(CompileError, match=r"\d+ bytes spilled"):
        nvrtc.compile(unit_of(SPILL, tmp_path))


def test_log_is_read():
    compiled = nvrtc.parse_log(CLEAN_LOG, cubin=b"", nvrtc_version="13.5", seconds=0.0)
    assert (compiled.registers, compiled.spill_bytes, compiled.stack_bytes) == (168, 0, 0)
    with pytest.raises(CompileError, match="names no registers"):
        nvrtc.parse_log("", cubin=b"", nvrtc_version="13.5", seconds=0.0)


SPILLED = CLEAN_LOG.replace("0 bytes spill stores", "8 bytes spill stores")
STACK = CLEAN_LOG.replace("0 bytes stack", "16 bytes stack")
SERIALISED = CLEAN_LOG + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async\n"
FEW_REGISTERS = CLEAN_LOG.replace("Used 168", "Used 160")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (SPILLED, "8 bytes spilled"),
        (STACK, "stack frame of 16 bytes"),
        (SERIALISED, r"advisory: .*C7510"),
        (FEW_REGISTERS, "160 registers where setmaxnreg needs 168"),
    ],
)
def test_gates(tmp_path, log, words):
    """See Note [Build gates]."""
    unit = dataclasses.replace(unit_of(GOOD, tmp_path), registers=168)

    def checked(log: str, version: str) -> None:
        nvrtc.check(unit, nvrtc.parse_log(log, cubin=b"", nvrtc_version=version, seconds=0.0))

    checked(CLEAN_LOG, nvrtc.TUNED_VERSION)
    with pytest.raises(CompileError, match=words):
        checked(log, nvrtc.TUNED_VERSION)
    if log is FEW_REGISTERS:
        with pytest.raises(CompileError, match=words):
            checked(log, "12.9")
    else:
        with pytest.warns(RuntimeWarning, match=f"{words}.*under NVRTC 12.9"):
            checked(log, "12.9")


def test_tuned_version_is_the_pinned_one():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f"nvidia-cuda-nvrtc=={nvrtc.TUNED_VERSION}." in project


@pytest.mark.parametrize("target", recipes.RECIPES["core"])
@pytest.mark.parametrize("mask", tuning.MASKS)
def test_every_kernel_of_the_wheel_passes_the_gates(library, target, mask):
    """No spill, no stack frame, no advisory, the registers that setmaxnreg counts on."""
    for spec in recipes.specs("core", (target,)):
        if spec.mask == mask and spec.dtype is DType.bfloat16:
            nvrtc.compile(source.translation_unit(spec))
