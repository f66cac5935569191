"""From a problem to the driver: launch structs, contexts, streams, loading. A stub driver
(cuda_stub.c) takes the place of libcuda and remembers what libcupyflash asked of it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy
import pytest

import cupyflash
from cupyflash import arrays, driver, launch, serve
from cupyflash.cache import CacheEntry
from cupyflash.errors import DriverError, UnsupportedError
from cupyflash.params import FORWARD, SCALE_KINDS
from cupyflash.problem import (
    MAX_SEQLEN,
    UNBOUNDED,
    DeviceInfo,
    Mask,
    OperandScale,
    Problem,
    Scaling,
    make_problem,
    ragged_fault,
    ragged_strides,
    tma_fault,
)
from cupyflash.select import select, siblings
from cupyflash.tensor import Device, DeviceKind, DType, TensorView, contiguous_strides

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

H200 = DeviceInfo("Stub H200", (9, 0), 132, 232448, 50 << 20)
A100 = DeviceInfo("A100", (8, 0), 108, 166912, 40 << 20)


PARAMS_BYTES, NUM_REMEMBERED = 2048, 8


class Launched(ctypes.Structure):
    """Launched of cuda_stub.c."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("context", "function", "stream")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("params", ctypes.c_uint8 * PARAMS_BYTES),
    ]


