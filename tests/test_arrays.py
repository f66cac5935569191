"""Arrays of other libraries in and out. What needs a GPU is in test_gpu_interop.py."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import ml_dtypes
import numpy
import pytest

import cupyflash
from cupyflash import arrays, serve
from cupyflash.tensor import CPU, Device, DeviceKind, DType

BF16 = numpy.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def inputs(dtype=numpy.float32, seed=0):
    generator = numpy.random.default_rng(seed)
    shapes = ((2, 5, 4, 32), (2, 9, 2, 32), (2, 9, 2, 16))
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def expected(q, k, v, **options):
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return out, lse


# --- NumPy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(arrays.NUMPY_DTYPES, key=str), ids=str)
def test_numpy_types_go_both_ways(dtype):
    array = numpy.zeros((2, 3), arrays.NUMPY_DTYPES[dtype])
    view = arrays.NumpyAdapter().view("q", array)
    assert view.dtype is dtype and view.dtype.itemsize == array.itemsize
    made = arrays.NumpyAdapter().empty((2, 3), dtype, CPU)
    assert made.dtype == array.dtype and made.shape == (2, 3)


def test_views_of_numpy_arrays():
    base = numpy.zeros((4, 6, 8), numpy.float16)
    view = arrays.NumpyAdapter().view("q", base[::-2, 1:, ::2])
    assert view.shape == (2, 5, 4) and view.strides == (-96, 8, 2)
    assert view.pointer == base.ctypes.data + (3 * 48 + 8) * 2
    assert view.device == CPU and not view.readonly
    base.flags.writeable = False
    assert arrays.NumpyAdapter().view("q", base).readonly


@pytest.mark.parametrize(
    "array",
    [
        numpy.zeros((1, 2, 3, 4), ">f2"),
        numpy.zeros((1, 2, 3, 4), numpy.complex64),
        numpy.zeros((1, 2, 3, 4), object),
        numpy.zeros((1, 2, 3, 4), [("a", "f2")]),
        numpy.ma.zeros((1, 2, 3, 4), numpy.float16),
    ],
    ids=["byte order", "complex", "object", "structured", "masked"],
)
def test_numpy_arrays_of_no_use(array):
    with pytest.raises(TypeError, match="q:"):
        cupyflash.attention(array, array, array)


def test_strides_that_split_an_element():
    records = numpy.zeros((1, 4, 1, 8), [("x", "f4"), ("tag", "u1")])["x"]
    with pytest.raises(ValueError, match="strides .* not multiples"):
        cupyflash.attention(records, records, records)


@pytest.mark.parametrize("thing", [None, 1.0, [[1.0]], "q", object(), numpy.float32(1)])
def test_what_is_no_array(thing):
    q, k, v = inputs()
    with pytest.raises((TypeError, ValueError), match="k: expected"):
        cupyflash.attention(q, thing, v)


def test_subclasses_of_numpy_arrays_are_arrays(tmp_path):
    q, k, v = inputs()
    mapped = numpy.memmap(tmp_path / "q", q.dtype, "w+", shape=q.shape)
    mapped[:] = q
    numpy.testing.assert_array_equal(
        cupyflash.attention(mapped, k, v), cupyflash.attention(q, k, v)
    )


# --- PyTorch on the CPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_in_torch_out(torch, name):
    tensors = [torch.from_numpy(x).to(getattr(torch, name)) for x in inputs()]
    out, lse = cupyflash.attention(*tensors, causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == tensors[0].dtype
    assert isinstance(lse, torch.Tensor) and lse.shape == (2, 4, 5)
    as_numpy = [x.float().numpy().astype(arrays.NUMPY_DTYPES[DType[name]]) for x in tensors]
    same, same_lse = expected(*as_numpy, causal=True)
    numpy.testing.assert_array_equal(out.double().numpy(), same.astype(float))
    numpy.testing.assert_array_equal(lse.numpy(), same_lse)


def test_torch_writes_into_the_callers_tensor(torch):
    tensors = [torch.from_numpy(x).bfloat16() for x in inputs()]
    wide = torch.full((2, 5, 4, 32), torch.nan, dtype=torch.bfloat16)
    out = wide[..., 8:24]
    assert cupyflash.attention(*tensors, out=out) is out
    assert torch.equal(out, cupyflash.attention(*tensors))
    assert wide[..., :8].isnan().all() and wide[..., 24:].isnan().all()


def test_torch_strides_are_read(torch):
    tensors = [torch.from_numpy(x) for x in inputs()]
    by_heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert not by_heads[0].is_contiguous()
    assert torch.equal(cupyflash.attention(*by_heads), cupyflash.attention(*tensors))
    swapped = [x.transpose(1, 2) for x in tensors]
    out = cupyflash.attention(*swapped, layout="bhsd")
    assert torch.equal(out.transpose(1, 2), cupyflash.attention(*tensors))


def test_gradients_are_never_lost_silently(torch):
    """B59: a Parameter is recorded, unless under no_grad."""
    q, k, v = (torch.from_numpy(x) for x in inputs())
    parameter = torch.nn.Parameter(q)
    for arguments in (
        (parameter, k, v),
        (q, torch.nn.Parameter(k), v),
        (q, k, v.clone().requires_grad_()),
    ):
        recorded = next(x for x in arguments if x.requires_grad)
        (grad,) = torch.autograd.grad(cupyflash.attention(*arguments).sum(), recorded)
        assert grad.shape == recorded.shape and torch.isfinite(grad).all()
    with torch.no_grad():
        out = cupyflash.attention(parameter, k, v)
    assert torch.equal(out, cupyflash.attention(q, k, v)) and not out.requires_grad
    assert torch.equal(cupyflash.attention(parameter.detach(), k, v), out)


def test_tangents_are_never_lost_silently(torch, monkeypatch):
    """Forward mode: a dual tensor is refused, and known configurations do not let it slip."""
    from torch.autograd import forward_ad

    q, k, v = (torch.from_numpy(x) for x in inputs())
    adapter = arrays.TorchAdapter(torch)  # of the GPU; it reads tensors on the CPU as well
    monkeypatch.setattr(arrays, "FAST", {torch.Tensor: adapter})
    settings = (False, "bottom_right", None, None, 0.0, None, None, "bshd", False, None)
    key, _, _ = serve.lookup((q, k, v, None), settings)
    assert key is not None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        assert not dual.requires_grad
        with torch.no_grad():  # does not end forward mode
            for arguments in ((q, dual, v), (dual, dual, dual)):
                with pytest.raises(TypeError, match=r"forward-mode tangent.*detach"):
                    cupyflash.attention(*arguments)
                assert serve.lookup((*arguments, None), settings)[0] is None
        with pytest.raises(TypeError, match="out: .*forward-mode tangent"):
            out = torch.zeros(2, 5, 4, 16)
            cupyflash.attention(q, k, v, out=forward_ad.make_dual(out, torch.ones_like(out)))
        out = cupyflash.attention(q, dual.detach(), v)
    assert torch.equal(out, cupyflash.attention(q, k, v))
    assert serve.lookup((q, k, v, None), settings)[0] == key
    with pytest.raises(TypeError, match="q: "):
        torch.func.jvp(lambda one: cupyflash.attention(one, k, v), (q,), (q,))


def test_tensors_without_memory_of_their_own(torch):
    q, k, v = (torch.from_numpy(x) for x in inputs())
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(q.shape)
    for odd in (fake, q.to_sparse(), torch.empty(q.shape, device="meta")):
        with pytest.raises(TypeError, match="q:"):
            cupyflash.attention(odd, k, v)
    with pytest.raises(TypeError, match="q: .*vmap"):
        torch.func.vmap(lambda one: cupyflash.attention(one, k, v))(q[None])


def test_lazy_negations_are_refused(torch):
    """The memory behind such a tensor holds the opposite values."""
    q, k, v = (torch.from_numpy(x.astype(numpy.float32)) for x in inputs())
    lazy = torch.complex(q, q).conj().imag
    assert lazy.is_neg()
    with pytest.raises(TypeError, match=r"q: .*resolve_neg"):
        cupyflash.attention(lazy, k, v)
    expected = cupyflash.attention(-q, k, v)
    assert torch.equal(cupyflash.attention(lazy.resolve_neg(), k, v), expected)


def test_untagged_bytes_stay_bytes(torch):
    """B58: nothing is reinterpreted as bf16."""
    bits = [torch.from_numpy(x).bfloat16().view(torch.uint16) for x in inputs()]
    with pytest.raises(TypeError, match="got uint16"):
        cupyflash.attention(*bits)
    eighths = [torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8) for x in inputs()]
    with pytest.raises(TypeError, match="got uint8"):
        cupyflash.attention(*eighths)
    q, k, v = (torch.from_numpy(x).bfloat16() for x in inputs())
    with pytest.raises(TypeError, match="q bfloat16, k float16"):
        cupyflash.attention(q, k.half(), v)


def test_lengths_may_be_tensors_too(torch):
    q, k, v = inputs()
    lengths = numpy.array([3, 9], numpy.int32)
    same, _ = expected(q, k, v, seqused_kv=lengths)
    out = cupyflash.attention(
        *(torch.from_numpy(x) for x in (q, k, v)), seqused_kv=torch.from_numpy(lengths)
    )
    numpy.testing.assert_array_equal(out.numpy(), same)


# --- JAX on the CPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_jax_in_jax_out(jax, name):
    given = [jax.numpy.asarray(x, getattr(jax.numpy, name)) for x in inputs()]
    out, lse = cupyflash.attention(*given, window=(2, 1), return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == given[0].dtype and isinstance(lse, jax.Array)
    same, same_lse = expected(*(numpy.asarray(x) for x in given), window=(2, 1))
    numpy.testing.assert_array_equal(numpy.asarray(out), same)
    numpy.testing.assert_array_equal(numpy.asarray(lse), same_lse)


def test_jax_arrays_are_no_output(jax):
    given = [jax.numpy.asarray(x) for x in inputs()]
    out = jax.numpy.zeros((2, 5, 4, 16))
    with pytest.raises(ValueError, match="read-only"):
        cupyflash.attention(*given, out=out)
    assert not numpy.asarray(out).any()


def test_tracers_of_the_cpu_are_served(jax):
    given = [jax.numpy.asarray(x) for x in inputs()]
    out = jax.jit(cupyflash.attention)(*given)
    numpy.testing.assert_array_equal(out, cupyflash.attention(*given))


# --- any DLPack producer, any CUDA array interface ------------------------------------------------


class Producer:
    """A library that we have never heard of: exports DLPack, once an array."""

    def __init__(self, array, device=None):
        self._array = array
        self._device = device or array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device


def test_unknown_producers_on_the_cpu():
    given = inputs()
    out = cupyflash.attention(*(Producer(x) for x in given))
    assert isinstance(out, numpy.ndarray)
    numpy.testing.assert_array_equal(out, cupyflash.attention(*given))


def test_results_and_inputs_outlive_each_other(torch):
    """B59: the last one out turns off the light, whichever it is."""
    for turn in range(200):
        given = inputs(seed=turn)
        tensors = [torch.from_numpy(x.copy()) for x in given]
        out = cupyflash.attention(*tensors)
        if turn % 2:
            del tensors
            gc.collect(0)
        assert torch.isfinite(out).all()
        del out


def test_devices_of_no_use():
    q, k, v = inputs()
    vulkan = Producer(q, device=(7, 0))
    with pytest.raises(TypeError, match="DLPack device type 7"):
        cupyflash.attention(vulkan, k, v)


def test_a_cuda_array_interface_becomes_a_view(monkeypatch):
    driver = SimpleNamespace(device_of=lambda pointer: pointer >> 40)
    monkeypatch.setattr(arrays, "default_driver", lambda: driver)
    interface = {
        "data": ((1 << 40) + 64, True),
        "shape": (2, 3, 4),
        "strides": None,
        "typestr": "<f2",
        "version": 3,
    }
    view = arrays.view_of_interface("q", interface)
    assert view.device == Device(DeviceKind.cuda, 1)
    assert view.strides == (12, 4, 1) and view.readonly and view.dtype is DType.float16
    view = arrays.view_of_interface("q", interface | {"strides": (-24, 8, 2)})
    assert view.strides == (-12, 4, 1)
    with pytest.raises(ValueError, match="strides"):
        arrays.view_of_interface("q", interface | {"strides": (24, 8, 1)})
    with pytest.raises(TypeError, match="mask"):
        arrays.view_of_interface("q", interface | {"mask": object()})
    with pytest.raises(TypeError, match="V2"):
        arrays.view_of_interface("q", interface | {"typestr": "|V2"})


def test_a_mix_of_libraries_is_refused(torch, jax):
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"one library.*q NumPy on the CPU, k PyTorch on the CPU"):
        cupyflash.attention(q, torch.from_numpy(k), v)
    with pytest.raises(TypeError, match="v JAX on the CPU"):
        cupyflash.attention(q, k, jax.numpy.asarray(v))
    on_gpu = SimpleNamespace(__cuda_array_interface__={}, shape=q.shape)
    pytest.importorskip("cupy")
    with pytest.raises(TypeError, match=r"on a GPU, k NumPy on the CPU"):
        cupyflash.attention(on_gpu, k, v)


# --- what an import costs (B61) -------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    import os

    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_import_is_lazy_and_touches_nothing(tmp_path):
    code = """
        import sys
        import numpy
        before = set(sys.modules)
        import cupyflash
        loaded = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not loaded & {"cupy", "torch", "jax", "ml_dtypes", "ctypes", "cuda"}, loaded
        assert {n for n in sys.modules if n.startswith("cupyflash.")} == set()
        extra = set(dir(cupyflash)) - set(cupyflash.__all__)
        assert set(cupyflash.__all__) <= set(dir(cupyflash))
        assert "__version__" in extra and all(name.startswith("__") for name in extra), extra
        for name in cupyflash.__all__:
            getattr(cupyflash, name)
        assert not {"cupy", "torch", "jax"} & set(sys.modules)
        try:
            cupyflash.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
    """
    run_python(code, HOME=str(tmp_path / "none"), CUDA_VISIBLE_DEVICES="")
    assert not list(tmp_path.iterdir())


def test_no_library_is_imported_for_another(torch):
    code = """
        import sys
        import torch, cupyflash
        x = torch.zeros(1, 4, 1, 64)
        cupyflash.attention(x, x, x)
        assert not {"cupy", "jax", "numba"} & set(sys.modules)
    """
    run_python(code)


def test_a_gpu_array_without_a_driver_is_a_clear_error():
    """CuPy arrays can be made without a GPU; the message says what is missing."""
    code = """
        import cupy, numpy, cupyflash
        try:
            if cupy.cuda.runtime.getDeviceCount():
                print("there is a GPU")
                raise SystemExit
        except cupy.cuda.runtime.CUDARuntimeError:
            pass
        memory = cupy.cuda.UnownedMemory(1 << 20, 1 << 20, None, 0)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        x = cupy.ndarray((1, 16, 2, 64), numpy.float16, memptr=pointer)
        try:
            cupyflash.attention(x, x, x)
        except cupyflash.DriverError as error:
            assert "NVIDIA driver" in str(error), error
        else:
            raise SystemExit("no error")
    """
    pytest.importorskip("cupy")
    said = run_python(code)
    if said:
        pytest.skip(said.strip())


def test_a_fork_after_the_import_works():
    code = """
        import os
        import numpy, cupyflash
        x = numpy.ones((1, 4, 1, 64), numpy.float32)
        child = os.fork()
        if child == 0:
            out = cupyflash.attention(x, x, x)
            os._exit(0 if (out == 1).all() else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    run_python(code)
