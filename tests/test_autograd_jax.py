"""JAX's transformations of ``cupyflash.attention``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupyflash

jax = pytest.importorskip("jax")

SHAPES = ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 6))  # two query heads share a key head
PACKED_SHAPES = ((9, 4, 8), (11, 2, 8), (11, 2, 6))
STARTS_Q, STARTS_KV = np.array([0, 5, 5, 8], np.int32), np.array([0, 4, 6, 10], np.int32)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def inputs(dtype: Any = np.float32, shapes: Any = SHAPES, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [jax.numpy.asarray(random.standard_normal(shape).astype(dtype)) for shape in shapes]


def loss_of(**options: Any) -> Any:
    """A function of q, k and v that weighs every element of out and of lse."""

    def loss(*arrays: Any) -> Any:
        out, lse = cupyflash.attention(*arrays, return_lse=True, **options)
        lse = jax.numpy.where(lse == -np.inf, 0, lse)  # rows that see nothing
        weights = (jax.numpy.linspace(-1, 2, x.size).reshape(x.shape) for x in (out, lse))
        return sum((x.astype(w.dtype) * w).sum() for x, w in zip((out, lse), weights))

    return loss


def differences(function: Any, arrays: list[Any], step: float = 1e-5) -> list[np.ndarray]:
    """The derivatives of a function of arrays, by central differences in each element."""
    found = []
    for index, array in enumerate(arrays):
        slope = np.zeros(array.shape)
        for at in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = np.array(array)
                moved[at] += sign * step
                given = [*arrays[:index], jax.numpy.asarray(moved), *arrays[index + 1 :]]
                ends.append(float(function(*given)))
            slope[at] = (ends[0] - ends[1]) / (2 * step)
        found.append(slope)
    return found


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1), "align": "top_left"},
    "softcap": {"softcap": 1.5, "causal": True, "softmax_scale": np.float32(0.5)},
    "offsets": {"causal": True, "q_offset": 1, "kv_offset": np.array([2, 0], np.int32)},
    "used": {"seqused_q": np.array([5, 2]), "seqused_kv": np.array([3, 6]), "causal": True},
}


def agree(found: Any, expected: Any, bound: float) -> bool:
    return all(
        np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max() <= bound
        for x, y in zip(found, expected, strict=True)
    )


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_derivatives(name: str, float64: None) -> None:
    """Finite differences in float64, then the same gradients from a compiled program."""
    arrays, loss = inputs(np.float64), loss_of(**CASES[name])
    expected = differences(loss, arrays)
    found = jax.grad(loss, (0, 1, 2))(*arrays)
    assert all(isinstance(x, jax.Array) and x.dtype == np.float64 for x in found)
    assert agree(found, expected, 1e-7)
    again = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    assert agree(found, again, 1e-13)  # the weights of the loss are rounded otherwise


def test_gradients_are_derivatives_in_the_other_layout(float64: None) -> None:
    arrays = [x.transpose(0, 2, 1, 3) for x in inputs(np.float64)]
    loss = loss_of(causal=True, layout="bhsd")
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    assert agree(found, differences(loss, arrays), 1e-7)


def test_gradients_are_derivatives_of_packed_sequences(float64: None) -> None:
    arrays = inputs(np.float64, PACKED_SHAPES)

    def loss(*arrays: Any, starts_q: Any = STARTS_Q, starts_kv: Any = STARTS_KV) -> Any:
        return loss_of(cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, causal=True)(*arrays)

    found = jax.grad(loss, (0, 1, 2))(*arrays)
    assert agree(found, differences(loss, arrays), 1e-7)
    traced = jax.jit(jax.grad(lambda q, k, v, a, b: loss(q, k, v, starts_q=a, starts_kv=b)))
    assert agree([traced(*arrays, STARTS_Q, STARTS_KV)], found[:1], 1e-13)


def test_the_gradient_of_lse_alone() -> None:
    """With q = 0 every key weighs the same: dq is the mean of the keys, dk and dv are 0."""
    _, k, v = inputs(shapes=((1, 2, 1, 64), (1, 3, 1, 64), (1, 3, 1, 64)))
    q = jax.numpy.zeros((1, 2, 1, 64))
    dq, dk, dv = jax.grad(
        lambda *x: cupyflash.attention(*x, return_lse=True)[1].sum(), argnums=(0, 1, 2)
    )(q, k, v)
    assert agree([dq], [np.broadcast_to(64**-0.5 * np.mean(k, 1, keepdims=True), q.shape)], 1e-6)
    assert not dk.any() and not dv.any()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_gradients_have_the_inputs_type(name: str) -> None:
    arrays = [x.astype(name) for x in inputs()]
    loss = loss_of(causal=True)
    expected = jax.grad(loss, (0, 1, 2))(*(x.astype(np.float32) for x in arrays))
    for transform in (lambda f: f, jax.jit):
        found = transform(jax.grad(loss, (0, 1, 2)))(*arrays)
        assert all(x.dtype == name and x.shape == y.shape for x, y in zip(found, arrays))
        largest = max(float(np.abs(x).max()) for x in expected)
        assert agree(found, expected, 8 * float(jax.numpy.finfo(name).eps) * largest + 1e-5)


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_the_same(name: str) -> None:
    arrays, options = inputs(), CASES[name]
    plain = cupyflash.attention(*arrays, return_lse=True, **options)
    traced = jax.jit(lambda *x: cupyflash.attention(*x, return_lse=True, **options))(*arrays)
    assert all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(plain, traced))
    (alone,) = jax.jit(lambda *x: [cupyflash.attention(*x, **options)])(*arrays)
    assert np.array_equal(alone, plain[0])


def test_a_plain_call_is_not_traced() -> None:
    arrays = inputs()
    cupyflash.attention(*arrays)
    code = """
        import sys, jax, cupyflash
        x = jax.numpy.zeros((1, 4, 1, 8))
        cupyflash.attention(x, x, x)
        assert "cupyflash.adapters.jax" not in sys.modules
        assert not {"torch", "cupyflash.adapters.torch"} & set(sys.modules)
    """
    run_python(code)


def test_transformations_together() -> None:
    """A loop of steps inside a program, with recomputation, and a traced offset."""
    q, k, v = inputs(shapes=((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)))

    def loss(q: Any, attend: Any) -> Any:
        for offset in range(3):
            q = attend(q, offset)
        return (q**2).sum()

    def step(q: Any, offset: Any) -> Any:
        return cupyflash.attention(q, k, v, causal=True, q_offset=offset)

    expected = jax.grad(loss)(q, step)

    def scanned(q: Any) -> Any:
        last, _ = jax.lax.scan(lambda q, i: (jax.checkpoint(step)(q, i), None), q, np.arange(3))
        return (last**2).sum()

    assert agree([jax.jit(jax.grad(scanned))(q)], [expected], 1e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (None, 0, 2)], ids=str)
def test_vmap_joins_the_batch(axes: tuple[int | None, ...], transform: Any) -> None:
    """The same as a loop, also of gradients; what is not mapped over is shared."""
    arrays, count = inputs(), 3
    stacked = []
    for array, axis in zip(arrays, axes):
        several = np.stack([np.asarray(array) * (1 + i) for i in range(count)])
        stacked.append(array if axis is None else np.moveaxis(several, 0, axis))
    used = np.array([[3, 6], [6, 1], [2, 2]])

    def gradients(q: Any, k: Any, v: Any, used: Any) -> Any:
        loss = loss_of(causal=True, seqused_kv=used)
        return cupyflash.attention(q, k, v), jax.grad(loss, (0, 1, 2))(q, k, v)

    out, grads = transform(jax.vmap(gradients, (*axes, 0)))(*stacked, used)
    for i in range(count):
        one = [x if axis is None else np.take(x, i, axis) for x, axis in zip(stacked, axes)]
        expected, expected_grads = gradients(*(jax.numpy.asarray(x) for x in one), used[i])
        assert agree([out[i]], [expected], 1e-6)
        assert agree([x[i] for x in grads], expected_grads, 1e-5)


def test_vmap_over_nothing_and_over_packs() -> None:
    q, k, v = inputs()
    out = jax.vmap(lambda q: cupyflash.attention(q, k, v))(np.zeros((0, *q.shape), np.float32))
    assert out.shape == (0, *q.shape[:-1], 6)
    q, k, v = inputs(shapes=PACKED_SHAPES)
    with pytest.raises(cupyflash.UnsupportedError, match=r"jax\.vmap over packed sequences"):
        jax.vmap(
            lambda q: cupyflash.attention(q, k, v, cu_seqlens_q=STARTS_Q, cu_seqlens_kv=STARTS_KV)
        )(q[None])


# --- refusals -------------------------------------------------------------------------------------


def test_other_derivatives_are_refused() -> None:
    arrays, loss = inputs(), loss_of()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, tuple(arrays), tuple(arrays))
    with pytest.raises(cupyflash.UnsupportedError, match="no second derivatives"):
        jax.grad(lambda q: jax.grad(loss)(q, *arrays[1:]).sum())(arrays[0])


def test_a_wrong_call_is_refused_while_tracing() -> None:
    q, k, v = inputs()

    def attend(**options: Any) -> Any:
        return jax.jit(lambda *x: cupyflash.attention(*x, **options))(q, k, v)

    with pytest.raises(ValueError, match="k: expected shape"):
        jax.jit(cupyflash.attention)(q, k[..., :4], v)
    with pytest.raises(TypeError, match="one dtype"):
        jax.jit(cupyflash.attention)(q, k.astype(np.float16), v)
    with pytest.raises(ValueError, match="align: expected one of"):
        attend(align="left")
    with pytest.raises(TypeError, match="softcap: expected a number"):
        attend(softcap="much")
    with pytest.raises(ValueError, match=r"out: the array is read-only"):
        attend(out=q)
    with pytest.raises(cupyflash.UnsupportedError, match="stream: JAX chooses"):
        attend(stream=0)
    with pytest.raises(cupyflash.UnsupportedError, match="num_sms"):
        attend(num_sms=4)
    with pytest.raises(cupyflash.UnsupportedError, match="q_scale: scales belong to fp8"):
        attend(q_scale=np.ones(1))
    eighths = [x.astype(jax.numpy.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(cupyflash.UnsupportedError, match="no graphs of fp8 arrays"):
        jax.jit(cupyflash.attention)(*eighths)
    with pytest.raises(TypeError, match="softmax_scale: expected a value .* JAX tracer"):
        jax.jit(lambda q, scale: cupyflash.attention(q, k, v, softmax_scale=scale))(q, 0.5)
    with pytest.raises(TypeError, match="softmax_scale: expected a number known to the host"):
        jax.jit(lambda scale: cupyflash.attention(q, k, v, softmax_scale=scale))(0.5)
    with pytest.raises(TypeError, match="k: all arrays must be JAX's"):
        jax.jit(lambda q: cupyflash.attention(q, [1.0], v))(q)
    with pytest.raises(TypeError, match="seqused_kv: all arrays must be JAX's"):
        jax.jit(lambda q: cupyflash.attention(q, k, v, seqused_kv=[6, 6]))(q)


def test_other_functions_are_refused_while_tracing() -> None:
    q, k, v = inputs()
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    with pytest.raises(cupyflash.UnsupportedError, match="JAX tracer: .* no other function"):
        jax.jit(lambda dout: cupyflash.attention_backward(dout, q, k, v, out, lse))(out)
    with pytest.raises(cupyflash.UnsupportedError, match="JAX tracer: .* no other function"):
        jax.jit(lambda part: cupyflash.merge([part], [lse]))(out)


def test_what_only_the_data_tells_is_an_error_when_it_runs() -> None:
    q, k, v = inputs()
    attend = jax.jit(lambda used: cupyflash.attention(q, k, v, seqused_kv=used))
    attend(np.array([6, 0]))
    with pytest.raises(Exception, match="seqused_kv"):
        attend(np.array([6, 9])).block_until_ready()


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset to run on one core with")
def test_one_core_is_enough() -> None:
    """A callback that waits for JAX's own threads would never end."""
    code = """
        import jax, numpy, cupyflash
        x = jax.numpy.ones((1, 1024, 8, 64))
        def loss(x):
            for _ in range(3):
                x = jax.numpy.sin(cupyflash.attention(x, x, x, window=(64, 0)))
            return (x ** 2).sum()
        grad = jax.jit(jax.grad(loss))
        for _ in range(3):
            x = x - grad(x)
        assert numpy.isfinite(numpy.asarray(x)).all()
    """
    core = min(os.sched_getaffinity(0))
    run_python(code, "taskset", "-c", str(core))


@pytest.mark.gpu
def test_gradients_on_a_gpu() -> None:
    """Outside of jit, through DLPack; programs are those of ``test_xla_gpu.py``."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no CUDA: {error}")
    shapes = ((2, 300, 8, 128), (2, 300, 2, 128), (2, 300, 2, 128))
    exact, loss = inputs(np.float32, shapes), loss_of(causal=True)
    rounded = [x.astype(np.float16) for x in exact]
    expected = jax.grad(loss, (0, 1, 2))(*(x.astype(np.float32) for x in rounded))
    given = [jax.device_put(x, device) for x in rounded]
    with jax.default_device(device):
        found = jax.grad(loss, (0, 1, 2))(*given)
    for x, y in zip(found, expected):
        assert x.devices() == {device} and x.dtype == np.float16
        assert agree([x], [y], 0.02 * float(np.abs(y).max()))


def run_python(code: str, *prefix: str) -> None:
    process = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(code)],
        env=dict(os.environ, JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
