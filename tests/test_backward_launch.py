"""The launches of ``attention_backward`` on both ways, on the stub driver of ``test_launch.py``."""

from __future__ import annotations

import shutil
from typing import Any

import ml_dtypes
import numpy
import pytest

import cupyflash
from cupyflash import arrays, gradients, serve
from cupyflash.arguments import Options
from cupyflash.params import BACKWARD, DEVICE_LENGTHS
from tests.test_launch import (  # noqa: F401 - fixtures
    EncodedMap,
    FakeArray,
    Launched,
    fake_cupy,
    fake_inputs,
    int32,
    library_path,
    packed_inputs,
    stub,
    stub_path,
)

# ruff: noqa: F811 - what looks redefined is a fixture

pytestmark = [
    pytest.mark.usefixtures("fake_cupy"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
WORKSPACE = ("row_lse", "row_delta", "dq_sums", "dq_turns")


def with_results(q: FakeArray, k: FakeArray, v: FakeArray) -> list[FakeArray]:
    """dout, q, k, v, out, lse."""
    shape = (*q.shape[:-1], v.shape[-1])
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    dout, out = (FakeArray(shape, q.dtype) for _ in range(2))
    return [dout, q, k, v, out, FakeArray(rows, numpy.float32)]


def backward(log: Any, *given: FakeArray, **options: Any) -> tuple[Any, list[Launched]]:
    """The gradients, and the launches."""
    log.params_bytes = BACKWARD.size
    before = log.launches
    grads = cupyflash.attention_backward(*given, **options)
    return grads, log.since(before)


def scalars(launched: Launched) -> dict[str, int | float]:
    return BACKWARD.unpack(bytes(launched.params)[: BACKWARD.size])


def base_of(launched: Launched, tensor: str) -> int:
    """Where a tensor map begins; 0: there is none."""
    encoded = EncodedMap.from_buffer_copy(bytes(launched.params), BACKWARD.offsets[f"{tensor}_map"])
    return encoded.pointer


def geometry(launched: Launched) -> tuple[Any, ...]:
    return (*launched.grid, *launched.block, launched.shared_bytes, launched.cluster)


def independent(launched: Launched) -> tuple[Any, ...]:
    """All of a launch but addresses."""
    values = scalars(launched)
    maps = [
        bytes(launched.params)[BACKWARD.offsets[f"{name}_map"] + 8 :][:120]
        for name in BACKWARD.mapped
    ]
    given = {name: bool(values.pop(name)) for name in BACKWARD.pointers}
    return geometry(launched), values, given, maps


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "align": "top_left"},
    {"window": (3, None)},
    {"softmax_scale": 0.5},
    {"q_offset": 3, "causal": True},
    {"num_sms": 7},
    {"softcap": 20.0},
    {"deterministic": True},
    {"seqused_q": int32},
    {"seqused_kv": int32, "deterministic": True},
    {"q_offset": int32, "causal": True},
    {"kv_offset": int32, "q_offset": 3, "causal": True},
)


