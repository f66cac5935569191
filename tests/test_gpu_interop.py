"""Libraries, streams, graphs and devices on a real GPU.

The arithmetic is tested elsewhere; here every result is compared, bit for bit, with that of the
same call on CuPy arrays, which is itself checked against the CPU path once. CuPy is asked for no
arithmetic on bfloat16 and for no matrix product, so that no further CUDA library is needed.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import launch, serve
from cupyflash.params import FORWARD

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to others

pytestmark = pytest.mark.gpu

SHAPES = ((2, 300, 8, 128), (2, 500, 2, 128), (2, 500, 2, 128))


def host_inputs(dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(dtype) for shape in SHAPES]


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return np.dtype(request.param)


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch without CUDA")
    return torch


@pytest.fixture
def jax() -> Any:
    jax = pytest.importorskip("jax")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX without CUDA: {error}")
    return jax


@pytest.fixture
def numba_cuda() -> Any:
    pytest.importorskip("numba")
    return pytest.importorskip("numba.cuda")


def bits(x: Any) -> np.ndarray:
    """Contents of any library's array on the host, comparable bit for bit."""
    if hasattr(x, "get"):
        x = x.get()
    elif type(x).__module__ == "torch":
        torch = sys.modules["torch"]
        x = (x.view(torch.int16) if x.element_size() == 2 else x).cpu().numpy()
    else:
        x = np.asarray(x)
    return x.view(np.int16) if x.dtype.itemsize == 2 else x


def on_cupy(cupy: Any, arrays: list[np.ndarray], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    out, lse = cupyflash.attention(*map(cupy.asarray, arrays), return_lse=True, **options)
    return bits(out), bits(lse)


def to_torch(torch: Any, x: np.ndarray, device: str = "cuda") -> Any:
    tensor = torch.from_numpy(x.view(np.int16)).to(device)
    return tensor.view(torch.float16 if x.dtype == np.float16 else torch.bfloat16)


def busy(cupy: Any) -> None:
    """Tens of milliseconds of work on the current stream: a wrong order of streams shows."""
    large = cupy.zeros(1 << 28, cupy.float32)
    for _ in range(50):
        large += 1


def test_cupy_agrees_with_the_cpu(poisoned_pool: Any, dtype: Any) -> None:
    arrays = host_inputs(dtype)
    out, lse = cupyflash.attention(
        *map(poisoned_pool.asarray, arrays), causal=True, return_lse=True
    )
    exact, exact_lse = cupyflash.attention(
        *(x.astype(np.float32) for x in arrays), causal=True, return_lse=True
    )
    np.testing.assert_allclose(out.get().astype(np.float32), exact, atol=2e-2, rtol=2e-2)
    np.testing.assert_allclose(lse.get(), exact_lse, atol=1e-3, rtol=1e-5)


# --- PyTorch --------------------------------------------------------------------------------------


def test_torch_in_torch_out(cupy: Any, torch: Any, dtype: Any) -> None:
    arrays = host_inputs(dtype)
    expected, expected_lse = on_cupy(cupy, arrays, causal=True)
    tensors = [to_torch(torch, x) for x in arrays]
    for _ in range(3):  # the long way, then the short one
        out, lse = cupyflash.attention(*tensors, causal=True, return_lse=True)
        assert isinstance(out, torch.Tensor) and out.is_cuda and out.dtype == tensors[0].dtype
        assert isinstance(lse, torch.Tensor) and lse.dtype == torch.float32
        np.testing.assert_array_equal(bits(out), expected)
        np.testing.assert_array_equal(bits(lse), expected_lse)
    by_heads = [x.transpose(1, 2).contiguous() for x in tensors]
    out = cupyflash.attention(*by_heads, causal=True, layout="bhsd")
    assert out.is_contiguous() and out.shape == by_heads[0].shape
    np.testing.assert_array_equal(bits(out.transpose(1, 2).contiguous()), expected)


def test_torch_needs_no_cupy(torch: Any) -> None:
    code = """
        import sys
        import torch, cupyflash
        sys.modules["cupy"] = None  # an import fails
        x = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            out = cupyflash.attention(x, x, x)
        assert (out == 1).all() and out.dtype == torch.bfloat16
    """
    run_python(code)


def test_torch_runs_on_its_current_stream(cupy: Any, torch: Any) -> None:
    arrays = host_inputs()
    expected, _ = on_cupy(cupy, arrays)
    ready = [to_torch(torch, x) for x in arrays]
    for given in (False, True) * 2:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            tensors = [torch.zeros_like(x) for x in ready]
            matrix = torch.ones(8192, 8192, device="cuda")
            for _ in range(4):
                matrix = matrix @ matrix
            for tensor, x in zip(tensors, ready):
                tensor.copy_(x)
            if not given:
                out = cupyflash.attention(*tensors)
        if given:
            out = cupyflash.attention(*tensors, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(bits(out), expected)


def test_torch_graph(torch: Any) -> None:
    """B56: outputs may come from the capture's own pool; replays see new contents."""
    tensors = [to_torch(torch, x) for x in host_inputs()]
    cupyflash.attention(*tensors, causal=True, return_lse=True)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cupyflash.attention(*tensors, causal=True, return_lse=True)
    for seed in (1, 2):
        for tensor, x in zip(tensors, host_inputs(seed=seed)):
            tensor.copy_(to_torch(torch, x))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        eager, eager_lse = cupyflash.attention(*tensors, causal=True, return_lse=True)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse)


def test_a_new_shape_of_a_loaded_kernel_may_be_captured(torch: Any) -> None:
    q, k, v = (to_torch(torch, x) for x in host_inputs())
    cupyflash.attention(q[:, :129], k, v)
    cupyflash.forget_configurations()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cupyflash.attention(q[:, :129], k[:, :77], v[:, :77])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, cupyflash.attention(q[:, :129], k[:, :77], v[:, :77]))


