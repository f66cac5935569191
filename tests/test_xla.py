"""Programs that XLA compiles for GPUs: what they call, and the handler that answers.

No GPU is needed: a program is lowered for one that the stub driver of ``test_launch.py`` shows, and
the handler is called with frames made here, so that its launches can be held against those of an
eager call with the same addresses. The declarations of XLA's interface are compared with its own
header, and the handler is called by XLA itself, on the CPU, as far as that goes.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest

import cupyflash
from cupyflash import driver, launch
from cupyflash.params import BACKWARD, FORWARD, StructLayout
from tests.test_launch import (  # noqa: F401 - fixtures
    FakeArray,
    Launched,
    fake_cupy,
    library_path,
    stub,
    stub_path,
)

# ruff: noqa: F811 - what looks redefined is a fixture

jax = pytest.importorskip("jax")
xla = pytest.importorskip("cupyflash.adapters.xla")

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

OK, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, INTERNAL = 0, 3, 5, 9, 13
STREAM = 0x777
BF16 = jax.numpy.bfloat16


@pytest.fixture
def two_gpus(stub: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """JAX with two of the stub's GPUs; the first is current, as XLA makes it before a call."""
    monkeypatch.setattr(xla, "gpus", lambda: [launch.CudaBackend(index) for index in (0, 1)])
    stub.library.cuCtxPushCurrent_v2(ctypes.c_uint64(0x1000))
    yield stub
    stub.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_uint64()))


# --- a frame of XLA's -----------------------------------------------------------------------------


class Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("element_type", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Items(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("items", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Span(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("element_type", ctypes.c_int), ("value", ctypes.c_void_p)]


class Attributes(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(Span))),
        ("items", ctypes.POINTER(ctypes.c_void_p)),
    ]


class ErrorArguments(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


class StreamArguments(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArguments))
GetStream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(StreamArguments))


class Version(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class Api(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("create_error", CreateError),
        ("others", ctypes.c_void_p * 3),
        ("get_stream", GetStream),
    ]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("version", Version),
        ("traits", ctypes.c_uint32),
    ]


class MetadataExtension(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    ]


class Frame(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", Items),
        ("results", Items),
        ("attributes", Attributes),
        ("future", ctypes.c_void_p),
    ]


FRAME_BYTES = Frame.attributes.offset + ctypes.sizeof(Attributes)


@dataclass
class Runtime:
    """XLA's side of the interface.

    Attributes:
        errors: (code, message) of every error that the handler made.
        refusal: what asking for the stream returns: 0, or an error.
        minor: of the version that it speaks.
    """

    handler: Any
    errors: list[tuple[int, str]] = field(default_factory=list)
    refusal: int = 0
    minor: int = 3

    ERROR = 0xE000

    def _create_error(self, arguments: Any) -> int:
        given = arguments[0]
        assert given.struct_bytes == 28, "up to the end of its last member"
        self.errors.append((given.code, given.message.decode()))
        return self.ERROR + len(self.errors)

    def _get_stream(self, arguments: Any) -> int:
        assert arguments[0].context == 0xC0 and arguments[0].struct_bytes == 32
        arguments[0].stream = STREAM
        return self.refusal

    def call(self, frame: Frame) -> int:
        """What the handler returns."""
        created, streamed = CreateError(self._create_error), GetStream(self._get_stream)
        api = Api(ctypes.sizeof(Api), None, Version(24, None, 0, self.minor), None, created)
        api.get_stream = streamed
        frame.api, frame.context = ctypes.pointer(api), 0xC0
        self.handler.restype, self.handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        return self.handler(ctypes.addressof(frame)) or 0

    def fails(self, frame: Frame, code: int, words: str) -> bool:
        """Whether a call is answered by this one error."""
        before = len(self.errors)
        returned = self.call(frame)
        assert len(self.errors) == before + 1 and returned == self.ERROR + len(self.errors)
        found, message = self.errors[-1]
        return found == code and re.search(words, message) is not None


@pytest.fixture
def runtime(two_gpus: Any) -> Runtime:
    return Runtime(two_gpus.driver.xla_handler)


