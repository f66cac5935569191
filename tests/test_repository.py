"""The rules of CONTRIBUTING.md that a machine can check: layers, where asm may stand, agreement of
what is written twice."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyflash import params, tuning
from cupyflash.problem import UNBOUNDED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupyflash"
KERNELS = ROOT / "kernels_cu"

PYTHON_LAYERS = {
    "errors": 0,
    "tensor": 0,
    "problem": 0,
    "reference": 0,
    "fp8": 0,
    "reference_fp8": 0,
    "fp8_gradients": 0,
    "tuning": 1,
    "params": 1,
    "select": 1,
    "schedule": 1,
    "source": 1,
    "host": 1,
    "host_fp8": 1,
    "nvrtc": 2,
    "cache": 2,
    "gxx": 2,
    "driver": 3,
    "emulate": 3,
    "arrays": 4,
    "launch": 4,
    "arguments": 5,
    "operands": 5,
    "serve": 5,
    "backward": 5,
    "backward_fp8": 5,
    "gradients": 5,
    "merging": 5,
    "quantizing": 5,
    "api": 5,
    "__init__": 5,
    "adapters": 6,
    "timing": 6,
    "bench": 6,
    "__main__": 7,
}
"""A module imports from its own layer or a lower one, and never in a circle."""

CUDA_LAYERS = {
    "types.cuh": 0,
    "ptx": 1,
    "params.cuh": 1,
    "backward_params.cuh": 1,
    "backward_fp8_params.cuh": 1,
    "config.cuh": 1,
    "tile": 2,
    "attn": 3,
}
ARCHITECTURES = ("sm80", "sm90", "sm100", "any")  # layer 4, none includes another

FORBIDDEN_IN_KERNELS = (
    "__shared__",
    "threadIdx",
    "blockIdx",
    "blockDim",
    "gridDim",
    "__syncthreads",
    "__syncwarp",
    r"__shfl\w*",
    r"atomic[A-Z]\w*",
    "printf",
    "assert",
    "asm",
    "__device__",
    "__global__",
    "long",
    "double",
    "1e30f?",
)
ASM_ALLOWED = ("ptx/", "emulate/fiber.hpp", "emulate/runtime.cpp")


def python_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "kernels_cu" not in path.parts)


def kernel_files() -> list[Path]:
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cuh", ".hpp", ".cpp"))


def relative(path: Path) -> str:
    return path.relative_to(KERNELS).as_posix()


def device_files() -> list[Path]:
    """What both compilers read: everything but ptx/ and the emulator."""
    return [
        path
        for path in kernel_files()
        if path.suffix == ".cuh" and not relative(path).startswith("ptx/")
    ]


@functools.cache
def code_of(path: Path) -> str:
    """Source without comments; strings stay, line numbers too."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    """What is, or would be, in the repository."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git: {error}")
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


# --- Python ---------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_for_types_only(child):
            yield from running_nodes(child)


def imports_of(path: Path) -> set[str]:
    """Modules of cupyflash that a file imports when it runs, anywhere in it."""
    found = set()
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module == "cupyflash":
                names = [f"cupyflash.{alias.name}" for alias in node.names]
            else:
                names = [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("cupyflash.")}
    return {
        name for name in found if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()
    }


def test_every_module_has_a_layer():
    assert {module_of(path) for path in python_files()} <= PYTHON_LAYERS.keys()


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_python_imports_go_down(path):
    if path.name == "__init__.py":
        return  # public names, imported lazily
    layer = PYTHON_LAYERS[module_of(path)]
    too_high = {name for name in imports_of(path) if PYTHON_LAYERS[name] > layer}
    assert not too_high, f"{path.name} (layer {layer}) imports {sorted(too_high)}"


def test_python_imports_have_no_circle():
    graph = {
        module_of(path): imports_of(path) - {module_of(path)}
        for path in python_files()
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for name in sorted(graph.get(module, ())):
                visit(name, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("reference", set()),
        ("fp8", {"errors"}),
        ("reference_fp8", {"reference", "fp8"}),
        ("fp8_gradients", {"fp8"}),
    ],
)
def test_the_definitions_stand_alone(name, others):
    tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    imported -= {"cupyflash"} if imports_of(PACKAGE / f"{name}.py") <= others else set()
    allowed = {"__future__", "numpy", "math", "dataclasses", "collections", "functools", "typing"}
    assert imported <= allowed


# --- CUDA -----------------------------------------------------------------------------------------


