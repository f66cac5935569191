"""Compiles kernels and the emulator itself with g++, each once: the host's counterpart of nvrtc.py.

Libraries lie in ``emulate`` below the folder of compiled kernels. Their names carry a digest of
everything that they are made from: sources, headers, flags, compiler. A process that finds another
one at work on the same library waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from cupyflash import source
from cupyflash.cache import default_directory
from cupyflash.errors import CompileError

_COMMON_FLAGS = ("-std=c++20", "-fno-strict-aliasing", "-fPIC", "-shared")
_KERNEL_FLAGS = ("-O1", "-g1", "-ffp-contract=off")
_SANITIZE_FLAGS = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
_LIBRARY_FLAGS = ("-O3", "-ffp-contract=fast", "-fvisibility-inlines-hidden")
_LIBRARY_SOURCES = (
    "runtime.cpp",
    "reports.cpp",
    "faults.cpp",
    "memory.cpp",
    "barriers.cpp",
    "copies.cpp",
    "operations.cpp",
    "wgmma.cpp",
    "tcgen05.cpp",
)
_KERNEL_HEADERS = ("emulate/ptx.hpp", "emulate/runtime.hpp", "types.cuh", "ptx/ptx.cuh")


class Unit(Protocol):
    """What compiling needs of a ``source.TranslationUnit``."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def include_root(self) -> Path: ...
    @property
    def digest(self) -> str: ...


def compile_kernel(
    unit: Unit, defines: Sequence[str] = (), *, sanitize: bool = False
) -> tuple[Path, bool]:
    """The shared library of a translation unit, and whether it had to be compiled.

    Args:
        unit: the kernel.
        defines: preprocessor definitions.
        sanitize: whether undefined behaviour executes a trap instruction.

    Raises:
        CompileError: g++ is missing or refuses the unit.
    """
    flags = (
        *_COMMON_FLAGS,
        *_machine_flags(),
        *_KERNEL_FLAGS,
        *(_SANITIZE_FLAGS if sanitize else ()),
        f"-DCF_ARCH={architecture(unit.target)}",
        *(f"-D{define}" for define in defines),
    )
    headers = _texts(unit.include_root / name for name in _KERNEL_HEADERS)
    key = _key(unit.digest, unit.text, *flags, _compiler_version(), *headers)
    path = _folder() / f"{unit.name}-{key}.so"
    if path.is_file():
        return path, False
    with tempfile.TemporaryDirectory(dir=_folder(), prefix=".unit-") as folder:
        file = Path(folder) / f"{unit.name}.cpp"
        file.write_text(unit.text, encoding="utf-8")
        return path, _compile_once(path, [file], flags, unit.include_root)


def emulator_library() -> Path:
    """The shared library of the emulator itself; compiled if need be (about 20 s).

    Raises:
        CompileError: g++ is missing or refuses it.
    """
    root = source.include_root()
    folder = root / "emulate"
    files = [folder / name for name in _LIBRARY_SOURCES]
    flags = (*_COMMON_FLAGS, *_machine_flags(), *_LIBRARY_FLAGS)
    texts = _texts([*files, *sorted(folder.glob("*.hpp")), root / "types.cuh"])
    path = _folder() / f"libcf_emulator-{_key(*flags, _compiler_version(), *texts)}.so"
    _compile_once(path, files, flags, root)
    return path


def architecture(target: str) -> int:
    """80 of "sm_80", 100 of "sm_100f"."""
    return int("".join(character for character in target if character.isdigit()))


def _machine_flags() -> tuple[str, ...]:
    return ("-march=x86-64-v3",) if platform.machine() == "x86_64" else ()


@functools.cache
def _compiler() -> str:
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise CompileError("the emulator compiles kernels with g++, which is not on the PATH")
    return path


@functools.cache
def _compiler_version() -> str:
    command = [_compiler(), "--version"]
    output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return output.splitlines()[0]


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _texts(paths: Iterable[Path]) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in paths]


def _folder() -> Path:
    base = default_directory()
    folder = (base if base is not None else Path(tempfile.gettempdir()) / "cupyflash") / "emulate"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile_once(path: Path, files: Sequence[Path], flags: Sequence[str], root: Path) -> bool:
    """Makes ``path`` unless it exists; false if it did, or another process made it meanwhile."""
    if path.is_file():
        return False
    with _exclusive(path.with_suffix(".lock")):
        if path.is_file():
            return False
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
            output = Path(folder) / path.name
            inputs = [str(file) for file in files]
            command = [_compiler(), *flags, f"-I{root}", *inputs, "-o", str(output)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                raise CompileError(f"{' '.join(command)}\n{result.stderr.strip()}")
            os.replace(output, path)
    return True


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