def test_both_ways_do_the_same(stub: Any) -> None:
    """Everything that may differ between calls changes the launches on the short way too."""
    turns: list[list[Any]] = [[] for _ in range(3)]
    for turn in turns:
        for variant in VARIANTS:
            for seqlen in (128, 100):
                given = with_results(*fake_inputs(seqlen_q=seqlen))
                options = {k: x(2) if x is int32 else x for k, x in variant.items()}
                _, launched = backward(stub.log, *given, **options)
                assert len(launched) == 3
                turn.append([independent(x) for x in launched])
    assert turns[0] == turns[1] == turns[2]
    assert len({str(x) for x in turns[0]}) == len(turns[0]), "each option has an effect"
    assert len(serve._configurations) == len(turns[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_addresses_are_those_of_the_call(stub: Any, fake_cupy: Any, deterministic: bool) -> None:
    for turn in range(4):
        fake_cupy.cuda.streams[0] = 0x100 + turn
        dout, q, k, v, out, lse = with_results(*fake_inputs())
        dlse = FakeArray(lse.shape, numpy.float32)
        used = int32(2)
        start = FakeArray.next_address
        grads, launched = backward(
            stub.log,
            *(dout, q, k, v, out, lse),
            dlse=dlse,
            deterministic=deterministic,
            seqused_kv=used,
        )
        named = dict(zip(("dout", "q", "k", "v", "out", "lse"), (dout, q, k, v, out, lse)))
        named |= {"dlse": dlse, "seqused_kv": used, "dout_given": dout, **grads._asdict()}
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
        for one in launched:
            values = scalars(one)
            assert one.stream == 0x100 + turn and one.context == 0x1000
            assert {name: values[name] for name in named} == {
                name: array.data.ptr for name, array in named.items()
            }
            assert values["delta"] == 0
            assert not any(values[name] for name in DEVICE_LENGTHS if name != "seqused_kv")
            parts = [values[name] for name in WORKSPACE]
            assert all(start <= part < FakeArray.next_address for part in parts if part)
            assert not any(part % 256 for part in parts) and bool(parts[3]) == deterministic
            assert values == {**scalars(launched[0]), "tile_counter": values["tile_counter"]}
        for tensor in ("q", "k", "v", "dout", "dk", "dv"):
            base = named[tensor].data.ptr
            if tensor in ("dk", "dv"):  # general kernels clip them from behind
                base -= 256 * 2 * 128 * 2
            assert base_of(launched[1], tensor) == base
            assert base_of(launched[0], tensor) == 0, "only the main kernel has maps"
    assert len(serve._configurations) == 1


def test_tile_counters(stub: Any) -> None:
    """Of the stream where blocks claim tiles, of the workspace where additions go in turns."""
    given = with_results(*(FakeArray((8, 1024, n, 128), ml_dtypes.bfloat16) for n in (16, 16, 16)))
    counters = stub.driver.tile_counters(0)
    for _ in range(3):
        _, launched = backward(stub.log, *given)
        found = [scalars(one)["tile_counter"] for one in launched]
        assert found == [0, counters.of_stream(0x100), 0]
        _, launched = backward(stub.log, *given, deterministic=True)
        values = [scalars(one) for one in launched]
        places = values[0]["heads_q"] * values[0]["num_slots"]
        assert all(x["tile_counter"] == x["dq_turns"] + 4 * places for x in values)
    stub.log.capturing_stream = 0x100
    _, launched = backward(stub.log, *given)
    first = scalars(launched[1])["tile_counter"]
    _, launched = backward(stub.log, *given)
    assert first != scalars(launched[1])["tile_counter"], "every captured launch has its own"
    stub.log.capturing_stream = 0


def test_a_gradient_that_must_be_copied(stub: Any) -> None:
    """The gradient of a sum has strides of 0: the first kernel copies it into the workspace."""
    for _ in range(3):
        dout, *rest = with_results(*fake_inputs())
        spread = FakeArray(dout.shape, dout.dtype, strides=(0, 0, 0, 0))
        _, launched = backward(stub.log, spread, *rest)
        for one in launched:
            values = scalars(one)
            assert values["dout_given"] == spread.data.ptr and values["copy_dout"] == 1
            assert values["dout"] not in (0, spread.data.ptr)
            assert values["dout"] > values["row_lse"] and values["dout"] % 256 == 0
        assert base_of(launched[1], "dout") == values["dout"]
    assert len(serve._configurations) == 1


def test_gradients_into_the_callers_arrays(stub: Any) -> None:
    given = with_results(*fake_inputs())
    dtypes = (ml_dtypes.bfloat16, numpy.float32)
    for dtype in dtypes:
        own = {f"d{name}": FakeArray(x.shape, dtype) for name, x in zip("qkv", given[1:4])}
        for accumulate in (False, True):
            for _ in range(3):
                grads, launched = backward(stub.log, *given, **own, accumulate=accumulate)
                assert all(x is y for x, y in zip(grads, own.values()))
                values = scalars(launched[1])
                assert [values[name] for name in own] == [x.data.ptr for x in own.values()]
                assert values["accumulate"] == accumulate and values["clear_grads"] == 0
                assert values["float_grads"] == (dtype is numpy.float32)
    assert len(serve._configurations) == 4
    grads, launched = backward(stub.log, *given, dk=FakeArray(given[2].shape, dtypes[0]))
    assert scalars(launched[1])["clear_grads"] == 1, "some of them are ours"


def test_gradients_in_the_place_of_others_are_refused_warm(stub: Any) -> None:
    given = with_results(*fake_inputs())
    own = {f"d{name}": FakeArray(x.shape, x.dtype) for name, x in zip("qkv", given[1:4])}
    far, used = FakeArray((1 << 20,), numpy.int32), int32(2)
    assert far.data.ptr + (1 << 22) < used.data.ptr
    for _ in range(2):
        backward(stub.log, *given, **own, seqused_kv=used)
        launches = stub.log.launches
        for change in ({"dq": given[1]}, {"dk": own["dv"]}, {"dv": given[3]}, {"dq": given[0]}):
            with pytest.raises(ValueError, match="shares memory with"):
                cupyflash.attention_backward(*given, **{**own, **change}, seqused_kv=used)
        half = FakeArray(own["dk"].shape, own["dk"].dtype)
        half.data.ptr = used.data.ptr - 512
        with pytest.raises(ValueError, match="dk: shares memory with seqused_kv"):
            cupyflash.attention_backward(*given, **{**own, "dk": half}, seqused_kv=used)
        assert stub.log.launches == launches


def test_what_is_refused_cold_is_refused_warm(stub: Any) -> None:
    given = with_results(*fake_inputs())
    refusals: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"accumulate": 0}, TypeError, "accumulate: expected a bool"),
        ({"deterministic": 0}, TypeError, "deterministic: expected a bool"),
        ({"causal": 0}, TypeError, "causal"),
        ({"return_lse": True}, TypeError, "returns no lse"),
        ({"out_scale": 1.0}, TypeError, "out_scale: scales belong to fp8 arrays"),
        ({"mask": None}, TypeError, "unexpected argument mask"),
        ({"max_seqlen_q": 5}, ValueError, "only with cu_seqlens"),
        ({"dlse": FakeArray((2, 8, 128), numpy.float16)}, TypeError, "dlse: expected float32"),
        ({"dq": FakeArray(given[1].shape, numpy.float16)}, TypeError, "dq, dk, dv: expected"),
        ({"stream": "0"}, TypeError, "stream"),
    )
    for _ in range(2):
        backward(stub.log, *given)
        launches = stub.log.launches
        for change, error, words in refusals:
            with pytest.raises(error, match=words):
                cupyflash.attention_backward(*given, **change)
        with pytest.raises(TypeError, match="out: may be None only"):
            cupyflash.attention_backward(*given[:4], None, given[5])
        shifted = FakeArray(given[0].shape, given[0].dtype, offset=2)
        _, launched = backward(stub.log, shifted, *given[1:])
        assert scalars(launched[1])["copy_dout"] == 1
        assert stub.log.launches == launches + 3


