"""What a wheel holds, and that it works on its own.

CUPYFLASH_TEST_WHEEL names the wheel to look into; without it one is built without cubins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy
import pytest

from tests.test_repository import ROOT, kernel_files, relative

MAX_WHEEL_BYTES = 25_000_000
CORE_TARGETS = ("sm_80", "sm_90a", "sm_100f")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    given = os.environ.get("CUPYFLASH_TEST_WHEEL")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    environment = {**os.environ, "CUPYFLASH_AOT": "none"}
    result = subprocess.run(
        [*command, "--config-settings", f"build-dir={folder / 'build'}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"pip cannot build a wheel here: {result.stderr[-500:]}")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def names(wheel) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="session")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def index(unpacked) -> dict:
    found = json.loads((unpacked / "cupyflash" / "cubins" / "index.json").read_text())
    if not found["cubins"]:
        pytest.skip("this wheel carries no cubins; CUPYFLASH_TEST_WHEEL can name one that does")
    return found


def run_in_wheel(unpacked: Path, program: str, **environment: str) -> str:
    """Runs a program against the unpacked wheel and nothing of the checkout.

    -S keeps out the hook of an editable install, which would bring the checkout back.
    """
    dependencies = Path(numpy.__file__).parent.parent
    process = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": f"{unpacked}{os.pathsep}{dependencies}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_one_wheel_serves_every_python(wheel, names):
    assert re.fullmatch(r"cupyflash-[\d.]+-py3-none-(many)?linux[\w.]*_x86_64\.whl", wheel.name)
    (tags,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(tags).decode()
    assert "Tag: py3-none-" in text and "Root-Is-Purelib: false" in text


def test_wheel_is_small(wheel):
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_python_and_licence_are_in(names):
    for path in (ROOT / "cupyflash").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    assert "cupyflash/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_kernel_sources_are_in(names):
    """For NVRTC and for the emulator, which both work from an installed wheel."""
    for path in kernel_files():
        assert f"cupyflash/kernels_cu/{relative(path)}" in names


def test_nothing_else_is_in(names):
    allowed = r"cupyflash/|cupyflash-[\d.]+\.dist-info/"
    assert all(re.match(allowed, name) for name in names)
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|/native/|/tests/", name)]


def test_launcher_links_nothing(unpacked):
    """Exported functions, no needed libraries: any glibc and any Python will do."""
    library = unpacked / "cupyflash" / "libcupyflash.so"
    try:
        exported = subprocess.run(
            ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
        ).stdout
        dynamic = subprocess.run(
            ["readelf", "--dynamic", "--version-info", library],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except OSError as error:
        pytest.skip(f"binutils: {error}")
    symbols = {line.split()[-1] for line in exported.splitlines()}
    assert {"cf_version", "cf_initialize", "cf_launch"} <= symbols
    assert all(symbol.startswith("cf_") for symbol in symbols)
    assert not re.search(r"NEEDED.*(libstdc|libpython|libcuda)", dynamic)
    versions = [
        tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", dynamic)
    ]
    assert all(version <= (2, 17) for version in versions)


def test_cubins_of_every_target_are_in(unpacked, index):
    folder = unpacked / "cupyflash" / "cubins"
    files = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.cubin")}
    assert files == set(index["cubins"])
    for name, digest in index["cubins"].items():
        content = (folder / name).read_bytes()
        assert content[:4] == b"\x7fELF" and hashlib.sha256(content).hexdigest() == digest
    counts = Counter(name.split("/")[0] for name in files)
    assert set(CORE_TARGETS) <= set(counts)


def test_cubins_were_made_by_the_pinned_nvrtc(index):
    project = (ROOT / "pyproject.toml").read_text()
    (pinned,) = set(re.findall(r"nvidia-cuda-nvrtc==([\d.]+)", project))
    assert index["nvrtc"] == pinned


def test_packaged_cubins_are_found_without_nvrtc(unpacked, index, tmp_path):
    """What a user of the wheel runs: every kernel of the core recipe, from the package."""
    program = f"""
import sys
sys.modules["cuda.pathfinder"] = None
import cupyflash
from cupyflash import cache
sys.path.append({str(ROOT)!r})  # for the recipe alone
from aot import recipes
assert cupyflash.__file__.startswith({str(unpacked)!r})
store = cache.default_cache()
specs = recipes.specs("core")
for spec in specs:
    assert store.get(spec).origin == "packaged"
print(len(specs))
"""
    out = run_in_wheel(unpacked, program, CUPYFLASH_JIT="0", CUPYFLASH_CACHE_DIR=str(tmp_path))
    assert int(out) == sum(name.split("/")[0] in CORE_TARGETS for name in index["cubins"])


def test_wheel_works_on_its_own(unpacked, tmp_path):
    program = """
import numpy, cupyflash
from cupyflash import source
q = numpy.random.default_rng(0).standard_normal((1, 70, 2, 64)).astype(numpy.float32)
out = cupyflash.attention(q, q, q, causal=True)
assert out.shape == q.shape and numpy.allclose(out[:, 0], q[:, 0], atol=1e-6)
print(source.include_root())
"""
    out = run_in_wheel(unpacked, program, CUPYFLASH_CACHE_DIR=str(tmp_path))
    assert out.strip() == str(unpacked / "cupyflash" / "kernels_cu")


def test_importing_opens_and_reads_nothing(unpacked):
    program = """
import builtins, os, sys
import numpy
os.environ = None  # reading it fails
before = set(sys.modules)
import cupyflash
loaded = {name for name in set(sys.modules) - before if name.startswith("cupyflash")}
assert loaded == {"cupyflash"}, loaded
heavy = {"cupy", "torch", "jax", "cuda", "ctypes"} & (set(sys.modules) - before)
assert not heavy, heavy
"""
    run_in_wheel(unpacked, program)
