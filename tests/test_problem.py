"""Problem, Mask, TensorView: what is accepted, what they say, which words errors use."""

from __future__ import annotations

import fractions
import math

import ml_dtypes
import numpy
import pytest

from cupyflash.errors import UnsupportedError
from cupyflash.problem import (
    MAX_SEQLEN,
    UNBOUNDED,
    DeviceInfo,
    Mask,
    Problem,
    as_float,
    as_int,
    make_problem,
    to_bshd,
)
from cupyflash.tensor import CPU, Device, DeviceKind, DType, TensorView, contiguous_strides

GPU = Device(DeviceKind.cuda, 0)


def view(*shape, pointer=0x10000, strides=None, dtype=DType.bfloat16, device=GPU, readonly=False):
    strides = strides or contiguous_strides(shape)
    return TensorView(pointer, shape, strides, dtype, device, readonly)


def qkv(q=(2, 100, 8, 128), k=(2, 512, 8, 128), v=(2, 512, 8, 128), **more):
    pointers = (0x1000000, 0x2000000, 0x3000000)
    return [view(*shape, pointer=p, **more) for shape, p in zip((q, k, v), pointers)]


@pytest.mark.parametrize(
    "value",
    [
        DType.bfloat16,
        Device(DeviceKind.cuda, 1),
        view(2, 3, 4, 8),
        Mask(left=3, right=None, align="top_left"),
        DeviceInfo("H200", (9, 0), 132, 232448, 1 << 25),
        make_problem(*qkv(), mask=Mask(right=0), want_lse=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repr_can_be_pasted_back(value):
    assert eval(repr(value)) == value
    assert hash(eval(repr(value))) == hash(value)


def test_a_problem_holds_what_the_views_say():
    problem = make_problem(*qkv(k=(2, 512, 2, 128), v=(2, 512, 2, 64)), mask=Mask(right=0))
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv) == (2, 100, 512)
    assert (problem.heads_q, problem.heads_kv, problem.group) == (8, 2, 4)
    assert (problem.head_dim_qk, problem.head_dim_v) == (128, 64)
    assert problem.softmax_scale == 128**-0.5
    assert problem.out_dtype is DType.bfloat16
    assert (problem.shift, problem.mask_left, problem.mask_right) == (412, -UNBOUNDED, 412)
    assert problem.no_tma == problem.unaligned == ()


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "window", "bounds"),
    [
        (False, None, (None, None)),
        (True, None, (None, 0)),
        (False, (None, None), (None, None)),
        (True, (None, None), (None, 0)),
        (False, (None, 0), (None, 0)),
        (True, (2, 0), (2, 0)),
        (True, (2, 5), (2, 0)),
        (False, (0, 0), (0, 0)),
        (False, [numpy.int64(3), 4], (3, 4)),
        (numpy.True_, (numpy.array(3), None), (3, 0)),
    ],
)
def test_causal_and_window_become_two_bounds(causal, window, bounds):
    mask = Mask.resolve(causal, window)
    assert (mask.left, mask.right) == bounds


@pytest.mark.parametrize(
    ("window", "error", "words"),
    [
        ((-1, 0), ValueError, "use None"),
        ((0, -1), ValueError, "use None"),
        ((2**31, 0), ValueError, "use None"),
        ((1, 2, 3), ValueError, "pair"),
        (5, TypeError, "pair"),
        ("12", TypeError, "pair"),
        (b"12", TypeError, "pair"),
        ({1, 2}, TypeError, "pair"),
        ({1: 2, 3: 4}, TypeError, "pair"),
        ((True, 1), TypeError, r"window\[0\].*bool"),
        ((1, 2.0), TypeError, r"window\[1\].*float"),
        ((1, "2"), TypeError, r"window\[1\].*str"),
    ],
)
def test_windows_that_are_none(window, error, words):
    with pytest.raises(error, match=words):
        Mask.resolve(window=window)


