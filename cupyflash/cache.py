"""Where cubins come from: memory, the wheel, the disk, NVRTC, in this order.

A packaged cubin is found by its key, the digest of everything that it was compiled from, so one
that no longer matches its sources is never used. A disk entry is one file

    <directory>/<target>/<spec>-<key>-nvrtc<version>-<sha256 of the file>.cubin

written under a temporary name and renamed: two processes may write it at once, a reader never sees
half of it, and it carries the digest that it is checked against. An entry that fails the check, or
that the driver refuses, is a miss with one warning. So is a directory that cannot be written:
kernels then live as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cupyflash import nvrtc, source
from cupyflash.errors import MissingKernelError
from cupyflash.select import KernelSpec
from cupyflash.source import TranslationUnit

logger = logging.getLogger("cupyflash")

INDEX = "index.json"
"""Beside the packaged cubins: {"nvrtc": version, "cubins": {"<target>/<file>": sha256}}."""


@dataclass(frozen=True)
class CacheEntry:
    """A cubin at hand.

    Attributes:
        cubin: ELF image.
        origin: where this lookup found it: "memory", "packaged", "disk" or "compiled".
        path: the file that holds it, or None when only this process does.
        key: the unit's key.
    """

    cubin: bytes
    origin: str
    path: Path | None
    key: str


@dataclass(frozen=True)
class DiskEntry:
    """A file of the disk cache, as its name tells."""

    path: Path
    target: str
    spec: str
    key: str
    nvrtc_version: str
    sha256: str

    @classmethod
    def parse(cls, path: Path) -> DiskEntry | None:
        """The entry behind a file name, or None where the name is not of our making."""
        parts = path.name.removesuffix(".cubin").split("-")
        if path.suffix != ".cubin" or len(parts) != 4 or not parts[2].startswith("nvrtc"):
            return None
        spec, key, version, digest = parts
        return cls(path, path.parent.name, spec, key, version.removeprefix("nvrtc"), digest)

    def read(self) -> bytes | None:
        """The cubin, or None when the file does not hold what its name says."""
        try:
            cubin = self.path.read_bytes()
        except OSError:
            return None
        return cubin if digest_of(cubin) == self.sha256 else None


class CubinCache:
    """Finds or makes the cubin of a kernel. Safe to share between threads.

    Args:
        packaged: folder with the wheel's cubins and their index, or None.
        directory: folder for compiled cubins, or None to keep them in memory only.
        jit: whether NVRTC may be called on a miss.
        compiler: what to call then.
    """

    def __init__(
        self,
        packaged: Path | None,
        directory: Path | None,
        *,
        jit: bool = True,
        compiler: Callable[[TranslationUnit], nvrtc.CompiledKernel] = nvrtc.compile,
    ) -> None:
        self.packaged = packaged
        self.directory = directory
        self.jit = jit
        self._compiler = compiler
        self._memory: dict[KernelSpec, CacheEntry] = {}
        self._refused: set[Path] = set()
        self._lock = threading.Lock()
        self._spec_locks: dict[KernelSpec, threading.Lock] = {}
        self._warned_unwritable = False

    def get(self, spec: KernelSpec) -> CacheEntry:
        """The cubin of ``spec``, compiled if it must be.

        Raises:
            MissingKernelError: it is nowhere, and compiling is off or NVRTC is not installed.
            CompileError: it does not compile.
        """
        entry = self._memory.get(spec)
        if entry is not None:
            return _as_memory(entry)
        with self._lock:
            lock = self._spec_locks.setdefault(spec, threading.Lock())
        with lock:  # one compilation of a kernel per process, others in parallel
            entry = self._memory.get(spec)
            if entry is not None:
                return _as_memory(entry)
            entry = self._find(spec)
            self._memory[spec] = entry
            return entry

    def locate(self, spec: KernelSpec) -> str:
        """In words, where ``get`` would find the cubin now. Compiles nothing."""
        if spec in self._memory:
            return f"memory (first {self._memory[spec].origin}: {self._memory[spec].path})"
        unit = source.translation_unit(spec)
        entry = self._at_hand(unit)
        if entry is not None:
            return f"{entry.origin}: {entry.path}"
        missing = f"key {unit.key}, not in {self._places(unit)}"
        if not self.jit:
            return f"none, and CUPYFLASH_JIT=0 forbids compiling it: {missing}"
        if nvrtc.installed_version() is None:
            return f"none, and NVRTC is not installed: {missing}"
        return f"compiled by NVRTC at the first call: {missing}"

    def get_at_hand(self, spec: KernelSpec) -> CacheEntry | None:
        """What ``get`` gives, or None where it would have to compile."""
        entry = self._memory.get(spec)
        if entry is not None:
            return _as_memory(entry)
        entry = self._at_hand(source.translation_unit(spec))
        return None if entry is None else self._memory.setdefault(spec, entry)

    def discard(self, spec: KernelSpec, reason: str) -> None:
        """Forgets an entry that the driver refused, so that the next ``get`` makes a new one.

        A packaged cubin is passed over from now on, a file on disk is deleted.
        """
        entry = self._memory.pop(spec, None)
        if entry is None:
            return
        warnings.warn(
            f"cupyflash: the driver refused {entry.path or spec.name} ({reason}); making it anew",
            RuntimeWarning,
            stacklevel=2,
        )
        if entry.path is not None:
            self._refused.add(entry.path)
            if self._owns(entry.path):
                with contextlib.suppress(OSError):
                    entry.path.unlink()

    def entries(self) -> Iterator[DiskEntry]:
        """Every entry of the disk cache, by target and name."""
        if self.directory is None or not self.directory.is_dir():
            return
        for path in sorted(self.directory.glob("*/*.cubin")):
            entry = DiskEntry.parse(path)
            if entry is not None:
                yield entry

    def packaged_files(self) -> dict[str, str]:
        """The wheel's cubins: "<target>/<file>" to sha256."""
        return dict(_index(self.packaged)["cubins"]) if self.packaged is not None else {}

    def _find(self, spec: KernelSpec) -> CacheEntry:
        unit = source.translation_unit(spec)
        entry = self._at_hand(unit)
        if entry is not None:
            return entry
        if not self.jit:
            raise MissingKernelError(self._missing(unit, "CUPYFLASH_JIT=0 forbids compiling it"))
        try:
            compiled = self._compiler(unit)
        except nvrtc.NvrtcNotFoundError as error:
            raise MissingKernelError(self._missing(unit, str(error))) from error
        logger.info("compiled %s for %s in %.2f s", unit.name, unit.target, compiled.seconds)
        return CacheEntry(compiled.cubin, "compiled", self._store(unit, compiled.cubin), unit.key)

    def _at_hand(self, unit: TranslationUnit) -> CacheEntry | None:
        return self._from_package(unit) or self._from_disk(unit)

    def _from_package(self, unit: TranslationUnit) -> CacheEntry | None:
        if self.packaged is None:
            return None
        name = packaged_name(unit)
        digest = _index(self.packaged)["cubins"].get(name)
        path = self.packaged / name
        if digest is None or path in self._refused:
            return None
        try:
            cubin = path.read_bytes()
        except OSError as error:
            _warn_corrupt(path, f"cannot be read ({error})")
            return None
        if digest_of(cubin) != digest:
            _warn_corrupt(path, "does not match its digest")
            return None
        return CacheEntry(cubin, "packaged", path, unit.key)

    def _from_disk(self, unit: TranslationUnit) -> CacheEntry | None:
        for found in self._disk_candidates(unit):
            if found.path in self._refused:
                continue
            cubin = found.read()
            if cubin is not None:
                return CacheEntry(cubin, "disk", found.path, unit.key)
            _warn_corrupt(found.path, "does not match its digest")
            with contextlib.suppress(OSError):
                found.path.unlink()
        return None

    def _disk_candidates(self, unit: TranslationUnit) -> list[DiskEntry]:
        """Files with the unit's key, made by the NVRTC at hand; by any where there is none."""
        if self.directory is None:
            return []
        stem = f"{unit.name}-{unit.key}-nvrtc"
        try:
            names = os.listdir(self.directory / unit.target)
        except OSError:
            return []
        names = sorted(name for name in names if name.startswith(stem))
        if not names:
            return []
        version = nvrtc.installed_version() if self.jit else None
        parsed = (DiskEntry.parse(self.directory / unit.target / name) for name in names)
        return [
            entry
            for entry in parsed
            if entry is not None and version in (None, entry.nvrtc_version)
        ]

    def _store(self, unit: TranslationUnit, cubin: bytes) -> Path | None:
        if self.directory is None:
            return None
        version = nvrtc.installed_version() or "unknown"
        digest = digest_of(cubin)
        folder = self.directory / unit.target
        path = folder / f"{unit.name}-{unit.key}-nvrtc{version}-{digest}.cubin"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, cubin)
        except OSError as error:
            if not self._warned_unwritable:
                self._warned_unwritable = True
                warnings.warn(
                    f"cupyflash: cannot keep compiled kernels in {self.directory} ({error}); "
                    "they last as long as this process. CUPYFLASH_CACHE_DIR names another place.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None
        return path

    def _owns(self, path: Path) -> bool:
        return self.directory is not None and path.is_relative_to(self.directory)

    def _missing(self, unit: TranslationUnit, why: str) -> str:
        return (
            f"no cubin of {unit.name} for {unit.target} (key {unit.key}), and {why}. "
            f"Looked in {self._places(unit)}"
        )

    def _places(self, unit: TranslationUnit) -> str:
        packaged = "the package (built without cubins)"
        if self.packaged is not None:
            packaged = f"the package ({self.packaged / unit.target})"
        disk = "no directory for compiled kernels"
        if self.directory is not None:
            disk = f"the disk cache ({self.directory / unit.target})"
        return f"{packaged}, {disk}"


@functools.lru_cache(maxsize=1)
def default_cache() -> CubinCache:
    """The cache of this process, as the environment configures it at the first call."""
    index = source.find_packaged(f"cubins/{INDEX}")
    return CubinCache(
        packaged=index.parent if index is not None else None,
        directory=default_directory(),
        jit=os.environ.get("CUPYFLASH_JIT", "1") != "0",
    )


def default_directory() -> Path | None:
    """CUPYFLASH_CACHE_DIR, or cupyflash in the user's cache folder; None without a home."""
    chosen = os.environ.get("CUPYFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "cupyflash"
    try:
        return Path.home() / ".cache" / "cupyflash"
    except RuntimeError:
        warnings.warn(
            "cupyflash: there is no home folder to keep compiled kernels in; they last as long as "
            "this process. CUPYFLASH_CACHE_DIR names another place.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def packaged_name(unit: TranslationUnit) -> str:
    """Where the wheel holds the cubin of a unit, relative to its ``cubins`` folder."""
    return f"{unit.target}/{unit.name}-{unit.key}.cubin"


def digest_of(cubin: bytes) -> str:
    """The digest that entries carry and are checked against."""
    return hashlib.sha256(cubin).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees all of it or nothing, whoever else writes it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # users may share a cache; mkstemp thinks of one
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove_leftovers(directory: Path, older_than_seconds: float = 3600.0) -> int:
    """Deletes temporary files that a killed process left behind; returns how many."""
    removed = 0
    for path in directory.glob("*/.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > older_than_seconds:
                path.unlink()
                removed += 1
    return removed


def _as_memory(entry: CacheEntry) -> CacheEntry:
    return CacheEntry(entry.cubin, "memory", entry.path, entry.key)


@functools.lru_cache(maxsize=4)
def _index(packaged: Path) -> dict[str, dict[str, str]]:
    """The index of packaged cubins; empty, with a warning, when it cannot be read."""
    path = packaged / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {"cubins": dict(index["cubins"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn_corrupt(path, f"cannot be read ({error})")
        return {"cubins": {}}


def _warn_corrupt(path: Path, what: str) -> None:
    warnings.warn(f"cupyflash: {path} {what}; passing it over", RuntimeWarning, stacklevel=3)