class Log(ctypes.Structure):
    """Log of cuda_stub.c."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("launches", "loads", "pushes", "pops", "waits")),
        *((name, ctypes.c_uint64) for name in ("context", "function", "stream")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *(
            (name, ctypes.c_uint32)
            for name in ("shared_bytes", "cluster", "dependent", "num_attributes")
        ),
        ("attribute_function", ctypes.c_uint64),
        ("attribute_context", ctypes.c_uint64),
        ("attribute", ctypes.c_uint32),
        ("attribute_value", ctypes.c_uint32),
        ("relaxed_loads", ctypes.c_uint64),
        ("capturing_stream", ctypes.c_uint64),
        ("fail_launch_with", ctypes.c_uint64),
        ("waiting_stream", ctypes.c_uint64),
        ("event_stream", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("allocations", "allocated_bytes", "allocated_in", "relaxed_allocations"),
                *("cleared_from", "cleared_bytes", "cleared_with", "cleared_on", "awaited_stream"),
                *("open_streams", "fail_clear_with"),
            )
        ),
        ("params", ctypes.c_uint8 * PARAMS_BYTES),
        ("params_bytes", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("words_cleared", "cleared_word", "word_cleared_on"),
                "launches_before_clearing",
            )
        ),
        ("last", Launched * NUM_REMEMBERED),
    ]

    def since(self, launches: int) -> list[Launched]:
        """Copies of the launches behind this many, at most ``NUM_REMEMBERED``."""
        assert self.launches - launches <= NUM_REMEMBERED
        return [
            Launched.from_buffer_copy(self.last[number % NUM_REMEMBERED])
            for number in range(launches, self.launches)
        ]

    def scalars(self) -> dict[str, int | float]:
        return FORWARD.unpack(bytes(self.params)[: FORWARD.size])

    def map(self, field: str) -> EncodedMap:
        return EncodedMap.from_buffer_copy(bytes(self.params), FORWARD.offsets[field])


class EncodedMap(ctypes.Structure):
    """What the stub writes in place of a tensor map."""

    _fields_ = [
        ("pointer", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint32)
            for name in ("data_type", "rank", "swizzle", "promotion", "interleave", "fill")
        ),
        ("dims", ctypes.c_uint32 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("unused", ctypes.c_uint8 * 24),
    ]


@pytest.fixture(scope="session")
def stub_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    code = Path(__file__).parent / "cuda_stub.c"
    subprocess.run(
        ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
        + ["-o", str(path), str(code)],
        check=True,
    )
    return path


@pytest.fixture(scope="session")
def library_path(tmp_path_factory) -> Path:
    code = Path(driver.__file__).parent / "native" / "launch.c"
    return driver.build_library(code, tmp_path_factory.mktemp("native"))


@pytest.fixture
def stub(stub_path, library_path, monkeypatch):
    """A Driver on the stub, as the process's one; kernels come from a cache that compiles
    nothing. Yields the log."""
    library = ctypes.CDLL(str(stub_path))
    library.stub_log.restype = ctypes.POINTER(Log)
    library.stub_current_context.restype = ctypes.c_uint64
    library.stub_reset()
    connected = driver.Driver(str(stub_path), library_path)
    monkeypatch.setattr(driver, "default_driver", lambda: connected)
    monkeypatch.setattr(arrays, "default_driver", lambda: connected)
    monkeypatch.setattr(launch, "default_cache", lambda: StubCache([b"ELF"]))
    monkeypatch.setattr(launch, "_kernels", {})
    serve.forget_configurations()
    log = library.stub_log().contents
    log.params_bytes = FORWARD.size
    yield SimpleNamespace(log=log, driver=connected, library=library)
    serve.forget_configurations()


class StubCache:
    """Hands out cubins in turn, and notes which were refused."""

    def __init__(self, cubins: list[bytes]) -> None:
        self.cubins = cubins
        self.refused: list[str] = []
        self.at_hand: set[str] = set()

    def get_at_hand(self, spec):
        return self.get(spec) if spec.name in self.at_hand else None

    def get(self, spec):
        return CacheEntry(
            self.cubins[min(len(self.refused), len(self.cubins) - 1)], "disk", None, ""
        )

    def discard(self, spec, reason):
        self.refused.append(reason)


def view(shape, pointer, strides=None, dtype=DType.bfloat16, index=0) -> TensorView:
    return TensorView(
        pointer, shape, strides or contiguous_strides(shape), dtype, Device(DeviceKind.cuda, index)
    )


def forward(
    batch=2, seqlen_q=300, seqlen_kv=500, heads_q=8, heads_kv=2, head_dim=128, mask=None, index=0
) -> tuple[Problem, dict[str, TensorView]]:
    views = {
        "q": view((batch, seqlen_q, heads_q, head_dim), 0x10000, index=index),
        "k": view((batch, seqlen_kv, heads_kv, head_dim), 0x20000, index=index),
        "v": view((batch, seqlen_kv, heads_kv, head_dim), 0x30000, index=index),
    }
    problem = make_problem(**views, mask=mask or Mask(), want_lse=True)
    views["out"] = view((batch, seqlen_q, heads_q, head_dim), 0x40000, index=index)
    views["lse"] = view((batch, heads_q, seqlen_q), 0x50000, dtype=DType.float32, index=index)
    return problem, views


def general(
    lengths=("seqused_kv",), *, total=None, batch=2, mask=None, align="bottom_right", **changes
) -> tuple[Problem, dict[str, TensorView]]:
    """As ``forward``, with these arrays of lengths; ``total``: rows of packed q and k."""
    problem, views = forward(batch=batch)
    if mask is not None:
        mask = dataclasses.replace(mask, align=align)
    if total is not None:
        for name, rows in zip(("q", "k", "v", "out"), (total[0], total[1], total[1], total[0])):
            shape = (1, rows, *views[name].shape[2:])
            views[name] = view(shape, views[name].pointer, (0, *contiguous_strides(shape)[1:]))
        heads = views["q"].shape[2]
        views["lse"] = view((heads, total[0]), 0x50000, dtype=DType.float32)
    problem = make_problem(
        *(views[name] for name in ("q", "k", "v")),
        mask=mask or Mask(),
        want_lse=True,
        lengths=lengths,
        packed=None if total is None else (batch, *total),
        **changes,
    )
    for position, name in enumerate(lengths):
        entries = batch + 1 if name.startswith("cu_seqlens") else batch
        views[name] = view((entries,), 0x60000 + 0x100 * position, dtype=DType.int32)
    return problem, views


def addresses(*given: int) -> list[int]:
    """One for each of ``launch.TENSORS``."""
    return [*given, *[0] * (len(launch.TENSORS) - len(given))]


def launch_of(problem, views, device=H200, stream=0) -> launch.Launch:
    spec = select(problem, device).spec
    return launch.forward_launch(problem, spec, device, views, stream)


# --- the struct of a launch -----------------------------------------------------------------------


def test_parameters_of_a_forward():
    problem, views = forward(mask=Mask(left=40, right=0))
    made = launch_of(problem, views)
    values = FORWARD.unpack(made.params)
    assert values["q"] == 0x10000 and values["lse"] == 0x50000
    assert values["q_stride_batch"] == 300 * 8 * 128
    assert values["k_stride_seqlen"] == 2 * 128 and values["k_stride_head"] == 128
    assert (values["lse_stride_batch"], values["lse_stride_head"]) == (8 * 300, 300)
    assert values["group"] == 4
    assert (values["mask_left"], values["mask_right"]) == (200 - 40, 200)
    assert values["bottom_right"] == 0, "the host has added it"
    assert values["num_m_blocks"] == -(-300 // made.spec.block_m)
    assert values["num_tiles"] == values["num_m_blocks"] * 16
    assert values["softmax_scale"] == pytest.approx(128**-0.5, rel=1e-7)
    assert values["softmax_scale_log2"] == pytest.approx(128**-0.5 / numpy.log(2), rel=1e-7)
    assert not any(made.params[: FORWARD.scalars_offset]), "maps are encoded at the launch"


def test_an_unwanted_lse_is_a_null_pointer():
    problem, views = forward()
    del views["lse"]
    assert FORWARD.unpack(launch_of(problem, views).params)["lse"] == 0


def test_a_persistent_grid_is_no_larger_than_the_device():
    problem, views = forward(batch=16, seqlen_q=4096, heads_q=32)
    made = launch_of(problem, views)
    assert made.spec.scheduler == "persistent"
    assert made.grid == (132, 1, 1)
    limited = dataclasses.replace(problem, num_sms=100)
    assert launch_of(limited, views).grid == (100, 1, 1)
    small, views = forward(batch=1, seqlen_q=64, heads_q=4)
    assert launch_of(small, views).grid == (4, 1, 1)


def test_a_grid_of_tiles_cannot_be_limited():
    problem, views = forward()
    with pytest.raises(UnsupportedError, match="num_sms"):
        launch_of(dataclasses.replace(problem, num_sms=4), views, A100)


def test_tensor_maps_of_strided_arrays():
    """bhsd by strides, one batch, and a view into a wider buffer: strides are read, not derived."""
    wide = 3 * 4 * 64
    views = {
        name: view((1, 200, 4, 64), 0x10000 + 512 * position, (0, wide, 64, 1))
        for position, name in enumerate("qkv")
    }
    problem = make_problem(**views)
    views["out"] = view((1, 200, 4, 64), 0x90000, (4 * 200 * 64, 64, 200 * 64, 1))
    made = launch_of(problem, views)
    requests = {request.offset: request for request in made.maps}
    q = requests[FORWARD.offsets["q_map"]]
    assert q.dims == (64, 200, 4, 1)
    assert q.strides_bytes[:2] == (wide * 2, 128)
    assert q.strides_bytes[2] > 0 and q.strides_bytes[2] % 16 == 0, "batch of 1: any legal stride"
    assert q.box == (64, 64, 1, 1) and q.swizzle == 128
    out = requests[FORWARD.offsets["out_map"]]
    assert out.strides_bytes[:2] == (128, 200 * 128)


def test_no_keys_no_maps_of_them():
    problem, views = forward(seqlen_kv=0)
    fields = {request.offset for request in launch_of(problem, views).maps}
    assert fields == {FORWARD.offsets["q_map"], FORWARD.offsets["out_map"]}


def test_parameters_of_capped_scores():
    """The scale works inside the cap; what comes out of it is the exponent."""
    problem, views = forward(mask=Mask(right=0))
    problem = dataclasses.replace(problem, softcap=30.0, softmax_scale=0.25)
    made = launch_of(problem, views)
    values = FORWARD.unpack(made.params)
    assert made.spec.general and made.spec.name.endswith("_general_causal")
    assert values["softcap"] == 30 and values["softcap_slope"] == pytest.approx(0.25 / 30, rel=1e-7)
    assert values["softmax_scale"] == 1
    assert values["softmax_scale_log2"] == pytest.approx(numpy.log2(numpy.e), rel=1e-7)
    assert (values["mask_left"], values["mask_right"]) == (-UNBOUNDED, 200), "lengths are known"
    assert values["bottom_right"] == 0
    plain = FORWARD.unpack(launch_of(*forward()).params)
    assert plain["softcap"] == plain["softcap_slope"] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_parameters_of_scales(packed):
    """Whatever kernel takes them: no family has one, so that of a 16-bit type stands in."""
    names = ("cu_seqlens_q", "cu_seqlens_kv") if packed else ()
    problem, views = general(names, total=(300, 500) if packed else None)
    scaling = Scaling(
        q=OperandScale("token", 1), k=OperandScale("block", 64), v=OperandScale("head"), v_slot=128
    )
    columns = 128 * (500 // 128 + 2) if packed else 512
    batches = 1 if packed else 2
    transposed = (batches, 2, 128, columns)
    strides = (0 if packed else 2 * 128 * columns, 128 * columns, columns, 1)
    views["v"] = view(transposed, 0x30000, strides).permuted((0, 3, 1, 2))
    shapes = {"q": (2, 8, 300), "k": (2, 2, 8), "v": (2, 2)}
    if packed:
        shapes |= {"q": (8, 302), "k": (2, 500 // 64 + 2)}
    for position, (name, shape) in enumerate(shapes.items()):
        own = (0, 1) if name == "v" else None  # a broadcast array of scales of heads
        pointer = 0x70000 + 0x1000 * position
        views[f"{name}_scale"] = view(shape, pointer, own, DType.float32)
    made = launch_of(dataclasses.replace(problem, scaling=scaling), views)
    values = FORWARD.unpack(made.params)
    found = {name: values[name] for name in values if "_scale" in name and name[0] in "qkv"}
    assert found == {
        "q_scale": 0x70000,
        "q_scale_stride_batch": 0 if packed else 8 * 300,
        "q_scale_stride_head": 302 if packed else 300,
        "q_scale_stride_block": 1,
        "q_scale_kind": SCALE_KINDS.index("token"),
        "q_scale_tokens_log2": 0,
        "k_scale": 0x71000,
        "k_scale_stride_batch": 0 if packed else 16,
        "k_scale_stride_head": 9 if packed else 8,
        "k_scale_stride_block": 1,
        "k_scale_kind": SCALE_KINDS.index("block"),
        "k_scale_tokens_log2": 6,
        "v_scale": 0x72000,
        "v_scale_stride_batch": 0,
        "v_scale_stride_head": 1,
        "v_scale_stride_block": 0,
        "v_scale_kind": SCALE_KINDS.index("head"),
        "v_scale_tokens_log2": 0,
    }
    assert (values["v_slot_log2"], values["v_columns"]) == (7, columns)
    assert (values["v_stride_seqlen"], values["v_stride_dim"]) == (1, columns)
    assert values["v_stride_head"] == 128 * columns and values["out_scale"] == 0
    assert made.pointers[11:] == (0x70000, 0x71000, 0x72000, 0)


def test_one_scale_a_tensor_has_no_strides_and_a_missing_one_no_address():
    problem, views = forward()
    scaling = Scaling(k=OperandScale("tensor"), out=True)
    views["k_scale"] = view((), 0x70000, dtype=DType.float32)
    views["out_scale"] = view((), 0x70010, dtype=DType.float32)
    values = FORWARD.unpack(launch_of(dataclasses.replace(problem, scaling=scaling), views).params)
    members = [name for name in values if "_scale" in name and not name.startswith("softmax")]
    scales = {name: values[name] for name in members if values[name]}
    assert scales == {"k_scale": 0x70000, "out_scale": 0x70010}
    assert values["v_stride_dim"] == 1 and values["v_slot_log2"] == values["v_columns"] == 0
    plain = FORWARD.unpack(launch_of(problem, views).params)
    assert plain["v_stride_dim"] == 0, "nothing of 8-bit floats is set for others"


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("offset", [0, -7, 2**40])
def test_the_device_adds_to_the_bounds_of_a_general_mask(align, offset):
    """Bounds as given: the host knows no length that would shift them."""
    mask = Mask(left=40, right=3)
    problem, views = general(mask=mask, align=align, position_offset=offset)
    values = FORWARD.unpack(launch_of(problem, views).params)
    assert (values["mask_left"], values["mask_right"]) == (offset - 40, offset + 3)
    assert values["bottom_right"] == (align == "bottom_right")
    assert values["seqused_kv"] == 0x60000 and values["seqused_q"] == values["cu_seqlens_q"] == 0


def test_an_absent_bound_hides_nothing_whatever_the_device_adds():
    problem, views = general(mask=Mask(right=0))
    values = FORWARD.unpack(launch_of(problem, views).params)
    most = 2**31 + 2 * MAX_SEQLEN + 2**31  # two offsets, two lengths
    assert values["mask_left"] + most < -UNBOUNDED and values["mask_right"] == 0
    problem, views = general(mask=Mask())
    values = FORWARD.unpack(launch_of(problem, views).params)
    assert values["mask_right"] - most > UNBOUNDED
    far = Mask(left=2**31 - 1, right=2**31 - 1)
    for offset in (2**100, -(2**100)):
        problem, views = general(mask=far, position_offset=offset)
        values = FORWARD.unpack(launch_of(problem, views).params)
        for name in ("mask_left", "mask_right"):
            assert UNBOUNDED + most < abs(values[name]) < 2**63 - most


def test_parameters_of_packed_sequences():
    names = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "q_offset", "kv_offset")
    problem, views = general(names, total=(1000, 3000), batch=5, mask=Mask(right=0))
    made = launch_of(problem, views)
    values = FORWARD.unpack(made.params)
    assert [values[name] for name in names] == [views[name].pointer for name in names]
    assert made.pointers[5:11] == tuple(views[name].pointer for name in names)
    assert not any(made.pointers[11:]), "no scales"
    assert (values["batch"], values["rows_q"], values["rows_kv"]) == (5, 1000, 3000)
    assert values["q_stride_batch"] == values["lse_stride_batch"] == 0
    assert values["lse_stride_head"] == 1000
    assert values["num_m_blocks"] == 1000 // made.spec.slot_rows + 5, "some of them empty"
    heads = 8 // made.spec.slot_heads
    assert values["num_tiles"] == values["num_m_blocks"] * heads
    # Half of the L2 cache holds the keys and values of as many heads as have section_rows keys.
    assert values["section_rows"] == H200.l2_bytes // 2 // (2 * 128 * 2)


@pytest.mark.parametrize("clear", [False, True])
def test_an_output_of_ours_is_cleared(clear):
    problem, views = general()
    spec = select(problem, H200).spec
    made = launch.forward_launch(problem, spec, H200, views, clear_out=clear)
    assert FORWARD.unpack(made.params)["clear_out"] == clear


def reach(request, sequence_begin, length, row) -> tuple[bool, int]:
    """Whether row ``row`` of a sequence lies in a ragged map, and its address (attn/ragged.cuh).
    ``sequence_begin`` counts rows of the array, batch entries too."""
    if request.shift_bytes:  # of an output
        at = (request.dims[1] - length + row, sequence_begin + length, 0, 0)
    else:
        at = (launch.FAR_ROW - length + row, 0, launch.FAR_ROW, sequence_begin + length)
    inside = all(0 <= c < extent for c, extent in zip(at, request.dims[1:]))
    address = sum(c * stride for c, stride in zip(at, request.strides_bytes))
    return inside, (request.pointer + request.shift_bytes + address) % 2**64


def test_ragged_maps_end_where_a_sequence_ends():
    problem, views = general(("cu_seqlens_q", "cu_seqlens_kv"), total=(1000, 3000), batch=5)
    made = launch_of(problem, views)
    requests = {request.offset: request for request in made.maps}
    assert len(requests) == 4
    out, k = (requests[FORWARD.offsets[f"{name}_map"]] for name in ("out", "k"))
    row = 2 * 128 * 2
    assert k.dims == (128, 1 << 30, 2, (1 << 30) + 1, 3001)
    assert k.strides_bytes == (row, 128 * 2, (1 << 34) - row, row)
    assert k.shift_bytes == 0 and k.pointer == 0x20000, "a load needs a base that is somebody's"
    assert k.box == (64, made.spec.block_n // made.spec.cluster, 1, 1, 1) and k.swizzle == 128
    out_row = 8 * 128 * 2
    assert out.dims == (128, 1000, 1001, 8, 1) and out.shift_bytes == -1000 * out_row
    for begin, length, at in itertools.product((0, 1, 300), (0, 1, 700), (0, 5, 699)):
        assert reach(out, begin, length, at) == (at < length, out.pointer + (begin + at) * out_row)
    for begin, length, at in itertools.product((0, 1, 2000), (0, 1, 700, 1000), (0, 5, 699, 999)):
        assert reach(k, begin, length, at) == (at < length, 0x20000 + (begin + at) * row)


def test_ragged_maps_of_sequences_that_are_not_packed():
    problem, views = general(batch=3)
    requests = {request.offset: request for request in launch_of(problem, views).maps}
    v = requests[FORWARD.offsets["v_map"]]
    row = 2 * 128 * 2
    assert v.dims == (128, 1 << 30, 2, (1 << 30) + 1, 2 * 500 + 500 + 1)
    assert reach(v, 2 * 500, 77, 76) == (True, v.pointer + (2 * 500 + 76) * row)
    assert not reach(v, 0, 77, 77)[0]


def test_ragged_maps_count_batch_entries_in_rows():
    problem, views = general(batch=3)
    values = FORWARD.unpack(launch_of(problem, views).params)
    assert [values[f"{name}_batch_rows"] for name in "qkv"] == [views["q"].shape[1], 500, 500]
    odd = view((2, 100, 2, 64), 0x10000, (100 * 128 + 64, 128, 64, 1))
    assert "batch stride" in ragged_fault(odd) and tma_fault(odd) is None
    one = view((4, 1, 2, 64), 0x10000, (640, 8, 64, 1))
    assert ragged_strides(one) == (1280, 1), "the stride of a dimension of one may be anything"


@pytest.mark.parametrize("offset", [0, 5, -5, 2**40, -(2**40), 2**31 - 2048])
@pytest.mark.parametrize("left", [None, 0, 3, 10**6, 2**31 - 1])
def test_kernel_bounds_show_the_same_keys(left, offset):
    """Diagonals fit 32 bits in every sum, and mean what the mask means."""
    lengths = (1, 2, 77, 2048)
    for seqlen_q, seqlen_kv, right in itertools.product(lengths, lengths, (None, 0, 3, 2**31 - 1)):
        mask = Mask(left, right)
        problem = Problem(
            1, seqlen_q, seqlen_kv, 1, 1, 64, 64, DType.float16, mask, position_offset=offset
        )
        for query in {0, seqlen_q // 2, seqlen_q - 1}:
            position = query + seqlen_kv - seqlen_q + offset
            low = 0 if left is None else max(position - left, 0)
            high = seqlen_kv - 1 if right is None else min(position + right, seqlen_kv - 1)
            first, last = 0, seqlen_kv - 1
            first = max(query + problem.mask_left, first)
            last = min(query + problem.mask_right, last)
            assert (first, last) == (low, high) or (first > last and low > high), problem
            for bound in (problem.mask_left, problem.mask_right):
                assert abs(bound) <= UNBOUNDED and abs(query + bound) < 2**31


# --- the driver -----------------------------------------------------------------------------------


def test_a_launch_reaches_the_driver_whole(stub):
    problem, views = forward(mask=Mask(right=0))
    made = launch_of(problem, views, stream=0x77)
    launch.CudaBackend(0).run(made)
    log = stub.log
    assert log.launches == 1 and log.stream == 0x77
    assert tuple(log.grid) == made.grid and tuple(log.block) == (made.spec.threads, 1, 1)
    assert log.shared_bytes == made.spec.shared_bytes
    assert log.cluster == (made.spec.cluster if made.spec.cluster > 1 else 0)
    assert (log.attribute, log.attribute_value) == (8, made.spec.shared_bytes)
    assert log.function == log.attribute_function == 0x2000
    expected = FORWARD.unpack(made.params)
    assert log.scalars() == expected
    k = log.map("k_map")
    assert k.pointer == 0x20000 and k.rank == 4 and k.data_type == 9  # CU_..._BFLOAT16
    assert tuple(k.dims)[:4] == (128, 500, 2, 2)
    assert tuple(k.strides)[:3] == (2 * 128 * 2, 128 * 2, 500 * 2 * 128 * 2)
    assert tuple(k.box)[:4] == (64, made.spec.block_n // made.spec.cluster, 1, 1)
    assert (k.swizzle, k.promotion, k.interleave, k.fill) == (3, 3, 0, 0)


def test_a_plan_runs_at_other_addresses_and_streams(stub):
    problem, views = forward()
    plan = launch.CudaBackend(0).plan(launch_of(problem, views))
    plan.run(0x88, *addresses(0xA000, 0xB000, 0xC000, 0xD000, 0xE000))
    scalars = stub.log.scalars()
    expected = addresses(0xA000, 0xB000, 0xC000, 0xD000, 0xE000)
    assert [scalars[name] for name in launch.TENSORS] == expected
    assert stub.log.stream == 0x88
    maps = [stub.log.map(f"{tensor}_map").pointer for tensor in ("q", "k", "v", "out")]
    assert maps == [0xA000, 0xB000, 0xC000, 0xD000]
    plan.run(0, *addresses(0xA000, 0xA000, 0xA000, 0xD000, 0))
    assert stub.log.scalars()["lse"] == 0
    assert stub.log.loads == 1


def test_cluster_and_dependent_launch_become_attributes(stub):
    prepared = driver.PreparedLaunch(
        context=stub.driver.context(0),
        function=0x2000,
        grid=(8, 1, 1),
        block=(128, 1, 1),
        cluster=2,
        shared_bytes=0,
        params=bytes(64),
        pointer_offsets=[8, None],
        maps=[],
        dependent_launch=True,
    )
    stub.log.params_bytes = 64
    stub.driver.launch(prepared, 5, [0x1234, 0x5678])
    assert (stub.log.cluster, stub.log.dependent, stub.log.num_attributes) == (2, 1, 2)
    params = bytes(stub.log.params)[:64]
    assert int.from_bytes(params[8:16], "little") == 0x1234
    assert not any(params[16:]), "a pointer without an offset goes to maps only"


def test_each_device_gets_its_own_context_function_and_shared_memory(stub):
    """B55: a handle of one GPU is of no use on another."""
    for index in (0, 1, 0, 1):
        problem, views = forward(index=index)
        launch.CudaBackend(index).run(launch_of(problem, views))
        assert stub.log.context == 0x1000 + index
        assert stub.log.function == 0x2000 + index
        assert stub.log.attribute_context in (0x1000, 0x1001)
    assert stub.log.loads == 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_current_context_is_restored(stub, fails):
    problem, views = forward(index=1)
    plan = launch.CudaBackend(1).plan(launch_of(problem, views))
    stub.log.fail_launch_with = 1 if fails else 0
    for current in (0, 0x1000, 0x1001):
        if current:
            stub.library.cuCtxPushCurrent_v2(ctypes.c_uint64(current))
        pushes = stub.log.pushes
        if fails:
            with pytest.raises(DriverError, match=r"kernel launch: .* \(1\)"):
                plan.run(0, *addresses(16, 32, 48, 64, 80))
        else:
            plan.run(0, *addresses(16, 32, 48, 64, 80))
        assert stub.log.context == 0x1001
        assert stub.library.stub_current_context() == current
        assert stub.log.pushes - pushes == (current != 0x1001)
        if current:
            stub.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_uint64()))
    stub.log.fail_launch_with = 0


def test_a_cold_kernel_inside_a_capture_is_refused_and_nothing_is_loaded(stub):
    """B56: the message says to warm up; a warm kernel is launched into the capture."""
    problem, views = forward()
    made = launch_of(problem, views, stream=0x99)
    stub.log.capturing_stream = 0x99
    with pytest.raises(RuntimeError, match="captured.*call attention once before"):
        launch.CudaBackend(0).run(made)
    assert stub.log.loads == 0 and stub.log.launches == 0
    stub.log.capturing_stream = 0
    launch.CudaBackend(0).run(made)
    stub.log.capturing_stream = 0x99
    launch.CudaBackend(0).run(made)
    assert stub.log.launches == 2
    # Asking about the default stream while another is captured is an error that means no.
    assert not stub.driver.is_capturing(0, 0)


def test_loading_does_not_disturb_a_capture_of_another_thread(stub):
    problem, views = forward()
    launch.CudaBackend(0).run(launch_of(problem, views))
    assert stub.log.loads == stub.log.relaxed_loads == 1


def test_other_tiles_at_hand_are_loaded_along(stub, monkeypatch):
    """So that other lengths do not meet a cold kernel inside a capture."""
    problem, views = forward()
    spec = launch_of(problem, views).spec
    (sibling,) = siblings(spec)
    cache = StubCache([b"ELF"])
    monkeypatch.setattr(launch, "default_cache", lambda: cache)
    launch.load_kernel(spec, 0)
    assert (sibling, 0) not in launch._kernels, "nothing is compiled on the side"
    launch._kernels.clear()
    cache.at_hand.add(sibling.name)
    launch.load_kernel(spec, 0)
    assert (sibling, 0) in launch._kernels


def test_a_cubin_that_the_driver_refuses_is_a_miss(stub, monkeypatch):
    cache = StubCache([b"BAD", b"ELF"])
    monkeypatch.setattr(launch, "default_cache", lambda: cache)
    problem, views = forward()
    launch.CudaBackend(0).run(launch_of(problem, views))
    assert stub.log.launches == 1
    assert len(cache.refused) == 1 and "CUDA_ERROR_INVALID_IMAGE" in cache.refused[0]

    monkeypatch.setattr(launch, "default_cache", lambda: StubCache([b"BAD"]))
    monkeypatch.setattr(launch, "_kernels", {})
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_IMAGE"):
        launch.CudaBackend(0).run(launch_of(problem, views))


def test_an_illegal_tensor_map_is_an_error_not_a_launch(stub):
    problem, views = forward()
    plan = launch.CudaBackend(0).plan(launch_of(problem, views))
    with pytest.raises(DriverError):
        plan.run(0, *addresses(8, 16, 32, 48, 64))  # q is not 16-byte aligned
    assert stub.log.launches == 0


def test_threads_share_a_plan(stub):
    """No state of a launch outlives the call: addresses of threads never mix."""
    problem, views = forward()
    made = launch_of(problem, views)
    prepared = launch.prepare(launch.load_kernel(made.spec, 0), made)
    encoded: dict[int, set[bytes]] = {}

    def work(thread: int) -> None:
        pointers = [0x1000 * thread + 16 * position for position in range(5)]
        encoded[thread] = {stub.driver.encode(prepared, pointers) for _ in range(2000)}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(encoded) == {1, 2, 3, 4}, "a thread that failed leaves nothing"
    for thread, results in encoded.items():
        assert len(results) == 1
        assert FORWARD.unpack(results.pop())["v"] == 0x1000 * thread + 32


def test_a_kernel_is_loaded_once_by_many_threads(stub):
    problem, views = forward()
    made = launch_of(problem, views)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        launch.load_kernel(made.spec, 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stub.log.loads == 1


def test_waiting_for_a_producer_is_left_to_the_gpu(stub):
    stub.driver.wait(0, 0x10, 0x20)
    assert stub.log.event_stream == 0x20 and stub.log.waiting_stream == 0x10
    stub.driver.wait(0, 0x10, 0x10)
    assert stub.log.waits == 1, "its own stream needs no wait"


def test_in_flight_objects_are_let_go_in_order(stub):
    held = launch.InFlight()
    held.hold(0, 0x10, ["a"])
    held.hold(0, 0x10, ["b"])
    assert len(held._held) == 1, "the stub's events are always reached"
    held.release()
    assert not held._held


def test_device_info_and_version(stub):
    assert stub.driver.device_info(0) == H200
    assert stub.driver.version() == (13, 0) and stub.driver.device_count() == 2
    with pytest.raises(DriverError, match="GPU 2"):
        stub.driver.device_info(2)


def test_without_a_driver_the_message_says_what_is_needed(library_path):
    with pytest.raises(DriverError, match="NVIDIA driver"):
        driver.Driver("libcuda_that_is_not_there.so", library_path)


def test_a_library_of_another_version_is_refused(stub_path, tmp_path):
    code = (Path(driver.__file__).parent / "native" / "launch.c").read_text()
    other = tmp_path / "launch.c"
    other.write_text(code.replace("CF_MAX_MAPS = 12", "CF_MAX_MAPS = 13"))
    library = driver.build_library(other, tmp_path)
    with pytest.raises(DriverError, match="does not fit"):
        driver.Driver(str(stub_path), library)


def test_the_library_is_built_once(tmp_path):
    code = Path(driver.__file__).parent / "native" / "launch.c"
    first = driver.build_library(code, tmp_path)
    modified = first.stat().st_mtime_ns
    assert driver.build_library(code, tmp_path) == first
    assert first.stat().st_mtime_ns == modified
    broken = tmp_path / "launch.c"
    broken.write_text("int f(")
    with pytest.raises(DriverError, match="does not compile"):
        driver.build_library(broken, tmp_path)


def test_building_leaves_nothing_behind(tmp_path, monkeypatch):
    scratch, broken = tmp_path / "scratch", tmp_path / "launch.c"
    scratch.mkdir()
    monkeypatch.setattr(driver.tempfile, "tempdir", str(scratch))
    broken.write_text("int f(")
    with pytest.raises(DriverError, match="does not compile"):
        driver.build_library(broken, tmp_path)
    code = Path(driver.__file__).parent / "native" / "launch.c"
    assert driver.build_library(code, tmp_path).exists()
    assert not list(scratch.iterdir())
    at_exit = []
    monkeypatch.setattr(driver.atexit, "register", at_exit.append)
    for directory in (None, broken):  # no place to keep it, or none that can be written
        assert driver.build_library(code, directory).parent.parent == scratch
        at_exit.pop()()
        assert not list(scratch.iterdir())


def test_the_compiler_may_come_with_options(tmp_path, monkeypatch):
    code = tmp_path / "launch.c"
    code.write_text("#ifndef WANTED\n#error no option\n#endif\n")
    monkeypatch.setenv("CC", "cc -DWANTED")
    assert driver.build_library(code, tmp_path).exists()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(DriverError, match="no-such-compiler"):
        driver.build_library(code, tmp_path / "other")


# --- counters of tiles ----------------------------------------------------------------------------


def dynamic(**changes) -> launch.Launch:
    """A launch whose blocks claim tiles."""
    made = launch_of(*forward(batch=16, seqlen_q=4096, heads_q=32, mask=Mask(right=0)), **changes)
    assert made.dynamic
    return made


def counter_of(stub, plan, stream) -> int:
    plan.run(stream, *plan.launches[0].pointers)
    return stub.log.scalars()["tile_counter"]


def memory_of(stub) -> range:
    counters = stub.driver.tile_counters(0)
    first = stub.log.cleared_from
    assert stub.log.cleared_bytes > counters.STREAMS * counters.STEP
    return range(first, first + stub.log.cleared_bytes)


def test_a_counter_for_every_stream(stub):
    plan = launch.CudaBackend(0).plan(dynamic())
    first = counter_of(stub, plan, 0x10)
    assert first in memory_of(stub)
    second = counter_of(stub, plan, 0x20)
    assert second in memory_of(stub)
    assert abs(second - first) >= 32, "a sector of the L2 cache each"
    assert counter_of(stub, plan, 0) not in (first, second)
    assert counter_of(stub, plan, 0x10) == first and counter_of(stub, plan, 0x20) == second
    other = launch.CudaBackend(0).plan(dynamic())
    assert counter_of(stub, other, 0x10) == first, "whatever runs on the stream"
    assert stub.log.allocations == 1


def test_the_memory_of_counters_is_cleared_before_it_is_used(stub):
    """On a stream of its own and in the relaxed mode: another thread may be capturing."""
    assert stub.log.allocations == 0, "nothing is allocated that no kernel needs"
    launch.CudaBackend(0).run(launch_of(*forward()))
    assert stub.log.allocations == 0 and stub.log.scalars()["tile_counter"] == 0
    launch.CudaBackend(0).plan(dynamic())
    log = stub.log
    assert log.allocations == log.relaxed_allocations == 1 and log.allocated_in == 0x1000
    assert log.cleared_with == 0 and log.cleared_bytes == log.allocated_bytes > 0
    assert log.awaited_stream == log.cleared_on != 0 and log.open_streams == 0
    assert stub.library.stub_current_context() == 0
    mode = ctypes.c_int(0)
    stub.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0, "the thread's mode is restored"


def test_counters_that_cannot_be_cleared_are_not_used(stub):
    made = dynamic()
    stub.log.fail_clear_with = 1
    with pytest.raises(DriverError, match="clearing tile counters"):
        launch.CudaBackend(0).plan(made)
    assert stub.log.open_streams == 0 and stub.library.stub_current_context() == 0
    stub.log.fail_clear_with = 0
    assert counter_of(stub, launch.CudaBackend(0).plan(made), 0x10) in memory_of(stub)


def test_counters_of_another_device_are_its_own(stub):
    first = counter_of(stub, launch.CudaBackend(0).plan(dynamic()), 0x10)
    second = counter_of(stub, launch.CudaBackend(1).plan(dynamic()), 0x10)
    assert first >> 40 != second >> 40 and stub.log.allocated_in == 0x1001


def test_the_per_thread_stream_has_a_counter_for_every_thread(stub):
    """Handle 2 means another stream in every thread. A thread's ident goes to a later thread, its
    kernels may still be running then: the counter does not."""
    plan = launch.CudaBackend(0).plan(dynamic())
    seen = [counter_of(stub, plan, 2), counter_of(stub, plan, 2)]
    assert seen[0] == seen[1]
    idents = []

    def work() -> None:
        idents.append(threading.get_ident())
        seen.append(counter_of(stub, plan, 2))
        assert counter_of(stub, plan, 1) == shared

    shared = counter_of(stub, plan, 1)
    for _ in range(4):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(set(seen)) == 5 and shared not in seen
    assert len(idents) == 4


def test_threads_get_one_counter_for_one_stream(stub):
    counters = stub.driver.tile_counters(0)
    start = threading.Barrier(8)
    found = [[] for _ in range(8)]

    def work(own: list[int]) -> None:
        start.wait()
        own += [counters.of_stream(stream) for stream in range(100, 600)]

    threads = [threading.Thread(target=work, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(own == found[0] for own in found) and len(set(found[0])) == 500


def test_without_a_free_counter_tiles_are_dealt_out_by_position(stub):
    plan = launch.CudaBackend(0).plan(dynamic())
    counters = stub.driver.tile_counters(0)
    first = counter_of(stub, plan, 0x10)
    words = {counters.of_stream(0x1000 + number) for number in range(counters.STREAMS - 1)}
    assert len(words) == counters.STREAMS - 1 and 0 not in words and first not in words
    assert counter_of(stub, plan, 0x20) == 0
    assert counter_of(stub, plan, 0x10) == first
    captured = capture(stub, plan, 0x10)
    assert captured not in words | {0, first}, "graphs have words of their own"


def capture(stub, plan, stream) -> int:
    stub.log.capturing_stream = stream
    try:
        return counter_of(stub, plan, stream)
    finally:
        stub.log.capturing_stream = 0


def test_a_captured_launch_has_a_counter_that_no_other_gets(stub):
    """A graph runs on whatever stream it is launched on, beside anything."""
    plan = launch.CudaBackend(0).plan(dynamic())
    own = counter_of(stub, plan, 0x10)
    captured = [capture(stub, plan, 0x10) for _ in range(5)]
    other = launch.CudaBackend(0).plan(dynamic())
    captured += [capture(stub, other, 0x10), capture(stub, other, 0x30)]
    assert len(set(captured)) == 7 and own not in captured
    assert all(word in memory_of(stub) and word + 4 in memory_of(stub) for word in captured)
    assert counter_of(stub, plan, 0x10) == own
    # While another stream is captured: its own counter, and the default stream's.
    stub.log.capturing_stream = 0x30
    assert counter_of(stub, plan, 0x10) == own
    default = counter_of(stub, plan, 0)
    assert default not in captured and default in memory_of(stub)
    streams = {counter_of(stub, plan, 0x1000 + number) for number in range(100)}
    stub.log.capturing_stream = 0
    assert not streams & set(captured)


def test_threads_capture_with_different_counters(stub):
    plan = launch.CudaBackend(0).plan(dynamic())
    stub.log.capturing_stream = 0x10
    counters = stub.driver.tile_counters(0)
    ends = struct.Struct("@3Q").unpack_from(counters._storage)
    number = 4 * 500

    def work() -> None:
        for _ in range(500):
            plan.run(0x10, *plan.launches[0].pointers)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stub.log.capturing_stream = 0
    following = struct.Struct("@3Q").unpack_from(counters._storage)
    assert following == (ends[0] + number * counters.STEP, *ends[1:])


def test_captured_launches_without_a_free_counter_have_none(stub):
    counters = driver.TileCounters(0x500000000000, (driver.TileCounters.STREAMS + 2) * 32)
    stub.driver._counters[0] = counters
    plan = launch.CudaBackend(0).plan(dynamic())
    own = counter_of(stub, plan, 0x10)
    captured = [capture(stub, plan, 0x10) for _ in range(4)]
    assert captured[2:] == [0, 0] and 0 not in captured[:2]
    assert max(captured) + 32 == 0x500000000000 + (counters.STREAMS + 2) * 32
    assert counter_of(stub, plan, 0x10) == own


def test_kernels_that_deal_out_by_position_have_no_counter(stub):
    plan = launch.CudaBackend(0).plan(launch_of(*forward()))
    assert not plan.launches[0].dynamic
    assert counter_of(stub, plan, 0x10) == 0 and capture(stub, plan, 0x10) == 0
    problem, views = forward(batch=16, seqlen_q=4096, heads_q=32)
    assert not launch_of(problem, views, A100).dynamic


def test_general_arrays_and_maps_reach_the_driver(stub):
    names = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_kv")
    problem, views = general(names, total=(1000, 3000), batch=5)
    made = launch_of(problem, views)
    plan = launch.CudaBackend(0).plan(made)
    moved = [pointer + 0x700000000000 if pointer else 0 for pointer in made.pointers]
    plan.run(0, *moved)
    scalars = stub.log.scalars()
    assert [scalars[name] for name in launch.TENSORS] == moved
    k = stub.log.map("k_map")
    assert k.rank == 5 and tuple(k.dims) == (128, 1 << 30, 2, (1 << 30) + 1, 3001)
    assert k.pointer == 0x700000020000
    assert stub.log.map("out_map").pointer == moved[3] - 1000 * 8 * 128 * 2
    assert tuple(k.box) == made.maps[1].box and tuple(k.strides) == made.maps[1].strides_bytes


# --- the whole way with an array type of a library -----------------------------------------------


class FakeCuda:
    """The part of cupy.cuda that the adapter uses; counts and remembers."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = {0: 0x100, 1: 0x101}
        self.runtime = SimpleNamespace(getDevice=lambda: self.device)

    def get_current_stream(self, index=None):
        return SimpleNamespace(ptr=self.streams[self.device if index is None else index])

    def Device(self, index):  # noqa: N802 - CuPy's name
        return Scope(self, "device", index)

    def ExternalStream(self, pointer, index):  # noqa: N802 - CuPy's name
        return Scope(self, "streams", {**self.streams, index: pointer})