def test_a_mask_needs_a_known_alignment_and_a_true_bool():
    with pytest.raises(ValueError, match="align.*'middle'"):
        Mask.resolve(align="middle")
    with pytest.raises(TypeError, match="causal.*int"):
        Mask.resolve(causal=1)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv", "mask", "kind"),
    [
        (100, 100, Mask(), "none"),
        (100, 100, Mask(right=0), "causal"),
        (1, 5, Mask(right=0), "none"),  # one decoding query sees every key
        (1, 5, Mask(right=0, align="top_left"), "causal"),
        (100, 100, Mask(left=99), "none"),
        (100, 100, Mask(left=98), "window"),
        (100, 100, Mask(left=5, right=0), "window"),
        (100, 100, Mask(left=99, right=0), "causal"),
        (5, 2, Mask(right=0), "causal"),
        (100, 100, Mask(right=99), "none"),
    ],
)
def test_the_mask_kind_names_the_bounds_that_hide_a_key(seqlen_q, seqlen_kv, mask, kind):
    assert Problem(1, seqlen_q, seqlen_kv, 1, 1, 64, 64, DType.float16, mask).mask_kind == kind


# --- numbers (B64) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale",
    [
        0.125,
        numpy.float32(0.125),
        numpy.float64(0.125),
        fractions.Fraction(1, 8),
        numpy.array(0.125),
        ml_dtypes.bfloat16(0.125),
        numpy.array(0.125, ml_dtypes.bfloat16),
    ],
    ids=lambda scale: type(scale).__name__,
)
def test_every_host_number_is_a_scale(scale):
    assert make_problem(*qkv(), softmax_scale=scale).softmax_scale == 0.125
    assert type(make_problem(*qkv(), softmax_scale=scale).softmax_scale) is float


def test_integers_are_numbers_too():
    assert as_float("softmax_scale", 1) == 1.0 and as_float("softmax_scale", numpy.int32(2)) == 2.0
    assert as_int("n", numpy.int64(7)) == 7 and type(as_int("n", numpy.int64(7))) is int


class DeviceScalar:
    """Like a 0-d array on a GPU: it would convert, after a wait."""

    ndim = 0

    def __str__(self) -> str:
        return "device scalar"

    def __float__(self):
        raise AssertionError("read from the device")

    __int__ = __index__ = __float__


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (math.nan, ValueError),
        (math.inf, ValueError),
        (1e39, ValueError),
        (DeviceScalar(), TypeError),
        (True, TypeError),
        ("0.125", TypeError),
        (1j, TypeError),
        (numpy.complex64(1), TypeError),
        (numpy.str_("1"), TypeError),
        (numpy.array([0.125]), TypeError),
    ],
    ids=["nan", "inf", "large", "device", "bool", "text", "complex"]
    + ["numpy complex", "numpy text", "array"],
)
def test_what_is_no_scale(value, error):
    with pytest.raises(error, match="softmax_scale") as caught:
        make_problem(*qkv(), softmax_scale=value)
    assert ("device scalar" in str(caught.value)) == hasattr(value, "__dlpack__")