Sides = Sequence[tuple[int, Sequence[int]]]
"""(address, shape) of every operand, or of every result."""


def frame_of(key: int, operands: Sides, results: Sides, name: bytes = b"recipe") -> Frame:
    def side(buffers: Sides) -> Items:
        made = []
        for address, shape in buffers:
            dims = (ctypes.c_int64 * len(shape))(*shape)
            made.append(Buffer(48, None, 16, address, len(shape), dims))
        pointers = (ctypes.c_void_p * len(made))(*(ctypes.addressof(x) for x in made))
        items = Items(40, None, len(made), (ctypes.c_int * len(made))(*[1] * len(made)), pointers)
        items.kept = made, pointers
        return items

    value = ctypes.c_int64(key)
    scalar, span = Scalar(5, ctypes.addressof(value)), Span(name, len(name))
    attributes = Attributes(
        *(48, None, 1, (ctypes.c_int * 1)(3), (ctypes.POINTER(Span) * 1)(ctypes.pointer(span))),
        (ctypes.c_void_p * 1)(ctypes.addressof(scalar)),
    )
    sides = side(operands), side(results)
    frame = Frame(FRAME_BYTES, None, None, None, 3, *sides, attributes)
    frame.kept = value, scalar, span, sides
    return frame


# --- lowering -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallSite:
    """A call of libcupyflash in a lowered program; shapes of its operands and results."""

    target: str
    key: int
    operands: list[tuple[int, ...]]
    results: list[tuple[int, ...]]


def lower(function: Callable[..., Any], *shapes: Any) -> list[CallSite]:
    """The calls in a program for CUDA, in order. Shapes are of bfloat16, or structs."""
    given = [jax.ShapeDtypeStruct(x, BF16) if isinstance(x, tuple) else x for x in shapes]
    lowered = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",))
    return calls_in(lowered.as_text())


def calls_in(text: str) -> list[CallSite]:
    def shapes(types: str) -> list[tuple[int, ...]]:
        found = re.findall(r"tensor<((?:\d+x)*)\w+>", types)
        return [tuple(int(n) for n in dims.split("x")[:-1]) for dims in found]

    sites = []
    for line in text.splitlines():
        if "custom_call @cupyflash" not in line:
            continue
        target = re.search(r"custom_call @(\w+)\(", line)
        key = re.search(r"recipe = (\d+) : i64", line)
        types = re.search(r"\} : \((.*)\) -> (.*)$", line)
        layouts = re.search(r"operand_layouts = \[(.*)\], result_layouts = \[(.*)\]\}", line)
        assert target and key and types and layouts, line
        site = CallSite(target[1], int(key[1]), shapes(types[1]), shapes(types[2]))
        for found, of in zip(layouts.groups(), (site.operands, site.results)):
            orders = re.findall(r"dense<(?:\[([\d, ]*)\]|(\d+))>", found)
            assert len(orders) == len(of)
            for (several, one), shape in zip(orders, of):
                order = [int(n) for n in several.split(", ")] if several else [int(one)]
                assert order == list(range(len(shape)))[::-1], "rows first"
        sites.append(site)
    return sites


def int32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, numpy.int32)


DENSE = ((2, 300, 8, 128), (2, 500, 2, 128), (2, 500, 2, 128))
LONG = ((16, 4096, 32, 128),) * 3
WIDE = ((1, 500, 4, 256),) * 3
PACKED = ((1000, 8, 64), (3000, 4, 64), (3000, 4, 64))
BATCH = 5

CASES: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "dense": (DENSE, {}, ()),
    "causal": (LONG, {"causal": True}, ()),
    "window": (DENSE, {"window": (100, 20), "align": "top_left", "softmax_scale": 0.25}, ()),
    "softcap": (DENSE, {"softcap": 30.0, "causal": True, "num_sms": 40}, ()),
    "wide": (WIDE, {"causal": True}, ()),
    "used": (DENSE, {}, ("seqused_q", "seqused_kv")),
    "offsets": (DENSE, {"causal": True}, ("q_offset", "kv_offset")),
    "packed": (
        PACKED,
        {"causal": True, "max_seqlen_q": 400},
        ("cu_seqlens_q", "cu_seqlens_kv", "seqused_kv"),
    ),
}