class Scope:
    def __init__(self, owner, name, value) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __enter__(self):
        self.before = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.value)

    def __exit__(self, *error):
        setattr(self.owner, self.name, self.before)


class FakeArray:
    """As cupy.ndarray: an address, no memory."""

    __module__ = "cupy"
    cuda: FakeCuda
    next_address = 0x7F0000000000
    allocations: list = []

    def __init__(self, shape, dtype, strides=None, offset=0, device=None):
        self.shape, self.dtype = tuple(shape), numpy.dtype(dtype)
        self.ndim = len(self.shape)
        itemsize = self.dtype.itemsize
        self.strides = strides or tuple(s * itemsize for s in contiguous_strides(self.shape))
        size = max(int(numpy.prod(self.shape)) * itemsize, 1)
        device_id = self.cuda.device if device is None else device
        self.data = SimpleNamespace(ptr=FakeArray.next_address + offset, device_id=device_id)
        FakeArray.next_address += (size + 511) // 512 * 512 + 512
        FakeArray.allocations.append(self.cuda.streams[self.cuda.device])


@pytest.fixture
def fake_cupy(stub, monkeypatch):
    cuda = FakeCuda()
    module = SimpleNamespace(ndarray=FakeArray, empty=FakeArray, cuda=cuda)
    FakeArray.cuda = cuda
    monkeypatch.setitem(__import__("sys").modules, "cupy", module)
    monkeypatch.setattr(arrays, "FAST", {})
    yield module
    FakeArray.allocations = []


