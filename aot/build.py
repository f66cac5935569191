"""Compiles the cubins of a wheel, on a machine that needs no GPU and no CUDA toolkit.

    python aot/build.py --recipe core --out build/cubins

CMake runs this when a wheel is built. It is the same code that compiles at run time, so a packaged
cubin and a compiled one have the same key. What is up to date is kept, what belongs to no kernel of
the recipe is removed, and a kernel that spills or earns an advisory fails the build.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aot import recipes  # noqa: E402 - the path comes first
from cupyflash import cache, nvrtc, source  # noqa: E402
from cupyflash.errors import CompileError  # noqa: E402
from cupyflash.select import KernelSpec  # noqa: E402


@dataclass(frozen=True)
class Built:
    """One kernel of the recipe: where it lies and how it came out; ``fault`` is empty if well."""

    file: str
    sha256: str
    note: str
    fault: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds what the arguments ask for; returns the exit status."""
    options = _parse(arguments)
    targets = tuple(target for target in options.targets.replace(";", ",").split(",") if target)
    specs = recipes.specs(options.recipe, targets)
    if options.list:
        for spec in specs:
            print(f"{spec.target:<8} {spec.name}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    built = _build_all(specs, options.out, options.jobs)
    faults = [kernel for kernel in built if kernel.fault]
    good = [kernel for kernel in built if not kernel.fault]
    _write_index(options.out, good)
    for kernel in faults:
        print(f"\n{kernel.fault}", file=sys.stderr)
    if faults:
        print(f"{len(faults)} of {len(specs)} kernels failed", file=sys.stderr)
        return 1
    size = sum((options.out / kernel.file).stat().st_size for kernel in good)
    seconds = time.perf_counter() - start
    print(f"{len(good)} cubins, {size / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=list(recipes.RECIPES), default="core")
    parser.add_argument(
        "--targets", default="", help="comma separated, instead of the recipe's: sm_90a,sm_120"
    )
    parser.add_argument("--out", type=Path, default=Path("build/cubins"))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="print the kernels and stop")
    return parser.parse_args(arguments)


def _build_all(specs: Sequence[KernelSpec], out: Path, jobs: int) -> list[Built]:
    built: list[Built] = []
    # Wide tiles take longest to compile: first, so that the processes end together.
    ordered = sorted(specs, key=lambda spec: -spec.head_dim_qk * spec.block_m)
    digests = _known_digests(out)
    with ProcessPoolExecutor(max_workers=max(jobs, 1)) as pool:
        futures = [pool.submit(_build, spec, out, digests) for spec in ordered]
        for future in as_completed(futures):
            kernel = future.result()
            built.append(kernel)
            print(f"[{len(built):3}/{len(specs)}] {kernel.note}", flush=True)
    return built


def _build(spec: KernelSpec, out: Path, digests: dict[str, str]) -> Built:
    unit = source.translation_unit(spec)
    file = cache.packaged_name(unit)
    path = out / file
    label = f"{spec.target:<8} {spec.name}"
    if path.is_file():
        digest = cache.digest_of(path.read_bytes())
        if digests.get(file) == digest:
            return Built(file, digest, f"{label}: up to date")
    try:
        compiled = nvrtc.compile(unit)
    except CompileError as error:
        return Built(file, "", f"{label}: FAILED", str(error))
    path.parent.mkdir(parents=True, exist_ok=True)
    cache.write_atomically(path, compiled.cubin)
    digest = cache.digest_of(compiled.cubin)
    size = len(compiled.cubin) / 1e3
    note = f"{compiled.registers} registers, {size:.0f} kB, {compiled.seconds:.1f} s"
    return Built(file, digest, f"{label}: {note}")


def _known_digests(out: Path) -> dict[str, str]:
    """Digests of the last build; empty where there was none, or another NVRTC made it."""
    try:
        index = json.loads((out / cache.INDEX).read_text(encoding="utf-8"))
        current = index["nvrtc"] == nvrtc.installed_version()
        return dict(index["cubins"]) if current else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_index(out: Path, built: Sequence[Built]) -> None:
    kept = {kernel.file: kernel.sha256 for kernel in sorted(built, key=lambda one: one.file)}
    for path in out.glob("*/*.cubin"):
        if path.relative_to(out).as_posix() not in kept:
            path.unlink()
    index = {"nvrtc": nvrtc.installed_version() if built else None, "cubins": kept}
    cache.write_atomically(out / cache.INDEX, json.dumps(index, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main())
