"""Exact attention for arrays on GPUs and CPUs, by hand-written CUDA kernels.

Importing the package is cheap: it opens no CUDA library, creates no context, reads no environment
variable and touches no file. The public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyflash.api import (
        Grads,
        RawKernel,
        attention,
        attention_backward,
        explain,
        merge,
        quantize,
        raw_kernel,
    )
    from cupyflash.errors import (
        CompileError,
        DriverError,
        EmulationError,
        MissingKernelError,
        UnsupportedError,
    )
    from cupyflash.fp8 import Quantized
    from cupyflash.serve import forget_configurations

__version__ = "0.1.0"

_HOME = {
    "Grads": "api",
    "Quantized": "fp8",
    "RawKernel": "api",
    "attention": "api",
    "attention_backward": "api",
    "explain": "api",
    "forget_configurations": "serve",
    "merge": "api",
    "quantize": "api",
    "raw_kernel": "api",
    "CompileError": "errors",
    "DriverError": "errors",
    "EmulationError": "errors",
    "MissingKernelError": "errors",
    "UnsupportedError": "errors",
}

__all__ = [
    "CompileError",
    "DriverError",
    "EmulationError",
    "Grads",
    "MissingKernelError",
    "Quantized",
    "RawKernel",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "explain",
    "forget_configurations",
    "merge",
    "quantize",
    "raw_kernel",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
