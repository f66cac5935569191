"""python -m cupyflash info | check | explain | warmup | cache | bench | bench-report."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

import cupyflash
from cupyflash import cache, nvrtc, reference, schedule, select, source
from cupyflash.bench import command as bench
from cupyflash.errors import CompileError, DriverError, MissingKernelError, UnsupportedError
from cupyflash.problem import (
    ALIGNS,
    LAYOUTS,
    DeviceInfo,
    Mask,
    Problem,
    make_problem,
    to_bshd,
)
from cupyflash.select import KernelSpec
from cupyflash.tensor import Device, DeviceKind, DType, TensorView, contiguous_strides
from cupyflash.tuning import FAMILIES, MASKS

KIB = 1024
EXAMPLES = {
    "sm_80": DeviceInfo("an A100", (8, 0), 108, 163 * KIB, 40 << 20),
    "sm_86": DeviceInfo("an A10", (8, 6), 72, 99 * KIB, 6 << 20),
    "sm_89": DeviceInfo("an L40", (8, 9), 142, 99 * KIB, 96 << 20),
    "sm_90a": DeviceInfo("an H200", (9, 0), 132, 227 * KIB, 60 << 20),
    "sm_100f": DeviceInfo("a B200", (10, 0), 148, 227 * KIB, 126 << 20),
    "sm_120": DeviceInfo("an RTX 5090", (12, 0), 170, 99 * KIB, 96 << 20),
}
"""A device of each target, for machines that have none: ``--target``."""

EMULATED_TARGETS = ("sm_80", "sm_90a", "sm_100f")
DTYPES = {"bf16": DType.bfloat16, "f16": DType.float16}
LIBRARIES = ("numpy", "ml_dtypes", "cuda-pathfinder", "cupy", "torch", "jax", "numba")
_CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (
        CompileError,
        DriverError,
        MissingKernelError,
        UnsupportedError,
        ValueError,
    ) as error:
        print(f"cupyflash: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupyflash", description=cupyflash.__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    info = command("info", run_info, "Versions, devices, where each library was found.")
    info.add_argument("--json", action="store_true", help="print as JSON")

    command("check", run_check, "Runs the kernels that this machine can run and compares.")

    explain = command("explain", run_explain, "Which kernel would serve a problem, and why.")
    _add_problem(explain)

    warmup = command("warmup", run_warmup, "Compiles kernels into the cache ahead of their use.")
    warmup.add_argument("--target", choices=sorted(EXAMPLES), help="default: the first GPU")
    warmup.add_argument("--head-dim", type=_size, nargs="+", default=[64, 128], metavar="N")
    warmup.add_argument("--dtype", choices=sorted(DTYPES), nargs="+", default=sorted(DTYPES))
    warmup.add_argument("--mask", choices=MASKS, nargs="+", default=["none", "causal"])

    store = command("cache", run_cache, "Looks into the cache of compiled kernels.")
    store.add_argument("action", choices=["list", "verify", "clear"])

    bench.add_run_options(
        command("bench", bench.run_bench, "Times attention against other libraries.")
    )
    bench.add_report_options(
        command("bench-report", bench.run_report, "A table and plots of what bench measured.")
    )
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=_size, default=1)
    parser.add_argument("--seqlen", type=_length, default=4096, help="queries")
    parser.add_argument("--seqlen-kv", type=_length, help="keys; default: as many as queries")
    parser.add_argument("--heads", type=_size, default=16, help="query heads")
    parser.add_argument("--heads-kv", type=_size, help="default: as many as query heads")
    parser.add_argument("--head-dim", type=_size, default=128)
    parser.add_argument("--head-dim-v", type=_size, help="default: as head-dim")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--align", choices=ALIGNS, default=ALIGNS[0], help="of causal and window")
    parser.add_argument(
        "--window",
        type=_bound,
        nargs=2,
        metavar=("LEFT", "RIGHT"),
        help="keys visible before and after a query's position; none for no bound",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    parser.add_argument("--target", choices=sorted(EXAMPLES), help="default: the first GPU")


def _size(text: str) -> int:
    return _at_least(1, text)


def _length(text: str) -> int:
    return _at_least(0, text)


def _bound(text: str) -> int | None:
    return None if text.lower() == "none" else _at_least(0, text, " or none")


def _at_least(least: int, text: str, alternative: str = "") -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= least:
            return int(text)
    raise argparse.ArgumentTypeError(f"expected an int from {least} on{alternative}, got {text!r}")


# --- info -----------------------------------------------------------------------------------------


def run_info(options: argparse.Namespace) -> int:
    """Prints what cupyflash finds on this machine."""
    facts = collect_info()
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        values = value if isinstance(value, list) else [value]
        for position, line in enumerate(values or ["none"]):
            print(f"{name if position == 0 else '':<{width}}  {line}")
    return 0


def collect_info() -> dict[str, Any]:
    """Facts by name; each a string or a list of strings."""
    store = cache.default_cache()
    entries = list(store.entries())
    size = sum(entry.path.stat().st_size for entry in entries)
    return {
        "cupyflash": f"{cupyflash.__version__} in {Path(cupyflash.__file__).parent}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "libraries": [f"{name} {_version_of(name) or 'not installed'}" for name in LIBRARIES],
        "driver": _driver_facts(),
        "launcher": str(source.find_packaged("libcupyflash.so") or "built at the first call"),
        "nvrtc": _nvrtc_facts(),
        "compiler": shutil.which("g++") or "no g++: the emulator cannot run",
        "kernels": str(source.include_root()),
        "packaged": _packaged_facts(store),
        "cache": f"{store.directory}: {len(entries)} kernels, {size / 1e6:.1f} MB",
    }


def _version_of(library: str) -> str | None:
    names = _CUPY_DISTRIBUTIONS if library == "cupy" else (library,)
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _driver_facts() -> list[str]:
    from cupyflash import driver

    try:
        found = driver.default_driver()
        major, minor = found.version()
        infos = [found.device_info(index) for index in range(found.device_count())]
    except DriverError as error:
        return [str(error)]
    devices = [f"GPU {index}: {select.describe_device(info)}" for index, info in enumerate(infos)]
    return [f"CUDA {major}.{minor}", *devices]


def _nvrtc_facts() -> str:
    try:
        return f"{nvrtc.version()} in {nvrtc.library_path()}"
    except nvrtc.NvrtcNotFoundError as error:
        return str(error)


def _packaged_facts(store: cache.CubinCache) -> list[str]:
    if store.packaged is None:
        return ["no cubins in the package"]
    targets: dict[str, int] = {}
    for name in store.packaged_files():
        target = name.split("/")[0]
        targets[target] = targets.get(target, 0) + 1
    counts = [f"{target}: {count} kernels" for target, count in sorted(targets.items())]
    return [f"{store.packaged}", *counts]


# --- check ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table of ``check``.

    Attributes:
        target: what ran: "cpu", "sm_90a (GPU 0)", "sm_80 (emulated)".
        kernel: its kernel, or why it did not run.
        comparison: how far the result is off; None when it did not run.
        seconds: wall time, compilation included.
        fault: an exception that ended it, in words.
    """

    target: str
    kernel: str
    comparison: reference.Comparison | None = None
    seconds: float = 0.0
    fault: str = ""

    @property
    def verdict(self) -> str:
        if self.fault:
            return "FAILED"
        if self.comparison is None:
            return "skipped"
        return "ok" if self.comparison.ok else "FAILED"