def lengths_of(name: str) -> list[Any]:
    shapes, _, lengths = CASES[name]
    batch = BATCH if len(shapes[0]) == 3 else shapes[0][0]
    return [int32(batch + x.startswith("cu_seqlens")) for x in lengths]


def attend(name: str, layout: str = "bshd") -> Callable[..., Any]:
    """attention of q, k, v and the lengths of a case."""
    _, options, names = CASES[name]

    def call(q: Any, k: Any, v: Any, *lengths: Any) -> Any:
        more = dict(zip(names, lengths), layout=layout)
        return cupyflash.attention(q, k, v, return_lse=True, **options, **more)

    return call


def pull_back(name: str, layout: str = "bshd") -> Callable[..., Any]:
    """The gradients of a case for given cotangents."""
    call = attend(name, layout)

    def gradients(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *lengths: Any) -> Any:
        _, pull = jax.vjp(lambda *x: call(*x, *lengths), q, k, v)
        return pull((dout, dlse))

    return gradients


def result_shapes(q: Any, v: Any, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of out and of lse."""
    rows = q[:-1] if layout == "bhsd" else (*q[:-3], q[-2], q[-3])
    return (*q[:-1], v[-1]), rows


# --- the handler does what an eager call does -----------------------------------------------------


def fake(shape: tuple[int, ...], dtype: Any = BF16) -> FakeArray:
    return FakeArray(shape, numpy.dtype(dtype))


def place(array: FakeArray) -> tuple[int, tuple[int, ...]]:
    return array.data.ptr, array.shape


def described(one: Launched, layout: StructLayout) -> tuple[Any, ...]:
    """A launch, without its stream and its counter of tiles."""
    values = layout.unpack(bytes(one.params)[: layout.size])
    counter = values.pop("tile_counter")
    geometry = (*one.grid, *one.block, one.shared_bytes, one.cluster, one.context, one.function)
    return geometry, values, bytes(one.params)[: layout.scalars_offset], bool(counter)


def counters(launched: list[Launched], layout: StructLayout) -> list[int]:
    found = (layout.unpack(bytes(x.params)[: layout.size])["tile_counter"] for x in launched)
    return [int(x) for x in found]


def check_counter(log: Any, before: int, found: list[int], scratch: FakeArray | None) -> None:
    """A launch that claims tiles does so from a word of the scratch, cleared on the stream."""
    claimed = [x for x in found if x]
    assert log.words_cleared == len(claimed) <= 1
    if claimed:
        assert scratch is not None
        assert scratch.data.ptr <= claimed[0] <= scratch.data.ptr + scratch.shape[0] - 4
        assert log.cleared_word == claimed[0] and log.word_cleared_on == STREAM
        assert log.launches_before_clearing == before


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", CASES)
def test_a_forward(name: str, layout: str, two_gpus: Any, fake_cupy: Any, runtime: Any) -> None:
    shapes, options, names = CASES[name]
    if layout == "bhsd" and len(shapes[0]) == 3:
        pytest.skip("packed sequences have one layout")
    if layout == "bhsd":
        shapes = tuple((b, h, s, d) for b, s, h, d in shapes)
    (site,) = lower(attend(name, layout), *shapes, *lengths_of(name))
    out_and_lse = result_shapes(shapes[0], shapes[2], layout)
    assert site.target == "cupyflash_attention" and tuple(site.results[:2]) == out_and_lse
    assert site.operands == [*shapes, *(x.shape for x in lengths_of(name))]
    q, k, v = (fake(shape) for shape in shapes)
    lengths = [fake(x.shape, x.dtype) for x in lengths_of(name)]
    log = two_gpus.log
    eager_before = log.launches
    out, lse = cupyflash.attention(
        q, k, v, return_lse=True, layout=layout, **options, **dict(zip(names, lengths))
    )
    expected = log.since(eager_before)
    scratch = [fake(shape, numpy.uint8) for shape in site.results[2:]]
    frame = frame_of(
        site.key, [place(x) for x in (q, k, v, *lengths)], [place(x) for x in (out, lse, *scratch)]
    )
    before = log.launches
    assert runtime.call(frame) == OK and not runtime.errors
    (launched,) = log.since(before)
    assert launched.stream == STREAM
    assert described(launched, FORWARD) == described(expected[0], FORWARD)
    check_counter(log, before, counters([launched], FORWARD), scratch[0] if scratch else None)


@pytest.mark.parametrize("name", CASES)
def test_a_backward(name: str, two_gpus: Any, fake_cupy: Any, runtime: Any) -> None:
    shapes, options, names = CASES[name]
    of_out, of_lse = result_shapes(shapes[0], shapes[2], "bshd")
    cotangents = of_out, jax.ShapeDtypeStruct(of_lse, numpy.float32)
    sites = lower(pull_back(name), *cotangents, *shapes, *lengths_of(name))
    site = sites[1]
    assert [x.target for x in sites] == list(xla.TARGETS)
    lengths = [fake(x.shape, x.dtype) for x in lengths_of(name)]
    assert site.operands == [
        *(of_out, of_lse, *shapes, of_out, of_lse),
        *(x.shape for x in lengths),
    ]
    assert site.results[:3] == list(shapes) and len(site.results) == 4
    dout, q, k, v, out = (fake(shape) for shape in (of_out, *shapes, of_out))
    lse, dlse = (fake(of_lse, numpy.float32) for _ in range(2))
    log = two_gpus.log
    log.params_bytes = BACKWARD.size
    eager_before = log.launches
    grads = cupyflash.attention_backward(
        *(dout, q, k, v, out, lse), dlse=dlse, **options, **dict(zip(names, lengths))
    )
    expected = log.since(eager_before)
    scratch = fake(site.results[3], numpy.uint8)
    workspace = BACKWARD.unpack(bytes(expected[0].params)[: BACKWARD.size])["row_lse"]
    scratch.data.ptr = int(workspace)
    operands = (dout, dlse, q, k, v, out, lse, *lengths)
    frame = frame_of(site.key, [place(x) for x in operands], [place(x) for x in (*grads, scratch)])
    before = log.launches
    assert runtime.call(frame) == OK and not runtime.errors
    launched = log.since(before)
    assert [x.stream for x in launched] == [STREAM] * 3
    for one, other in zip(launched, expected, strict=True):
        assert described(one, BACKWARD) == described(other, BACKWARD)
    check_counter(log, before, counters(launched, BACKWARD), scratch)


def test_the_gpu_that_runs_it(two_gpus: Any, fake_cupy: Any, runtime: Any) -> None:
    """One program, launched where XLA runs it: with that GPU's context and kernel."""
    (site,) = lower(attend("dense"), *DENSE)
    frame = frame_of(
        site.key,
        [place(fake(shape)) for shape in DENSE],
        [place(fake(DENSE[0])), place(fake((2, 8, 300), numpy.float32))],
    )
    for context in (0x1001, 0x1000):
        two_gpus.library.cuCtxPushCurrent_v2(ctypes.c_uint64(context))
        assert runtime.call(frame) == OK
        assert two_gpus.log.context == context and two_gpus.log.function == context + 0x1000
        assert two_gpus.library.stub_current_context() == context
        two_gpus.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_uint64()))