def fake_inputs(device=0, seqlen_q=128, dtype=ml_dtypes.bfloat16, **more):
    q = FakeArray((2, seqlen_q, 8, 128), dtype, device=device, **more)
    k, v = (FakeArray((2, 256, 2, 128), dtype, device=device) for _ in range(2))
    return q, k, v


def int32(entries: int) -> FakeArray:
    return FakeArray((entries,), numpy.int32)


def packed_inputs(total_q=1000, total_kv=3000, batch=5):
    q = FakeArray((total_q, 8, 128), ml_dtypes.bfloat16)
    k, v = (FakeArray((total_kv, 2, 128), ml_dtypes.bfloat16) for _ in range(2))
    starts = {name: int32(batch + 1) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    return (q, k, v), starts


def test_attention_launches_on_the_current_stream(stub, fake_cupy):
    q, k, v = fake_inputs()
    for turn in range(4):  # the first calls go the long way, later ones the short way
        fake_cupy.cuda.streams[0] = 0x100 + turn
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert lse.shape == (2, 8, 128) and lse.dtype == numpy.float32
        scalars = stub.log.scalars()
        pointers = [array.data.ptr for array in (q, k, v, out, lse)]
        assert [scalars[name] for name in launch.TENSORS] == addresses(*pointers)
        assert stub.log.stream == 0x100 + turn
        assert stub.log.launches == turn + 1
    assert len(serve._configurations) == 1


def test_both_ways_do_the_same(stub, fake_cupy):
    """Everything that may differ between calls changes the launch on the short way too."""
    variants = [
        {},
        {"causal": True},
        {"causal": True, "align": "top_left"},
        {"window": (3, None)},
        {"window": (None, 5)},
        {"softmax_scale": 0.5},
        {"q_offset": 3, "causal": True},
        {"kv_offset": 3, "causal": True},
        {"num_sms": 7},
        {"softcap": 20.0},
        {"seqused_q": int32(2)},
        {"seqused_kv": int32(2)},
        {"q_offset": int32(2), "causal": True},
        {"kv_offset": int32(2), "causal": True},
        {"kv_offset": int32(2), "q_offset": 3, "causal": True},
    ]
    inputs = fake_inputs(), fake_inputs(seqlen_q=100)
    seen = []
    for turn in range(3):
        for number, options in enumerate(variants):
            for q, k, v in inputs:
                cupyflash.attention(q, k, v, **options)
                scalars = stub.log.scalars()
                del scalars["out"]
                seen.append((turn, number, q.shape, scalars, tuple(stub.log.grid)))
    turns = [[entry[1:] for entry in seen if entry[0] == turn] for turn in range(3)]
    assert turns[0] == turns[1] == turns[2]
    assert len({str(entry[1:]) for entry in turns[0]}) == len(turns[0]), "each option has an effect"
    assert len(serve._configurations) == len(variants) * len(inputs)


def test_packed_calls_on_both_ways(stub, fake_cupy):
    """Addresses of lengths are those of the call; what they may hold is no part of the key."""
    inputs, _ = packed_inputs()
    for turn in range(4):
        starts = packed_inputs()[1]
        used = int32(5)
        out, lse = cupyflash.attention(*inputs, **starts, seqused_kv=used, return_lse=True)
        assert out.shape == (1000, 8, 128) and lse.shape == (8, 1000)
        scalars = stub.log.scalars()
        arrays_given = [*inputs, out, lse, *starts.values()]
        pointers = [array.data.ptr for array in arrays_given] + [0, used.data.ptr]
        assert [scalars[name] for name in launch.TENSORS] == addresses(*pointers)
        assert scalars["clear_out"] == 1 and stub.log.launches == turn + 1
    assert len(serve._configurations) == 1
    out = FakeArray((1000, 8, 128), ml_dtypes.bfloat16)
    for _ in range(3):
        assert cupyflash.attention(*inputs, **packed_inputs()[1], out=out) is out
        assert stub.log.scalars()["clear_out"] == 0, "the caller's rows are left alone"
    assert len(serve._configurations) == 2


def test_lengths_of_another_shape_or_type_are_refused_warm(stub, fake_cupy):
    (q, k, v), starts = packed_inputs()
    cupyflash.attention(q, k, v, **starts)
    for change, error, words in (
        ({"cu_seqlens_q": int32(5)}, ValueError, "as many entries in both, got 5 and 6"),
        ({"cu_seqlens_kv": FakeArray((6,), numpy.int64)}, TypeError, "expected int32 on a GPU"),
        ({"cu_seqlens_kv": FakeArray((6,), numpy.int32, (8,))}, ValueError, "contiguous"),
        ({"cu_seqlens_kv": FakeArray((6,), numpy.int32, device=1)}, TypeError, "where q is"),
        ({"cu_seqlens_kv": numpy.zeros(6, numpy.int32)}, TypeError, "cu_seqlens_kv"),
        ({"seqused_q": int32(6)}, ValueError, r"seqused_q: expected shape \[5\]"),
        ({"q_offset": int32(1)}, ValueError, r"q_offset: expected shape \[5\]"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q"),
    ):
        launches = stub.log.launches
        with pytest.raises(error, match=words):
            cupyflash.attention(q, k, v, **{**starts, **change})
        assert stub.log.launches == launches


def test_an_offset_on_the_device_is_read_there(stub, fake_cupy):
    """A scalar of the device is no int: its value would be read once and then remembered."""
    q, k, v = fake_inputs()
    scalar = FakeArray((), numpy.int32)
    for _ in range(2):
        with pytest.raises(TypeError, match="q_offset: expected int or int32"):
            cupyflash.attention(q, k, v, causal=True, q_offset=scalar)
    assert stub.log.launches == 0


def test_checked_calls_are_checked_every_time(stub, fake_cupy, monkeypatch):
    """CUPYFLASH_CHECK=1: the lengths of a second call are others than those of the first."""
    inputs, starts = packed_inputs(batch=2)
    held: dict[int, list[int]] = {}
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    monkeypatch.setattr(
        arrays.CupyAdapter,
        "to_numpy",
        lambda self, array: numpy.array(held[array.data.ptr], numpy.int32),
    )

    def call(q=(0, 400, 1000), kv=(0, 0, 3000), used=None, **more):
        held[starts["cu_seqlens_q"].data.ptr] = list(q)
        held[starts["cu_seqlens_kv"].data.ptr] = list(kv)
        if used is not None:
            more["seqused_kv"] = int32(2)
            held[more["seqused_kv"].data.ptr] = list(used)
        cupyflash.attention(*inputs, **starts, **more)

    for _ in range(2):
        call()
        call(kv=(0, 0, 2999), max_seqlen_q=600, max_seqlen_kv=2999, used=(0, 2999))
        for words, given in (
            (r"cu_seqlens_q: expected 0 first.*got \[1, 2, 3\]", {"q": (1, 2, 3)}),
            ("cu_seqlens_q", {"q": (0, 600, 500)}),
            ("cu_seqlens_kv: .*at most 3000", {"kv": (0, 600, 3001)}),
            ("max_seqlen_q: 599 is less than the longest sequence, 600", {"max_seqlen_q": 599}),
            ("seqused_kv: expected lengths from 0", {"used": (1, 3000)}),
            ("seqused_kv", {"used": (0, -1)}),
        ):
            launches = stub.log.launches
            with pytest.raises(ValueError, match=words):
                call(**given)
            assert stub.log.launches == launches
    monkeypatch.delenv("CUPYFLASH_CHECK")
    call(q=(7, 3, 5000))


@pytest.mark.parametrize(
    ("served", "refused"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0.0}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"softmax_scale": 1}, {"softmax_scale": True}),
        ({"softcap": 0.0}, {"softcap": False}),
        ({"num_sms": 4}, {"num_sms": 4.0}),
        ({"q_offset": 0}, {"q_offset": False}),
        ({"kv_offset": 1}, {"kv_offset": True}),
        ({"window": (3, 1)}, {"window": (3.0, 1)}),
        ({"window": (3, 1)}, {"window": (3, True)}),
    ],
    ids=str,
)
def test_what_is_refused_cold_is_refused_warm(stub, fake_cupy, served, refused):
    """Equal values are one key of a dictionary: True == 1 == 1.0."""
    q, k, v = fake_inputs()
    with pytest.raises(TypeError, match=next(iter(refused))):
        cupyflash.attention(q, k, v, **refused)
    for _ in range(3):
        cupyflash.attention(q, k, v, **served)
        with pytest.raises(TypeError, match=next(iter(refused))):
            cupyflash.attention(q, k, v, **refused)
    assert len(serve._configurations) == 1


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_kv"])
@pytest.mark.parametrize("refused", [400.0, True])
def test_a_bound_is_an_int_warm_too(stub, fake_cupy, name, refused):
    inputs, starts = packed_inputs()
    for _ in range(2):
        cupyflash.attention(*inputs, **starts, **{name: int(refused)})
        with pytest.raises(TypeError, match=name):
            cupyflash.attention(*inputs, **starts, **{name: refused})


