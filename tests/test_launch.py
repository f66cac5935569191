"""From a problem to the driver: launch structs, contexts, streams, loading. A stub driver
(cuda_stub.c) takes the place of libcuda and remembers what libcupyflash asked of it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import shutil
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
from cupyflash.params import FORWARD
from cupyflash.problem import UNBOUNDED, DeviceInfo, Mask, Problem, make_problem
from cupyflash.select import select, siblings
from cupyflash.tensor import Device, DeviceKind, DType, TensorView, contiguous_strides

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

H200 = DeviceInfo("Stub H200", (9, 0), 132, 232448, 50 << 20)
A100 = DeviceInfo("A100", (8, 0), 108, 166912, 40 << 20)


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
        ("params", ctypes.c_uint8 * 1024),
        ("params_bytes", ctypes.c_uint64),
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
    assert (values["window_left"], values["window_right"], values["shift"]) == (40, 0, 200)
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


@pytest.mark.parametrize("offset", [0, 5, -5, 2**40, -(2**40), 2**31 - 2048])
@pytest.mark.parametrize("left", [None, 0, 3, 10**6, 2**31 - 1])
def test_kernel_bounds_show_the_same_keys(left, offset):
    """Bounds and shift fit 32 bits in every sum, and mean what the mask means."""
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
            if problem.window_left != UNBOUNDED:
                first = max(query + problem.shift - problem.window_left, first)
            if problem.window_right != UNBOUNDED:
                last = min(query + problem.shift + problem.window_right, last)
            assert (first, last) == (low, high) or (first > last and low > high), problem
            for bound in (problem.window_left, problem.window_right):
                assert bound == UNBOUNDED or abs(query + problem.shift) + abs(bound) < 2**31


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
    plan.run(0x88, 0xA000, 0xB000, 0xC000, 0xD000, 0xE000)
    scalars = stub.log.scalars()
    assert [scalars[name] for name in launch.TENSORS] == [0xA000, 0xB000, 0xC000, 0xD000, 0xE000]
    assert stub.log.stream == 0x88
    maps = [stub.log.map(f"{tensor}_map").pointer for tensor in ("q", "k", "v", "out")]
    assert maps == [0xA000, 0xB000, 0xC000, 0xD000]
    plan.run(0, 0xA000, 0xA000, 0xA000, 0xD000, 0)
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
                plan.run(0, 16, 32, 48, 64, 80)
        else:
            plan.run(0, 16, 32, 48, 64, 80)
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
        plan.run(0, 8, 16, 32, 48, 64)  # q is not 16-byte aligned
    assert stub.log.launches == 0


def test_threads_share_a_plan(stub):
    """No state of a launch outlives the call: addresses of threads never mix."""
    problem, views = forward()
    plan = launch.CudaBackend(0).plan(launch_of(problem, views))
    encoded: dict[int, set[bytes]] = {}

    def work(thread: int) -> None:
        pointers = [0x1000 * thread + 16 * position for position in range(5)]
        encoded[thread] = {stub.driver.encode(plan.prepared, pointers) for _ in range(2000)}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    other.write_text(code.replace("CF_MAX_MAPS = 8", "CF_MAX_MAPS = 9"))
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


def test_attention_launches_on_the_current_stream(stub, fake_cupy):
    q, k, v = fake_inputs()
    for turn in range(4):  # the first calls go the long way, later ones the short way
        fake_cupy.cuda.streams[0] = 0x100 + turn
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert lse.shape == (2, 8, 128) and lse.dtype == numpy.float32
        scalars = stub.log.scalars()
        pointers = [array.data.ptr for array in (q, k, v, out, lse)]
        assert [scalars[name] for name in launch.TENSORS] == pointers
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
