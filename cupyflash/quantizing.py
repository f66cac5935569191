"""Serves ``quantize``: checks its arguments, then runs ``fp8.quantize`` on the CPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy

from cupyflash import arrays, fp8
from cupyflash.arguments import as_one
from cupyflash.arrays import Adapter, Array
from cupyflash.errors import UnsupportedError
from cupyflash.fp8 import Arrangement, Quantized
from cupyflash.problem import LAYOUTS, as_int, to_bshd
from cupyflash.tensor import DeviceKind, DType, TensorView


@dataclass(frozen=True, eq=False)
class QuantizeCall:
    """A call of ``quantize`` with everything checked.

    Attributes:
        adapter: of x and cu_seqlens.
        x, cu_seqlens: as given, in the adapter's form; None for sequences that are not packed.
        view, starts: what they are, x in bshd order and packed as a batch of one.
        arrangement: where things will lie.
        role, block, hadamard_seed, for_backward, layout: as given.
    """

    adapter: Adapter
    x: Array
    cu_seqlens: Array | None
    view: TensorView
    starts: TensorView | None
    arrangement: Arrangement
    role: str
    block: fp8.Block
    hadamard_seed: int | None
    for_backward: bool
    layout: str


def resolve_quantize(
    x: Array,
    role: str,
    fmt: str,
    block: Any,
    hadamard_seed: int | None,
    for_backward: bool,
    cu_seqlens: Array | None,
    layout: str,
) -> QuantizeCall:
    """Checks all arguments of ``quantize``."""
    if role not in fp8.ROLES:
        raise ValueError(f"role: expected one of {', '.join(fp8.ROLES)}, got {role!r}")
    if fmt != "e4m3":
        raise UnsupportedError(f'fmt: nothing but "e4m3" is made yet, got {fmt!r}')
    kind, slot = fp8.kind_of(block, role)
    seed = _seed(hadamard_seed, role)
    if not isinstance(for_backward, (bool, numpy.bool_)):
        raise TypeError(f"for_backward: expected a bool, got {type(for_backward).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    packed = cu_seqlens is not None
    if packed and layout != "bshd":
        raise ValueError('layout: packed sequences are [total, heads, head_dim], pass "bshd"')
    given = {"x": x} | ({"cu_seqlens": cu_seqlens} if packed else {})
    adapter = arrays.adapter_for(given)
    adopted = {name: adapter.adopt(name, array) for name, array in given.items()}
    views = {name: adapter.view(name, array) for name, array in adopted.items()}
    view, starts = views["x"], views.get("cu_seqlens")
    _check_tensor(view, packed, layout)
    num_sequences = view.shape[0]
    if starts is not None:
        _check_starts_view(starts)
        num_sequences = starts.shape[0] - 1
    view = as_one(view) if packed else to_bshd(view, layout)
    batch, seqlen, heads, head_dim = view.shape
    return QuantizeCall(
        adapter=adapter,
        x=adopted["x"],
        cu_seqlens=adopted.get("cu_seqlens"),
        view=view,
        starts=starts,
        arrangement=Arrangement(
            kind, slot, packed, (batch, seqlen, heads, head_dim), num_sequences
        ),
        role=role,
        block=block,
        hadamard_seed=seed,
        for_backward=bool(for_backward),
        layout=layout,
    )


def _seed(given: Any, role: str) -> int | None:
    if given is None:
        return None
    seed = as_int("hadamard_seed", given, "int or None")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"hadamard_seed: expected 0 to 2**64 - 1, got {seed}")
    if role not in ("q", "k"):
        raise ValueError(
            f"hadamard_seed: rotates q and k, whose products stay what they are, got role {role!r}"
        )
    return seed


def _check_tensor(view: TensorView, packed: bool, layout: str) -> None:
    if view.ndim != (3 if packed else 4):
        order = "batch, seqlen, heads" if layout == "bshd" else "batch, heads, seqlen"
        expected = "[total, heads, head_dim] with cu_seqlens" if packed else f"[{order}, head_dim]"
        raise ValueError(f"x: expected {expected}, got {view.ndim} dimensions: {list(view.shape)}")
    if view.shape[-1] == 0:
        raise ValueError(f"x: expected a head_dim of at least 1, got {list(view.shape)}")
    if view.dtype not in (DType.float16, DType.bfloat16, DType.float32, DType.float64):
        raise TypeError(f"x: expected floating-point numbers, got {view.dtype}")


def _check_starts_view(starts: TensorView) -> None:
    if starts.ndim != 1 or starts.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens: expected shape [batch + 1] for at least one sequence, got "
            f"{list(starts.shape)}"
        )
    if not starts.dtype.name.startswith(("int", "uint")):
        raise TypeError(f"cu_seqlens: expected integers, got {starts.dtype}")


def run_quantize(call: QuantizeCall) -> Quantized:
    """Quantizes where the tensor is."""
    if call.adapter.kind is DeviceKind.cpu:
        return _run_on_host(call)
    raise UnsupportedError("quantize: has no GPU kernel yet; pass NumPy arrays")


def _run_on_host(call: QuantizeCall) -> Quantized:
    x, give = call.x, call.adapter.give
    if call.layout == "bhsd":
        x = x.transpose(0, 2, 1, 3)
    starts = None
    if call.cu_seqlens is not None:
        starts = call.cu_seqlens.astype(numpy.int64)
        fp8.check_starts(starts, call.arrangement.shape[1])
    made = fp8.quantize(x, call.role, call.block, call.hadamard_seed, call.for_backward, starts)
    data_t = None if made.data_t is None else give(made.data_t)
    return dataclasses.replace(made, data=give(made.data), scale=give(made.scale), data_t=data_t)