def test_a_cold_kernel_inside_a_torch_capture(torch: Any) -> None:
    """B56: a clear message; the process can go on and capture once the kernel is warm."""
    code = """
        import torch, cupyflash
        x = torch.ones(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)
        graph = torch.cuda.CUDAGraph()
        message = ""
        with torch.cuda.graph(graph):
            y = x + 1
            try:
                cupyflash.attention(x, x, x, out=out)
            except RuntimeError as error:
                message = str(error)
        assert "captured" in message and "call attention once before" in message, message
        graph.replay()
        torch.cuda.synchronize()
        assert (y == 2).all()
        cupyflash.attention(x, x, x, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cupyflash.attention(x, x, x, out=out)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 1).all()
    """
    run_python(code)


def test_torch_gradients_and_parameters(torch: Any) -> None:
    q, k, v = (to_torch(torch, x) for x in host_inputs())
    parameter = torch.nn.Parameter(q)
    expected = cupyflash.attention(q, k, v)
    for _ in range(3):
        with pytest.raises(TypeError, match=r"requires grad.*detach"):
            cupyflash.attention(parameter, k, v)
        with torch.no_grad():
            assert torch.equal(cupyflash.attention(parameter, k, v), expected)
        with torch.inference_mode():
            assert torch.equal(cupyflash.attention(parameter, k, v), expected)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(TypeError, match=r"forward-mode tangent.*detach"):
                cupyflash.attention(dual, k, v)
            assert torch.equal(cupyflash.attention(q, k, v), expected)


def test_torch_host_and_gpu_do_not_mix(torch: Any) -> None:
    q, k, v = (to_torch(torch, x) for x in host_inputs())
    for _ in range(2):
        with pytest.raises(TypeError, match="q PyTorch on a GPU, k PyTorch on the CPU"):
            cupyflash.attention(q, k.cpu(), v)
        with pytest.raises(cupyflash.UnsupportedError, match="float32 has no GPU kernel"):
            cupyflash.attention(q.float(), k.float(), v.float())


# --- JAX, Numba, DLPack, CUDA array interface -----------------------------------------------------


