"""NVRTC through ctypes: a translation unit in, a checked cubin out. Needs no GPU, CUDA or CuPy.

The library comes from an nvidia-cuda-nvrtc wheel on the import path, else from conda or a CUDA
toolkit, found by cuda-pathfinder. Headers travel with the program, so what is compiled is exactly
what was hashed.

Note [Build gates]: ptxas reports on success what makes a kernel slow or unsafe, so the log of
every build is read. A spilled byte, a stack frame or an advisory C75xx (ptxas serialised wgmma)
fails the build; only under another NVRTC than ``TUNED_VERSION``, whose register allocation nobody
tuned the kernels for, is it a warning, because a slower kernel beats none. A kernel that moves
registers between its warps must have got exactly those that its launch bounds allow, whatever the
version: otherwise setmaxnreg would wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash import source
from cupyflash.errors import CompileError
from cupyflash.source import TranslationUnit

DISTRIBUTIONS = ("nvidia_cuda_nvrtc", "nvidia_cuda_nvrtc_cu13", "nvidia_cuda_nvrtc_cu12")
TUNED_VERSION = "13.5"
"""The NVRTC that wheels are built with and figures are measured on (pyproject.toml pins it)."""

CONTEXT_LINES = 3

_SUCCESS = 0
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ADVISORY = re.compile(r"^.*\(C75\d\d\).*$|^.*\bC75\d\d\b.*$", re.MULTILINE)
_DIAGNOSTIC = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?P<kind>error|catastrophic error)")


class NvrtcNotFoundError(RuntimeError):
    """There is no NVRTC library on this machine, or it cannot be loaded."""


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what the compiler said about it.

    Attributes:
        cubin: ELF image for the unit's target.
        log: NVRTC's and ptxas' messages.
        registers: per thread at launch.
        spill_bytes: spilled bytes, stores and loads.
        stack_bytes: stack frame.
        nvrtc_version: "13.5".
        seconds: time of the compilation.
    """

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    nvrtc_version: str
    seconds: float


def compile(unit: TranslationUnit) -> CompiledKernel:
    """Compiles a unit to a cubin and holds it to the gates of Note [Build gates].

    Raises:
        CompileError: the source has errors (quoted with their lines), or a gate failed.
        NvrtcNotFoundError: there is no NVRTC.
    """
    start = time.perf_counter()
    log, cubin = _run(unit, unit.options)
    if "ptxas" not in log:
        # Beside a driver, NVRTC may answer from the driver's own cache, without a log to judge by.
        log, cubin = _run(unit, (*unit.options, "--no-cache"))
    seconds = time.perf_counter() - start
    compiled = parse_log(log, cubin=cubin, nvrtc_version=version(), seconds=seconds)
    check(unit, compiled)
    return compiled


