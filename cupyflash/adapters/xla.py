"""Attention in programs that XLA compiles for GPUs.

When a program is lowered, shapes and types of a call are known: the kernels are chosen, loaded and
their launches settled, for every GPU of this process. What remains, addresses and a stream, is
filled in by ``cf_xla_run`` of ``native/launch.c`` when the program runs, without Python.

Note [Recipes]: a program holds no address of this process, only the key of a recipe, a digest of
all that it says. So the same call has the same key in every process, and a program that JAX finds
in its cache on disk runs with the recipe that lowering it has made here. A program that was not
lowered here (``jax.export``) finds none, which is an error.

Note [Scratch]: workspace and tile counter are one more result of the call, so XLA allocates them
and knows how long they live. The counter is a word that the handler clears on the stream: a counter
for each stream, as eager calls have, would be one for each capture of a command buffer.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy

from cupyflash import driver as drivers
from cupyflash.arguments import Options, resolve
from cupyflash.arrays import Outline, OutlinedArray
from cupyflash.backward import workspace_of
from cupyflash.driver import Binding, Place, PreparedPlan, PreparedRecipe
from cupyflash.errors import UnsupportedError
from cupyflash.gradients import allocate_grads, grad_problem, resolve_backward, settle_launches
from cupyflash.launch import CudaBackend, Launch, forward_launch, prepare
from cupyflash.problem import DeviceInfo
from cupyflash.select import select
from cupyflash.serve import allocate

TARGETS = ("cupyflash_attention", "cupyflash_attention_backward")
"""Names of the handler in programs; it is one, the recipe says what it does."""

_WORD_BYTES = 16  # of the scratch, for a tile counter


@dataclass(frozen=True)
class Settled:
    """What one GPU does at a call site.

    Attributes:
        launches: with addresses of an ``Outline``: operands, results, then the scratch.
        scratch_bytes: of the workspace and behind it the tile counter.
        counter_place: of that counter in the scratch, or None.
    """

    launches: tuple[Launch, ...]
    scratch_bytes: int
    counter_place: int | None


Settle = Callable[[Outline, DeviceInfo, Sequence[OutlinedArray], dict[str, Any]], "Settled | None"]
"""(outline, device, operands, options with lengths) -> what to do; None where nothing is."""


def gpus() -> list[CudaBackend]:
    """The GPUs that a program of this process may run on.

    Raises:
        UnsupportedError: JAX has none.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise UnsupportedError(
            "attention in a program for cuda: kernels are chosen for the GPUs of this process, and "
            f"JAX has none here ({error})"
        ) from error
    return [CudaBackend(device.local_hardware_id) for device in devices]


def settle_forward(
    outline: Outline,
    device: DeviceInfo,
    operands: Sequence[OutlinedArray],
    options: dict[str, Any],
) -> Settled | None:
    """Operands q, k, v and lengths; results out, lse."""
    q, k, v = operands[:3]
    call = resolve(q, k, v, Options(**options, return_lse=True))
    allocate(call)
    if call.problem.is_empty:
        return None
    spec = select(call.problem, device).spec
    launch = forward_launch(call.problem, spec, device, call.views, clear_out=True)
    return _with_counter((launch,), 0)


def settle_backward(
    outline: Outline,
    device: DeviceInfo,
    operands: Sequence[OutlinedArray],
    options: dict[str, Any],
) -> Settled | None:
    """Operands dout, dlse, q, k, v, out, lse and lengths; results dq, dk, dv."""
    dout, dlse, q, k, v, out, lse = operands[:7]
    given = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    grad_call = resolve_backward(given, (q, k, v), Options(**options), False, False)
    _, views = allocate_grads(grad_call)
    if views["q"].size == 0 and views["k"].size == 0:
        return None
    problem = grad_problem(grad_call)
    spec = select(problem, device, "backward").spec
    places, nbytes = workspace_of(problem, spec, views["dout"], False).places()
    base = outline.array((nbytes,), numpy.dtype(numpy.uint8)).pointer
    workspace = {name: base + place for name, place in places.items()}
    launches = settle_launches(grad_call, problem, spec, device, views, workspace)
    return _with_counter(launches, nbytes)