def test_arrays_on_another_device(stub, fake_cupy):
    """B55: the kernel and the outputs go where the arrays are, on that device's stream."""
    q, k, v = fake_inputs(device=1)
    for _ in range(3):
        out = cupyflash.attention(q, k, v)
        assert out.data.device_id == 1
        assert stub.log.context == 0x1001 and stub.log.stream == 0x101
        assert fake_cupy.cuda.device == 0


@pytest.mark.parametrize(
    "stream",
    [
        0x500,
        numpy.int64(0x500),
        SimpleNamespace(ptr=0x500),
        SimpleNamespace(cuda_stream=0x500),
        SimpleNamespace(__cuda_stream__=lambda: (0, 0x500)),
        SimpleNamespace(handle=SimpleNamespace(value=0x500)),
    ],
    ids=["int", "numpy", "cupy", "torch", "protocol", "numba"],
)
def test_the_callers_stream(stub, fake_cupy, stream):
    q, k, v = fake_inputs()
    for _ in range(3):
        FakeArray.allocations.clear()
        cupyflash.attention(q, k, v, stream=stream, return_lse=True)
        assert stub.log.stream == 0x500
        assert FakeArray.allocations == [0x500, 0x500], "outputs belong to the stream's arena"
        assert fake_cupy.cuda.streams[0] == 0x100


