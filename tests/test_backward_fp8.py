"""The backward over 8-bit floats: its definition, and its kernels on the CPU emulator.

``fp8_gradients.gradients`` repeats every rounding of the kernel to e4m3. What may differ: the order
of float32 sums, exp2 and log2 by an ulp or two, and through those, where a value lies between two
e4m3 numbers, that one weight of many becomes the other. So a gradient may be off by ``FLIPS`` times
what the format costs (which rounds every weight) and by roundings of float32.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupyflash import arrays, backward_fp8, emulate, fp8, fp8_gradients, reference
from cupyflash.errors import EmulationError, UnsupportedError
from cupyflash.fp8 import Quantized
from cupyflash.fp8_gradients import Fp8Gradients
from cupyflash.problem import Mask, Problem
from cupyflash.tensor import DType
from tests.paths import SCHEDULES, emulated

TARGET = "sm_90a"
FLIPS = 0.05
FLOAT_NOISE = 2.0**-18
OUTPUT_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}


@dataclass(frozen=True)
class Case:
    """A backward pass.

    Attributes:
        seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, batch: its shape.
        left, right: bounds of the mask as ``attention`` takes them, bottom-right.
        blocks: what shares a scale, of q, k, v and dout; one for all or four.
        spread: dout of every 64 queries is 2^spread times as large as that of the 64 before, over
            and over: exponents must follow. 0: alike.
        dtype: of out and the gradients.
    """

    seqlen_q: int
    seqlen_kv: int
    head_dim: int = 64
    heads_q: int = 1
    heads_kv: int = 1
    batch: int = 1
    left: int | None = None
    right: int | None = None
    blocks: Any = (128, None)
    spread: int = 0
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        words = [f"{self.seqlen_q}x{self.seqlen_kv}d{self.head_dim}"]
        words += [f"h{self.heads_q}-{self.heads_kv}b{self.batch}"]
        words += [f"left{self.left}"] * (self.left is not None)
        words += [f"right{self.right}"] * (self.right is not None)
        words += [f"spread{self.spread}"] * (self.spread != 0) + [self.dtype]
        return "-".join([*words, str(self.blocks).replace(" ", "")])

    @property
    def block_of(self) -> dict[str, fp8.Block]:
        """What shares a scale, by tensor."""
        given = self.blocks if isinstance(self.blocks, list) else [self.blocks] * 4
        return dict(zip(("q", "k", "v", "dout"), given))

    @property
    def block_m(self) -> int:
        return 128 if self.head_dim <= 64 else 64

    @property
    def bounds(self) -> dict[str, int | None]:
        """left and right as diagonals j - i."""
        shift = self.seqlen_kv - self.seqlen_q
        left = None if self.left is None else shift - self.left
        return {"left": left, "right": None if self.right is None else shift + self.right}

    @functools.cached_property
    def tensors(self) -> dict[str, Quantized]:
        """q, k, v and dout, some of whose numbers are ten times as large as the others."""
        rng = np.random.default_rng(self.seqlen_q + self.seqlen_kv + self.head_dim)
        made = {}
        for name, block in self.block_of.items():
            of_q = name in ("q", "dout")
            seqlen = self.seqlen_q if of_q else self.seqlen_kv
            heads = self.heads_q if of_q else self.heads_kv
            x = rng.standard_normal((self.batch, seqlen, heads, self.head_dim))
            x *= np.where(rng.random(x.shape) < 0.002, 10, 1)
            if name == "dout":
                x *= np.exp2(self.spread * (np.arange(seqlen) // 64 % 3))[:, None, None]
            made[name] = fp8.quantize(x.astype(np.float32), name, block, None, True, None)
        return made

    @functools.cached_property
    def dequantized(self) -> list[NDArray[np.float32]]:
        return [self.tensors[name].dequantize() for name in ("dout", "q", "k", "v")]

    @functools.cached_property
    def forward(self) -> tuple[NDArray, NDArray[np.float32], NDArray[np.float32]]:
        """out in ``dtype``, lse and delta of it."""
        out, lse = reference.attention(*self.dequantized[1:], **self._mask)
        out = out.astype(arrays.NUMPY_DTYPES[DType[self.dtype]])
        delta = np.einsum("bshd,bshd->bhs", out.astype(np.float32), self.dequantized[0])
        return out, lse.astype(np.float32), delta.astype(np.float32)

    @property
    def _mask(self) -> dict[str, Any]:
        shift = self.seqlen_kv - self.seqlen_q
        return {"left": self.left, "right": self.right, "shift": shift}

    @functools.cached_property
    def exact(self) -> tuple[NDArray[np.float64], ...]:
        """dq, dk, dv of the dequantized values."""
        return reference.attention_backward(*self.dequantized, **self._mask)

    @functools.cached_property
    def expected(self) -> Fp8Gradients:
        _, lse, delta = self.forward
        tensors = self.tensors.values()
        return fp8_gradients.gradients(*tensors, lse, delta, block_m=self.block_m, **self.bounds)

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=DType[self.dtype],
            mask=Mask(self.left, self.right, "bottom_right"),
        )

    def check(self, grads: list[NDArray], dtype: str = "float32") -> None:
        """Compares gradients in ``dtype`` with what is expected."""
        expected = (self.expected.dq, self.expected.dk, self.expected.dv)
        for name, grad, wanted, exact in zip(("dq", "dk", "dv"), grads, expected, self.exact):
            assert np.isfinite(grad).all(), name
            size = rms(wanted)
            allowed = FLIPS * rms(wanted - exact) + FLOAT_NOISE * size
            allowed += OUTPUT_ROUNDING[dtype] * size
            found = rms(grad.astype(np.float32) - wanted)
            assert found <= allowed, f"{name}: off by {found / size:.2e}, {allowed / size:.2e}"


def rms(x: NDArray) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


def cosine(a: NDArray, b: NDArray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def run(
    case: Case,
    grad_dtype: str = "float32",
    delta: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> list[NDArray]:
    """dq, dk and dv of the kernels on the emulator."""
    options.setdefault("num_sms", 2)
    device = emulate.device(TARGET, **options)
    spec = backward_fp8.fp8_backward_spec(case.problem, device.info, case.block_of)
    made = backward_fp8.fp8_workspace(case.problem, spec, deterministic)
    out, lse, given_delta = case.forward
    placed = {"lse": device.array(lse)}
    placed |= {"delta": device.array(given_delta)} if delta else {"out": device.array(out)}
    for name, tensor in case.tensors.items():
        natural, transposed = tensor.data, tensor.data_t
        if name == "v":
            natural, transposed = transposed, None
        placed |= {name: device.array(natural), f"{name}_scale": device.array(tensor.scale)}
        if transposed is not None:
            placed[f"{name}_t"] = device.array(transposed)
    element = arrays.NUMPY_DTYPES[DType[grad_dtype]]
    grads = [device.empty(case.tensors[name].shape, element) for name in ("q", "k", "v")]
    placed |= dict(zip(("dq", "dk", "dv"), grads))
    adapter = arrays.adapter_for(placed)
    views = {name: adapter.view(name, array) for name, array in placed.items()}
    own = {
        name: device.empty(getattr(made.base, name), np.float32)
        for name in ("row_lse", "row_delta", "dq_sums")
    }
    own["slot_scales"] = device.empty(made.slot_scales, np.float32)
    if deterministic:
        own["dq_turns"] = device.empty(made.base.dq_turns, np.int32)
    addresses = {name: array.pointer for name, array in own.items()}
    if deterministic:
        addresses["tile_counter"] = addresses["dq_turns"] + made.base.counter_place
    for launch in backward_fp8.fp8_backward_launches(
        case.problem, spec, device.info, views, case.block_of, addresses
    ):
        device.run(launch)
    return [grad.numpy() for grad in grads]
