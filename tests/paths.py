"""The ways an attention call can be computed, behind one interface, so that a test can run on all.

A path turns NumPy arrays into arrays of its own kind and back; between the two a test calls the
public functions. NUMPY is here and now; the emulated ones run the CUDA kernels on the CPU; CUPY
needs a GPU.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cases import Case, Fp8Case, GeneralCase, Placed

TARGETS = ("sm_80", "sm_90a", "sm_100f")
SCHEDULES = (("early", 0), ("late", 0), ("random", 1), ("random", 2))
emulated = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]


@dataclass(frozen=True)
class NumpyPath:
    """NumPy arrays, computed by host.py."""

    name: str = "numpy"

    def __str__(self) -> str:
        return self.name

    def array(self, x: NDArray) -> Any:
        return x

    def place(self, x: Placed) -> Any:
        """An array in the layout of its case, with NaN around it in memory."""
        return x.array

    def numpy(self, x: Any) -> NDArray:
        return x


@dataclass(frozen=True)
class EmulatedPath:
    """Arrays of the CPU emulator: the CUDA kernels, executed without a GPU."""

    target: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.target

    @property
    def device(self) -> Any:
        from cupyflash import emulate

        return emulate.device(self.target, **self.options)

    def array(self, x: NDArray) -> Any:
        return self.device.array(x)

    def place(self, x: Placed) -> Any:
        return self.device.array(x.buffer)[x.index]

    def numpy(self, x: Any) -> NDArray:
        return x.numpy()


@dataclass(frozen=True)
class CupyPath:
    """CuPy arrays on the current GPU."""

    name: str = "cupy"

    def __str__(self) -> str:
        return self.name

    def array(self, x: NDArray) -> Any:
        import cupy

        return cupy.asarray(x)

    def place(self, x: Placed) -> Any:
        return self.array(x.buffer)[x.index]

    def numpy(self, x: Any) -> NDArray:
        return x.get()


Path = NumpyPath | EmulatedPath | CupyPath

NUMPY = NumpyPath()
EMULATED = tuple(EmulatedPath(target) for target in TARGETS)
CUPY = CupyPath()

EVERY_PATH = (
    NUMPY,
    *(pytest.param(path, marks=pytest.mark.emulated) for path in EMULATED),
    pytest.param(CUPY, marks=pytest.mark.gpu),
)
every_path = pytest.mark.parametrize("path", EVERY_PATH, ids=str)
numpy_and_gpu = pytest.mark.parametrize(
    "path", [NUMPY, pytest.param(CUPY, marks=pytest.mark.gpu)], ids=str
)


def run(path: Path, case: Case, **more: Any) -> tuple[NDArray, NDArray]:
    """The public call for a case on a path, into an output full of NaN with more NaN around it.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v] and lse [batch, heads_q, seqlen_q].
    """
    import cupyflash

    placed = case.nan_output()
    arrays = [path.place(x) for x in case.inputs]
    out = path.place(placed)
    result, lse = cupyflash.attention(*arrays, out=out, return_lse=True, **case.options, **more)
    assert result is out, "the caller's out is what comes back"
    values = path.numpy(out)
    if case.layout == "bhsd":
        values = values.transpose(0, 2, 1, 3)
    return values, path.numpy(lse)


def run_backward(
    path: Path, case: Case, float_grads: bool = False, **more: Any
) -> tuple[NDArray, NDArray, NDArray]:
    """The public backward call for a case, into arrays full of NaN with more NaN around them.

    Args:
        path, case, more: what to call, with what, and further options.
        float_grads: float32 gradients, without NaN around them.

    Returns:
        dq, dk and dv, [batch, seqlen, heads, head_dim] each.
    """
    import cupyflash

    dout, dlse = case.gradients
    out, lse = case.forward_results
    written = [case.place(np.full(x.bshd.shape, np.nan)) for x in case.inputs]
    own = [path.place(x) for x in written]
    if float_grads:
        own = [path.array(x.array.astype(np.float32)) for x in written]
    grads = cupyflash.attention_backward(
        path.place(dout),
        *(path.place(x) for x in case.inputs),
        path.place(out),
        path.array(lse),
        dlse=path.array(dlse),
        **dict(zip(("dq", "dk", "dv"), own)),
        **case.options,
        **more,
    )
    assert all(grad is x for grad, x in zip(grads, own)), "the caller's arrays are what comes back"
    values = [path.numpy(grad) for grad in grads]
    if case.layout == "bhsd":
        values = [x.transpose(0, 2, 1, 3) for x in values]
    dq, dk, dv = values
    return dq, dk, dv


def run_general_backward(
    path: Path, case: GeneralCase, **more: Any
) -> tuple[NDArray, NDArray, NDArray]:
    """The public call of the backward pass for a general case, into arrays allocated by it."""
    import cupyflash

    out, lse = case.forward_results
    options = {name: path.array(x) for name, x in case.lengths.items()}
    grads = cupyflash.attention_backward(
        *(path.array(x) for x in (case.dout, *case.inputs, out, lse)),
        **options,
        **case.options,
        **more,
    )
    dq, dk, dv = (path.numpy(grad) for grad in grads)
    return dq, dk, dv


def run_general(
    path: Path, case: GeneralCase, given_output: bool, **more: Any
) -> tuple[NDArray, NDArray]:
    """The public call for a general case, into an output full of NaN or one allocated by it.

    Returns:
        out as the call returns it, and lse.
    """
    import cupyflash

    arrays = [path.array(x) for x in case.inputs]
    options = {name: path.array(x) for name, x in case.lengths.items()}
    if given_output:
        options["out"] = path.array(case.nan_output())
    out, lse = cupyflash.attention(*arrays, return_lse=True, **options, **case.options, **more)
    return path.numpy(out), path.numpy(lse)


def run_fp8(path: Path, case: Fp8Case, given_output: bool, **more: Any) -> tuple[NDArray, NDArray]:
    """The public call for a case of 8-bit floats, as ``run_general``."""
    import cupyflash

    (q, k, v), scales = case.operands
    moved = []
    for x in (q, k, v):
        if isinstance(x, cupyflash.Quantized):
            x = dataclasses.replace(x, data=path.array(x.data), scale=path.array(x.scale))
            moved.append(x)
        else:
            moved.append(path.array(x))
    options = {name: path.array(x) for name, x in {**case.of.lengths, **scales}.items()}
    options["out_dtype"] = case.out_dtype
    if given_output:
        options["out"] = path.array(case.nan_output())
    options |= case.of.options
    out, lse = cupyflash.attention(*moved, return_lse=True, **options, **more)
    return path.numpy(out), path.numpy(lse)


def bf16(x: Any) -> NDArray:
    import ml_dtypes

    return np.asarray(x).astype(ml_dtypes.bfloat16)