def test_jax_in_jax_out(cupy: Any, jax: Any, dtype: Any) -> None:
    arrays = host_inputs(dtype)
    expected, expected_lse = on_cupy(cupy, arrays, causal=True)
    given = [jax.device_put(jax.numpy.asarray(x), jax.devices("cuda")[0]) for x in arrays]
    out, lse = cupyflash.attention(*given, causal=True, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array) and out.dtype == dtype
    np.testing.assert_array_equal(bits(out), expected)
    np.testing.assert_array_equal(bits(lse), expected_lse)
    doubled = jax.numpy.add(out, out)  # used by JAX's own kernels
    np.testing.assert_array_equal(
        np.asarray(doubled).astype(np.float32), 2 * expected.view(dtype).astype(np.float32)
    )


def test_jax_inputs_live_until_they_are_read(cupy: Any, jax: Any) -> None:
    """B59: results of a thousand calls, inputs dropped at once, memory reused by JAX meanwhile."""
    device = jax.devices("cuda")[0]
    arrays = host_inputs()
    expected, _ = on_cupy(cupy, arrays)
    for turn in range(300):
        given = [jax.device_put(jax.numpy.asarray(x), device) for x in arrays]
        out = cupyflash.attention(*given)
        del given
        other = jax.numpy.full(SHAPES[0], jax.numpy.nan, jax.numpy.bfloat16)
        if turn % 50 == 0:
            gc.collect()
            np.testing.assert_array_equal(bits(out), expected)
        del other
    assert len(launch.in_flight._held) < 300


def test_jax_arrays_are_no_output(jax: Any) -> None:
    device = jax.devices("cuda")[0]
    given = [jax.device_put(jax.numpy.asarray(x), device) for x in host_inputs()]
    out = jax.device_put(jax.numpy.zeros(SHAPES[0], jax.numpy.bfloat16), device)
    with pytest.raises(ValueError, match="read-only"):
        cupyflash.attention(*given, out=out)
    assert not np.asarray(out).astype(np.float32).any()


def test_numba_in_numba_out(cupy: Any, numba_cuda: Any) -> None:
    arrays = host_inputs(np.float16)
    expected, _ = on_cupy(cupy, arrays)
    given = [numba_cuda.to_device(x) for x in arrays]
    out = cupyflash.attention(*given)
    assert type(out).__module__.startswith("numba")
    np.testing.assert_array_equal(out.copy_to_host().view(np.int16), expected)


class Foreign:
    """A library known by its ``__cuda_array_interface__`` only."""

    def __init__(self, array: Any, readonly: bool = False, stream: int | None = None) -> None:
        self._array = array
        self.__cuda_array_interface__ = {
            "data": (array.data.ptr, readonly),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": "<f2",
            "version": 3,
            "stream": stream,
        }


def test_any_cuda_array_interface(cupy: Any) -> None:
    arrays = host_inputs(np.float16)
    expected, _ = on_cupy(cupy, arrays)
    given = [Foreign(cupy.asarray(x)) for x in arrays]
    out = cupyflash.attention(*given)
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(bits(out), expected)
    target = cupy.zeros(SHAPES[0], cupy.float16)  # all bytes 0
    with pytest.raises(ValueError, match="read-only"):
        cupyflash.attention(*given, out=Foreign(target, readonly=True))
    assert not target.get().any()
    cupyflash.attention(*given, out=Foreign(target))
    np.testing.assert_array_equal(bits(target), expected)


def test_the_producers_stream_is_waited_for(cupy: Any) -> None:
    """Version 3 of the interface names the stream that is still writing the array."""
    arrays = host_inputs(np.float16)
    expected, _ = on_cupy(cupy, arrays)
    ready = [cupy.asarray(x) for x in arrays]
    cupyflash.attention(*ready)
    cupy.cuda.Device().synchronize()
    producer, consumer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with producer:
        late = [cupy.zeros_like(x) for x in ready]
        busy(cupy)
        for target, x in zip(late, ready):
            target[...] = x
    with consumer:
        out = cupyflash.attention(*(Foreign(x, stream=producer.ptr) for x in late))
    consumer.synchronize()
    np.testing.assert_array_equal(bits(out), expected)