# --- what the handler refuses ---------------------------------------------------------------------


@pytest.fixture
def call_site(two_gpus: Any, fake_cupy: Any) -> tuple[int, list[Any], list[Any]]:
    """Key, operands and results of a good call."""
    (site,) = lower(attend("causal"), *LONG)
    operands = [place(fake(shape)) for shape in site.operands]
    return site.key, operands, [place(fake(shape)) for shape in site.results]


def test_other_frames_are_errors(runtime: Any, two_gpus: Any, call_site: Any) -> None:
    key, operands, results = call_site
    launches = two_gpus.log.launches
    (address, shape), *rest = operands
    for frame, code, words in (
        (frame_of(key + 1, operands, results), NOT_FOUND, "lowered in another process"),
        (frame_of(key + 256, operands, results), NOT_FOUND, "lowered in another process"),
        (frame_of(key, operands, results, b"receipt"), INVALID_ARGUMENT, "one attribute, recipe"),
        (frame_of(key, rest, results), INVALID_ARGUMENT, "expected 3 operands, got 2"),
        (frame_of(key, operands, results[:2]), INVALID_ARGUMENT, "expected 3 results, got 2"),
        (
            frame_of(key, [(address, (*shape[:3], 64)), *rest], results),
            INVALID_ARGUMENT,
            "operand 0: expected 268435456 elements .* got 134217728 at 0x7f",
        ),
        (
            frame_of(key, operands, [results[0], (results[1][0] + 8, results[1][1]), results[2]]),
            INVALID_ARGUMENT,
            "result 1: .* multiple of 16 bytes, got",
        ),
    ):
        assert runtime.fails(frame, code, words), runtime.errors[-1]
    frame = frame_of(key, operands, results)
    frame.stage = 2
    assert runtime.fails(frame, INVALID_ARGUMENT, "stage 2")
    frame = frame_of(key, operands, results)
    frame.struct_bytes = 100
    assert runtime.fails(frame, INVALID_ARGUMENT, "another kind")
    frame = frame_of(key, operands, results)
    frame.attributes.types[0] = 4
    assert runtime.fails(frame, INVALID_ARGUMENT, "one attribute")
    frame = frame_of(key, operands, results)
    frame.operands.types[1] = 2
    assert runtime.fails(frame, INVALID_ARGUMENT, "operand 1 is no buffer")
    assert two_gpus.log.launches == launches and two_gpus.log.words_cleared == 0
    assert runtime.call(frame_of(key, operands, results)) == OK