def run_check(options: argparse.Namespace) -> int:
    """Attention on what this machine has, each result against the float64 definition."""
    rows = []
    with _Progress() as progress:
        for label, check in _checks():
            progress.show(label)
            rows.append(_run_row(label, check))
    _print_rows(rows)
    sys.stdout.flush()
    for row in rows:
        problem = row.fault or (row.comparison.problem if row.comparison else "")
        if problem:
            print(f"\n{row.target}: {problem}", file=sys.stderr)
    count = collections.Counter(row.verdict for row in rows)
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    print(f"\n{count['ok']} passed, {count['FAILED']} failed{skipped}")
    return 1 if count["FAILED"] else 0


class _SkippedError(Exception):
    """A row cannot run on this machine, and why."""


def _checks() -> Iterator[tuple[str, Callable[[], tuple[str, reference.Comparison]]]]:
    yield "cpu (NumPy)", _check_cpu
    devices = _gpu_infos()
    for index, info in enumerate(devices):
        for family in _families_of(info):
            target = select.target_for(family, info.capability)
            yield f"{target} (GPU {index})", functools.partial(_check_gpu, index, info, family)
    if not devices:
        for target in EMULATED_TARGETS:
            yield f"{target} (emulated)", functools.partial(_check_emulated, target)


def _run_row(label: str, check: Callable[[], tuple[str, reference.Comparison]]) -> Row:
    start = time.perf_counter()
    try:
        kernel, comparison = check()
    except _SkippedError as reason:
        return Row(label, f"skipped: {reason}")
    except Exception as error:  # a table of what works must show what does not
        return Row(label, type(error).__name__, None, time.perf_counter() - start, str(error))
    return Row(label, kernel, comparison, time.perf_counter() - start)