class Producer:
    """A library known by DLPack only."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_any_dlpack_producer(cupy: Any, dtype: Any) -> None:
    arrays = host_inputs(dtype)
    expected, _ = on_cupy(cupy, arrays)
    for _ in range(3):
        out = cupyflash.attention(*(Producer(cupy.asarray(x)) for x in arrays))
        assert isinstance(out, cupy.ndarray)
        np.testing.assert_array_equal(bits(out), expected)


# --- outputs, sizes, strides ----------------------------------------------------------------------


@pytest.mark.parametrize("return_lse", [False, True])
def test_outputs_are_written_whole_and_nothing_else(poisoned_pool: Any, return_lse: bool) -> None:
    cupy = poisoned_pool
    arrays = [cupy.asarray(x) for x in host_inputs()]
    wide = cupy.asarray(np.full((2, 302, 10, 128), np.nan, ml_dtypes.bfloat16))
    out = wide[:, 1:301, 1:9]
    for _ in range(3):
        result = cupyflash.attention(*arrays, out=out, return_lse=return_lse)
        assert (result[0] if return_lse else result) is out
    fresh = cupyflash.attention(*arrays)
    np.testing.assert_array_equal(bits(out), bits(fresh))
    edge = wide.get().astype(np.float32)
    edge[:, 1:301, 1:9] = np.nan
    assert np.isnan(edge).all()


def test_sizes_of_zero(poisoned_pool: Any, dtype: Any) -> None:
    cupy = poisoned_pool
    q, k, v = (cupy.asarray(x) for x in host_inputs(dtype))
    out, lse = cupyflash.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert not out.get().any() and (lse.get() == -np.inf).all()
    out, lse = cupyflash.attention(q[:, :0], k, v, return_lse=True)
    assert out.shape == (2, 0, 8, 128) and lse.shape == (2, 8, 0)
    out = cupyflash.attention(q[:0], k[:0], v[:0])
    assert out.shape == (0, 300, 8, 128)


def test_broadcast_reversed_and_shifted_arrays(cupy: Any) -> None:
    """B14, B16, B17: right, or an error that names the argument."""
    arrays = host_inputs()
    q, k, v = (cupy.asarray(x) for x in arrays)

    def odd(module: Any, q: Any, k: Any, v: Any) -> list[tuple[Any, Any, Any]]:
        return [
            (q, module.broadcast_to(k[:, :, :1], k.shape), v),
            (q, k[:, ::-1], v),
            (q[::-1], k, v),
            (q, k, module.broadcast_to(v[:1], v.shape)),
        ]

    for views, dense in zip(odd(cupy, q, k, v), odd(np, *arrays)):
        expected = cupyflash.attention(*(cupy.asarray(x.copy()) for x in dense))
        try:
            out = cupyflash.attention(*views)
        except cupyflash.MissingKernelError:
            continue  # CUPYFLASH_JIT=0 and the kernel without TMA is not in the wheel
        np.testing.assert_allclose(
            out.get().astype(np.float32), expected.get().astype(np.float32), atol=2e-2
        )
    shifted = cupy.empty(q.size + 8, q.dtype)[1 : q.size + 1].reshape(q.shape)
    with pytest.raises(ValueError, match="q: .*16 bytes"):
        cupyflash.attention(shifted, k, v)


# --- raw kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_raw_kernel(poisoned_pool: Any, causal: bool) -> None:
    cupy = poisoned_pool
    arrays = host_inputs()
    expected, expected_lse = on_cupy(cupy, arrays, causal=causal)
    raw = cupyflash.raw_kernel(*map(cupy.asarray, arrays), causal=causal, return_lse=True)
    assert isinstance(raw.kernel, cupy.RawKernel) and raw.args[0].dtype == FORWARD.dtype
    raw()
    np.testing.assert_array_equal(bits(raw.out), expected)
    np.testing.assert_array_equal(bits(raw.lse), expected_lse)
    raw.out.data.memset(0, raw.out.nbytes)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        raw.kernel(raw.grid, raw.block, raw.args, shared_mem=raw.shared_bytes)
    stream.synchronize()
    np.testing.assert_array_equal(bits(raw.out), expected)


# --- devices, threads, processes ------------------------------------------------------------------


def test_many_threads_one_gpu(cupy: Any) -> None:
    """Each thread on its own stream, with its own shapes."""
    wrong: list[int] = []

    def work(number: int) -> None:
        arrays = [x[:, : 50 * number] for x in host_inputs(seed=number)]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            given = [cupy.asarray(x) for x in arrays]
            first = bits(cupyflash.attention(*given, causal=True))
            for turn in range(200):
                out = cupyflash.attention(*given, causal=True)
                if turn % 20 == 0:
                    stream.synchronize()
                    if not np.array_equal(bits(out), first):
                        wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_without_a_context(torch: Any) -> None:
    """The driver's context stack of a fresh thread is empty, and is empty again afterwards."""
    tensors = [to_torch(torch, x) for x in host_inputs()]
    expected = cupyflash.attention(*tensors)
    torch.cuda.synchronize()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(cupyflash.attention(*tensors)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


@pytest.mark.two_gpus
def test_torch_on_the_second_gpu(cupy: Any, torch: Any) -> None:
    """B55: the arrays' device counts, not the current one."""
    arrays = host_inputs()
    expected, _ = on_cupy(cupy, arrays)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        tensors = [to_torch(torch, x, device) for x in arrays]
        before = torch.cuda.memory_allocated(0)
        for _ in range(3):
            out = cupyflash.attention(*tensors)
            assert out.device == torch.device(device) and torch.cuda.current_device() == 0
            torch.cuda.synchronize(device)
            np.testing.assert_array_equal(bits(out), expected)
        if device == "cuda:1":
            assert torch.cuda.memory_allocated(0) <= before
    first, second = (to_torch(torch, arrays[0], f"cuda:{index}") for index in (0, 1))
    with pytest.raises(TypeError, match="cuda:0.*cuda:1"):
        cupyflash.attention(first, second, second)


@pytest.mark.two_gpus
def test_cupy_on_the_second_gpu_on_its_stream(cupy: Any) -> None:
    arrays = host_inputs()
    expected, _ = on_cupy(cupy, arrays)
    with cupy.cuda.Device(1):
        given = [cupy.asarray(x) for x in arrays]
        cupy.cuda.Device(1).synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        pool = cupy.get_default_memory_pool().used_bytes()
        with stream:
            out = cupyflash.attention(*given)
        stream.synchronize()
        assert cupy.get_default_memory_pool().used_bytes() > pool
    assert out.data.device_id == 1 and cupy.cuda.runtime.getDevice() == 0
    np.testing.assert_array_equal(bits(out), expected)
    for _ in range(3):
        out = cupyflash.attention(*given)  # device 0 is current
        assert out.data.device_id == 1
    cupy.cuda.Device(1).synchronize()
    np.testing.assert_array_equal(bits(out), expected)


def test_nothing_is_allocated_or_waited_for_with_a_given_out(cupy: Any) -> None:
    given = [cupy.asarray(x) for x in host_inputs()]
    out = cupy.empty(SHAPES[0], ml_dtypes.bfloat16)
    for _ in range(3):
        cupyflash.attention(*given, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        large = cupy.zeros(1 << 28, cupy.float32)
        used = cupy.get_default_memory_pool().used_bytes()
        for _ in range(50):
            large += 1
        cupyflash.attention(*given, out=out)
        assert not stream.done, "the call returned while earlier work was still running"
        assert cupy.get_default_memory_pool().used_bytes() == used
    stream.synchronize()


def test_the_configuration_is_remembered_once(cupy: Any) -> None:
    cupyflash.forget_configurations()
    given = [cupy.asarray(x) for x in host_inputs()]
    for _ in range(10):
        cupyflash.attention(*given)
    assert len(serve._configurations) == 1


def run_python(code: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