def _with_counter(launches: tuple[Launch, ...], nbytes: int) -> Settled:
    if not any(launch.dynamic for launch in launches):
        return Settled(launches, nbytes, None)
    return Settled(launches, nbytes + _WORD_BYTES, nbytes)


def call(
    target: str,
    settle: Settle,
    operands: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    options_of: Callable[[Sequence[Any]], dict[str, Any]],
    num_arrays: int,
) -> list[Any]:
    """Traces a call of the handler, inside of a lowering for CUDA.

    Args:
        target: one of ``TARGETS``.
        settle: what is computed.
        operands: traced arrays.
        results: what comes out.
        options_of: keyword arguments of ``attention``, from the operands that are lengths.
        num_arrays: of the operands, all before the lengths.

    Raises:
        UnsupportedError: lengths that CUPYFLASH_CHECK asks to have read before a launch.
    """
    if len(operands) > num_arrays and os.environ.get("CUPYFLASH_CHECK") == "1":
        raise UnsupportedError(
            "CUPYFLASH_CHECK=1: lengths in a program for a GPU cannot be read before each launch; "
            "unset it, or call attention outside of jax.jit"
        )
    outlines = []
    for backend in gpus():
        outline = Outline(backend.device_index)
        stand_ins = [outline.array(x.shape, x.dtype) for x in operands]
        options = options_of(stand_ins[num_arrays:])
        settled = settle(outline, backend.info, stand_ins, options)
        if settled is None:
            return [jax.numpy.zeros(x.shape, x.dtype) for x in results]
        shapes = [tuple(x.shape) for x in (*operands, *results)]
        assert [x.shape for x in outline.arrays][: len(shapes)] == shapes  # what an address means
        outlines.append((backend, outline, settled))
    scratch_bytes = max(settled.scratch_bytes for _, _, settled in outlines)
    elements = [[math.prod(x.shape) for x in side] for side in (operands, results)]
    if scratch_bytes:
        results = [*results, jax.ShapeDtypeStruct((scratch_bytes,), numpy.uint8)]
        elements[1].append(scratch_bytes)
    key = _register(outlines, *elements)
    _register_targets()
    found = jax.ffi.ffi_call(target, results)(*operands, recipe=numpy.int64(key))
    return found[:-1] if scratch_bytes else found


def _register(
    outlines: Sequence[tuple[CudaBackend, Outline, Settled]],
    operands: Sequence[int],
    results: Sequence[int],
) -> int:
    """Makes libcupyflash know what to do; the key to ask for it."""
    said = {repr((backend.info, settled)) for backend, _, settled in outlines}
    text = "\n".join([*sorted(said), repr((operands, results))])
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    scratch = len(operands) + len(results) - 1

    def make() -> PreparedRecipe:
        bindings = [_bind(*each, scratch) for each in outlines]
        return PreparedRecipe(key, bindings, operands, results)

    drivers.default_driver().register(key, make)
    return key


def _bind(backend: CudaBackend, outline: Outline, settled: Settled, scratch: int) -> Binding:
    launches = settled.launches
    kernels = backend.load(*launches)
    plan = PreparedPlan([prepare(kernel, made) for kernel, made in zip(kernels, launches)])
    places: list[Place] = [outline.buffer_at(address) for address in launches[0].pointers]
    cleared_idx = None
    if settled.counter_place is not None:
        cleared_idx = len(places)
        places.append((scratch, settled.counter_place))
    return Binding(plan, tuple(places), cleared_idx)


@functools.lru_cache(maxsize=1)
def _register_targets() -> None:
    handler = jax.ffi.pycapsule(drivers.default_driver().xla_handler)
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
