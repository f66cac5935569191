"""Runs kernels on the CPU, instruction by instruction, and finds what a GPU would hide.

The translation unit that NVRTC compiles for a GPU is compiled by g++ against
``kernels_cu/emulate/ptx.hpp``; every CUDA thread becomes a fiber, every asynchronous instruction an
operation that the chosen schedule may delay. A race detector, a deadlock table, guard pages around
every array and NaN in all memory that nobody wrote turn mistakes into an ``EmulationError``.

* ``device("sm_90a")`` is a device for the public functions: its arrays go through the pipeline.
* ``build`` and ``run`` are what it is made of, for tests of single kernels.

Nothing in the package chooses the emulator by itself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import re
import shutil
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import DTypeLike, NDArray

from cupyflash import gxx, source
from cupyflash.errors import EmulationError
from cupyflash.params import TensorMapRequest
from cupyflash.problem import DeviceInfo

if TYPE_CHECKING:
    from cupyflash.launch import Launch

SCHEDULES = ("early", "late", "random", "pct")
"""When asynchronous work happens, and in which order threads run.

early: at issue; late: when nothing else can run, or a wait demands it; random and pct: at random
points, with random preemption of threads (pct: random priorities of threads).
"""

_CHANGE_POINTS = 3  # of the pct schedule
_REPORT_BYTES = 1 << 16
_TENSOR_MAP_MAGIC = 0x70614D726F736E54
_RACE_SHARED, _RACE_GLOBAL = 1, 2


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel built for the emulator.

    Attributes:
        name: the kernel's symbol.
        target: the architecture whose rules hold, such as "sm_90a".
        path: the shared library.
        seconds: what g++ took, or 0 for a kernel found in the cache.
    """

    name: str
    target: str
    path: Path
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
        mma: matrix instructions of any kind.
        bytes_to_shared: bytes that asynchronous copies brought into shared memory.
        bytes_to_global: bytes written to global memory.
        switches: changes from one thread to another.
        operations: asynchronous operations.
        bank_conflicts: extra wavefronts of ldmatrix and stmatrix.
        seconds: wall-clock time.
    """

    mma: int
    bytes_to_shared: int
    bytes_to_global: int
    switches: int
    operations: int
    bank_conflicts: int
    seconds: float


# --- building -------------------------------------------------------------------------------------


def build(unit: gxx.Unit, defines: Sequence[str] = (), *, sanitize: bool = False) -> EmulatedKernel:
    """Compiles a translation unit for the emulator, or finds it in the cache.

    Args:
        unit: the kernel, as ``source.translation_unit`` makes it.
        defines: preprocessor definitions, such as "CF_MUTANT=3".
        sanitize: whether undefined behaviour (overflow, shifts, indices) ends a launch.

    Returns:
        The kernel, for ``run``.

    Raises:
        CompileError: g++ is missing or refuses the unit.
    """
    _library()  # kernels find its symbols, which are global in this process
    started = time.perf_counter()
    path, compiled = gxx.compile_kernel(unit, defines, sanitize=sanitize)
    seconds = time.perf_counter() - started if compiled else 0.0
    return EmulatedKernel(unit.name, unit.target, path, seconds)


@functools.cache
def _library() -> ctypes.CDLL:
    """The emulator, loaded once, its symbols visible to kernels."""
    library = ctypes.CDLL(str(gxx.emulator_library()), mode=ctypes.RTLD_GLOBAL)
    library.cf_emulate_add_region.argtypes = [ctypes.c_char_p, *[ctypes.c_size_t] * 4]
    library.cf_emulate_add_region.restype = None
    library.cf_emulate_remove_region.argtypes = [ctypes.c_size_t]
    library.cf_emulate_remove_region.restype = None
    return library


# --- running --------------------------------------------------------------------------------------


_COUNTERS = tuple(field.name for field in dataclasses.fields(Report) if field.name != "seconds")


class _Counters(ctypes.Structure):
    """``cf::emulate::Counters``."""

    _fields_ = [(name, ctypes.c_uint64) for name in _COUNTERS]


class _LaunchRequest(ctypes.Structure):
    """``cf::emulate::LaunchRequest``."""

    _fields_ = [
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("time_limit", ctypes.c_double),
        ("grid", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("race", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("change_points", ctypes.c_int32),
        ("report", ctypes.c_void_p),
        ("report_bytes", ctypes.c_uint64),
        ("counters", ctypes.POINTER(_Counters)),
    ]


_one_launch = threading.Lock()  # the emulator has one machine, and ctypes releases the GIL


@functools.cache
def _entry(path: Path, name: str) -> Any:
    function = getattr(ctypes.CDLL(str(path)), f"cf_emulate_{name}")
    function.argtypes = [ctypes.POINTER(_LaunchRequest)]
    function.restype = ctypes.c_int
    return function


def run(
    kernel: EmulatedKernel,
    grid: int,
    params: bytes | bytearray,
    maps: Sequence[TensorMapRequest] = (),
    *,
    shared_bytes: int = 0,
    schedule: str = "early",
    seed: int = 0,
    race: bool | str = False,
    window: int = 1,
    time_limit: float = 300.0,
) -> Report:
    """Launches a kernel and waits for it.

    Args:
        kernel: what ``build`` returned.
        grid: number of CTAs; a multiple of the kernel's cluster.
        params: the parameter struct; tensor maps in it are overwritten from ``maps``.
        maps: the tensor maps to encode.
        shared_bytes: dynamic shared memory of a CTA.
        schedule: one of ``SCHEDULES``.
        seed: of the random schedules; a launch is a function of schedule and seed.
        race: whether to look for races on shared and tensor memory; "global": on global memory too.
        window: clusters that are resident together. 1 shows that no CTA waits for a later one.
        time_limit: seconds until a launch is given up.

    Returns:
        What the launch did.

    Raises:
        EmulationError: the emulator found a fault. The text names the hazard, the kernel, the
            schedule and seed, and for both sides the thread and source line.
        ValueError: a schedule or a tensor map that does not exist.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    entry = _entry(kernel.path, kernel.name)
    storage = ctypes.create_string_buffer(len(params) + 64)
    address = -(-ctypes.addressof(storage) // 64) * 64
    encoded = bytearray(params)
    for tensor_map in maps:
        encoded[tensor_map.offset : tensor_map.offset + 128] = encode_tensor_map(tensor_map)
    ctypes.memmove(address, bytes(encoded), len(encoded))
    report = ctypes.create_string_buffer(_REPORT_BYTES)
    counters = _Counters()
    request = _LaunchRequest(
        params=address,
        params_bytes=len(params),
        seed=seed,
        time_limit=time_limit,
        grid=grid,
        shared_bytes=shared_bytes,
        schedule=SCHEDULES.index(schedule),
        race=(_RACE_SHARED if race else 0) | (_RACE_GLOBAL if race == "global" else 0),
        window=window,
        change_points=_CHANGE_POINTS if schedule == "pct" else 0,
        report=ctypes.addressof(report),
        report_bytes=_REPORT_BYTES,
        counters=ctypes.pointer(counters),
    )
    with _one_launch:
        started = time.perf_counter()
        failed = entry(ctypes.byref(request))
        seconds = time.perf_counter() - started
    if failed:
        raise EmulationError(_with_call_chain(report.value.decode(errors="replace")))
    for memory in list(_memories):
        memory.check()
    return Report(**{name: getattr(counters, name) for name in _COUNTERS}, seconds=seconds)


def _with_call_chain(report: str) -> str:
    """Replaces the address in a report by the chain of inlined calls that leads there."""
    match = re.search(r"\n  frame (0x[0-9a-f]+) of (.+)", report)
    if match is None:
        return report
    chain = " < ".join(_call_chain(match[1], match[2]))
    return report.replace(match[0], f"\n  in {chain}" if chain else "")


def _call_chain(offset: str, library: str) -> Iterator[str]:
    program = shutil.which("addr2line")
    if program is None:
        return
    command = [program, "-f", "-i", "-s", "-C", "-e", library, offset]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    for function, place in zip(lines[::2], lines[1::2]):
        if function.startswith("cf_body_"):
            return
        if not place.startswith(("?", "ptx.hpp")):
            name = re.sub(r"[<(].*", "", function).removeprefix("cf::")
            yield f"{name} ({place.split(' ')[0]})"


def encode_tensor_map(request: TensorMapRequest, *, is_float16: bool = False) -> bytes:
    """The emulator's form of a tensor map, 128 bytes; its decoder checks the driver's rules.

    Args:
        request: the map.
        is_float16: whether reductions add two-byte elements as float16, not bfloat16.
    """
    rank = len(request.dims)
    if not 1 <= rank <= 5 or len(request.box) != rank or len(request.strides_bytes) != rank - 1:
        raise ValueError(f"tensor map: dims, box and strides do not fit together in {request}")
    missing = 5 - rank
    return struct.pack(
        "<QQ4I5I5I4Q24x",
        _TENSOR_MAP_MAGIC,
        request.pointer + request.shift_bytes,
        rank,
        request.element_bytes,
        request.swizzle,
        is_float16,
        *request.dims,
        *(1,) * missing,
        *request.box,
        *(1,) * missing,
        *request.strides_bytes,
        *(0,) * missing,
    )


# --- memory ---------------------------------------------------------------------------------------


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class _GuardedMemory:
    """Bytes between two guard pages, full of 0xFF (NaN in every format).

    The bytes end at the upper guard page (or begin at the lower one), up to an alignment of 16.
    What then lies between them and the other guard page must stay as it is.
    """

    ALIGNMENT = 16

    def __init__(self, nbytes: int, name: str, at_start: bool) -> None:
        page = mmap.PAGESIZE
        inside = max(1, -(-nbytes // page)) * page
        self.nbytes = nbytes
        mapping = _LIBC.mmap(
            None, inside + 2 * page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        if mapping in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"cannot map {inside} bytes for an emulated array")
        self._inside, self._inside_bytes = mapping + page, inside
        _LIBC.mprotect(self._inside, inside, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(self._inside, 0xFF, inside)
        room = inside - nbytes
        self.address = self._inside + (0 if at_start else room // self.ALIGNMENT * self.ALIGNMENT)
        library = _library()
        library.cf_emulate_add_region(
            name.encode(), self.address, nbytes, mapping, inside + 2 * page
        )
        self._release = weakref.finalize(self, _release, library, mapping, inside + 2 * page)
        _memories.add(self)

    def array(self) -> NDArray[numpy.uint8]:
        buffer = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        return numpy.frombuffer(memoryview(buffer), numpy.uint8)

    def check(self) -> None:
        """Raises EmulationError if a kernel wrote beside the bytes."""
        before = self.address - self._inside
        after = self._inside_bytes - before - self.nbytes
        untouched = ctypes.string_at(self._inside, before) + ctypes.string_at(
            self.address + self.nbytes, after
        )
        if untouched.count(0xFF) != len(untouched):
            raise EmulationError("a kernel wrote beside an array, within 4096 bytes of it")


_LIBC = _libc()
_memories: weakref.WeakSet[_GuardedMemory] = weakref.WeakSet()


def _release(library: ctypes.CDLL, mapping: int, nbytes: int) -> None:
    library.cf_emulate_remove_region(mapping)
    _LIBC.munmap(mapping, nbytes)


class EmulatedArray:
    """An array in the memory of an emulated device; made by ``EmulatedDevice.array`` or ``empty``.

    It has the attributes of a NumPy array that describe it, and basic indexing and ``transpose``,
    which make views of the same memory.
    """

    def __init__(self, device: EmulatedDevice, memory: _GuardedMemory, view: NDArray) -> None:
        self.device = device
        self._memory = memory
        self._view = view

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return self._view.__array_interface__["data"][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each dimension."""
        return self._view.strides

    @property
    def dtype(self) -> numpy.dtype:
        return self._view.dtype

    @property
    def ndim(self) -> int:
        return self._view.ndim

    @property
    def readonly(self) -> bool:
        return not self._view.flags.writeable

    def numpy(self) -> NDArray:
        """A copy of the contents."""
        return self._view.copy()

    def __getitem__(self, index: Any) -> EmulatedArray:
        view = self._view[index]
        if not isinstance(view, numpy.ndarray) or not (
            view.size == 0 or numpy.may_share_memory(view, self._view)
        ):
            raise IndexError("only basic indexing, which makes a view, works on an emulated array")
        return EmulatedArray(self.device, self._memory, view)

    def transpose(self, *axes: int) -> EmulatedArray:
        """The same elements with dimensions in another order."""
        return EmulatedArray(self.device, self._memory, self._view.transpose(*axes))

    def __repr__(self) -> str:
        return f"<EmulatedArray {self.dtype}{list(self.shape)} on {self.device!r}>"


# --- the device -----------------------------------------------------------------------------------

_KIB = 1024
_SHARED_MEMORY = {80: 163 * _KIB, 87: 163 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 103: 227 * _KIB}
_SHARED_MEMORY_ELSEWHERE = 99 * _KIB
_L2_BYTES = 50 << 20


class EmulatedDevice:
    """A device whose launches run on the emulator; see ``device``.

    Attributes:
        info: what kernels are chosen by.
        index: distinguishes emulated devices.
        last_report: what the last launch did, or None.
    """

    def __init__(
        self,
        target: str,
        schedule: str,
        seed: int,
        race: bool | str,
        num_sms: int,
        window: int,
        guard: str,
        mutant: int,
        sanitize: bool,
        claims_tiles: bool,
        index: int,
    ) -> None:
        self.target = target
        self.schedule = schedule
        self.seed = seed
        self.race = race
        self.window = window
        self.guard = guard
        self.mutant = mutant
        self.sanitize = sanitize
        self.claims_tiles = claims_tiles
        self.index = index
        self.last_report: Report | None = None
        self._defines = (f"CF_MUTANT={mutant}",) if mutant else ()
        architecture = gxx.architecture(target)
        self.info = DeviceInfo(
            name=f"emulated {target}",
            capability=divmod(architecture, 10),
            num_sms=num_sms,
            shared_memory_per_block=_SHARED_MEMORY.get(architecture, _SHARED_MEMORY_ELSEWHERE),
            l2_bytes=_L2_BYTES,
        )

    def array(self, x: NDArray) -> EmulatedArray:
        """A copy of ``x`` on the device, C-contiguous."""
        x = numpy.asarray(x)
        result = self.empty(x.shape, x.dtype)
        result._view[...] = x
        return result

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> EmulatedArray:
        """An array full of NaN (bytes 0xFF)."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = numpy.dtype(dtype)
        count = int(numpy.prod(shape, dtype=numpy.int64))
        memory = _GuardedMemory(
            count * dtype.itemsize, f"{dtype}{list(shape)}", self.guard == "before"
        )
        return EmulatedArray(self, memory, memory.array().view(dtype).reshape(shape))

    def run(self, launch: Launch) -> None:
        """Runs a launch of the public pipeline.

        Raises:
            EmulationError: the kernel is at fault.
        """
        spec = launch.spec
        params = bytearray(launch.params)
        counter = None
        if launch.dynamic and self.claims_tiles:
            counter = self.array(numpy.zeros(1, numpy.int32))
            offset = launch.layout.offsets[launch.layout.pointers[-1]]
            struct.pack_into("<Q", params, offset, counter.pointer)
        self.last_report = run(
            build(source.translation_unit(spec), self._defines, sanitize=self.sanitize),
            launch.grid[0],
            params,
            launch.maps,
            shared_bytes=spec.shared_bytes,
            schedule=self.schedule,
            seed=self.seed,
            race=self.race,
            window=self.window,
        )
        if counter is not None and counter.numpy()[0] != 0:
            raise EmulationError(f"{spec.name} left its tile counter at {counter.numpy()[0]}")

    def __repr__(self) -> str:
        return f"emulate.device({self.target!r}, schedule={self.schedule!r}, seed={self.seed})"


_indices: dict[tuple[Any, ...], int] = {}


@functools.cache
def device(
    target: str,
    schedule: str = "early",
    *,
    seed: int = 0,
    race: bool | str = False,
    num_sms: int = 4,
    window: int = 1,
    guard: str = "after",
    mutant: int = 0,
    sanitize: bool = False,
    claims_tiles: bool = True,
) -> EmulatedDevice:
    """A device for tests, whose arrays the public functions accept.

    Args:
        target: "sm_80", "sm_90a", "sm_100f", ...: the kernels that it gets, and their rules.
        schedule: one of ``SCHEDULES``.
        seed: of the random schedules.
        race: whether to look for races; "global" includes global memory.
        num_sms: CTAs that a persistent kernel launches.
        window: clusters that are resident together.
        guard: "after" places arrays against the guard page above them, "before" against the one
            below.
        mutant: which barrier or wait to leave out of kernels (``ptx::kMutant``); 0 for none.
        sanitize: whether undefined behaviour of a kernel is an error.
        claims_tiles: whether blocks of kernels that can claim tiles from a counter do so.

    Returns:
        The device; the same one for the same arguments.

    Raises:
        ValueError: an unknown ``schedule`` or ``guard``, or a ``target`` that names no
            architecture.

    Example:
        >>> import numpy
        >>> import cupyflash
        >>> from cupyflash import emulate
        >>> device = emulate.device("sm_80", "random", seed=3, race=True)
        >>> q = device.array(numpy.ones((1, 64, 1, 64), numpy.float16))
        >>> cupyflash.attention(q, q, q).shape
        (1, 64, 1, 64)
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if re.fullmatch(r"sm_[1-9]\d+[af]?", target) is None:
        raise ValueError(f'target: expected a name such as "sm_90a", got {target!r}')
    if guard not in ("after", "before"):
        raise ValueError(f"guard: expected 'after' or 'before', got {guard!r}")
    key = (target, schedule, seed, race, num_sms, window, guard, mutant, sanitize, claims_tiles)
    index = _indices.setdefault(key, len(_indices))
    return EmulatedDevice(*key, index)
