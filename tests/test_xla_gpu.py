"""Programs with attention, run by XLA on a GPU.

Each test runs on the CPU as well, where it shows that the test itself is right.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cupyflash

jax = pytest.importorskip("jax")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to others

Function = Callable[..., Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def platform(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where everything in a test runs."""
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no {request.param}: {error}")
    with jax.default_device(device):
        yield request.param


DENSE = ((2, 200, 8, 64), (2, 230, 2, 64), (2, 230, 2, 64))
WIDE = ((1, 150, 2, 192), (1, 170, 1, 192), (1, 170, 1, 128))
PACKED = ((300, 4, 64), (330, 2, 64), (330, 2, 64))


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (DENSE, {}),
    "causal": (DENSE, {"causal": True}),
    "window": (DENSE, {"window": (64, 10), "align": "top_left", "softmax_scale": 0.2}),
    "softcap": (DENSE, {"softcap": 2.0, "causal": True}),
    "wide": (WIDE, {"causal": True}),
    "used": (DENSE, {"seqused_q": int32(200, 77), "seqused_kv": int32(100, 230), "causal": True}),
    "offsets": (DENSE, {"causal": True, "q_offset": int32(7, 40), "kv_offset": 3}),
    "packed": (
        PACKED,
        {
            "causal": True,
            "cu_seqlens_q": int32(0, 100, 100, 290),
            "cu_seqlens_kv": int32(0, 120, 140, 320),
        },
    ),
}


