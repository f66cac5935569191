"""Exceptions of cupyflash.

Bad shapes and values raise ``ValueError``, bad dtypes and devices raise ``TypeError``. The classes
below are for what is valid but cannot be served, and for faults of the tool chain.
"""

from __future__ import annotations

from collections.abc import Iterable


class UnsupportedError(NotImplementedError):
    """No kernel serves this combination of arguments.

    Attributes:
        rejections: pairs of (candidate, first condition that ruled it out), as ``explain`` lists
            them. Empty when the request was refused before any candidate was considered.
    """

    def __init__(self, message: str, rejections: Iterable[tuple[str, str]] = ()) -> None:
        self.rejections: tuple[tuple[str, str], ...] = tuple(rejections)
        lines = [message, *(f"  {name}: {reason}" for name, reason in self.rejections)]
        super().__init__("\n".join(lines))


class CompileError(RuntimeError):
    """NVRTC or ptxas refused a kernel, or a kernel spilled registers."""


class MissingKernelError(RuntimeError):
    """A compiled kernel is not at hand and compiling it is not allowed or not possible."""


class EmulationError(RuntimeError):
    """The CPU emulator found a fault in a kernel: a race, a deadlock, a wrong access."""


class DriverError(RuntimeError):
    """A CUDA driver call failed, or the driver is absent.

    Attributes:
        code: the ``CUresult``, or None when there is no driver to ask.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)