@pytest.mark.parametrize("stream", [True, "0", 1.5, object()])
def test_what_is_no_stream(stub, fake_cupy, stream):
    q, k, v = fake_inputs()
    cupyflash.attention(q, k, v)
    with pytest.raises(TypeError, match="stream"):
        cupyflash.attention(q, k, v, stream=stream)


def test_out_is_written_and_checked_on_both_ways(stub, fake_cupy):
    q, k, v = fake_inputs()
    out = FakeArray(q.shape, q.dtype)
    for _ in range(3):
        assert cupyflash.attention(q, k, v, out=out) is out
        assert stub.log.scalars()["out"] == out.data.ptr
        launches = stub.log.launches
        with pytest.raises(ValueError, match="shares memory with q"):
            cupyflash.attention(q, k, v, out=q)
        with pytest.raises(ValueError, match="expected shape"):
            cupyflash.attention(q, k, v, out=FakeArray((2, 128, 8, 64), q.dtype))
        with pytest.raises(TypeError, match="out: expected bfloat16"):
            cupyflash.attention(q, k, v, out=FakeArray(q.shape, numpy.float16))
        with pytest.raises(TypeError, match="one device"):
            cupyflash.attention(q, k, v, out=FakeArray(q.shape, q.dtype, device=1))
        assert stub.log.launches == launches