def inputs(shapes: Any, dtype: Any = jax.numpy.bfloat16, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [jax.numpy.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def loss_of(**options: Any) -> Function:
    """A function of q, k and v that weighs every element of out and of lse."""

    def loss(*arrays: Any) -> Any:
        out, lse = cupyflash.attention(*arrays, return_lse=True, **options)
        lse = jax.numpy.where(lse == -np.inf, 0, lse)  # rows that see nothing
        total = 0
        for x in (out, lse):
            weights = jax.numpy.linspace(-1, 2, x.size).reshape(x.shape)
            total += (x.astype(np.float32) * weights).mean()
        return total * 100

    return loss


def exactly(function: Function, arrays: list[Any]) -> Any:
    """The same on the CPU, outside of a program, from the same numbers in float32."""
    with jax.default_device(jax.devices("cpu")[0]):
        return function(*(jax.numpy.asarray(np.asarray(x, np.float32)) for x in arrays))


def close(found: Any, expected: Any) -> bool:
    """Within 2 % of the largest number, with infinities in the same places."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    for x, y in ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs):
        finite = np.isfinite(y)
        if not np.array_equal(np.isfinite(x), finite):
            return False
        distance = np.abs(x[finite] - y[finite]).max(initial=0)
        if distance > 0.02 * np.abs(y[finite]).max(initial=0.01):
            return False
    return True


def same_bits(first: Any, second: Any) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


@pytest.mark.parametrize("dtype", [jax.numpy.bfloat16, np.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_a_program(name: str, dtype: Any) -> None:
    shapes, options = CASES[name]
    arrays = inputs(shapes, dtype)

    def attend(*given: Any) -> Any:
        return cupyflash.attention(*given, return_lse=True, **options)

    program = jax.jit(attend)
    found = program(*arrays)
    assert found[0].dtype == dtype and close(found, exactly(attend, arrays))
    assert same_bits(found, program(*arrays))


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_a_program(name: str) -> None:
    shapes, options = CASES[name]
    arrays = inputs(shapes)
    gradients = jax.value_and_grad(loss_of(**options), (0, 1, 2))
    assert close(jax.jit(gradients)(*arrays), exactly(gradients, arrays))


def test_lengths_that_only_the_program_knows() -> None:
    """Traced lengths are read on the device: one program serves them all."""
    arrays = inputs(DENSE)

    def attend(used: Any, offset: Any) -> Function:
        return lambda *given: cupyflash.attention(
            *given, causal=True, seqused_kv=used, q_offset=offset
        )

    program = jax.jit(lambda used, offset, *given: attend(used, offset)(*given))
    for first, offset in ((230, 0), (1, 5), (0, 100)):
        used = int32(first, 200)
        found = program(used, offset, *arrays)
        assert close(found, exactly(attend(used, offset), arrays))


def test_vmap_in_a_program() -> None:
    q, k, v = inputs(((3, *DENSE[0]), DENSE[1], (2, 3, *DENSE[2][1:])))

    def gradients(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(loss_of(causal=True), (0, 1, 2))(q, k, v)

    found = jax.jit(jax.vmap(gradients, (0, None, 1)))(q, k, v)
    for i in range(3):
        one = [x[i] for x in found]
        assert close(one, exactly(gradients, [q[i], k, v[:, i]]))


def test_a_loop_with_recomputation() -> None:
    q, k, v = inputs(((2, 100, 4, 64),) * 3)

    def loss(q: Any, k: Any, v: Any) -> Any:
        def step(x: Any, offset: Any) -> Any:
            attend = jax.checkpoint(
                lambda x: cupyflash.attention(x, k, v, causal=True, q_offset=offset)
            )
            return attend(x), None

        last, _ = jax.lax.scan(step, q, np.arange(4, dtype=np.int32))
        return (last.astype(np.float32) ** 2).mean() * 100

    gradients = jax.value_and_grad(loss, (0, 1, 2))
    assert close(jax.jit(gradients)(q, k, v), exactly(gradients, [q, k, v]))


def test_donated_buffers() -> None:
    """Training steps that give up what they were given."""
    shapes = ((2, 128, 4, 64),) * 3
    weights = inputs(shapes)
    gradients = jax.grad(loss_of(causal=True), (0, 1, 2))

    def step(*weights: Any) -> Any:
        return tuple(w - 0.1 * g for w, g in zip(weights, gradients(*weights)))

    expected = tuple(weights)
    for _ in range(5):
        expected = jax.jit(step)(*expected)
    donating = jax.jit(step, donate_argnums=(0, 1, 2))
    found = tuple(jax.numpy.copy(x) for x in weights)
    for _ in range(5):
        found = donating(*found)
    assert close(found, expected)


def test_many_runs_give_the_same_bits() -> None:
    """Blocks claim tiles from a counter that every run must find at zero; captured or not."""
    arrays = inputs(((8, 256, 8, 64),) * 3)
    program = jax.jit(lambda *given: cupyflash.attention(*given, causal=True, return_lse=True))
    expected = program(*arrays)
    for _ in range(50):
        assert same_bits(program(*arrays), expected)


def test_threads_run_one_program() -> None:
    arrays = inputs(((4, 128, 4, 64),) * 3)
    program = jax.jit(jax.grad(loss_of(causal=True), (0, 1, 2)))
    expected = program(*arrays)
    found: list[Any] = []

    def run() -> None:
        found.extend(program(*arrays) for _ in range(10))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40 and all(close(grads, expected) for grads in found)


def test_a_program_from_the_cache_on_disk(platform: str, tmp_path: Any) -> None:
    """Another process finds the compiled program and runs it with a recipe of its own."""
    if platform == "cpu":
        pytest.skip("a program with a callback is not kept on disk")
    code = """
        import hashlib, jax, numpy, cupyflash
        q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 64), jax.numpy.bfloat16)
        out = jax.jit(lambda *x: cupyflash.attention(*x, causal=True))(q, k, v)
        print(hashlib.sha256(numpy.asarray(out).tobytes()).hexdigest())
    """
    environment = dict(
        os.environ,
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    printed = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        printed.append(process.stdout.split()[-1])
        assert any(tmp_path.iterdir())
    assert printed[0] == printed[1]


@pytest.mark.two_gpus
def test_heads_on_two_gpus(platform: str) -> None:
    if platform == "cpu":
        pytest.skip("two GPUs are needed")
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(jax.devices("cuda")[:2], ("heads",))
    spec = PartitionSpec(None, None, "heads")
    arrays = inputs(((2, 200, 8, 64), (2, 230, 4, 64), (2, 230, 4, 64)))

    def attend(*given: Any) -> Any:
        return cupyflash.attention(*given, causal=True)

    # JAX's check of what varies along a mesh knows no rule for our gradients.
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )

    def loss(function: Function) -> Function:
        return lambda *given: (function(*given).astype(np.float32) ** 2).mean() * 100

    found = jax.jit(jax.value_and_grad(loss(sharded), (0, 1, 2)))(*arrays)
    assert close(found, exactly(jax.value_and_grad(loss(attend), (0, 1, 2)), arrays))
