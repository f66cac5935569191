"""The translation unit of a kernel: a few generated lines around one header of ``kernels_cu``.

A unit names the header of its family, asserts what Python believes about the launch struct and
the shared memory, and instantiates the kernel for one ``Config``. The same text goes to NVRTC, at
run time or when a wheel is built, and to g++ for the emulator. Its digest covers everything that
the compiled kernel depends on, except the version of the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cupyflash.params import BACKWARD, BACKWARD_FP8, FORWARD, MERGE, QUANTIZE
from cupyflash.select import TILED_KERNELS, KernelSpec
from cupyflash.tensor import DType
from cupyflash.tuning import FAMILIES

HOST_ONLY = "emulate/"
"""Headers below this folder are read by g++ only and do not belong to a cubin's digest."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_ELEMENTS = {
    DType.bfloat16: "cf::bf16_t",
    DType.float16: "cf::f16_t",
    DType.float32: "float",
}
_MASKS = {"none": "cf::NoMask", "causal": "cf::CausalMask", "window": "cf::WindowMask"}
_SCHEDULERS = {"single": "cf::SingleTile", "persistent": "cf::PersistentStatic"}
_REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class TranslationUnit:
    """Source text of one kernel and what it takes to compile it.

    Attributes:
        name: the kernel's symbol, ``KernelSpec.name``.
        text: the generated lines.
        target: ``--gpu-architecture`` of NVRTC.
        options: compiler options, in order, target included.
        include_root: the ``kernels_cu`` folder.
        includes: headers that ``text`` includes, directly or not, relative to ``include_root``,
            sorted; those of the emulator left out.
        registers: what ptxas must report, or None where any number will do (see ``nvrtc.check``).
        digest: sha256 over all of the above and the contents of the headers, hexadecimal.
    """

    name: str
    text: str
    target: str
    options: tuple[str, ...]
    include_root: Path
    includes: tuple[str, ...]
    registers: int | None
    digest: str

    @property
    def key(self) -> str:
        """The first 16 characters of the digest: the key of a packaged cubin."""
        return self.digest[:16]


def translation_unit(spec: KernelSpec) -> TranslationUnit:
    """The unit that compiles to the kernel of ``spec``.

    A header that is not there is left to the compiler to complain about, in its own words.

    Raises:
        FileNotFoundError: there is no ``kernels_cu``.
    """
    root = include_root()
    text = _text(spec)
    options = _options(spec)
    includes = _transitive_includes(root, text)
    digest = hashlib.sha256()
    for part in (spec.name, text, *options):
        digest.update(part.encode() + b"\0")
    for name in includes:
        digest.update(name.encode() + b"\0" + _header(root, name).digest)
    return TranslationUnit(
        name=spec.name,
        text=text,
        target=spec.target,
        options=options,
        include_root=root,
        includes=includes,
        registers=_required_registers(spec),
        digest=digest.hexdigest(),
    )


def headers(unit: TranslationUnit) -> tuple[tuple[str, str], ...]:
    """(name as included, contents) of every header of ``unit``."""
    return tuple((name, _header(unit.include_root, name).text) for name in unit.includes)


def include_root() -> Path:
    """The ``kernels_cu`` folder: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parent
    for root in (package.parent / "kernels_cu", package / "kernels_cu"):
        if (root / "params.cuh").is_file():
            return root
    packaged = find_packaged("kernels_cu/params.cuh")
    if packaged is not None:
        return packaged.parent
    raise FileNotFoundError(
        f"kernels_cu is neither beside nor inside {package}; reinstall cupyflash"
    )


def find_packaged(relative: str) -> Path | None:
    """A file that the build put into the package (a library, cubins), or None.

    An editable install splits the package between the checkout and site-packages, so every part
    of its path is searched.
    """
    for folder in sys.modules["cupyflash"].__path__:
        path = Path(folder) / relative
        if path.exists():
            return path
    return None


_LAYOUTS = {
    "forward": "ForwardLayout",
    "forward_fp8": "ForwardLayout",
    "backward": "BackwardLayout",
    "backward_keys": "BackwardLayout",
    "backward_queries": "QueriesLayout",
    "backward_fp8": "BackwardLayout",
    "quantize": "QuantizeLayout",
}
"""The map of shared memory of a kernel, whose size ``tuning.py`` knows too."""

_PARAMS = {
    "forward": FORWARD,
    "forward_fp8": FORWARD,
    "merge": MERGE,
    "quantize": QUANTIZE,
    "backward_fp8": BACKWARD_FP8,
    "backward_delta_fp8": BACKWARD_FP8,
}
"""The launch struct of a kernel; the others of a backward pass share one."""


def _text(spec: KernelSpec) -> str:
    layout = _PARAMS.get(spec.kernel, BACKWARD)
    offsets = "\n".join(
        f"static_assert(CF_OFFSETOF({layout.cpp_name}, {field.name}) == {field.offset});"
        for field in layout.fields
    )
    members = "\n".join(f"  {member};" for member in _config_members(spec))
    agreement = ""
    if spec.kernel in _LAYOUTS:
        layout_name = f"cf::{spec.family}::{_LAYOUTS[spec.kernel]}"
        agreement = f"""