def _inputs(seqlen_q: int, seqlen_kv: int, dtype: Any) -> tuple[Any, Any, Any]:
    """q [1, seqlen_q, 2, 64], k and v [1, seqlen_kv, 1, 64]; normal, seeded."""
    random = numpy.random.default_rng(1)
    shapes = ((1, seqlen_q, 2, 64), (1, seqlen_kv, 1, 64), (1, seqlen_kv, 1, 64))
    q, k, v = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def _compare(out: Any, lse: Any, q: Any, k: Any, v: Any) -> reference.Comparison:
    shift = k.shape[1] - q.shape[1]
    return reference.compare(out, lse, q, k, v, right=0, shift=shift)


def _check_cpu() -> tuple[str, reference.Comparison]:
    q, k, v = _inputs(200, 330, numpy.float32)
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    return "causal forward, float32, on BLAS", _compare(out, lse, q, k, v)


def _check_emulated(target: str) -> tuple[str, reference.Comparison]:
    if shutil.which("g++") is None:
        raise _SkippedError("the emulator needs g++")
    from ml_dtypes import bfloat16

    from cupyflash import emulate

    # Ragged in both lengths; five key blocks wrap every ring, several tiles a block.
    q, k, v = _inputs(330, 600, bfloat16)
    device = emulate.device(target, num_sms=2)
    out, lse = cupyflash.attention(
        *(device.array(x) for x in (q, k, v)), causal=True, return_lse=True
    )
    spec = select.select(_problem_of(q, k), device.info).spec
    return spec.name, _compare(out.numpy(), lse.numpy(), q, k, v)


def _check_gpu(index: int, info: DeviceInfo, family: str) -> tuple[str, reference.Comparison]:
    from ml_dtypes import bfloat16

    q, k, v = _inputs(330, 600, bfloat16)
    upload, download = _gpu_arrays(index)
    with _forced(family):
        spec = select.select(_problem_of(q, k), info).spec
        try:
            entry = cache.default_cache().get(spec)
        except MissingKernelError as error:
            raise _SkippedError(str(error)) from error
        out, lse = cupyflash.attention(
            *(upload(x) for x in (q, k, v)), causal=True, return_lse=True
        )
    return f"{spec.name} ({entry.origin})", _compare(download(out), download(lse), q, k, v)