def _run(unit: TranslationUnit, options: tuple[str, ...]) -> tuple[str, bytes]:
    """Log and cubin of one compilation.

    Raises:
        CompileError: it failed.
    """
    library = _loaded().library
    with _program(library, unit) as program:
        encoded = [option.encode() for option in options]
        status = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        log = _fetch(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status != _SUCCESS:
            reason = library.nvrtcGetErrorString(status).decode()
            raise CompileError(_describe_failure(unit, reason, log))
        return log, _fetch(library, program, "CUBIN")


def parse_log(log: str, *, cubin: bytes, nvrtc_version: str, seconds: float) -> CompiledKernel:
    """Reads registers, spills and stack out of ptxas' verbose log.

    Raises:
        CompileError: the log does not hold them, so the gates could not be applied.
    """
    stack = _STACK.search(log)
    registers = _REGISTERS.search(log)
    if stack is None or registers is None:
        raise CompileError(f"ptxas' log names no registers or no stack frame:\n{log}")
    frame, stores, loads = (int(count) for count in stack.groups())
    return CompiledKernel(
        cubin=cubin,
        log=log,
        registers=int(registers.group(1)),
        spill_bytes=stores + loads,
        stack_bytes=frame,
        nvrtc_version=nvrtc_version,
        seconds=seconds,
    )


def check(unit: TranslationUnit, compiled: CompiledKernel) -> None:
    """Applies Note [Build gates].

    Raises:
        CompileError: naming every gate that failed.
    """
    slow = []
    if compiled.spill_bytes:
        slow.append(f"{compiled.spill_bytes} bytes spilled")
    if compiled.stack_bytes:
        slow.append(f"a stack frame of {compiled.stack_bytes} bytes")
    slow += [f"advisory: {found.strip()}" for found in _ADVISORY.findall(compiled.log)]
    unsafe = []
    if unit.registers is not None and compiled.registers != unit.registers:
        unsafe.append(f"{compiled.registers} registers where setmaxnreg needs {unit.registers}")
    message = f"{unit.name} for {unit.target}: {'; '.join(unsafe + slow)}"
    if unsafe or (slow and compiled.nvrtc_version == TUNED_VERSION):
        raise CompileError(f"{message}\n--- log\n{compiled.log}")
    if slow:
        warnings.warn(
            f"cupyflash: {message}, under NVRTC {compiled.nvrtc_version}; the kernels are tuned "
            f"for {TUNED_VERSION}",
            RuntimeWarning,
            stacklevel=2,
        )


def version() -> str:
    """Version of the loaded library, "13.5".

    Raises:
        NvrtcNotFoundError: there is no NVRTC.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _loaded().library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.lru_cache(maxsize=1)
def installed_version() -> str | None:
    """Version of the NVRTC that would compile, without loading it where a wheel tells; or None.

    Loading the library takes up to 0.4 s, and a kernel found on disk needs only its version.
    """
    wheel = _installed_wheel()
    if wheel is not None:
        return wheel.version
    try:
        return version()
    except NvrtcNotFoundError:
        return None


def library_path() -> Path:
    """Where the loaded library lies.

    Raises:
        NvrtcNotFoundError: there is no NVRTC.
    """
    return _loaded().path


class _Loaded(NamedTuple):
    library: Any
    path: Path


@functools.lru_cache(maxsize=1)
def _loaded() -> _Loaded:
    """The library, opened at the first call."""
    wheel = _installed_wheel()
    path = wheel.library if wheel is not None else _path_by_pathfinder()
    # NVRTC 13.0 looks for its builtins by name alone; loaded first, they are found.
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return _Loaded(library, path)


class _Wheel(NamedTuple):
    version: str
    library: Path


@functools.lru_cache(maxsize=1)
def _installed_wheel() -> _Wheel | None:
    """The newest NVRTC wheel on the import path.

    A build front end puts what it installs for a build on that path and nowhere else, where
    cuda-pathfinder does not look.
    """
    found = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder or "."):
                name, _, rest = entry.partition("-")
                if name in DISTRIBUTIONS and rest.endswith(".dist-info"):
                    release = rest.removesuffix(".dist-info")
                    major = release.split(".")[0]
                    libraries = Path(folder).glob(f"nvidia/*/lib/libnvrtc.so.{major}")
                    found += [_Wheel(release, library) for library in libraries]
    return max(found, key=lambda wheel: _as_numbers(wheel.version), default=None)


def _as_numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def _path_by_pathfinder() -> Path:
    """A library of conda or of a CUDA toolkit.

    Raises:
        NvrtcNotFoundError: there is none.
    """
    try:
        from cuda import pathfinder

        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception as error:  # pathfinder raises its own classes, by version
        raise NvrtcNotFoundError(
            "NVRTC is not installed; pip install cupyflash[cu13] (or [cu12]) brings it"
        ) from error
    if path is None:
        raise NvrtcNotFoundError("cuda-pathfinder found NVRTC but does not say where")
    return Path(path)


@contextlib.contextmanager
def _program(library: Any, unit: TranslationUnit) -> Iterator[ctypes.c_void_p]:
    contents = source.headers(unit)
    count = len(contents)
    names = (ctypes.c_char_p * count)(*(name.encode() for name, _ in contents))
    texts = (ctypes.c_char_p * count)(*(text.encode() for _, text in contents))
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program),
        unit.text.encode(),
        f"{unit.name}.cu".encode(),
        count,
        texts,
        names,
    )
    if status != _SUCCESS:
        raise CompileError(f"{unit.name}: {library.nvrtcGetErrorString(status).decode()}")
    try:
        yield program
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _describe_failure(unit: TranslationUnit, reason: str, log: str) -> str:
    """The log, then the lines around every error with their numbers."""
    texts = {f"{unit.name}.cu": unit.text, **dict(source.headers(unit))}
    excerpts = []
    seen = set()
    for line in log.splitlines():
        match = _DIAGNOSTIC.match(line)
        if match is None:
            continue
        place = (match["file"], int(match["line"]))
        if place not in seen and place[0] in texts:
            seen.add(place)
            excerpts.append(_excerpt(*place, texts[place[0]]))
    return "\n".join([f"{unit.name} for {unit.target}: {reason}", log, *excerpts])


def _excerpt(file: str, line: int, text: str) -> str:
    lines = text.splitlines()
    first = max(line - CONTEXT_LINES, 1)
    last = min(line + CONTEXT_LINES, len(lines))
    rows = [
        f"{'>' if number == line else ' '} {number:5} | {lines[number - 1]}"
        for number in range(first, last + 1)
    ]
    return "\n".join([f"--- {file}", *rows])