def test_another_gpu_and_a_missing_stream_are_errors(
    runtime: Any, two_gpus: Any, call_site: Any
) -> None:
    frame = frame_of(*call_site)
    two_gpus.library.cuCtxPushCurrent_v2(ctypes.c_uint64(0x1002))
    assert runtime.fails(frame, FAILED_PRECONDITION, "a GPU that was not there")
    two_gpus.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_uint64()))
    runtime.refusal = 0xABC
    assert runtime.call(frame) == 0xABC, "XLA's own error is handed on"
    assert two_gpus.log.launches == two_gpus.log.words_cleared == 0


def test_a_failed_launch_is_an_error_with_its_name(
    runtime: Any, two_gpus: Any, call_site: Any
) -> None:
    two_gpus.log.fail_launch_with = 1
    assert runtime.fails(frame_of(*call_site), INTERNAL, r"kernel launch: CUDA_ERROR_STUB \(1\)")
    two_gpus.log.fail_launch_with = 0
    key, operands, results = call_site
    where = results[2][0] + 16 * 2**20  # aligned to 16 bytes only
    assert runtime.call(frame_of(key, operands, [*results[:2], (where, results[2][1])])) == OK


def test_a_recipe_that_does_not_fit_is_refused(two_gpus: Any) -> None:
    with pytest.raises(ValueError, match="25 buffers, expected at most 24"):
        driver.PreparedRecipe(1, [], [1] * 25, [])
    plan = driver.PreparedPlan(
        [
            driver.PreparedLaunch(
                context=0x1000,
                function=1,
                grid=(1, 1, 1),
                block=(1, 1, 1),
                cluster=1,
                shared_bytes=0,
                params=bytes(64),
                pointer_offsets=[0],
                maps=[],
            )
        ]
    )
    binding = driver.Binding(plan, ((2, 0),), None)
    with pytest.raises(cupyflash.DriverError, match="different versions"):
        two_gpus.driver.register(1, lambda: driver.PreparedRecipe(1, [binding], [4], [4]))


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "told"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_the_newest_common_version_is_told(runtime: Any, theirs: int, told: int) -> None:
    metadata = Metadata(36, Version(0, None, 7, 7), 0)
    extension = MetadataExtension(32, 1, None, ctypes.pointer(metadata))
    first = MetadataExtension(24, 99, ctypes.addressof(extension))  # of a kind of the future
    frame = Frame(FRAME_BYTES, ctypes.addressof(first))
    runtime.minor = theirs
    assert runtime.call(frame) == OK
    version = metadata.version
    assert (version.struct_bytes, version.major, version.minor) == (24, 0, told)
    assert metadata.traits == 1, "may be recorded into a command buffer"
    metadata.struct_bytes = 32
    assert runtime.fails(frame, INVALID_ARGUMENT, "metadata of 32 bytes")