def cuda_layer(name: str) -> int:
    folder = name.split("/")[0]
    if folder in ARCHITECTURES:
        return 4
    return CUDA_LAYERS[folder]


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*(["<][^">]+[">])', code_of(path), re.MULTILINE)


@pytest.mark.parametrize(
    "path", [path for path in kernel_files() if path.suffix == ".cuh"], ids=relative
)
def test_cuda_includes_go_down(path):
    name = relative(path)
    for include in includes_of(path):
        assert include.startswith('"'), f"{name} includes {include}: NVRTC has no such header"
        target = include.strip('"')
        if target.startswith("emulate/"):
            assert name == "ptx/ptx.cuh", f"{name} includes {target}"
            continue
        assert (KERNELS / target).is_file(), f"{name} includes {target}, which is not there"
        assert cuda_layer(target) <= cuda_layer(name), f"{name} includes {target}"
        if target.startswith("ptx/") and not name.startswith("ptx/"):
            assert target == "ptx/ptx.cuh", f"{name} includes {target}: include ptx/ptx.cuh"
        if cuda_layer(target) == 4:
            assert target.split("/")[0] == name.split("/")[0], f"{name} includes {target}"


@pytest.mark.parametrize("path", kernel_files(), ids=relative)
def test_asm_stands_in_ptx_only(path):
    if not relative(path).startswith(ASM_ALLOWED):
        assert not re.search(r"\b(asm|__asm__|__asm)\b", code_of(path))


@pytest.mark.parametrize("path", device_files(), ids=relative)
def test_kernels_use_wrappers_only(path):
    pattern = re.compile(r"(?<![\w.])(" + "|".join(FORBIDDEN_IN_KERNELS) + r")(?!\w)")
    for number, line in enumerate(code_of(path).splitlines(), 1):
        if relative(path) == "types.cuh" and re.match(r"using u?int64_t = .*long long;", line):
            continue
        match = pattern.search(line)
        assert match is None, f"{relative(path)}:{number}: {match[0]} (see ptx/ptx.cuh)"


@pytest.mark.parametrize("path", device_files(), ids=relative)
def test_no_preprocessor_branches_in_kernels(path):
    branches = re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif|else)\b.*", code_of(path), re.MULTILINE)
    assert not branches


@pytest.mark.parametrize("path", kernel_files(), ids=relative)
def test_kernel_files_are_formed_alike(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("//"), "a file opens with what it is for"
    if path.suffix != ".cpp":
        assert "#pragma once" in text
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 100, f"{relative(path)}:{number}: {len(line)} columns"
        assert "\t" not in line and line == line.rstrip(), f"{relative(path)}:{number}"


# --- what is written twice ------------------------------------------------------------------------

_KINDS = {
    "CUtensorMap": "tensor_map",
    "const void*": "pointer",
    "void*": "pointer",
    "float*": "pointer",
    "const float*": "pointer",
    "const int32_t*": "pointer",
    "int32_t*": "pointer",
    "int64_t": "int64",
    "int32_t": "int32",
    "float": "float",
}


def test_params_agree_with_the_struct():
    """NVRTC asserts offsets; this also compares names and kinds, and needs no NVRTC."""
    text = code_of(KERNELS / "params.cuh")
    body = re.search(r"struct ForwardParams \{(.*?)\n\};", text, re.DOTALL)
    assert body is not None
    members = []
    for declaration in body[1].split(";"):
        words = " ".join(declaration.split())
        if not words:
            continue
        kind = next(kind for kind in _KINDS if re.match(re.escape(kind) + r"(?![\w*])", words))
        names = words[len(kind) :].split(",")
        members += [(name.strip(), _KINDS[kind]) for name in names]
    assert members == [(field.name, field.kind) for field in params.FORWARD.fields]
    assert re.search(r"kUnbounded = 1 << 30;", text) and UNBOUNDED == 1 << 30


def test_families_have_kernels():
    for name in tuning.FAMILIES:
        assert (KERNELS / name / "forward.cuh").is_file()


def test_environment_variables_are_in_the_readme():
    used = set()
    sources = [*python_files(), *(ROOT / "aot").glob("*.py"), ROOT / "CMakeLists.txt"]
    for path in [*sources, ROOT / "pyproject.toml"]:
        used |= set(re.findall(r"\bCUPYFLASH_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| `CUPYFLASH_")]
    documented = set(re.findall(r"\bCUPYFLASH_[A-Z_]+\b", "\n".join(rows)))
    assert used == documented


def test_version_is_written_once_or_alike():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "([^"]+)"', project, re.MULTILINE)
    assert version is not None
    public = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    written = re.search(r'__version__(?:: str)? = "([^"]+)"', public)
    if written is not None:
        assert written[1] == version[1]
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- the tree -------------------------------------------------------------------------------------


def test_no_generated_or_binary_files():
    unwanted = (".cubin", ".ptx", ".so", ".o", ".whl", ".ncu-rep", ".nsys-rep", ".pyc")
    assert not [path for path in tracked_files() if path.name.endswith(unwanted)]


def test_no_machine_paths():
    """Nothing refers to the machine that it was written on."""
    places = "|".join(["work", "root", "home/[a-z]+"])
    pattern = re.compile(rf"(?<![\w./-])/(?:{places})/")
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