def _problem_of(q: Any, k: Any) -> Problem:
    return Problem(
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_kv=k.shape[1],
        heads_q=q.shape[2],
        heads_kv=k.shape[2],
        head_dim_qk=q.shape[3],
        head_dim_v=k.shape[3],
        dtype=DType.bfloat16,
        mask=Mask(right=0),
        want_lse=True,
    )


def _gpu_infos() -> list[DeviceInfo]:
    from cupyflash import driver

    try:
        found = driver.default_driver()
        return [found.device_info(index) for index in range(found.device_count())]
    except DriverError:
        return []


def _families_of(info: DeviceInfo) -> list[str]:
    return [name for name in FAMILIES if select.target_for(name, info.capability) is not None]


@contextlib.contextmanager
def _forced(family: str) -> Iterator[None]:
    """Lets ``family`` serve, as CUPYFLASH_FAMILY does."""
    before = os.environ.get("CUPYFLASH_FAMILY")
    os.environ["CUPYFLASH_FAMILY"] = family
    cupyflash.forget_configurations()
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUPYFLASH_FAMILY"]
        else:
            os.environ["CUPYFLASH_FAMILY"] = before
        cupyflash.forget_configurations()


def _gpu_arrays(index: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How to bring NumPy arrays to a GPU and back with whatever array library is installed."""
    with contextlib.suppress(ImportError):
        cupy = importlib.import_module("cupy")

        def to_cupy(x: Any) -> Any:
            with cupy.cuda.Device(index):
                return cupy.asarray(x)

        return to_cupy, lambda x: x.get()
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")

        def to_torch(x: Any) -> Any:
            raw = torch.from_numpy(x.view(numpy.uint16))
            return raw.view(torch.bfloat16).to(f"cuda:{index}")

        return to_torch, lambda x: x.float().cpu().numpy()
    raise _SkippedError("needs CuPy or PyTorch; pip install cupyflash[cu13] (or [cu12])")


def _print_rows(rows: Sequence[Row]) -> None:
    header = ("target", "kernel", "error", "bound", "seconds", "")
    table = [header]
    for row in rows:
        error = bound = ""
        if row.comparison is not None:
            error, bound = f"{row.comparison.error:.1e}", f"{row.comparison.bound:.1e}"
        seconds = f"{row.seconds:.1f}" if row.seconds else ""
        table.append((row.target, row.kernel, error, bound, seconds, row.verdict))
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths))
        print("  ".join(cells).rstrip())


# --- explain, warmup ------------------------------------------------------------------------------


def run_explain(options: argparse.Namespace) -> int:
    """Prints the choice for a problem given by its sizes."""
    seqlen_kv = options.seqlen if options.seqlen_kv is None else options.seqlen_kv
    heads_kv = options.heads if options.heads_kv is None else options.heads_kv
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    shapes = (
        (options.batch, options.seqlen, options.heads, options.head_dim),
        (options.batch, seqlen_kv, heads_kv, options.head_dim),
        (options.batch, seqlen_kv, heads_kv, head_dim_v),
    )
    q, k, v = (_imagined(shape, DTYPES[options.dtype], options.layout) for shape in shapes)
    mask = Mask.resolve(options.causal, options.window, options.align)
    problem = make_problem(q, k, v, mask=mask, layout=options.layout)
    info = _device_for(options.target)
    locate = cache.default_cache().locate
    print(select.explain(problem, info, locate, schedule.describe_work))
    return 0


def _imagined(shape: tuple[int, int, int, int], dtype: DType, layout: str) -> TensorView:
    """A contiguous array on a GPU, of this shape [batch, seqlen, heads, head_dim] in ``layout``."""
    batch, seqlen, heads, head_dim = shape
    stored = (batch, heads, seqlen, head_dim) if layout == "bhsd" else shape
    strides = contiguous_strides(stored)
    return to_bshd(TensorView(0, stored, strides, dtype, Device(DeviceKind.cuda)), layout)


def run_warmup(options: argparse.Namespace) -> int:
    """Brings the kernels of some configurations into the cache, showing each."""
    info = _device_for(options.target)
    specs = list(_warmup_specs(options, info))
    store = cache.default_cache()
    for position, spec in enumerate(specs, 1):
        start = time.perf_counter()
        entry = store.get(spec)
        seconds = time.perf_counter() - start
        print(
            f"[{position}/{len(specs)}] {spec.name} for {spec.target}: {entry.origin}, "
            f"{seconds:.2f} s",
            flush=True,
        )
    return 0


def _warmup_specs(options: argparse.Namespace, info: DeviceInfo) -> Iterator[KernelSpec]:
    masks = {"none": Mask(), "causal": Mask(right=0), "window": Mask(left=128, right=0)}
    seen = set()
    for head_dim in options.head_dim:
        for dtype in options.dtype:
            for mask in options.mask:
                sizes = (1, 4096, 4096, 1, 1, head_dim, head_dim)
                problem = Problem(*sizes, DTYPES[dtype], mask=masks[mask])
                spec = select.select(problem, info).spec
                if spec not in seen:
                    seen.add(spec)
                    yield spec


def _device_for(target: str | None) -> DeviceInfo:
    if target is not None:
        return EXAMPLES[target]
    infos = _gpu_infos()
    if not infos:
        names = ", ".join(EXAMPLES)
        raise ValueError(f"there is no GPU here; name what to answer for with --target ({names})")
    return infos[0]


# --- cache ----------------------------------------------------------------------------------------


def run_cache(options: argparse.Namespace) -> int:
    """Lists, verifies or empties the disk cache."""
    store = cache.default_cache()
    print(f"{store.directory}")
    actions = {"list": _list_cache, "verify": _verify_cache, "clear": _clear_cache}
    return actions[options.action](store)


def _list_cache(store: cache.CubinCache) -> int:
    count = 0
    for entry in store.entries():
        count += 1
        size = entry.path.stat().st_size / 1e3
        print(
            f"  {entry.target:<8} {entry.spec}  key {entry.key}  NVRTC {entry.nvrtc_version}  "
            f"{size:.0f} kB"
        )
    packaged = len(store.packaged_files())
    emulated = len(_emulated_files(store))
    print(f"{count} kernels; {packaged} more in the package; {emulated} files of the emulator")
    return 0


def _verify_cache(store: cache.CubinCache) -> int:
    corrupt = [entry.path for entry in store.entries() if entry.read() is None]
    packaged = store.packaged_files()
    for name, digest in packaged.items():
        assert store.packaged is not None  # for the type checker: it has files
        path = store.packaged / name
        if not path.is_file() or cache.digest_of(path.read_bytes()) != digest:
            corrupt.append(path)
    for path in corrupt:
        print(f"  corrupt: {path}")
    total = len(list(store.entries())) + len(packaged)
    print(f"{total - len(corrupt)} of {total} kernels are what they should be")
    return 1 if corrupt else 0


def _clear_cache(store: cache.CubinCache) -> int:
    count = 0
    for entry in list(store.entries()):
        entry.path.unlink(missing_ok=True)
        count += 1
    if store.directory is not None:
        cache.remove_leftovers(store.directory, older_than_seconds=0.0)
    emulated = _emulated_files(store)
    for path in emulated:
        path.unlink(missing_ok=True)
    print(f"{count} kernels removed, {len(emulated)} files of the emulator")
    return 0


def _emulated_files(store: cache.CubinCache) -> list[Path]:
    """What the emulator built with g++ and keeps beside the cubins."""
    if store.directory is None:
        return []
    return [path for path in (store.directory / "emulate").glob("*") if path.is_file()]


# --- progress -------------------------------------------------------------------------------------


class _Progress:
    """One line on standard error that says what is being done; silent where nobody looks."""

    def __enter__(self) -> _Progress:
        self._live = sys.stderr.isatty()
        return self

    def show(self, text: str) -> None:
        if self._live:
            print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
