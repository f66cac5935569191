"""What a kernel is told about 8-bit floats: numbers and scales read back through its parameters.

The launch is made for a kernel of bfloat16, which takes every case; the parameters are the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cupyflash import emulate
from cupyflash.arguments import Call, Options, resolve
from cupyflash.fp8 import MMA_ORDER, Quantized, widen_e4m3
from cupyflash.launch import Launch, forward_launch
from cupyflash.params import FORWARD, SCALE_KINDS
from cupyflash.problem import DeviceInfo
from cupyflash.select import select
from cupyflash.serve import allocate
from cupyflash.tensor import DType
from tests import cases
from tests.cases import Fp8Case

A100 = DeviceInfo("A100", (8, 0), 108, 166_912, 40 << 20)


def on_device(case: Fp8Case) -> tuple[tuple[Any, ...], Options]:
    device = emulate.device("sm_80")
    operands, scales = case.operands

    def moved(x: Any) -> Any:
        if isinstance(x, Quantized):
            data, scale = device.array(x.data), device.array(x.scale)
            return dataclasses.replace(x, data=data, scale=scale)
        return device.array(x)

    arrays = {name: device.array(x) for name, x in {**scales, **case.of.lengths}.items()}
    return tuple(map(moved, operands)), Options(**arrays, **case.of.options, return_lse=True)


def launched(call: Call) -> Launch:
    allocate(call)
    stand_in = dataclasses.replace(
        call.problem, dtype=DType.bfloat16, head_dim_qk=64, head_dim_v=64, unaligned=()
    )
    spec = select(dataclasses.replace(stand_in, out_dtype=DType.bfloat16), A100).spec
    return forward_launch(call.problem, spec, A100, call.views)


def read(
    case: Fp8Case, call: Call, values: dict[str, Any], name: str, b: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scales of ``length`` tokens of a sequence as a kernel finds them, [length, heads,
    head_dim] and [length, heads]."""
    which = 0 if name == "q" else 1
    starts = case.of.lengths.get(("cu_seqlens_q", "cu_seqlens_kv")[which])
    heads, head_dim = values["heads_q" if name == "q" else "heads_kv"], values["head_dim_qk"]
    if name == "v":
        head_dim = values["head_dim_v"]
    first, batch = (0, b) if starts is None else (int(starts[b]), 0)
    token = np.arange(length)[:, None, None]
    head, channel = np.arange(heads)[None, :, None], np.arange(head_dim)[None, None, :]
    place, by_channel = first + token, 1
    if name == "v":
        by_channel = values["v_stride_dim"]
        if values["v_slot_log2"]:
            slot_log2 = values["v_slot_log2"]
            slot = 0 if starts is None else (first >> slot_log2) + b
            within = token // 16 * 16 + np.argsort(MMA_ORDER)[token % 16]
            place = (slot << slot_log2) + within
            assert (place < values["v_columns"]).all()
    offset = batch * values[f"{name}_stride_batch"] + place * values[f"{name}_stride_seqlen"]
    offset = offset + head * values[f"{name}_stride_head"] + channel * by_channel
    data = call.arrays[name].numpy().view(np.uint8).reshape(-1)
    assert values[name] == call.arrays[name].pointer
    numbers = widen_e4m3(data[offset])
    if not values[f"{name}_scale"]:
        return numbers, np.ones((length, heads), np.float32)
    scale = call.arrays[f"{name}_scale"]
    assert values[f"{name}_scale"] == scale.pointer
    log2 = values[f"{name}_scale_tokens_log2"]
    block = 0 if starts is None else (first >> log2) + b
    at = b * values[f"{name}_scale_stride_batch"] + head * values[f"{name}_scale_stride_head"]
    at = at + (block + (token >> log2)) * values[f"{name}_scale_stride_block"]
    return numbers, np.broadcast_to(scale.numpy().reshape(-1)[at[..., 0]], (length, heads))


@pytest.mark.parametrize("case", cases.FP8, ids=str)
def test_parameters_lead_to_the_numbers(case: Fp8Case) -> None:
    operands, options = on_device(case)
    call = resolve(*operands, options)
    problem = call.problem
    assert problem.dtype is DType.float8_e4m3fn and problem.out_dtype is DType.bfloat16
    assert (problem.head_dim_qk, problem.head_dim_v) == (case.of.head_dim, case.of.value_dim)
    values = FORWARD.unpack(launched(call).params)
    for name, index in (("q", 0), ("k", 1), ("v", 2)):
        kind = getattr(problem.scaling, name).kind
        assert kind == "none" or values[f"{name}_scale_kind"] == SCALE_KINDS.index(kind)
        for b in range(case.of.batch):
            expected = case.scaled_of(b)[index]
            length = expected.numbers.shape[1]
            numbers, scales = read(case, call, values, name, b, length)
            np.testing.assert_array_equal(numbers, expected.numbers[0])
            np.testing.assert_array_equal(scales, expected.scales[0])


def test_an_output_in_8_bits_takes_its_scale_along() -> None:
    case = next(case for case in cases.FP8 if str(case) == "fp8_plain")
    operands, options = on_device(case)
    scale = operands[0].device.array(np.ones((), np.float32))
    options = dataclasses.replace(options, out_dtype="float8_e4m3fn", out_scale=scale)
    call = resolve(*operands, options)
    assert call.problem.out_dtype is DType.float8_e4m3fn and call.problem.scaling.out
    values = FORWARD.unpack(launched(call).params)
    assert values["out_scale"] == scale.pointer and call.views["out"].dtype is DType.float8_e4m3fn