// cupyflash/tuning.py and the kernel agree on the shared memory of a block.
static_assert({layout_name}<Config>::kBytes == {spec.shared_bytes});
"""
    return f"""\
// {spec.name} for {spec.target}, generated by cupyflash/source.py
#include "{spec.family}/{spec.kernel}.cuh"

// cupyflash/params.py and kernels_cu/{layout.header} describe the same struct.
{offsets}
static_assert(sizeof({layout.cpp_name}) == {layout.size});

struct Config {{
{members}
}};
{agreement}
CF_KERNEL({spec.name}, {layout.cpp_name}, {spec.threads}, {spec.min_blocks}, {spec.cluster}) {{
  cf::{spec.family}::{spec.kernel}<Config>(params);
}}
"""


def _config_members(spec: KernelSpec) -> list[str]:
    dtype = spec.dtype
    if spec.kernel == "forward_fp8":  # that of the output
        dtype = DType.float16 if spec.option("Float16Out") else DType.bfloat16
    element = f"using Element = {_ELEMENTS[dtype]}"
    if spec.kernel == "backward_convert":
        numbers: tuple[tuple[str, int], ...] = (
            ("Threads", spec.threads),
            ("HeadDimQk", spec.head_dim_qk),
            ("BlockM", spec.block_m),
            *spec.options,
        )
        return [element, *(f"static constexpr int k{name} = {value}" for name, value in numbers)]
    if spec.kernel not in TILED_KERNELS:
        numbers = (("Threads", spec.threads), *spec.options)
        return [element, *(f"static constexpr int k{name} = {value}" for name, value in numbers)]
    numbers = (
        ("HeadDimQk", spec.head_dim_qk),
        ("HeadDimV", spec.head_dim_v),
        ("BlockM", spec.block_m),
        ("BlockN", spec.block_n),
        ("Stages", spec.stages),
        ("Threads", spec.threads),
        ("Cluster", spec.cluster),
        ("General", int(spec.general)),
        *spec.options,
    )
    return [
        element,
        f"using Mask = {_MASKS[spec.mask]}",
        f"using Scheduler = {_SCHEDULERS[spec.scheduler]}",
        *(f"static constexpr int k{name} = {value}" for name, value in numbers),
    ]


def _options(spec: KernelSpec) -> tuple[str, ...]:
    # ptxas takes one option per --ptxas-options; the log is parsed, so it must be verbose.
    options = [
        f"--gpu-architecture={spec.target}",
        "--std=c++20",
        "--ptxas-options=-v",
        "--ptxas-options=--warn-on-spills",
        "--ptxas-options=--warn-on-local-memory-usage",
    ]
    if os.environ.get("CUPYFLASH_LINEINFO") == "1":
        options.append("--generate-line-info")
    return tuple(options)


def _required_registers(spec: KernelSpec) -> int | None:
    family = FAMILIES.get(spec.family)
    if family is None or not family.sets_registers:
        return None
    return _REGISTERS_PER_SM // (spec.threads * spec.min_blocks) // 8 * 8


@dataclass(frozen=True)
class _Header:
    text: str
    digest: bytes
    includes: tuple[str, ...]


def _header(root: Path, name: str) -> _Header:
    path = root / name
    status = path.stat()
    return _read_header(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=256)
def _read_header(path: Path, mtime_ns: int, size: int) -> _Header:
    text = path.read_text(encoding="utf-8")
    return _Header(text, hashlib.sha256(text.encode()).digest(), _direct_includes(text))


def _direct_includes(text: str) -> tuple[str, ...]:
    return tuple(name for name in _INCLUDE.findall(text) if not name.startswith(HOST_ONLY))


def _transitive_includes(root: Path, text: str) -> tuple[str, ...]:
    """Headers reached from ``text``, whatever the preprocessor would skip; names are relative to
    ``root``, as every include in kernels_cu is written."""
    found: set[str] = set()
    pending = list(_direct_includes(text))
    while pending:
        name = pending.pop()
        if name not in found and (root / name).is_file():
            found.add(name)
            pending.extend(_header(root, name).includes)
    return tuple(sorted(found))
