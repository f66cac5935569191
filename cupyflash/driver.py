"""The CUDA driver through libcupyflash: load a cubin, launch it, ask a device what it is.

Two libraries are opened at the first use of a GPU and never before: ``libcuda.so.1``, which the
NVIDIA driver installs, and our own ``libcupyflash.so`` (``native/launch.c``), which gets the
driver's entry points handed over and does all work of a launch in one call. A launch costs one
``struct.pack`` and one foreign call with two addresses.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import shlex
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyflash.cache import default_directory, write_atomically
from cupyflash.errors import DriverError
from cupyflash.problem import DeviceInfo
from cupyflash.source import find_packaged
from cupyflash.tensor import DType

VERSION = 3
MAX_POINTERS = 32
MAX_MAPS = 12
MAX_RANK = 5
MAX_LAUNCHES = 4
MAX_BUFFERS = 24
MAX_PARAMS_BYTES = 4096
NO_POINTER = 0xFFFFFFFF
FLAG_DEPENDENT_LAUNCH = 1

LIBRARY_NAME = "libcupyflash.so"

# Entry points in the order of CfDriver in native/launch.c. False: absent from older drivers.
DRIVER_TABLE = (
    ("cuCtxGetCurrent", True),
    ("cuCtxPushCurrent_v2", True),
    ("cuCtxPopCurrent_v2", True),
    ("cuThreadExchangeStreamCaptureMode", True),
    ("cuStreamIsCapturing", True),
    ("cuModuleLoadData", True),
    ("cuModuleGetFunction", True),
    ("cuFuncSetAttribute", True),
    ("cuLaunchKernel", True),
    ("cuLibraryLoadData", False),
    ("cuLibraryGetKernel", False),
    ("cuKernelGetFunction", False),
    ("cuFuncLoad", False),
    ("cuLaunchKernelEx", False),
    ("cuTensorMapEncodeTiled", False),
    ("cuMemsetD32Async", True),
    ("cuGetErrorName", True),
)

# CfTensorMap, CfLaunch without its maps and so on. Native alignment makes the padding.
_MAP = struct.Struct(f"@5I{MAX_RANK}I{MAX_RANK}Q{MAX_RANK - 1}Qq")
_LAUNCH = struct.Struct(f"@2I2Q3I3I2IQ3I{MAX_POINTERS}IIQ")
_PLAN = struct.Struct(f"@2IQ{MAX_LAUNCHES}Q")
_BINDING = struct.Struct(f"@Q2I{MAX_POINTERS}I{MAX_POINTERS}Q")
_RECIPE = struct.Struct(f"@2IqQQ2I{MAX_BUFFERS}q")
_ARGUMENTS = struct.Struct(f"@Q{MAX_POINTERS}Q")
_LAUNCH_BYTES = _LAUNCH.size + MAX_MAPS * _MAP.size

# CUtensorMapDataType. Sixteen-bit floats matter for TMA reductions; a copy looks at bytes only.
_MAP_DATA_TYPE = {
    DType.float8_e4m3fn: 0,
    DType.float8_e5m2: 0,
    DType.uint8: 0,
    DType.float16: 6,
    DType.float32: 7,
    DType.bfloat16: 9,
}
_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}

_ATTRIBUTE_MULTIPROCESSORS = 16
_ATTRIBUTE_L2_BYTES = 38
_ATTRIBUTE_MAJOR = 75
_ATTRIBUTE_MINOR = 76
_ATTRIBUTE_SHARED_MEMORY_OPTIN = 97

_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
_EVENT_DISABLE_TIMING = 2
_CAPTURE_STATUS_ACTIVE = 1
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1

_COUNTER_BYTES = 2 << 20
_ERROR_NOT_READY = 600

_LIBRARY_ERRORS = {
    -1: "libcupyflash and the Python files are of different versions; reinstall cupyflash",
    -2: "libcupyflash is not initialised",
    -3: "the CUDA driver is too old for this kernel; update the NVIDIA driver",
}


@dataclass(frozen=True)
class TensorMap:
    """One tensor map of a launch: CfTensorMap of ``native/launch.c``.

    Attributes:
        offset: byte offset in the parameter struct.
        pointer_idx: which of the launch's pointers is the base address.
        dtype: element type.
        dims: extents in elements, fastest first.
        strides_bytes: strides of ``dims[1:]``.
        box: elements that one copy moves along each dimension.
        swizzle: span in bytes; 0 for none.
        shift_bytes: from that pointer to the map's base address.
    """

    offset: int
    pointer_idx: int
    dtype: DType
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    shift_bytes: int = 0

    def pack(self) -> bytes:
        rank = len(self.dims)

        def padded(values: Sequence[int], length: int) -> list[int]:
            return [*values, *([0] * (length - len(values)))]

        return _MAP.pack(
            self.offset,
            self.pointer_idx,
            _MAP_DATA_TYPE[self.dtype],
            _MAP_SWIZZLE[self.swizzle],
            rank,
            *padded(self.box, MAX_RANK),
            *padded(self.dims, MAX_RANK),
            *padded(self.strides_bytes, MAX_RANK - 1),
            self.shift_bytes,
        )


class TileCounters:
    """Words of a GPU's memory from which persistent kernels claim tiles, zero between launches.

    Launches on one stream run one after the other and share a word. A launch that is captured into
    a graph gets its own (``with_counter`` in ``native/launch.c``), which nobody else ever gets:
    the graph may run beside anything.

    Args:
        base: address of the zeroed memory.
        nbytes: its size.
    """

    STEP = 32  # bytes: one sector of the L2 cache
    STREAMS = 4096
    PER_THREAD_STREAM = 2  # a handle that means another stream in every thread

    def __init__(self, base: int, nbytes: int) -> None:
        self._next = base
        self._end = base + self.STREAMS * self.STEP
        self._captured = struct.pack("@3Q", self._end, base + nbytes, self.STEP)
        self._storage = ctypes.create_string_buffer(self._captured, len(self._captured))
        self.address = ctypes.addressof(self._storage)
        self._by_stream: dict[int | tuple[int, int], int] = {}
        self._thread = threading.local()
        self._thread_numbers = itertools.count()
        self._lock = threading.Lock()

    def of_stream(self, stream: int) -> int:
        """Address of the word of a stream; 0 when all are taken, and tiles are then dealt out by
        position."""
        key: int | tuple[int, int] = stream
        if stream == self.PER_THREAD_STREAM:
            key = stream, self._thread_number()
        address = self._by_stream.get(key)
        return self._assign(key) if address is None else address

    def _thread_number(self) -> int:
        """Of this thread; unlike its ident, no later thread gets it while its kernels still run."""
        number: int | None = getattr(self._thread, "number", None)
        if number is None:
            number = self._thread.number = next(self._thread_numbers)
        return number

    def _assign(self, key: int | tuple[int, int]) -> int:
        with self._lock:
            if key not in self._by_stream:
                address = self._next if self._next < self._end else 0
                self._next += self.STEP
                self._by_stream[key] = address
            return self._by_stream[key]


class PreparedLaunch:
    """A CfLaunch in memory: everything of a launch but its stream and its arrays' addresses.

    It is never written after construction, so threads share it.
    """

    def __init__(
        self,
        *,
        context: int,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: int,
        shared_bytes: int,
        params: bytes,
        pointer_offsets: Sequence[int | None],
        maps: Sequence[TensorMap],
        dependent_launch: bool = False,
        counter_idx: int | None = None,
        counters: TileCounters | None = None,
    ) -> None:
        if len(params) > MAX_PARAMS_BYTES or len(maps) > MAX_MAPS:
            raise ValueError(f"launch: {len(params)} bytes of parameters, {len(maps)} maps")
        self._params = ctypes.create_string_buffer(params, len(params))
        offsets = [NO_POINTER if offset is None else offset for offset in pointer_offsets]
        head = _LAUNCH.pack(
            _LAUNCH_BYTES,
            FLAG_DEPENDENT_LAUNCH if dependent_launch else 0,
            context,
            function,
            *grid,
            *block,
            cluster,
            shared_bytes,
            ctypes.addressof(self._params),
            len(params),
            len(offsets),
            len(maps),
            *offsets,
            *([NO_POINTER] * (MAX_POINTERS - len(offsets))),
            NO_POINTER if counter_idx is None else counter_idx,
            0 if counters is None else counters.address,
        )
        self.context = context
        self._counters = counters
        packed = head + b"".join(tensor_map.pack() for tensor_map in maps)
        self._launch = ctypes.create_string_buffer(packed, _LAUNCH_BYTES)
        self.address = ctypes.addressof(self._launch)
        self.params_bytes = len(params)


class PreparedPlan:
    """A CfPlan in memory: launches on one GPU, of one parameter struct, in order. As read-only as
    they are.

    Args:
        launches: 1 to ``MAX_LAUNCHES`` of them.
    """

    def __init__(self, launches: Sequence[PreparedLaunch]) -> None:
        (context,) = {launch.context for launch in launches}
        self._launches = tuple(launches)
        addresses = [launch.address for launch in launches]
        packed = _PLAN.pack(
            *(_PLAN.size, len(launches), context),
            *addresses,
            *([0] * (MAX_LAUNCHES - len(launches))),
        )
        self._plan = ctypes.create_string_buffer(packed, _PLAN.size)
        self.address = ctypes.addressof(self._plan)


Place = tuple[int, int] | None
"""Where an address lies in a call by XLA: (buffer, bytes behind its first), or None for null.
Buffers are numbered through operands and results."""


@dataclass(frozen=True)
class Binding:
    """A plan of one GPU, and where its arguments come from: CfBinding of ``native/launch.c``.

    Attributes:
        plan: the launches.
        places: of each of the plan's pointers.
        cleared_idx: which of them is of a word that is set to 0 first, or None.
    """

    plan: PreparedPlan
    places: tuple[Place, ...]
    cleared_idx: int | None

    def pack(self) -> bytes:
        missing = MAX_POINTERS - len(self.places)
        found = [(NO_POINTER, 0) if place is None else place for place in self.places]
        found += [(NO_POINTER, 0)] * missing
        return _BINDING.pack(
            self.plan.address,
            len(self.places),
            NO_POINTER if self.cleared_idx is None else self.cleared_idx,
            *(buffer for buffer, _ in found),
            *(offset for _, offset in found),
        )


class PreparedRecipe:
    """A CfRecipe in memory: what a call site of a program does on each GPU.

    Args:
        key: by which the program names it; not negative, 63 bits.
        bindings: one for each GPU.
        operands, results: elements of each buffer.
    """

    def __init__(
        self,
        key: int,
        bindings: Sequence[Binding],
        operands: Sequence[int],
        results: Sequence[int],
    ) -> None:
        elements = [*operands, *results]
        if len(elements) > MAX_BUFFERS:
            raise ValueError(f"recipe: {len(elements)} buffers, expected at most {MAX_BUFFERS}")
        self._plans = [binding.plan for binding in bindings]
        packed = b"".join(binding.pack() for binding in bindings)
        self._bindings = ctypes.create_string_buffer(packed, len(packed))
        packed = _RECIPE.pack(
            *(_RECIPE.size, len(bindings), key, 0, ctypes.addressof(self._bindings)),
            *(len(operands), len(results)),
            *elements,
            *([0] * (MAX_BUFFERS - len(elements))),
        )
        self._recipe = ctypes.create_string_buffer(packed, _RECIPE.size)
        self.address = ctypes.addressof(self._recipe)


_recipes: dict[tuple[int, int], PreparedRecipe] = {}
"""By library and key: what a library knows must stay where it is."""

_recipes_lock = threading.Lock()


@functools.cache
def argument_packer(count: int) -> Callable[..., bytes]:
    """Packs CfArguments of a stream and this many addresses, without a Python frame in between; the
    other addresses are null."""
    return struct.Struct(f"@Q{count}Q{8 * (MAX_POINTERS - count)}x").pack


def pack_arguments(stream: int, pointers: Sequence[int]) -> bytes:
    """CfArguments; missing pointers are null."""
    return _ARGUMENTS.pack(stream, *pointers, *([0] * (MAX_POINTERS - len(pointers))))


class Driver:
    """libcuda and libcupyflash, opened and connected.

    Args:
        cuda: path or name of libcuda.
        library: path of libcupyflash.

    Raises:
        DriverError: either library is absent or too old, or there is no usable GPU.
    """

    def __init__(self, cuda: str = "libcuda.so.1", library: Path | None = None) -> None:
        try:
            self._cuda = ctypes.CDLL(cuda)
        except OSError as error:
            raise DriverError(
                f"{cuda} cannot be loaded ({error}): arrays on a GPU need the NVIDIA driver; NumPy "
                "arrays run on the CPU without it"
            ) from error
        self.library_path = library or find_library()
        self._library = ctypes.CDLL(str(self.library_path))
        self._check_layout()
        self._raise_for(self._cuda.cuInit(0), "cuInit")
        self._connect()
        self.run_function = self._library.cf_run
        self.run_function.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        self._contexts: dict[int, int] = {}
        self._counters: dict[int, TileCounters] = {}
        self._counters_lock = threading.Lock()

    def _check_layout(self) -> None:
        sizes = (
            ("cf_version", VERSION),
            ("cf_launch_bytes", _LAUNCH_BYTES),
            ("cf_tensor_map_bytes", _MAP.size),
            ("cf_plan_bytes", _PLAN.size),
            ("cf_binding_bytes", _BINDING.size),
            ("cf_recipe_bytes", _RECIPE.size),
            ("cf_arguments_bytes", _ARGUMENTS.size),
        )
        for name, expected in sizes:
            found = getattr(self._library, name)()
            if found != expected:
                raise DriverError(
                    f"{self.library_path} does not fit this version of cupyflash ({name} is "
                    f"{found}, expected {expected}); reinstall cupyflash"
                )

    def _connect(self) -> None:
        addresses = []
        for name, required in DRIVER_TABLE:
            function = getattr(self._cuda, name, None)
            if function is None and required:
                raise DriverError(f"the CUDA driver has no {name}; update the NVIDIA driver")
            addresses.append(
                None if function is None else ctypes.cast(function, ctypes.c_void_p).value
            )
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        self._raise_for(self._library.cf_initialize(table, ctypes.sizeof(table)), "cf_initialize")

    def version(self) -> tuple[int, int]:
        """CUDA version that the driver supports, such as (13, 0)."""
        number = ctypes.c_int()
        self._raise_for(self._cuda.cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
        return number.value // 1000, number.value % 1000 // 10

    def device_count(self) -> int:
        """Number of visible GPUs."""
        number = ctypes.c_int()
        self._raise_for(self._cuda.cuDeviceGetCount(ctypes.byref(number)), "cuDeviceGetCount")
        return number.value

    @functools.cache  # noqa: B019 - one driver per process
    def device_info(self, index: int) -> DeviceInfo:
        """What kernel selection needs to know about a GPU."""
        device = self._device(index)
        name = ctypes.create_string_buffer(256)
        self._raise_for(self._cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")

        def attribute(number: int) -> int:
            value = ctypes.c_int()
            result = self._cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
            self._raise_for(result, "cuDeviceGetAttribute")
            return value.value

        return DeviceInfo(
            name=name.value.decode(errors="replace"),
            capability=(attribute(_ATTRIBUTE_MAJOR), attribute(_ATTRIBUTE_MINOR)),
            num_sms=attribute(_ATTRIBUTE_MULTIPROCESSORS),
            shared_memory_per_block=attribute(_ATTRIBUTE_SHARED_MEMORY_OPTIN),
            l2_bytes=attribute(_ATTRIBUTE_L2_BYTES),
        )

    def context(self, index: int) -> int:
        """The primary context of a GPU, the one that CuPy, PyTorch and JAX use; kept retained."""
        context = self._contexts.get(index)
        if context is None:
            handle = ctypes.c_void_p()
            result = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(handle), self._device(index))
            self._raise_for(result, f"cuDevicePrimaryCtxRetain of GPU {index}")
            context = self._contexts[index] = handle.value or 0
        return context

    def load(self, index: int, cubin: bytes, name: str, shared_bytes: int) -> int:
        """Loads a cubin onto a GPU and returns the handle of its kernel.

        Raises:
            DriverError: the driver refuses the cubin, has no such kernel in it, or cannot give it
                that much shared memory.
        """
        function = ctypes.c_void_p()
        result = self._library.cf_load(
            ctypes.c_void_p(self.context(index)),
            cubin,
            name.encode(),
            ctypes.c_uint32(shared_bytes),
            ctypes.byref(function),
        )
        self._raise_for(result, f"loading {name} onto GPU {index}")
        return function.value or 0

    def tile_counters(self, index: int) -> TileCounters:
        """The tile counters of a GPU, allocated at the first call."""
        with self._counters_lock:
            counters = self._counters.get(index)
            if counters is None:
                counters = TileCounters(self._zeroed(index, _COUNTER_BYTES), _COUNTER_BYTES)
                self._counters[index] = counters
            return counters

    def _zeroed(self, index: int, nbytes: int) -> int:
        """Device memory full of zeros, for the rest of the process. Another thread may be capturing
        a graph: a relaxed mode and a stream of its own leave that alone."""
        address, stream = ctypes.c_uint64(), ctypes.c_void_p()
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        with self.current(index):
            self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            try:
                result = self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
                self._raise_for(result, f"allocating {nbytes} bytes on GPU {index}")
                result = self._cuda.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING)
                self._raise_for(result, "cuStreamCreate")
                result = self._cuda.cuMemsetD8Async(address, 0, ctypes.c_size_t(nbytes), stream)
                result = result or self._cuda.cuStreamSynchronize(stream)
                self._cuda.cuStreamDestroy_v2(stream)
                self._raise_for(result, "clearing tile counters")
            finally:
                self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return address.value

    def launch(self, prepared: PreparedLaunch, stream: int, pointers: Sequence[int]) -> None:
        """Launches on ``stream``; does not wait."""
        arguments = pack_arguments(stream, pointers)
        result = self._library.cf_launch(ctypes.c_void_p(prepared.address), arguments)
        if result:
            self._raise_for(result, "kernel launch")

    @property
    def xla_handler(self) -> Any:
        """The handler of XLA's foreign function interface, a ctypes function."""
        return self._library.cf_xla_run

    def register(self, key: int, make: Callable[[], PreparedRecipe]) -> None:
        """Makes the recipe of a key known to ``xla_handler`` for the rest of the process, unless it
        is already."""
        place = self._library._handle, key
        with _recipes_lock:
            if place not in _recipes:
                recipe = make()
                result = self._library.cf_register(ctypes.c_void_p(recipe.address))
                self._raise_for(result, "registering a call of XLA's")
                _recipes[place] = recipe

    def encode(self, prepared: PreparedLaunch, pointers: Sequence[int]) -> bytes:
        """The finished parameter struct: addresses filled in, tensor maps encoded."""
        buffer = ctypes.create_string_buffer(prepared.params_bytes + 64)
        address = -(-ctypes.addressof(buffer) // 64) * 64  # a tensor map is 64-byte aligned
        result = self._library.cf_encode(
            ctypes.c_void_p(prepared.address), pack_arguments(0, pointers), ctypes.c_void_p(address)
        )
        self._raise_for(result, "encoding tensor maps")
        return ctypes.string_at(address, prepared.params_bytes)

    def device_of(self, pointer: int) -> int:
        """Index of the GPU that owns an address.

        Raises:
            DriverError: the address is none of a GPU's.
        """
        index = ctypes.c_int()
        result = self._cuda.cuPointerGetAttribute(
            ctypes.byref(index), _POINTER_ATTRIBUTE_DEVICE_ORDINAL, ctypes.c_void_p(pointer)
        )
        self._raise_for(result, f"cuPointerGetAttribute of {pointer:#x}")
        return index.value

    def is_capturing(self, index: int, stream: int) -> bool:
        """Whether a graph is being captured on this stream; leaves the capture as it is."""
        status = ctypes.c_int(0)
        with self.current(index):
            result = self._cuda.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
        # The default stream cannot be captured; asking about it while another stream is captured
        # is an error that means no.
        return result == 0 and status.value == _CAPTURE_STATUS_ACTIVE

    def wait(self, index: int, stream: int, producer: int) -> None:
        """Makes ``stream`` wait, on the GPU, for what was enqueued on ``producer`` so far."""
        if stream == producer:
            return
        with self.current(index):
            event = self._record(producer)
            result = self._cuda.cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0)
            self._cuda.cuEventDestroy_v2(event)
        self._raise_for(result, "cuStreamWaitEvent")

    def record(self, index: int, stream: int) -> Event:
        """An event behind everything enqueued on ``stream`` so far."""
        with self.current(index):
            return Event(self, index, self._record(stream))

    def _record(self, stream: int) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        result = self._cuda.cuEventCreate(ctypes.byref(event), _EVENT_DISABLE_TIMING)
        self._raise_for(result, "cuEventCreate")
        result = self._cuda.cuEventRecord(event, ctypes.c_void_p(stream))
        if result:
            self._cuda.cuEventDestroy_v2(event)
            self._raise_for(result, "cuEventRecord")
        return event

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[None]:
        """Makes the primary context of a GPU current on this thread, then the previous one."""
        result = self._cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(self.context(index)))
        self._raise_for(result, "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self._raise_for(self._cuda.cuDeviceGet(ctypes.byref(device), index), f"GPU {index}")
        return device.value

    def _raise_for(self, result: int, doing: str) -> None:
        if result == 0:
            return
        if result in _LIBRARY_ERRORS:
            raise DriverError(f"{doing}: {_LIBRARY_ERRORS[result]}", result)
        name, text = (self._error_text(which, result) for which in ("Name", "String"))
        raise DriverError(f"{doing}: {name} ({result}): {text}", result)

    def _error_text(self, which: str, result: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._cuda, f"cuGetError{which}")(result, ctypes.byref(text))
        return (text.value or b"unknown error").decode()

    def raise_for_launch(self, result: int) -> None:
        """Raises for the code that ``run_function`` returned, if it is one of failure."""
        self._raise_for(result, "kernel launch")


class Event:
    """A point in a stream's work."""

    def __init__(self, driver: Driver, index: int, handle: ctypes.c_void_p) -> None:
        self._driver = driver
        self._index = index
        self._handle = handle

    def is_reached(self) -> bool:
        """Whether the work before it is done (or has failed); does not wait."""
        with self._driver.current(self._index):
            return self._driver._cuda.cuEventQuery(self._handle) != _ERROR_NOT_READY

    def destroy(self) -> None:
        with self._driver.current(self._index):
            self._driver._cuda.cuEventDestroy_v2(self._handle)


@functools.lru_cache(maxsize=1)
def default_driver() -> Driver:
    """The driver of this process, opened at the first call."""
    return Driver()


def find_library() -> Path:
    """libcupyflash: from the installed package, or built from a checkout's ``launch.c``.

    Raises:
        DriverError: it is not there and cannot be built.
    """
    packaged = find_packaged(LIBRARY_NAME)
    if packaged is not None:
        return packaged
    code = find_packaged("native/launch.c")
    if code is None:
        raise DriverError(f"{LIBRARY_NAME} is missing from the package; reinstall cupyflash")
    return build_library(code, default_directory())


def build_library(code: Path, directory: Path | None) -> Path:
    """Compiles ``launch.c`` (a checkout has no built library) and keeps the result by digest.

    Raises:
        DriverError: there is no C compiler ($CC, cc or gcc), or it fails.
    """
    import subprocess  # 7 ms that nobody with an installed package pays

    digest = hashlib.sha256(code.read_bytes()).hexdigest()[:16]
    target = None if directory is None else directory / "native" / f"libcupyflash-{digest}.so"
    if target is not None and target.exists():
        return target
    compiler = shlex.split(os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc")), ""))
    if not compiler:
        raise DriverError(f"{LIBRARY_NAME} is not built and there is no C compiler to build {code}")
    flags = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="cupyflash-"))
        built = Path(scratch) / LIBRARY_NAME
        try:
            process = subprocess.run(
                [*compiler, *flags, "-o", built, code], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise DriverError(f"{code} cannot be compiled: {error}") from error
        if process.returncode:
            raise DriverError(f"{code} does not compile:\n{process.stderr}")
        if target is not None:
            with contextlib.suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, built.read_bytes())
                return target
        atexit.register(stack.pop_all().close)  # there is no place to keep it: for this process
    return built
