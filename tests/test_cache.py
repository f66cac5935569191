"""The cubin cache: order of places, verification, concurrency, read-only and absent homes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import stat
import threading
import time
import warnings
from pathlib import Path

import pytest

from cupyflash import cache, nvrtc, source
from cupyflash.errors import CompileError, MissingKernelError
from tests.test_source import spec_of

CUBIN = b"\x7fELF not really a cubin"


class Compiler:
    """Stands in for NVRTC and counts its calls."""

    def __init__(self, cubin: bytes = CUBIN, seconds: float = 0.0) -> None:
        self.cubin = cubin
        self.seconds = seconds
        self.units: list[str] = []

    def __call__(self, unit: source.TranslationUnit) -> nvrtc.CompiledKernel:
        self.units.append(unit.name)
        time.sleep(self.seconds)
        return nvrtc.CompiledKernel(self.cubin, "", 128, 0, 0, "13.5", self.seconds)


def broken_compiler(unit: source.TranslationUnit) -> nvrtc.CompiledKernel:
    raise AssertionError("the compiler must not be called")


@pytest.fixture(autouse=True)
def _fixed_version(monkeypatch):
    monkeypatch.setattr(nvrtc, "installed_version", lambda: "13.5.37")


@pytest.fixture
def packaged(tmp_path) -> Path:
    """A folder as a wheel carries it, with one kernel."""
    folder = tmp_path / "package" / "cubins"
    unit = source.translation_unit(spec_of())
    name = cache.packaged_name(unit)
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(CUBIN)
    digest = hashlib.sha256(CUBIN).hexdigest()
    (folder / cache.INDEX).write_text(json.dumps({"nvrtc": "13.5.37", "cubins": {name: digest}}))
    cache._index.cache_clear()
    return folder


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*/*")
    return path


def test_order_memory_package_disk_compiler(tmp_path, packaged):
    spec, other = spec_of(), spec_of(mask="none")
    compiler = Compiler()
    first = cache.CubinCache(packaged, tmp_path / "disk", compiler=compiler)
    assert first.get(spec).origin == "packaged"
    assert first.get(spec).origin == "memory"
    made = first.get(other)
    assert made.origin == "compiled" and made.path == only_file(tmp_path / "disk")
    assert compiler.units == [other.name]
    second = cache.CubinCache(packaged, tmp_path / "disk", compiler=broken_compiler)
    found = second.get(other)
    assert (found.origin, found.cubin, found.path) == ("disk", CUBIN, made.path)
    assert found.key == source.translation_unit(other).key


def test_file_names_tell_everything(tmp_path):
    spec = spec_of()
    store = cache.CubinCache(None, tmp_path, compiler=Compiler())
    store.get(spec)
    (entry,) = store.entries()
    assert (entry.target, entry.spec) == ("sm_90a", spec.name)
    assert entry.key == source.translation_unit(spec).key
    assert entry.nvrtc_version == "13.5.37"
    assert entry.read() == CUBIN
    assert cache.DiskEntry.parse(tmp_path / "sm_90a" / "notes.txt") is None
    assert cache.DiskEntry.parse(tmp_path / "sm_90a" / "a-b.cubin") is None


def test_packaged_cubin_of_other_sources_is_not_used(tmp_path, packaged):
    spec = dataclasses.replace(spec_of(), stages=3)
    compiler = Compiler()
    assert cache.CubinCache(packaged, None, compiler=compiler).get(spec).origin == "compiled"


@pytest.mark.parametrize("content", [b"", CUBIN[:-1], CUBIN + b"x", b"\0" * len(CUBIN)])
def test_corrupt_disk_entry_is_a_miss_with_one_warning(tmp_path, content):
    spec = spec_of()
    cache.CubinCache(None, tmp_path, compiler=Compiler()).get(spec)
    path = only_file(tmp_path)
    path.write_bytes(content)
    compiler = Compiler()
    again = cache.CubinCache(None, tmp_path, compiler=compiler)
    with pytest.warns(RuntimeWarning, match="does not match its digest") as caught:
        assert again.get(spec).origin == "compiled"
    assert len(caught) == 1 and len(compiler.units) == 1
    assert path.read_bytes() == CUBIN


def test_corrupt_package_is_a_miss_with_one_warning(packaged):
    spec = spec_of()
    next(packaged.glob("*/*.cubin")).write_bytes(b"torn")
    with pytest.warns(RuntimeWarning, match="does not match its digest") as caught:
        entry = cache.CubinCache(packaged, None, compiler=Compiler()).get(spec)
    assert entry.origin == "compiled" and len(caught) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cubins": 3}'])
def test_unreadable_index_is_a_miss_with_one_warning(packaged, text):
    (packaged / cache.INDEX).write_text(text)
    with pytest.warns(RuntimeWarning, match="cannot be read") as caught:
        entry = cache.CubinCache(packaged, None, compiler=Compiler()).get(spec_of())
    assert entry.origin == "compiled" and len(caught) == 1


def test_entry_that_the_driver_refuses_is_made_anew(tmp_path, packaged):
    spec = spec_of()
    store = cache.CubinCache(packaged, tmp_path / "disk", compiler=Compiler(b"second"))
    assert store.get(spec).origin == "packaged"
    with pytest.warns(RuntimeWarning, match=r"refused .*no binary for this GPU"):
        store.discard(spec, "no binary for this GPU")
    entry = store.get(spec)
    assert (entry.origin, entry.cubin) == ("compiled", b"second")
    assert next(packaged.glob("*/*.cubin")).read_bytes() == CUBIN  # the package is left alone
    with pytest.warns(RuntimeWarning, match="refused"):
        store.discard(spec, "again")
    assert not list((tmp_path / "disk").glob("*/*.cubin"))


def test_other_nvrtc_is_a_miss(tmp_path, monkeypatch):
    spec = spec_of()
    cache.CubinCache(None, tmp_path, compiler=Compiler()).get(spec)
    monkeypatch.setattr(nvrtc, "installed_version", lambda: "13.6.1")
    compiler = Compiler()
    assert cache.CubinCache(None, tmp_path, compiler=compiler).get(spec).origin == "compiled"
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2
    # Where nothing can be compiled, any version will do.
    offline = cache.CubinCache(None, tmp_path, jit=False, compiler=broken_compiler)
    assert offline.get(spec).origin == "disk"


def test_jit_off_names_spec_key_and_places(tmp_path, packaged):
    spec = spec_of(mask="window")
    store = cache.CubinCache(packaged, tmp_path, jit=False, compiler=broken_compiler)
    with pytest.raises(MissingKernelError) as caught:
        store.get(spec)
    message = str(caught.value)
    for part in (spec.name, source.translation_unit(spec).key, str(packaged), str(tmp_path)):
        assert part in message
    assert "CUPYFLASH_JIT=0" in message
    assert store.get(spec_of()).origin == "packaged"


def test_absent_nvrtc_is_a_missing_kernel(tmp_path):
    def absent(unit):
        raise nvrtc.NvrtcNotFoundError("pip install cupyflash[cu13]")

    store = cache.CubinCache(None, tmp_path, compiler=absent)
    with pytest.raises(MissingKernelError, match="pip install cupyflash"):
        store.get(spec_of())


def test_failed_compilation_is_not_remembered(tmp_path):
    calls = []

    def fails_once(unit):
        calls.append(unit.name)
        if len(calls) == 1:
            raise CompileError("spilled")
        return Compiler()(unit)

    store = cache.CubinCache(None, tmp_path, compiler=fails_once)
    with pytest.raises(CompileError):
        store.get(spec_of())
    assert store.get(spec_of()).origin == "compiled"


def test_directory_that_is_a_file_warns_once(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = cache.CubinCache(None, blocked, compiler=Compiler())
    with pytest.warns(RuntimeWarning, match="CUPYFLASH_CACHE_DIR") as caught:
        first, second = store.get(spec_of()), store.get(spec_of(mask="none"))
    assert len(caught) == 1
    assert first.path is None and second.path is None
    assert store.get(spec_of()).origin == "memory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_directory_warns_once(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.warns(RuntimeWarning, match="cannot keep compiled kernels"):
        assert cache.CubinCache(None, tmp_path, compiler=Compiler()).get(spec_of()).path is None


def test_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.default_directory() == tmp_path / "chosen"
    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_directory() == tmp_path / "xdg" / "cupyflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache.default_directory() == tmp_path / "home" / ".cache" / "cupyflash"


def test_no_home_is_one_warning(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUPYFLASH_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(RuntimeWarning, match="no home folder"):
        assert cache.default_directory() is None
    entry = cache.CubinCache(None, None, compiler=Compiler()).get(spec_of())
    assert entry.path is None


def test_threads_compile_a_kernel_once(tmp_path):
    compiler = Compiler(seconds=0.05)
    store = cache.CubinCache(None, tmp_path, compiler=compiler)
    threads = [threading.Thread(target=store.get, args=(spec_of(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.units) == 1


def _compile_in_process(directory: Path, barrier) -> None:
    nvrtc.installed_version = lambda: "13.5.37"  # type: ignore[assignment]
    barrier.wait()
    for mask in ("none", "causal", "window"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            entry = cache.CubinCache(None, directory, compiler=Compiler()).get(spec_of(mask=mask))
        assert entry.cubin == CUBIN


def test_processes_share_a_directory(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    workers = [
        context.Process(target=_compile_in_process, args=(tmp_path, barrier)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    files = list(tmp_path.glob("*/*"))
    assert len(files) == 3
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() in path.name for path in files)


def test_entries_are_readable_by_other_users(tmp_path):
    cache.CubinCache(None, tmp_path, compiler=Compiler()).get(spec_of())
    assert stat.S_IMODE(only_file(tmp_path).stat().st_mode) == 0o644


def test_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fails(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        cache.write_atomically(tmp_path / "entry", b"content")
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    folder = tmp_path / "sm_80"
    folder.mkdir()
    old, new = folder / ".a.part", folder / ".b.part"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (1, 1))
    assert cache.remove_leftovers(tmp_path) == 1
    assert not old.exists() and new.exists()


def test_locate_promises_nothing_without_nvrtc(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "installed_version", lambda: None)
    store = cache.CubinCache(None, tmp_path, compiler=broken_compiler)
    assert store.locate(spec_of()).startswith("none, and NVRTC is not installed")


def test_locate_says_where_without_compiling(tmp_path, packaged):
    store = cache.CubinCache(packaged, tmp_path / "disk", compiler=broken_compiler)
    assert store.locate(spec_of()).startswith("packaged: ")
    assert "compiled by NVRTC at the first call" in store.locate(spec_of(mask="none"))
    offline = cache.CubinCache(None, None, jit=False)
    assert "CUPYFLASH_JIT=0 forbids" in offline.locate(spec_of())


def test_at_hand_is_what_get_gives_without_compiling(tmp_path, packaged):
    spec, absent = spec_of(), spec_of(mask="none")
    store = cache.CubinCache(packaged, tmp_path / "disk", compiler=broken_compiler)
    assert store.get_at_hand(absent) is None
    first = store.get_at_hand(spec)
    assert first is not None and (first.origin, first.cubin) == ("packaged", CUBIN)
    again = store.get_at_hand(spec)
    assert again is not None and again.origin == store.get(spec).origin == "memory"
    with pytest.warns(RuntimeWarning, match="refused"):
        store.discard(spec, "no binary for this GPU")
    assert store.get_at_hand(spec) is None