def test_misaligned_addresses_are_found_on_the_short_way(stub, fake_cupy):
    """B17: a configuration with aligned arrays says nothing about one that is shifted."""
    q, k, v = fake_inputs()
    for _ in range(3):
        cupyflash.attention(q, k, v)
    shifted = FakeArray(q.shape, q.dtype, offset=2)
    with pytest.raises(ValueError, match="q: base address .* 16 bytes"):
        cupyflash.attention(shifted, k, v)


def test_empty_outputs_launch_nothing(stub, fake_cupy):
    k = v = FakeArray((2, 256, 2, 128), numpy.float16)
    for shape in ((2, 0, 8, 128), (2, 16, 0, 128)):
        kv = FakeArray((2, 256, 0, 128), numpy.float16) if shape[2] == 0 else k
        out, lse = cupyflash.attention(
            FakeArray(shape, numpy.float16), kv, v if kv is k else kv, return_lse=True
        )
        assert out.shape == shape and lse.shape == (2, shape[2], shape[1])
    assert stub.log.launches == 0


def test_no_keys_still_launch_a_kernel_that_writes_zeros(stub, fake_cupy):
    q = FakeArray((2, 16, 8, 128), numpy.float16)
    k = v = FakeArray((2, 0, 2, 128), numpy.float16)
    cupyflash.attention(q, k, v, return_lse=True)
    assert stub.log.launches == 1 and stub.log.scalars()["seqlen_kv"] == 0
    assert not any(bytes(stub.log.params)[FORWARD.offsets["k_map"] :][:128])