def test_all_options_as_autograd_gives_them(stub: Any) -> None:
    """``adapters.torch`` names every option, most of them None."""
    given = with_results(*fake_inputs())
    settings = {
        name: value
        for name, value in vars(Options(causal=True)).items()
        if name not in ("out", "stream", "return_lse")
    }
    for _ in range(3):
        backward(stub.log, *given, dlse=None, deterministic=False, **settings)
        backward(stub.log, *given, causal=True)
    assert len(serve._configurations) == 2, "with max_seqlen and without"
    with pytest.raises(TypeError, match="out_dtype"):
        cupyflash.attention_backward(*given, **{**settings, "out_dtype": numpy.float16})


def test_packed_sequences_on_both_ways(stub: Any) -> None:
    for _ in range(3):
        inputs, starts = packed_inputs()
        given = with_results(*inputs)
        grads, launched = backward(stub.log, *given, **starts, max_seqlen_q=700)
        values = scalars(launched[1])
        assert [values[name] for name in starts] == [x.data.ptr for x in starts.values()]
        assert values["clear_grads"] == 1 and grads.dq.shape == inputs[0].shape
        assert values["seqlen_q"] == 700
    assert len(serve._configurations) == 1


def test_the_callers_stream(stub: Any, fake_cupy: Any) -> None:
    given = with_results(*fake_inputs())
    for _ in range(3):
        FakeArray.allocations.clear()
        _, launched = backward(stub.log, *given, stream=0x500)
        assert [one.stream for one in launched] == [0x500] * 3
        assert FakeArray.allocations == [0x500] * 4, "gradients and workspace are its arena's"


def test_a_checked_call_is_not_remembered(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    held = [256]
    monkeypatch.setattr(
        arrays.CupyAdapter, "to_numpy", lambda self, array: numpy.full(array.shape, held[0])
    )
    given, used = with_results(*fake_inputs()), int32(2)
    for _ in range(2):
        held[0] = 256
        cupyflash.attention_backward(*given, seqused_kv=used)
        held[0] = 257
        launches = stub.log.launches
        with pytest.raises(ValueError, match="seqused_kv"):
            cupyflash.attention_backward(*given, seqused_kv=used)
        assert stub.log.launches == launches


def test_a_failed_kernel_ends_the_plan(stub: Any) -> None:
    given = with_results(*fake_inputs())
    backward(stub.log, *given)
    launches = stub.log.launches
    stub.log.fail_launch_with = 1
    with pytest.raises(cupyflash.DriverError, match=r"kernel launch: .* \(1\)"):
        cupyflash.attention_backward(*given)
    stub.log.fail_launch_with = 0
    assert stub.log.launches == launches + 1 and stub.library.stub_current_context() == 0


def test_the_order_of_arrays_is_that_of_the_key() -> None:
    assert gradients.GIVEN[:3] == ("q", "k", "v") and set(gradients.GIVEN) <= set(BACKWARD.pointers)
    assert BACKWARD.pointers[-1] == "tile_counter"