SAME_LAYOUT = {
    ("XlaExtension", "XLA_FFI_Extension_Base"): {"type": "type", "next": "next"},
    ("XlaVersion", "XLA_FFI_Api_Version"): {"major": "major_version", "minor": "minor_version"},
    ("XlaMetadata", "XLA_FFI_Metadata"): {"version": "api_version", "traits": "traits"},
    ("XlaMetadataExtension", "XLA_FFI_Metadata_Extension"): {"metadata": "metadata"},
    ("XlaErrorArguments", "XLA_FFI_Error_Create_Args"): {"message": "message", "code": "errc"},
    ("XlaStreamArguments", "XLA_FFI_Stream_Get_Args"): {"context": "ctx", "stream": "stream"},
    ("XlaApi", "XLA_FFI_Api"): {
        "version": "api_version",
        "internal": "internal_api",
        "create_error": "XLA_FFI_Error_Create",
        "get_stream": "XLA_FFI_Stream_Get",
    },
    ("XlaBuffer", "XLA_FFI_Buffer"): {
        "element_type": "dtype",
        "data": "data",
        "rank": "rank",
        "dims": "dims",
    },
    ("XlaSpan", "XLA_FFI_ByteSpan"): {"text": "ptr", "length": "len"},
    ("XlaScalar", "XLA_FFI_Scalar"): {"element_type": "dtype", "value": "value"},
    ("XlaItems", "XLA_FFI_Args"): {"size": "size", "types": "types", "items": "args"},
    ("XlaItems", "XLA_FFI_Rets"): {"size": "size", "types": "types", "items": "rets"},
    ("XlaAttributes", "XLA_FFI_Attrs"): {
        "size": "size",
        "types": "types",
        "names": "names",
        "items": "attrs",
    },
    ("XlaFrame", "XLA_FFI_CallFrame"): {
        "extensions": "extension_start",
        "api": "api",
        "context": "ctx",
        "stage": "stage",
        "operands": "args",
        "results": "rets",
        "attributes": "attrs",
    },
}
SAME_VALUE = {
    "XLA_MAJOR": "XLA_FFI_API_MAJOR",
    "XLA_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "XLA_STAGE_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "XLA_TYPE_BUFFER": "XLA_FFI_ArgType_BUFFER",
    "XLA_ATTRIBUTE_SCALAR": "XLA_FFI_AttrType_SCALAR",
    "XLA_ELEMENT_S64": "XLA_FFI_DataType_S64",
    "XLA_TRAIT_COMMAND_BUFFER": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "XLA_INVALID_ARGUMENT": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "XLA_NOT_FOUND": "XLA_FFI_Error_Code_NOT_FOUND",
    "XLA_FAILED_PRECONDITION": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "XLA_INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
}