def test_remembered_configurations_are_bounded(stub, fake_cupy, monkeypatch):
    monkeypatch.setattr(serve, "MAX_CONFIGURATIONS", 8)
    for seqlen in range(1, 40):
        q, k, v = fake_inputs(seqlen_q=seqlen)
        cupyflash.attention(q, k, v)
    assert len(serve._configurations) <= 8


def test_one_log_line_for_a_new_kernel(stub, fake_cupy, caplog, monkeypatch):
    monkeypatch.setattr(launch, "_announced", set())
    caplog.set_level("INFO", logger="cupyflash")
    for seqlen in (64, 64, 128, 256):
        q, k, v = fake_inputs(seqlen_q=seqlen)
        cupyflash.attention(q, k, v)
    lines = [record.message for record in caplog.records]
    assert len(lines) == len(launch._kernels), "one a kernel, not one a call"
    assert all("forward_sm90_bf16_d128" in line and "disk" in line for line in lines)


def test_the_environment_sends_the_log_to_standard_error(stub, fake_cupy, monkeypatch, capsys):
    logger = launch.logger
    monkeypatch.setattr(launch, "_announced", set())
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("CUPYFLASH_LOG", "info")
    launch.configure_logging.cache_clear()
    cupyflash.attention(*fake_inputs())
    assert "cupyflash: forward_sm90_bf16_d128" in capsys.readouterr().err
    monkeypatch.setenv("CUPYFLASH_LOG", "loud")
    launch.configure_logging.cache_clear()
    with pytest.raises(ValueError, match="CUPYFLASH_LOG=loud"):
        launch.configure_logging()
    monkeypatch.delenv("CUPYFLASH_LOG")
    launch.configure_logging.cache_clear()
    launch.configure_logging()
