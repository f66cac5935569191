"""No argument is accepted and ignored, on any path; what is refused is refused by name (B65)."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import types
from pathlib import Path

import ml_dtypes
import numpy
import pytest

import cupyflash
from cupyflash import api, arguments, emulate, launch
from cupyflash.params import DEVICE_LENGTHS, FORWARD
from cupyflash.tensor import DType
from tests.test_launch import (  # noqa: F401 - fixtures
    FakeArray,
    addresses,
    fake_cupy,
    fake_inputs,
    int32,
    library_path,
    stub,
    stub_path,
)

SIGNATURE = inspect.signature(cupyflash.attention).parameters
OPTIONS = {name: p.default for name, p in SIGNATURE.items() if p.kind is p.KEYWORD_ONLY}

SIX = 6
CU_SEQLENS = numpy.array([0, 2, 6], numpy.int32)

# One value for every option that must change the result or be refused. Inputs: q = 0, so that every
# visible key counts the same, and v[j] = j.
FLIPPED = {
    "causal": True,
    "align": "top_left",  # with causal
    "window": (1, 1),
    "softmax_scale": 0.5,
    "softcap": 0.25,
    "cu_seqlens_q": CU_SEQLENS,  # with cu_seqlens_kv
    "cu_seqlens_kv": CU_SEQLENS,  # with cu_seqlens_q
    "max_seqlen_q": 3,  # with cu_seqlens: too short
    "max_seqlen_kv": 3,
    "seqused_q": numpy.array([2], numpy.int32),
    "seqused_kv": numpy.array([2], numpy.int32),
    "q_offset": 2,  # with causal
    "kv_offset": 2,  # with causal
    "q_scale": numpy.float32(2),
    "k_scale": numpy.float32(2),
    "v_scale": numpy.float32(2),
    "layout": "bhsd",
    "out": "an output",
    "out_dtype": "float64",
    "out_scale": numpy.float32(2),
    "return_lse": True,
    "num_sms": 1,
    "stream": 0x700,
}
TOGETHER_WITH = {
    "align": {"causal": True},
    "q_offset": {"causal": True},
    "kv_offset": {"causal": True},
    "cu_seqlens_q": {"cu_seqlens_kv": CU_SEQLENS},
    "cu_seqlens_kv": {"cu_seqlens_q": CU_SEQLENS},
    "max_seqlen_q": {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS},
    "max_seqlen_kv": {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS},
}
REFUSED_ON_CPU = {"q_scale", "k_scale", "v_scale", "out_scale", "out_dtype", "num_sms", "stream"}
REFUSED_ON_CPU |= {"max_seqlen_q", "max_seqlen_kv"}  # by the value chosen
REFUSED_ON_GPU = {"q_scale", "k_scale", "v_scale", "out_scale", "out_dtype"}


def on_a_device(name, batch, lengths, total):
    """The options of a call on a GPU, and those with ``name`` changed.

    Args:
        name: the option.
        batch: sequences of arrays that are not packed.
        lengths: makes an int32 array of so many entries on the device. What is in it only the
            kernel sees: another array is another address in its parameters.
        total: rows of packed arrays.
    """
    if name.startswith(("cu_seqlens", "max_seqlen")):
        plain = {"cu_seqlens_q": lengths(3), "cu_seqlens_kv": lengths(3)}
        bound = max(FLIPPED[name], total // 2) if name.startswith("max") else None
        return plain, {**plain, name: lengths(3) if bound is None else bound}
    plain = TOGETHER_WITH.get(name, {})
    if name.startswith("seqused"):
        return plain, {**plain, name: lengths(batch)}
    return plain, {**plain, name: FLIPPED[name]}


def test_the_options_are_the_arguments_of_attention():
    fields = {field.name: field.default for field in dataclasses.fields(arguments.Options)}
    assert fields == OPTIONS
    assert FLIPPED.keys() == OPTIONS.keys(), "every option has a value that matters"


def test_every_option_is_documented():
    documented = inspect.getdoc(cupyflash.attention)
    described = documented[documented.index("Args:") : documented.index("Returns:")]
    for name in SIGNATURE:
        assert f" {name}" in described or f", {name}" in described, name


def column(seqlen=SIX):
    """q, k, v with different scores, so that scale and softcap matter too."""
    q = numpy.full((1, seqlen, 1, 64), 0.25, numpy.float32)
    k = numpy.linspace(-1, 1, seqlen, dtype=numpy.float32)[None, :, None, None] * numpy.ones_like(q)
    v = numpy.arange(seqlen, dtype=numpy.float32)[None, :, None, None] * numpy.ones_like(q)
    return q, k, v


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_no_option_is_ignored_on_the_cpu(name):
    q, k, v = column()
    more = TOGETHER_WITH.get(name, {})
    value = FLIPPED[name]
    if "cu_seqlens" in name or "max_seqlen" in name:
        packed = [x[0] for x in (q, k, v)]
        if name in REFUSED_ON_CPU:
            with pytest.raises(ValueError, match=name):
                cupyflash.attention(*packed, **more, **{name: value})
            return
        assert not numpy.array_equal(
            cupyflash.attention(*packed, **more, **{name: value})[None],
            cupyflash.attention(q, k, v),
        )
        return
    if name in REFUSED_ON_CPU:
        with pytest.raises((cupyflash.UnsupportedError, TypeError, ValueError), match=name):
            cupyflash.attention(q, k, v, **more, **{name: value})
        return
    if name == "align":
        q = q[:, :4]
    plain = cupyflash.attention(q, k, v, **more)
    if name == "out":
        out = numpy.full_like(plain, numpy.nan)
        assert cupyflash.attention(q, k, v, out=out) is out
        numpy.testing.assert_array_equal(out, plain)
    elif name == "return_lse":
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        assert lse.shape == (1, 1, SIX)
    elif name == "layout":
        # [1, 6, 1, 64] read as [batch, heads, seqlen, head_dim] is six heads of one token: out = v.
        numpy.testing.assert_allclose(cupyflash.attention(q, k, v, layout="bhsd"), v, rtol=1e-6)
    else:
        assert not numpy.allclose(cupyflash.attention(q, k, v, **more, **{name: value}), plain)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_no_option_is_ignored_on_a_gpu(name, stub, fake_cupy):  # noqa: F811
    q, k, v = fake_inputs()
    value = FLIPPED[name]
    cupyflash.attention(q, k, v)  # so that the short way is open
    launches = stub.log.launches
    if name in REFUSED_ON_GPU:
        for _ in range(2):
            with pytest.raises(TypeError, match=name):
                cupyflash.attention(q, k, v, **{name: value})
        assert stub.log.launches == launches
        return

    def observed(**options):
        result = cupyflash.attention(q, k, v, **options)
        scalars = stub.log.scalars()
        written = scalars.pop("out"), scalars.pop("lse") != 0
        grid = tuple(stub.log.grid)
        return type(result), scalars, grid, stub.log.stream, written[1], written[0]

    if name == "layout":
        q, k, v = (FakeArray((2, x.shape[2], x.shape[1], 128), x.dtype) for x in (q, k, v))
        observed(layout="bhsd")
        assert stub.log.scalars()["heads_q"] == 8 and stub.log.scalars()["seqlen_q"] == 128
        return
    if name == "out":
        value = FakeArray(q.shape, q.dtype)
        assert observed(out=value)[-1] == value.data.ptr
        return
    given, changed = on_a_device(name, 2, int32, 128)
    if "cu_seqlens_q" in given:
        q, k, v = (FakeArray(x.shape[1:], x.dtype) for x in (q, k, v))
    plain = observed(**given)[:-1]
    for _ in range(2):
        assert observed(**changed)[:-1] != plain
        assert observed(**given)[:-1] == plain


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_no_option_is_ignored_on_an_emulated_device(name, monkeypatch):
    """The same launches as on a GPU; here they are looked at, elsewhere they are run."""
    device = emulate.device("sm_90a")
    launches = []
    monkeypatch.setattr(device, "run", launches.append)
    lengths = (400, 600, 600)
    q, k, v = (device.empty((1, n, 4, 64), ml_dtypes.bfloat16) for n in lengths)
    value = FLIPPED[name]
    if name in REFUSED_ON_GPU or name == "stream":
        with pytest.raises((cupyflash.UnsupportedError, TypeError), match=name):
            cupyflash.attention(q, k, v, **{name: value})
        assert not launches
        return
    if name == "out":
        value = device.empty(q.shape, q.dtype)
    if name == "layout":
        k = v = q
    given, changed = on_a_device(name, 1, lambda n: device.empty((n,), numpy.int32), 400)
    if "cu_seqlens_q" in given:
        q, k, v = (device.empty(x.shape[1:], x.dtype) for x in (q, k, v))
    if name == "out":
        changed = {"out": value}
    plain = cupyflash.attention(q, k, v, **given)
    result = cupyflash.attention(q, k, v, **changed)
    if name == "out":
        assert result is value and result is not plain
        assert launches[1].pointers[3] == value.pointer
        return
    first, second = (
        (FORWARD.unpack(made.params), made.grid, made.pointers[4] != 0) for made in launches
    )
    for scalars, *_ in (first, second):
        del scalars["out"], scalars["lse"]
    assert first != second


@pytest.mark.parametrize("name", DEVICE_LENGTHS)
def test_lengths_belong_beside_the_arrays(name, stub, fake_cupy):  # noqa: F811
    """A GPU kernel reads no memory of the host, and no list."""
    q, k, v = fake_inputs()
    more = {}
    if name.startswith("cu_seqlens"):
        q, k, v = (FakeArray(x.shape[1:], x.dtype) for x in (q, k, v))
        more = {"cu_seqlens_q": int32(3), "cu_seqlens_kv": int32(3)}
    for given in (numpy.array([0, 1, 2][-2 - (len(more) > 0) :], numpy.int32), [0, 1]):
        for _ in range(2):
            with pytest.raises(TypeError, match=name):
                cupyflash.attention(q, k, v, **{**more, name: given})
    assert stub.log.launches == 0


def test_explain_says_that_an_empty_problem_launches_nothing(stub, fake_cupy):  # noqa: F811
    empty = FakeArray((1, 0, 2, 64), numpy.float16)
    assert "nothing is launched" in cupyflash.explain(empty, empty, empty)


def test_explain_leaves_nothing_out_on_the_cpu():
    q, k, v = column()
    used = numpy.array([4], numpy.int32)
    text = cupyflash.explain(
        q, k, v, causal=True, softcap=2.0, seqused_kv=used, q_offset=3, kv_offset=used
    )
    assert "batch 1, seqlen 6 x 6" in text
    assert "softcap 2, seqused_kv [4], q_offset 3, kv_offset [4]" in text
    packed = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS}
    text = cupyflash.explain(*(x[0] for x in (q, k, v)), causal=True, softcap=0.25, **packed)
    for words in ("packed, batch 2, total 6 x 6", "float32", "right 0", "softcap 0.25"):
        assert words in text
    many = numpy.zeros((300, 2, 1, 8), numpy.float32)
    assert len(cupyflash.explain(many, many, many, seqused_q=numpy.ones(300, int))) < 300
    with pytest.raises(ValueError, match="as many entries"):
        packed["cu_seqlens_kv"] = CU_SEQLENS[1:]
        cupyflash.explain(*(x[0] for x in (q, k, v)), **packed)


@pytest.mark.parametrize("function", [cupyflash.explain, cupyflash.raw_kernel])
def test_other_functions_take_the_same_options(function):
    q, k, v = column()
    with pytest.raises(TypeError, match="unexpected argument dropout"):
        function(q, k, v, dropout=0.5)
    with pytest.raises(ValueError, match="use None"):
        function(q, k, v, window=(-1, 0))


def test_raw_kernels_are_for_gpus(stub, fake_cupy):  # noqa: F811
    with pytest.raises(TypeError, match="GPU"):
        cupyflash.raw_kernel(*column())
    empty = FakeArray((1, 0, 1, 64), numpy.float16)
    full = FakeArray((1, 8, 1, 64), numpy.float16)
    with pytest.raises(ValueError, match="empty"):
        cupyflash.raw_kernel(empty, full, full)


def test_a_raw_kernel_is_complete(stub, fake_cupy, monkeypatch):  # noqa: F811
    """Path of a cubin, launch geometry, and the parameter struct by value with its tensor maps."""
    loaded = []

    class RawModule:
        def __init__(self, path):
            loaded.append(Path(path).read_bytes())

        def get_function(self, name):
            return types.SimpleNamespace(name=name)

    fake_cupy.RawModule = RawModule
    monkeypatch.setattr(api, "default_driver", lambda: stub.driver)
    monkeypatch.setattr(api, "default_cache", launch.default_cache)
    q, k, v = fake_inputs()
    raw = cupyflash.raw_kernel(q, k, v, causal=True, return_lse=True)
    assert loaded == [b"ELF"] and stub.log.launches == 0
    (params,) = raw.args
    assert isinstance(params, numpy.void) and params.dtype == FORWARD.dtype
    assert [int(params[name]) for name in launch.TENSORS] == addresses(
        *(array.data.ptr for array in (q, k, v, raw.out, raw.lse))
    )
    assert raw.inputs == (q, k, v) and raw.tile_counter is None and params["tile_counter"] == 0
    assert params["clear_out"] == 1
    assert any(params["q_map"].tobytes()), "encoded"
    assert raw.kernel.max_dynamic_shared_size_bytes == raw.shared_bytes
    with pytest.raises(ValueError, match="stream"):
        cupyflash.raw_kernel(q, k, v, stream=0)


def test_a_raw_kernel_has_a_counter_and_no_clusters(stub, fake_cupy, monkeypatch):  # noqa: F811
    """CuPy launches no clusters; blocks that claim tiles do so from an array of this kernel."""
    fake_cupy.RawModule = lambda path: types.SimpleNamespace(
        get_function=lambda name: types.SimpleNamespace(name=name)
    )
    fake_cupy.zeros = lambda entries, dtype: FakeArray((entries,), dtype)
    monkeypatch.setattr(api, "default_driver", lambda: stub.driver)
    monkeypatch.setattr(api, "default_cache", launch.default_cache)
    q, k, v = (FakeArray((4, 4096, heads, 128), ml_dtypes.bfloat16) for heads in (16, 2, 2))
    used = int32(4)
    for options in ({}, {"causal": True}, {"causal": True, "seqused_kv": used}):
        cupyflash.attention(q, k, v, **options)
        assert stub.log.cluster == 2, "of kernels that we launch"
        raw = cupyflash.raw_kernel(q, k, v, **options)
        assert "c2_" not in raw.kernel.name
        (params,) = raw.args
        assert raw.tile_counter.shape == (1,) and raw.tile_counter.dtype == numpy.int32
        assert params["tile_counter"] == raw.tile_counter.data.ptr
        lengths = [used] if "seqused_kv" in options else []
        assert list(raw.inputs) == [q, k, v, *lengths]
        assert params["seqused_kv"] == (used.data.ptr if lengths else 0)
    allocations = stub.log.allocations
    out = FakeArray(q.shape, q.dtype)
    (params,) = cupyflash.raw_kernel(q, k, v, seqused_q=used, out=out).args
    assert params["clear_out"] == 0 and params["out"] == out.data.ptr
    assert stub.log.allocations == allocations


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (numpy.float32, "float32 has no GPU kernel.*bfloat16 or float16"),
        (numpy.float64, "float64 has no GPU kernel"),
        (ml_dtypes.float8_e4m3fn, "sm90 .*: fp8: takes values that quantize has transposed"),
        (ml_dtypes.float8_e5m2, "float8_e5m2 is not served, .* float8_e4m3fn"),
    ],
)
def test_element_types_without_a_gpu_kernel(dtype, words, stub, fake_cupy):  # noqa: F811
    with pytest.raises(cupyflash.UnsupportedError, match=words):
        cupyflash.attention(*fake_inputs(dtype=dtype))
    assert stub.log.launches == 0


@pytest.mark.parametrize(
    "same",
    ["float32", numpy.float32, numpy.dtype("float32"), DType.float32],
    ids=["name", "class", "dtype", "ours"],
)
def test_out_dtype_may_say_what_is_true_anyway(same):
    q, k, v = column()
    assert cupyflash.attention(q, k, v, out_dtype=same).dtype == numpy.float32


@pytest.mark.parametrize("other", ["bfloat16", numpy.float16, "no dtype", 7])
def test_out_dtype_converts_nothing(other):
    with pytest.raises(TypeError, match="out_dtype"):
        cupyflash.attention(*column(), out_dtype=other)


def test_a_dtype_is_called_by_its_name():
    with pytest.raises(TypeError, match="out_dtype: expected float32, .*, got float16$"):
        cupyflash.attention(*column(), out_dtype=numpy.float16)


@pytest.mark.parametrize("options", [{"num_sms": 4}, {"stream": 0}], ids=str)
def test_what_only_a_gpu_has_is_unsupported_on_the_cpu(options):
    with pytest.raises(cupyflash.UnsupportedError, match=next(iter(options))):
        cupyflash.attention(*column(), **options)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layout": "sbhd"}, ValueError, "layout: expected one of .*'sbhd'"),
        ({"align": "center"}, ValueError, "align"),
        ({"causal": "yes"}, TypeError, "causal"),
        ({"return_lse": 1}, TypeError, "return_lse"),
        ({"window": (-1, -1)}, ValueError, "use None"),
        ({"window": (2**31, None)}, ValueError, r"2\*\*31"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": "30"}, TypeError, "softcap"),
        (
            {"softcap": 1e-42},
            ValueError,
            "softcap: .* softmax_scale / softcap is finite, got 1e-42",
        ),
        ({"softcap": 0.5, "softmax_scale": 2e38}, ValueError, "softcap"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
        ({"softmax_scale": 3e38}, ValueError, "softmax_scale"),
        ({"num_sms": 0}, ValueError, "num_sms"),
        ({"num_sms": 1.5}, TypeError, "num_sms"),
        ({"q_offset": 1.5}, TypeError, "q_offset"),
        ({"max_seqlen_q": 5}, ValueError, "only with cu_seqlens"),
        ({"cu_seqlens_q": CU_SEQLENS}, ValueError, "both or none"),
        ({"seqused_kv": numpy.array([7])}, ValueError, "seqused_kv"),
        ({"seqused_kv": numpy.array([-1])}, ValueError, "seqused_kv"),
        ({"seqused_kv": numpy.array([1, 2])}, ValueError, "seqused_kv"),
        ({"seqused_kv": numpy.array([1.0])}, TypeError, "seqused_kv"),
        ({"q_offset": numpy.array([1, 2])}, ValueError, "q_offset"),
    ],
    ids=str,
)
def test_values_that_mean_nothing(options, error, words):
    out = numpy.full((1, SIX, 1, 64), 7, numpy.float32)
    with pytest.raises(error, match=words):
        cupyflash.attention(*column(), out=out, **options)
    assert (out == 7).all(), "nothing is half-written"


@pytest.mark.parametrize("scale", [0.0, -0.125, 1e-39])
def test_scales_that_only_the_cpu_serves(scale, stub, fake_cupy):  # noqa: F811
    out = cupyflash.attention(*column(), softmax_scale=scale)
    assert numpy.isfinite(out).all()
    with pytest.raises(cupyflash.UnsupportedError, match="softmax_scale"):
        cupyflash.attention(*fake_inputs(), softmax_scale=scale)


def test_small_softcaps_that_are_served():
    zeros = numpy.zeros((1, 2, 1, 8), numpy.float32)
    assert (cupyflash.attention(zeros, zeros, zeros + 1, softcap=1e-38) == 1).all()
    wide = zeros.astype(numpy.float64)
    assert (cupyflash.attention(wide, wide, wide + 1, softcap=1e-42) == 1).all()
    with pytest.raises(ValueError, match="softcap"):
        cupyflash.attention(wide, wide, wide, softcap=1e-320)


def test_offsets_of_each_sequence():
    q, k, v = (numpy.concatenate([x, x]) for x in column())
    out = cupyflash.attention(q, k, v, causal=True, q_offset=numpy.array([0, -2]))
    numpy.testing.assert_array_equal(out[0], cupyflash.attention(q, k, v, causal=True)[0])
    numpy.testing.assert_array_equal(
        out[1], cupyflash.attention(q, k, v, causal=True, q_offset=-2)[1]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": [0, 2, 6]}, "cu_seqlens_q: expected an array"),
        ({"cu_seqlens_q": numpy.array([1, 2, 6])}, "start at 0"),
        ({"cu_seqlens_q": numpy.array([0, 4, 2])}, "decrease"),
        ({"cu_seqlens_kv": numpy.array([0, 4, 9])}, "past"),
        ({"cu_seqlens_kv": numpy.array([0, 6])}, "as many entries"),
        ({"cu_seqlens_kv": numpy.array([[0, 6]])}, "one dimension"),
        ({"layout": "bhsd"}, "layout"),
        ({"max_seqlen_kv": 3}, "max_seqlen_kv: 3 is less than the longest sequence, 4"),
    ],
    ids=str,
)
def test_packed_lengths_that_do_not_fit(change, words):
    """B34, for arrays whose lengths the host can read."""
    packed = [x[0] for x in column()]
    given = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_kv": CU_SEQLENS, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        cupyflash.attention(*packed, **given)
    with pytest.raises(ValueError, match="3 dimensions"):
        cupyflash.attention(*column(), cu_seqlens_q=CU_SEQLENS, cu_seqlens_kv=CU_SEQLENS)


def test_the_environment_is_read_when_a_configuration_is_met(
    stub,  # noqa: F811
    fake_cupy,  # noqa: F811
    monkeypatch,
):
    names = []
    original = launch.CudaBackend.plan
    monkeypatch.setattr(
        launch.CudaBackend,
        "plan",
        lambda self, made: (names.append(made.spec.family), original(self, made))[1],
    )
    q, k, v = fake_inputs()
    cupyflash.attention(q, k, v)
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")
    cupyflash.forget_configurations()
    cupyflash.attention(q, k, v)
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm70")
    cupyflash.forget_configurations()
    with pytest.raises(ValueError, match="CUPYFLASH_FAMILY"):
        cupyflash.attention(q, k, v)
    assert names == ["sm90", "sm80"]


def test_the_examples_of_docstrings_run():
    results = doctest.testmod(api)
    assert results.attempted >= 6 and results.failed == 0


# --- functions without a kernel, merge ------------------------------------------------------------


def test_what_is_to_come_says_so():
    q, k, v = column()
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    with pytest.raises(cupyflash.UnsupportedError, match="dout_scale"):
        cupyflash.attention_backward(out, q, k, v, out, lse, dout_scale=out)
    quantized = [cupyflash.quantize(x, role) for x, role in zip((q, k, v), "qkv")]
    for made in (quantized, [x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]):
        with pytest.raises(cupyflash.UnsupportedError, match="no gradients yet"):
            cupyflash.attention_backward(out, *made, out, lse)
    with pytest.raises(cupyflash.UnsupportedError, match=r"outs\[0\]: a quantized tensor"):
        cupyflash.merge(quantized[:1], [lse])


def test_merge_of_two_halves_is_the_whole():
    q, k, v = column(8)
    halves = [
        cupyflash.attention(q, k[:, part], v[:, part], return_lse=True)
        for part in (slice(0, 3), slice(3, 8))
    ]
    whole, whole_lse = cupyflash.attention(q, k, v, return_lse=True)
    out, lse = cupyflash.merge(*zip(*halves), return_lse=True)
    numpy.testing.assert_allclose(out, whole, rtol=1e-5)
    numpy.testing.assert_allclose(lse, whole_lse, rtol=1e-5)
    assert cupyflash.merge(*zip(*halves)).dtype == q.dtype


@pytest.mark.parametrize(
    ("outs", "lses", "error", "words"),
    [
        ([], [], ValueError, "at least one"),
        ([(1, 2, 3, 4)], [], ValueError, "1 outs and 0 lses"),
        ([(1, 2, 3, 4)], [(1, 2, 3)], ValueError, r"lses\[0\]: expected shape \[1, 3, 2\]"),
        ([(1, 2, 3, 4), (1, 2, 3, 5)], [(1, 3, 2)] * 2, ValueError, r"outs\[1\]"),
        ([(2, 3)], [(3, 2)], ValueError, r"outs\[0\]"),
    ],
)
def test_parts_that_do_not_merge(outs, lses, error, words):
    outs, lses = ([numpy.zeros(shape, numpy.float32) for shape in part] for part in (outs, lses))
    with pytest.raises(error, match=words):
        cupyflash.merge(outs, lses)


def test_parts_are_floating_point_numbers():
    with pytest.raises(TypeError, match=r"outs\[0\].*int64"):
        cupyflash.merge([numpy.zeros((1, 2, 3, 4), numpy.int64)], [numpy.zeros((1, 3, 2))])
