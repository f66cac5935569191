"""What other libraries do with ``attention`` beyond calling it: derivatives and compiled graphs.

``api.attention`` comes here once it knows that a call is not a plain one: a PyTorch tensor requires
grad, or JAX is tracing. This module finds out which library it is; ``adapters.torch`` and
``adapters.jax`` are imported only then, so that nobody pays for a library that he does not use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cupyflash.arguments import Options
from cupyflash.arrays import Array
from cupyflash.errors import UnsupportedError

LENGTHS = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "seqused_q",
    "seqused_kv",
    "q_offset",
    "kv_offset",
)
"""Options of ``attention`` that may be arrays and have no gradient."""


def recorder(
    q: Array, k: Array, v: Array, options: Options
) -> Callable[[Array, Array, Array, Options], Any] | None:
    """What must serve a call in place of the usual way, so that no derivative is lost.

    Args:
        q, k, v, options: of ``attention``, unchecked.

    Returns:
        A function that takes the same and returns what ``attention`` returns, or None where nobody
        records anything.
    """
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", ())
    if torch is not None and any(isinstance(x, tensor_type) for x in (q, k, v)):
        records = torch.is_grad_enabled() and any(
            isinstance(x, tensor_type) and x.requires_grad for x in (q, k, v)
        )
        if records or torch.compiler.is_compiling():
            # Written so that torch.compile, which reads this too, follows it.
            from cupyflash.adapters.torch import attention as record_by_torch

            return record_by_torch
        return None
    tracer_type = getattr(sys.modules.get("jax.core"), "Tracer", ())
    given = (q, k, v, *(getattr(options, name) for name in LENGTHS))
    if any(isinstance(x, tracer_type) for x in given):
        from cupyflash.adapters.jax import attention as record_by_jax

        return record_by_jax
    return None


def refuse_fp8(options: Options, is_fp8: bool) -> None:
    """Raises for 8-bit floats and their scales, which nothing here hands on.

    A message fits its line: torch.compile shows the line in place of an exception that it cannot
    make.
    """
    for name in ("q_scale", "k_scale", "v_scale", "out_scale"):
        if getattr(options, name) is not None:
            raise UnsupportedError(f"{name}: scales belong to fp8 arrays, not recorded yet")
    if is_fp8:
        raise UnsupportedError("q, k, v: no gradients and no graphs of fp8 arrays yet")


def no_configuration(*_: Any) -> tuple[None, None, None]:
    """What torch.compile reads in place of ``serve.lookup``: in a graph there are no addresses."""
    return None, None, None