@pytest.mark.parametrize(
    "value",
    [True, 1.0, "1", DeviceScalar(), numpy.array([1])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_int(value):
    with pytest.raises(TypeError, match="count"):
        as_int("count", value)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"k": (2, 512, 8, 64)},
            "k: expected shape [2, ?, 8, 128] to match q, got [2, 512, 8, 64]; "
            "head_dim of q and k must be equal",
        ),
        (
            {"k": (3, 512, 8, 128)},
            "k: expected shape [2, ?, 8, 128] to match q, got [3, 512, 8, 128]; "
            "batch of q and k must be equal",
        ),
        (
            {"k": (2, 512, 3, 128)},
            "k: expected shape [2, ?, a divisor of 8, 128] to match q, got [2, 512, 3, 128]; "
            "heads of q must be a multiple of the heads of k and v",
        ),
        (
            {"v": (2, 511, 8, 128)},
            "v: expected shape [2, 512, 8, ?] to match k, got [2, 511, 8, 128]; "
            "seqlen of k and v must be equal",
        ),
        (
            {"v": (2, 512, 4, 128)},
            "v: expected shape [2, 512, 8, ?] to match k, got [2, 512, 4, 128]; "
            "heads of k and v must be equal",
        ),
        ({"q": (100, 8, 128)}, "q: expected 4 dimensions [batch, seqlen, heads, head_dim], got 3"),
        ({"q": (2, 1, 8, 0), "k": (2, 1, 8, 0)}, "q: head_dim must be at least 1"),
        ({"v": (2, 512, 8, 0)}, "v: head_dim must be at least 1"),
        ({"k": (2, 512, 0, 128), "v": (2, 512, 0, 128)}, "heads of q must be a multiple"),
        ({"q": (2, MAX_SEQLEN + 1, 8, 128)}, "q: seqlen is at most 2**29"),
    ],
)
def test_shapes_that_do_not_go_together(shapes, message):
    with pytest.raises(ValueError) as caught:
        make_problem(*qkv(**shapes))
    assert message in str(caught.value)


def test_messages_speak_the_callers_layout():
    views = [
        to_bshd(view(*shape), "bhsd")
        for shape in ((2, 8, 100, 128), (2, 8, 512, 64), (2, 8, 512, 64))
    ]
    with pytest.raises(ValueError) as caught:
        make_problem(*views, layout="bhsd")
    assert "k: expected shape [2, 8, ?, 128] to match q, got [2, 8, 512, 64]" in str(caught.value)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_kv", "heads"])
def test_sizes_of_zero_are_problems(empty):
    batch = 0 if empty == "batch" else 2
    heads = 0 if empty == "heads" else 8
    seqlen_q, seqlen_kv = (0 if empty == f"seqlen_{name}" else 16 for name in ("q", "kv"))
    kv = (batch, seqlen_kv, heads, 64)
    problem = make_problem(*qkv((batch, seqlen_q, heads, 64), kv, kv))
    assert problem.is_empty == (empty != "seqlen_kv")


def test_types_and_devices_that_do_not_go_together():
    q, k, v = qkv()
    half = view(2, 512, 8, 128, dtype=DType.float16)
    with pytest.raises(TypeError, match="q bfloat16, k float16, v bfloat16"):
        make_problem(q, half, v)
    bits = [view(*x.shape, dtype=DType.uint16) for x in (q, k, v)]
    with pytest.raises(TypeError, match="expected bfloat16 or float16.*got uint16"):
        make_problem(*bits)
    other = view(2, 512, 8, 128, device=Device(DeviceKind.cuda, 1))
    with pytest.raises(TypeError, match="q, k on cuda:0; v on cuda:1"):
        make_problem(q, k, other)
    with pytest.raises(TypeError, match="on cpu"):
        make_problem(q, k, view(2, 512, 8, 128, device=CPU))


# --- strides and addresses (B16, B17) -------------------------------------------------------------


def test_the_last_stride_is_one_except_on_the_cpu():
    q, k, v = qkv()
    strided = view(2, 100, 8, 128, strides=(204800, 2048, 256, 2))
    with pytest.raises(ValueError, match=r"q: the last dimension must be contiguous.*\[204800"):
        make_problem(strided, k, v)
    on_cpu = [view(*x.shape, device=CPU) for x in (k, v)]
    make_problem(view(2, 100, 8, 128, strides=(204800, 2048, 256, 2), device=CPU), *on_cpu)
    one = view(2, 100, 8, 1, strides=(800, 8, 1, 77))
    make_problem(one, *(view(2, 512, 8, 1) for _ in range(2)))