def test_declarations_agree_with_the_header(tmp_path: Path) -> None:
    """Ours beside those that come with JAX, in one file."""
    code = Path(driver.__file__).parent / "native" / "launch.c"
    lines = [f'#include "{code}"', "#include <stddef.h>", "#include <xla/ffi/api/c_api.h>"]
    for (ours, theirs), members in SAME_LAYOUT.items():
        for mine, their in members.items():
            lines.append(
                f"_Static_assert(offsetof({ours}, {mine}) == offsetof({theirs}, {their}) && "
                f"sizeof((({ours} *)0)->{mine}) == sizeof((({theirs} *)0)->{their}), "
                f'"{ours}.{mine}");'
            )
        if "extensions" not in members and ours not in ("XlaSpan", "XlaScalar"):
            last = list(members)[-1]
            size = f"XLA_BYTES({ours}, {last})"
            if ours != "XlaApi":  # the rest of the table we do not use
                lines.append(f'_Static_assert({size} == {theirs}_STRUCT_SIZE, "{ours}");')
    lines += [
        f'_Static_assert((int){mine} == (int){theirs}, "{mine}");'
        for mine, theirs in SAME_VALUE.items()
    ]
    lines.append('_Static_assert(XLA_OLDEST_MINOR <= XLA_FFI_API_MINOR, "version");')
    source = tmp_path / "declarations.c"
    source.write_text("\n".join(lines))
    command = ["cc", "-std=c11", "-fsyntax-only", "-isystem", jax.ffi.include_dir(), str(source)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


# --- XLA itself, on the CPU -----------------------------------------------------------------------


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_xla_accepts_the_handler_and_reports_its_errors(two_gpus: Any, on_the_cpu: None) -> None:
    """Registered for the CPU, where there is no stream: XLA asks for the version and then calls."""
    handler = jax.ffi.pycapsule(two_gpus.driver.xla_handler)
    name = f"cupyflash_test_{ctypes.cast(two_gpus.driver.xla_handler, ctypes.c_void_p).value}"
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
    shapes = ((1, 64, 2, 64),) * 3
    (site,) = lower(attend("dense"), *shapes)

    def run(key: int, number: int) -> None:
        results = [
            jax.ShapeDtypeStruct((1, 64, 2, 64), BF16),
            jax.ShapeDtypeStruct((1, 2, 64), numpy.float32),
            *(jax.ShapeDtypeStruct(shape, numpy.uint8) for shape in site.results[2:]),
        ]
        call = jax.ffi.ffi_call(name, results)
        x = jax.numpy.zeros(shapes[0], BF16)
        jax.block_until_ready(jax.jit(lambda *x: call(*x, recipe=numpy.int64(key)))(*[x] * number))

    for key, number, words in (
        (site.key ^ 1, 3, "NOT_FOUND: cupyflash: this program was lowered in another process"),
        (site.key, 2, "INVALID_ARGUMENT: cupyflash: expected 3 operands, got 2"),
        # In a thread that has the stub's context, or in one of XLA's.
        (site.key, 3, "GPU context is not available|cupyflash: .* a GPU that was not there"),
    ):
        with pytest.raises(Exception, match=words):
            run(key, number)
    assert two_gpus.log.launches == 0


# --- programs -------------------------------------------------------------------------------------


def test_a_recipe_is_a_digest_of_what_is_done(two_gpus: Any) -> None:
    """The same in another process, another for everything that may differ."""
    keys = set()
    for name, (shapes, _, _) in CASES.items():
        (site,) = lower(attend(name), *shapes, *lengths_of(name))
        (again,) = lower(attend(name), *shapes, *lengths_of(name))
        assert site.key == again.key
        keys.add(site.key)
    assert len(keys) == len(CASES)
    before = two_gpus.log.loads
    lower(attend("dense"), *DENSE)
    assert two_gpus.log.loads == before


def test_gpus_of_two_kinds(two_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for each, in a scratch that is large enough for both."""
    both = [launch.CudaBackend(index) for index in (0, 1)]
    a100 = both[0].info.__class__("A100", (8, 0), 108, 166912, 40 << 20)
    shapes = (LONG[0], jax.ShapeDtypeStruct((16, 32, 4096), numpy.float32), *LONG)
    scratch = {}
    for name, infos in (("alike", {}), ("old", {0: a100, 1: a100}), ("mixed", {1: a100})):
        for index, backend in enumerate(both):
            backend.info = infos.get(index, two_gpus.driver.device_info(index))
        monkeypatch.setattr(xla, "gpus", lambda: both)
        scratch[name] = lower(pull_back("causal"), *shapes)[1].results[3][0]
    assert scratch["mixed"] == max(scratch["alike"], scratch["old"])


def test_transformations_become_calls(two_gpus: Any) -> None:
    shapes = ((2, 300, 8, 128),) * 3

    def step(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q, k, v, causal=True)

    def loss(q: Any, k: Any, v: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return jax.checkpoint(step)(x, k, v), None

        return (jax.lax.scan(body, q, None, length=3)[0].astype(numpy.float32) ** 2).sum()

    sites = lower(jax.value_and_grad(loss, (0, 1, 2)), *shapes)
    assert {x.target for x in sites} == set(xla.TARGETS) and len(sites) == 3  # one is recomputed
    (site,) = lower(jax.vmap(step, (0, None, 1)), (3, *shapes[0]), shapes[1], (2, 3, 300, 8, 128))
    assert site.operands == [(6, 300, 8, 128)] * 3
    donated = jax.jit(step, donate_argnums=0).trace(
        *(jax.ShapeDtypeStruct(x, BF16) for x in shapes)
    )
    text = donated.lower(lowering_platforms=("cuda",)).as_text()
    assert len(calls_in(text)) == 1 and "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_one_program_for_cpus_and_gpus(two_gpus: Any) -> None:
    given = [jax.ShapeDtypeStruct(x, BF16) for x in DENSE]
    traced = jax.jit(attend("dense")).trace(*given)
    text = traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert len(calls_in(text)) == 1 and "xla_buffer_python_cpu_callback" in text


def test_nothing_is_called_for_nothing(two_gpus: Any) -> None:
    empty = ((2, 0, 8, 128), (2, 500, 2, 128), (2, 500, 2, 128))
    assert lower(attend("dense"), *empty) == []
    cotangents = (2, 0, 8, 128), jax.ShapeDtypeStruct((2, 8, 0), numpy.float32)
    assert [x.target for x in lower(pull_back("dense"), *cotangents, *empty)] == [xla.TARGETS[1]]
    nothing = ((2, 0, 8, 128), (2, 0, 2, 128), (2, 0, 2, 128))
    assert lower(pull_back("dense"), *cotangents, *nothing) == []
    (site,) = lower(attend("dense"), DENSE[0], *nothing[1:])
    assert site.target == xla.TARGETS[0], "rows that see nothing are written"


def test_what_no_gpu_serves_is_refused_when_it_is_lowered(two_gpus: Any) -> None:
    shapes = ((2, 300, 8, 128),) * 3

    def refused(error: type[Exception], words: str, *given: Any, **options: Any) -> None:
        names = [name for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)]
        lengths = [options.pop(name) for name in names]

        def call(q: Any, k: Any, v: Any, *x: Any) -> Any:
            return cupyflash.attention(q, k, v, **options, **dict(zip(names, x)))

        with pytest.raises(error, match=words):
            lower(call, *given, *lengths)

    wide = [jax.ShapeDtypeStruct(x, numpy.float32) for x in shapes]
    refused(cupyflash.UnsupportedError, "float32 has no GPU kernel", *wide)
    refused(cupyflash.UnsupportedError, "positive float32", *shapes, softmax_scale=-1.0)
    refused(cupyflash.UnsupportedError, "no kernel", *(((1, 8, 2, 264),) * 3))
    refused(ValueError, "num_sms: expected at least 1", *shapes, num_sms=0)
    int16 = jax.ShapeDtypeStruct((2,), numpy.int16)
    refused(TypeError, "seqused_kv: expected int32 on a GPU", *shapes, seqused_kv=int16)
    refused(ValueError, "seqused_kv: expected shape", *shapes, seqused_kv=int32(3))


def test_lengths_that_are_to_be_checked_are_refused(
    two_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    assert len(lower(attend("dense"), *DENSE)) == 1
    with pytest.raises(cupyflash.UnsupportedError, match="CUPYFLASH_CHECK=1: lengths in a program"):
        lower(attend("used"), *DENSE, *lengths_of("used"))


def test_without_a_gpu_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(backend: str) -> None:
        raise RuntimeError(f"no {backend} here")

    monkeypatch.setattr(jax, "local_devices", none)
    for function in (attend("dense"), pull_back("dense")):
        shapes = DENSE
        if function.__name__ == "gradients":
            shapes = (DENSE[0], jax.ShapeDtypeStruct((2, 8, 300), numpy.float32), *DENSE)
        with pytest.raises(cupyflash.UnsupportedError, match="JAX has none here .no cuda here"):
            lower(function, *shapes)


def test_other_platforms_are_refused() -> None:
    given = [jax.ShapeDtypeStruct(x, BF16) for x in DENSE]
    with pytest.raises(cupyflash.UnsupportedError, match="rocm: there are kernels for CUDA GPUs"):
        jax.jit(attend("dense")).trace(*given).lower(lowering_platforms=("rocm",))