@pytest.mark.parametrize(
    ("changed", "unaligned", "no_tma"),
    [
        ({"pointer": 0x1000002}, "base address", "base address"),
        ({"strides": (8 * 100 * 65, 8 * 65, 65, 1)}, "heads stride", "heads stride"),
        ({"strides": (-8 * 100 * 128, 8 * 128, 128, 1)}, None, "batch stride of -204800"),
        ({"strides": (0, 8 * 128, 128, 1)}, None, "batch stride of 0"),
        ({"strides": (8 * 100 * 128, 8 * 128, 128, 1)}, None, None),
        ({"strides": (1 << 40, 8 * 128, 128, 1)}, None, "batch stride"),
    ],
)
def test_the_sixteen_byte_rule_tensor_by_tensor(changed, unaligned, no_tma):
    _, k, v = qkv()
    problem = make_problem(view(2, 100, 8, 128, **changed), k, v)
    for expected, found in (
        (unaligned, problem.why_unaligned("q")),
        (no_tma, problem.why_no_tma("q")),
    ):
        assert (found is None) if expected is None else found.startswith(expected)
    assert problem.why_no_tma("k") is problem.why_unaligned("k") is None


def test_strides_of_size_one_dimensions_do_not_matter():
    q = view(1, 100, 1, 64, strides=(3, 64, -5, 1))
    k = v = view(1, 512, 1, 64, strides=(7, 64, 0, 1), pointer=0x2000000)
    assert make_problem(q, k, v).no_tma == ()


def test_an_output_of_our_own_may_be_unaligned_by_its_shape():
    problem = make_problem(*qkv(v=(2, 512, 8, 36)))
    assert problem.why_unaligned("out") == problem.why_unaligned("v") != None  # noqa: E711


# --- out ------------------------------------------------------------------------------------------


def out_like(**changed):
    return view(
        *changed.pop("shape", (2, 100, 8, 128)),
        pointer=changed.pop("pointer", 0x9000000),
        **changed,
    )


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"shape": (2, 100, 8, 64)}, ValueError, r"expected shape \[2, 100, 8, 128\]"),
        ({"shape": (2, 8, 128)}, ValueError, "expected 4 dimensions"),
        ({"dtype": DType.float16}, TypeError, "expected bfloat16, the dtype of q, got float16"),
        ({"readonly": True}, ValueError, "read-only"),
        ({"strides": (204800, 2048, 256, 2)}, ValueError, "contiguous"),
        ({"strides": (0, 1024, 128, 1)}, ValueError, "elements share memory"),
        ({"strides": (102400, 1024, 64, 1)}, ValueError, "elements share memory"),
        ({"pointer": 0x1000000}, ValueError, "shares memory with q"),
        ({"pointer": 0x2000100}, ValueError, "shares memory with k"),
        ({"device": Device(DeviceKind.cuda, 1)}, TypeError, "one device"),
    ],
)
def test_outputs_that_cannot_be_written(changed, error, words):
    with pytest.raises(error, match=words):
        make_problem(*qkv(), out=out_like(**changed))


def test_interleaved_slices_of_one_buffer_do_not_overlap():
    """[batch, seqlen, 4, heads, head_dim]: q, k, v and out side by side in every row."""
    strides = (64 * 4 * 256, 4 * 256, 64, 1)
    q, k, v, out = (
        view(2, 64, 4, 64, pointer=0x10000 + 512 * part, strides=strides) for part in range(4)
    )
    make_problem(q, k, v, out=out)
    shifted = view(2, 64, 4, 64, pointer=0x10000 + 512 * 2 + 256, strides=strides)
    with pytest.raises(ValueError, match="shares memory with v"):
        make_problem(q, k, v, out=shifted)


def test_an_unsupported_error_lists_its_rejections():
    error = UnsupportedError("no kernel", [("a", "too wide"), ("b", "too old")])
    assert error.rejections == (("a", "too wide"), ("b", "too old"))
    assert str(error) == "no kernel\n  a: too wide\n  b: too old"
    assert isinstance(error, NotImplementedError)
