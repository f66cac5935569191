"""Arrays of other libraries, in and out.

An ``Adapter`` speaks one library's language: it reads an array as a ``TensorView``, allocates
outputs with that library's own allocator and knows its current stream, so that a launch needs no
event and no second memory pool. No library is imported that the caller has not imported: an
adapter finds its module through the type of the array in hand.

Libraries with an allocator of their own are served natively (NumPy, CuPy, PyTorch, Numba). JAX
arrays and unknown DLPack producers on a GPU are taken in as CuPy arrays without a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy

from cupyflash.driver import default_driver
from cupyflash.errors import UnsupportedError
from cupyflash.fp8 import Quantized
from cupyflash.tensor import CPU, Device, DeviceKind, DType, TensorView, contiguous_strides

Array = Any
"""An array of any supported library."""

NUMPY_DTYPES: dict[DType, numpy.dtype] = {
    DType.float16: numpy.dtype(numpy.float16),
    DType.bfloat16: numpy.dtype(ml_dtypes.bfloat16),
    DType.float32: numpy.dtype(numpy.float32),
    DType.float64: numpy.dtype(numpy.float64),
    DType.float8_e4m3fn: numpy.dtype(ml_dtypes.float8_e4m3fn),
    DType.float8_e5m2: numpy.dtype(ml_dtypes.float8_e5m2),
    DType.boolean: numpy.dtype(numpy.bool_),
    DType.int8: numpy.dtype(numpy.int8),
    DType.int16: numpy.dtype(numpy.int16),
    DType.int32: numpy.dtype(numpy.int32),
    DType.int64: numpy.dtype(numpy.int64),
    DType.uint8: numpy.dtype(numpy.uint8),
    DType.uint16: numpy.dtype(numpy.uint16),
    DType.uint32: numpy.dtype(numpy.uint32),
    DType.uint64: numpy.dtype(numpy.uint64),
}
_FROM_NUMPY = {dtype: ours for ours, dtype in NUMPY_DTYPES.items()}

_TORCH_NAMES = {ours: ours.name for ours in DType} | {DType.boolean: "bool"}

_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_DLPACK_CUDA_MANAGED = 13


def from_numpy_dtype(name: str, dtype: numpy.dtype) -> DType:
    """The element type of a NumPy or CuPy array.

    Raises:
        TypeError: we have no such type, or its bytes are not in this machine's order.
    """
    ours = _FROM_NUMPY.get(dtype)
    if ours is None:
        raise TypeError(f"{name}: elements of type {dtype!r} are not supported")
    return ours


class Adapter:
    """One library's arrays on one kind of device.

    Attributes:
        library: its name in messages.
        kind: kind of device of the arrays that this adapter sees.
        keeps_alive: whether inputs must be held until the kernel has run, because their owner does
            not know of it.
    """

    library: str = ""
    kind: DeviceKind = DeviceKind.cuda
    keeps_alive: bool = False

    def adopt(self, name: str, array: Array) -> Array:
        """The array in the form that the other methods take; shares memory."""
        return array

    def view(self, name: str, array: Array) -> TensorView:
        """What ``array`` is. ``name`` is the argument's, for messages."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        """A new contiguous array, on the current stream where that matters."""
        raise NotImplementedError

    def give(self, array: Array) -> Array:
        """A result of ``empty`` as the caller's type."""
        return array

    def current_stream(self, device: Device) -> int:
        """Handle of the stream on which this library's next operation would run."""
        raise NotImplementedError

    def scope(self, device: Device, stream: int | None) -> AbstractContextManager[Any]:
        """Where ``empty`` must be called so that it allocates on ``device`` for ``stream`` (None:
        the current one)."""
        return contextlib.nullcontext()

    def producers(self, array: Array) -> tuple[int, ...]:
        """Streams, other than the current one, that may still be writing ``array``."""
        return ()

    def to_numpy(self, array: Array) -> numpy.ndarray:
        """A copy on the CPU; waits for the GPU."""
        raise NotImplementedError


class NumpyAdapter(Adapter):
    """numpy.ndarray: served on the CPU."""

    library = "NumPy"
    kind = DeviceKind.cpu

    def view(self, name: str, array: Array) -> TensorView:
        if isinstance(array, numpy.ma.MaskedArray):
            raise TypeError(f"{name}: a masked array's mask would be ignored; pass its data")
        dtype = from_numpy_dtype(name, array.dtype)
        if any(stride % dtype.itemsize for stride in array.strides):
            raise ValueError(f"{name}: strides {array.strides} are not multiples of an element")
        return TensorView(
            pointer=array.ctypes.data,
            shape=array.shape,
            strides=tuple(stride // dtype.itemsize for stride in array.strides),
            dtype=dtype,
            device=CPU,
            readonly=not array.flags.writeable,
        )

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        return numpy.empty(shape, NUMPY_DTYPES[dtype])


class CupyAdapter(Adapter):
    """cupy.ndarray."""

    library = "CuPy"

    def __init__(self, module: Any) -> None:
        self._cupy = module

    def view(self, name: str, array: Array) -> TensorView:
        dtype = from_numpy_dtype(name, array.dtype)
        if any(stride % dtype.itemsize for stride in array.strides):
            raise ValueError(f"{name}: strides {array.strides} are not multiples of an element")
        return TensorView(
            pointer=array.data.ptr,
            shape=array.shape,
            strides=tuple(stride // dtype.itemsize for stride in array.strides),
            dtype=dtype,
            device=Device(DeviceKind.cuda, array.data.device_id),
        )

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        return self._cupy.empty(shape, NUMPY_DTYPES[dtype])

    def current_stream(self, device: Device) -> int:
        return self._cupy.cuda.get_current_stream(device.index).ptr

    @contextlib.contextmanager
    def scope(self, device: Device, stream: int | None) -> Iterator[None]:
        cuda = self._cupy.cuda
        with cuda.Device(device.index):
            if stream is None:
                yield
            else:
                # The pool files a block under the stream current at its allocation.
                with cuda.ExternalStream(stream, device.index):
                    yield

    def to_numpy(self, array: Array) -> numpy.ndarray:
        return self._cupy.asarray(array).get()

    # The short way of a call whose configuration is known (serve.Configuration).

    def signature(self, array: Array) -> tuple[Any, ...]:
        return array.shape, array.strides, array.dtype, array.data.device_id

    def pointer(self, array: Array) -> int:
        return array.data.ptr

    def is_current(self, index: int) -> bool:
        return self._cupy.cuda.runtime.getDevice() == index

    def allocator(self, dtype: DType, device: Device) -> Callable[[tuple[int, ...]], Array]:
        ndarray, element = self._cupy.ndarray, NUMPY_DTYPES[dtype]
        return lambda shape: ndarray(shape, element)

    def stream_getter(self, index: int) -> Callable[[], int]:
        get_current_stream = self._cupy.cuda.get_current_stream
        return lambda: get_current_stream(index).ptr


class TorchAdapter(Adapter):
    """torch.Tensor on a GPU. No CuPy is needed."""

    library = "PyTorch"

    def __init__(self, module: Any) -> None:
        self._torch = module
        self._dtypes = {
            ours: getattr(module, name)
            for ours, name in _TORCH_NAMES.items()
            if hasattr(module, name)
        }
        self._from_torch = {dtype: ours for ours, dtype in self._dtypes.items()}
        self._is_grad_enabled = module.is_grad_enabled
        self._forward_ad = module.autograd.forward_ad

    def view(self, name: str, array: Array) -> TensorView:
        torch = self._torch
        if array.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name}: the tensor requires grad, and attention does not record gradients yet; "
                "call it under torch.no_grad() or pass tensor.detach()"
            )
        if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"{name}: {type(array).__qualname__} intercepts operations and need not have "
                "memory of its own; pass the plain tensor behind it (such as DTensor.to_local())"
            )
        if array.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense (strided) tensor, got {array.layout}")
        if array.is_neg():
            raise TypeError(
                f"{name}: the tensor is a lazy negation, its memory holds the opposite values; "
                "pass tensor.resolve_neg()"
            )
        dtype = self._from_torch.get(array.dtype)
        if dtype is None:
            raise TypeError(f"{name}: elements of type {array.dtype} are not supported")
        try:
            pointer = array.data_ptr()
        except RuntimeError as error:
            raise TypeError(
                f"{name}: a tensor without memory ({error}); attention cannot run inside "
                "torch.func.vmap or jvp yet"
            ) from error
        if self._forward_ad.unpack_dual(array).tangent is not None:
            raise TypeError(
                f"{name}: the tensor has a forward-mode tangent, and attention does not record "
                "gradients yet; pass tensor.detach()"
            )
        return TensorView(
            pointer=pointer,
            shape=tuple(array.shape),
            strides=array.stride(),
            dtype=dtype,
            device=Device(DeviceKind.cuda, array.get_device()) if array.is_cuda else CPU,
        )

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        where = "cpu" if device.kind is DeviceKind.cpu else self._torch.device("cuda", device.index)
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=where)

    def current_stream(self, device: Device) -> int:
        return self._torch.cuda.current_stream(device.index).cuda_stream

    @contextlib.contextmanager
    def scope(self, device: Device, stream: int | None) -> Iterator[None]:
        cuda = self._torch.cuda
        if stream is None:
            yield
        else:
            with cuda.stream(cuda.ExternalStream(stream, device=device.index)):
                yield

    def to_numpy(self, array: Array) -> numpy.ndarray:
        return array.cpu().numpy()

    # The short way of a call whose configuration is known (serve.Configuration).

    def signature(self, array: Array) -> tuple[Any, ...]:
        # Asking a tensor for its tangent takes microseconds; outside of a level none has one.
        if self._forward_ad._current_level >= 0 or (
            array.requires_grad and self._is_grad_enabled()
        ):
            raise TypeError("may record gradients")  # the long way says it in full
        return array.shape, array.stride(), array.dtype, array.device

    def pointer(self, array: Array) -> int:
        return array.data_ptr()

    def is_current(self, index: int) -> bool:
        return True  # allocation and stream name their device

    def allocator(self, dtype: DType, device: Device) -> Callable[[tuple[int, ...]], Array]:
        empty, element = self._torch.empty, self._dtypes[dtype]
        where = self._torch.device("cuda", device.index)
        return lambda shape: empty(shape, dtype=element, device=where)

    def stream_getter(self, index: int) -> Callable[[], int]:
        raw = getattr(self._torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:
            return lambda: raw(index)
        current_stream = self._torch.cuda.current_stream
        return lambda: current_stream(index).cuda_stream


class TorchCpuAdapter(NumpyAdapter):
    """torch.Tensor on the CPU: its memory is shared with NumPy."""

    library = "PyTorch"

    def __init__(self, module: Any) -> None:
        self._torch = module
        self._tensors = TorchAdapter(module)

    def adopt(self, name: str, array: Array) -> Array:
        return _as_numpy(self._tensors.view(name, array), array)

    def give(self, array: Array) -> Array:
        if array.dtype == NUMPY_DTYPES[DType.bfloat16]:  # NumPy's own types only, says from_numpy
            return self._torch.from_numpy(array.view(numpy.int16)).view(self._torch.bfloat16)
        if array.dtype == NUMPY_DTYPES[DType.float8_e4m3fn]:
            return self._torch.from_numpy(array.view(numpy.int8)).view(self._torch.float8_e4m3fn)
        return self._torch.from_numpy(array)


class JaxCpuAdapter(NumpyAdapter):
    """jax.Array on the CPU: its memory is shared with NumPy, read-only."""

    library = "JAX"

    def adopt(self, name: str, array: Array) -> Array:
        return numpy.asarray(array)

    def give(self, array: Array) -> Array:
        return sys.modules["jax"].numpy.asarray(array)


class NumbaAdapter(Adapter):
    """numba.cuda device arrays; their stream is the one that they carry."""

    library = "Numba"

    def __init__(self, module: Any) -> None:
        self._cuda = module.cuda

    def view(self, name: str, array: Array) -> TensorView:
        return view_of_interface(name, array.__cuda_array_interface__)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        if dtype not in (DType.float16, DType.float32, DType.uint8):
            raise UnsupportedError(f"out: Numba has no arrays of {dtype}; pass CuPy arrays")
        return self._cuda.device_array(shape, NUMPY_DTYPES[dtype])

    @contextlib.contextmanager
    def scope(self, device: Device, stream: int | None) -> Iterator[None]:
        with self._cuda.gpus[device.index]:
            yield

    def current_stream(self, device: Device) -> int:
        return stream_handle(self._cuda.default_stream())

    def to_numpy(self, array: Array) -> numpy.ndarray:
        return array.copy_to_host()

    def producers(self, array: Array) -> tuple[int, ...]:
        return _interface_streams(array)


class InterfaceAdapter(CupyAdapter):
    """Any other object with ``__cuda_array_interface__``; results are CuPy arrays."""

    library = "__cuda_array_interface__"

    def view(self, name: str, array: Array) -> TensorView:
        return view_of_interface(name, array.__cuda_array_interface__)

    def producers(self, array: Array) -> tuple[int, ...]:
        return _interface_streams(array)


class DlpackAdapter(CupyAdapter):
    """Any other DLPack producer on a GPU; arrays are imported to CuPy, results are CuPy arrays.

    ``cupy.from_dlpack`` makes CuPy's current stream wait for the producer.
    """

    library = "DLPack"
    keeps_alive = True

    def adopt(self, name: str, array: Array) -> Array:
        return self._cupy.from_dlpack(array)


class JaxAdapter(DlpackAdapter):
    """jax.Array on a GPU, through CuPy in both directions without a copy; never written to."""

    library = "JAX"

    def view(self, name: str, array: Array) -> TensorView:
        return dataclasses.replace(super().view(name, array), readonly=True)

    def give(self, array: Array) -> Array:
        return sys.modules["jax"].dlpack.from_dlpack(array)


class EmulatedAdapter(Adapter):
    """cupyflash.emulate.EmulatedArray: memory of the CPU emulator of the kernels."""

    library = "emulated"
    kind = DeviceKind.emulated

    def __init__(self, device: Any) -> None:
        self._device = device

    def view(self, name: str, array: Array) -> TensorView:
        dtype = from_numpy_dtype(name, array.dtype)
        return TensorView(
            pointer=array.pointer,
            shape=tuple(array.shape),
            strides=tuple(stride // dtype.itemsize for stride in array.strides),
            dtype=dtype,
            device=Device(DeviceKind.emulated, array.device.index),
            readonly=array.readonly,
        )

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        return self._device.empty(shape, NUMPY_DTYPES[dtype])

    def current_stream(self, device: Device) -> int:
        return 0

    def to_numpy(self, array: Array) -> numpy.ndarray:
        return array.numpy()


class Outline:
    """What stands for the arrays of a program that is being compiled for a GPU: shapes and types
    are known, memory is not there yet. Every array gets an address that nothing else has, far from
    all others, by which a launch can be read back: ``buffer_at``.

    Args:
        index: the GPU.
    """

    _STEP = 1 << 44

    def __init__(self, index: int) -> None:
        self.index = index
        self.arrays: list[OutlinedArray] = []

    def array(self, shape: tuple[int, ...], dtype: numpy.dtype) -> OutlinedArray:
        """The next array, contiguous."""
        pointer = (len(self.arrays) + 1) * self._STEP
        self.arrays.append(OutlinedArray(self, pointer, tuple(shape), numpy.dtype(dtype)))
        return self.arrays[-1]

    def buffer_at(self, address: int) -> tuple[int, int] | None:
        """Which array an address is in, and how many bytes behind its first; None for null."""
        return (address // self._STEP - 1, address % self._STEP) if address else None


@dataclasses.dataclass(frozen=True, eq=False)
class OutlinedArray:
    """An array of an ``Outline``."""

    outline: Outline
    pointer: int
    shape: tuple[int, ...]
    dtype: numpy.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class OutlineAdapter(Adapter):
    """Arrays of an ``Outline``."""

    library = "JAX"

    def __init__(self, outline: Outline) -> None:
        self._outline = outline

    def view(self, name: str, array: Array) -> TensorView:
        return TensorView(
            pointer=array.pointer,
            shape=array.shape,
            strides=contiguous_strides(array.shape),
            dtype=from_numpy_dtype(name, array.dtype),
            device=Device(DeviceKind.cuda, self._outline.index),
        )

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        return self._outline.array(shape, NUMPY_DTYPES[dtype])


FAST: dict[type, CupyAdapter | TorchAdapter] = {}
"""Adapters by exact type of array, for the short way (``serve.lookup``); filled as they come."""


def adapter_for(arrays: dict[str, Array]) -> Adapter:
    """The one adapter of all arrays (by argument name).

    Raises:
        TypeError: something is not an array, or the arrays are of several libraries or kinds of
            device.
    """
    found = {name: _adapter(name, array) for name, array in arrays.items()}
    first = next(iter(found.values()))
    if any(type(adapter) is not type(first) for adapter in found.values()):
        places = ", ".join(f"{name} {_place(adapter)}" for name, adapter in found.items())
        raise TypeError(f"all arrays must be of one library and on one device, got {places}")
    return first


def _place(adapter: Adapter) -> str:
    where = {DeviceKind.cpu: "on the CPU", DeviceKind.cuda: "on a GPU"}.get(adapter.kind, "")
    return f"{adapter.library} {where}".strip()


def _adapter(name: str, array: Array) -> Adapter:
    kind = type(array)
    if kind is Quantized:
        raise UnsupportedError(
            f"{name}: a quantized tensor, which nothing but attention takes, all of q, k and v at "
            "a time; pass the array that it was made from"
        )
    for library, serve in _BY_MODULE.items():
        module = next(
            (base.__module__ for base in kind.__mro__ if base.__module__.split(".")[0] == library),
            None,
        )
        if module is not None:
            adapter = serve(name, array)
            if adapter is not None:
                return adapter
    if hasattr(array, "__cuda_array_interface__"):
        return InterfaceAdapter(_import_cupy(name, array))
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        if _dlpack_kind(name, array) is DeviceKind.cuda:
            return DlpackAdapter(_import_cupy(name, array))
        return _DlpackCpuAdapter()
    raise TypeError(
        f"{name}: expected an array (CuPy, PyTorch, JAX, Numba, NumPy, or any with DLPack), got "
        f"{kind.__module__}.{kind.__qualname__}"
    )


class _DlpackCpuAdapter(NumpyAdapter):
    """Any other DLPack producer on the CPU; results are NumPy arrays."""

    library = "DLPack"

    def adopt(self, name: str, array: Array) -> Array:
        return numpy.from_dlpack(array)


def _numpy_adapter(name: str, array: Array) -> Adapter | None:
    return NumpyAdapter() if isinstance(array, numpy.ndarray) else None


def _cupy_adapter(name: str, array: Array) -> Adapter | None:
    cupy = sys.modules["cupy"]
    if not isinstance(array, cupy.ndarray):
        return None
    adapter = CupyAdapter(cupy)
    return FAST.setdefault(cupy.ndarray, adapter) if type(array) is cupy.ndarray else adapter


def _torch_adapter(name: str, array: Array) -> Adapter | None:
    torch = sys.modules["torch"]
    if not isinstance(array, torch.Tensor):
        return None
    if array.device.type == "cpu":
        return TorchCpuAdapter(torch)
    if array.device.type != "cuda" or torch.version.hip:
        raise TypeError(
            f"{name}: expected a tensor on an NVIDIA GPU or the CPU, got one on {array.device}"
        )
    adapter = FAST.get(torch.Tensor)
    if adapter is None:
        adapter = TorchAdapter(torch)
        FAST[torch.Tensor] = FAST[torch.nn.Parameter] = adapter
    return adapter


def _jax_adapter(name: str, array: Array) -> Adapter | None:
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise UnsupportedError(
            f"{name}: a JAX tracer: inside of jax.jit, jax.grad and jax.vmap there is attention "
            "with its gradients and no other function; call this one on concrete arrays"
        )
    if not isinstance(array, jax.Array):
        return None
    if _dlpack_kind(name, array) is DeviceKind.cpu:
        return JaxCpuAdapter()
    return JaxAdapter(_import_cupy(name, array))


def _numba_adapter(name: str, array: Array) -> Adapter | None:
    if not hasattr(array, "__cuda_array_interface__"):
        return None
    return NumbaAdapter(sys.modules["numba"])


def _own_adapter(name: str, array: Array) -> Adapter | None:
    if isinstance(array, OutlinedArray):
        return OutlineAdapter(array.outline)
    emulate = sys.modules.get("cupyflash.emulate")
    if emulate is None or not isinstance(array, emulate.EmulatedArray):
        return None
    return EmulatedAdapter(array.device)


_BY_MODULE: dict[str, Callable[[str, Array], Adapter | None]] = {
    "cupy": _cupy_adapter,
    "torch": _torch_adapter,
    "numpy": _numpy_adapter,
    "jax": _jax_adapter,
    "jaxlib": _jax_adapter,
    "numba": _numba_adapter,
    "numba_cuda": _numba_adapter,
    "cupyflash": _own_adapter,
}


def _import_cupy(name: str, array: Array) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(
            f"{name}: arrays of {type(array).__module__} on a GPU are served through CuPy, which "
            f"is not installed ({error})"
        ) from error
    return cupy


def _dlpack_kind(name: str, array: Array) -> DeviceKind:
    device_type, _ = array.__dlpack_device__()
    if int(device_type) in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        return DeviceKind.cuda
    if int(device_type) == _DLPACK_CPU:
        return DeviceKind.cpu
    raise TypeError(
        f"{name}: expected an array on an NVIDIA GPU or the CPU, got DLPack device "
        f"type {int(device_type)}"
    )


def view_of_interface(name: str, interface: dict[str, Any]) -> TensorView:
    """A view of what a ``__cuda_array_interface__`` describes (versions 2 and 3)."""
    if interface.get("mask") is not None:
        raise TypeError(f"{name}: arrays with a mask are not supported")
    dtype = from_numpy_dtype(name, numpy.dtype(interface["typestr"]))
    shape = tuple(interface["shape"])
    pointer, readonly = interface["data"]
    strides = interface.get("strides")
    if strides is None:
        elements = contiguous_strides(shape)
    elif any(stride % dtype.itemsize for stride in strides):
        raise ValueError(f"{name}: strides {strides} are not multiples of an element")
    else:
        elements = tuple(stride // dtype.itemsize for stride in strides)
    return TensorView(
        pointer=pointer or 0,
        shape=shape,
        strides=elements,
        dtype=dtype,
        device=Device(DeviceKind.cuda, _device_of_pointer(pointer or 0)),
        readonly=bool(readonly),
    )


def _device_of_pointer(pointer: int) -> int:
    """The GPU that owns an address; the interface does not say."""
    return default_driver().device_of(pointer) if pointer else 0


def _interface_streams(array: Array) -> tuple[int, ...]:
    stream = array.__cuda_array_interface__.get("stream")
    return () if stream is None else (int(stream),)


def stream_handle(stream: object) -> int:
    """The CUstream of an int, or of a CuPy, PyTorch, Numba or ``__cuda_stream__`` stream.

    Raises:
        TypeError: it is none of these.
        ValueError: a negative handle.
    """
    if isinstance(stream, numbers.Integral) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"stream: expected a CUDA stream handle, got {stream}")
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version_and_handle = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for attribute in ("cuda_stream", "ptr"):  # PyTorch, CuPy
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    handle = getattr(stream, "handle", None)  # Numba: c_void_p or a CUstream of cuda-bindings
    if handle is not None:
        return int(getattr(handle, "value", handle) or 0)
    raise TypeError(
        "stream: expected an int, a CuPy or PyTorch stream, or an object with __cuda_stream__, got "
        f"{type(stream).__module__}.{type(stream).__qualname__}"
    )


class _HostMemory:
    """Memory of another library, described to NumPy; keeps its owner alive."""

    def __init__(self, view: TensorView, owner: Array) -> None:
        self._owner = owner
        itemsize = view.dtype.itemsize
        self.__array_interface__ = {
            "data": (view.pointer, view.readonly),
            "shape": view.shape,
            "strides": tuple(stride * itemsize for stride in view.strides),
            "typestr": f"<u{itemsize}",
            "version": 3,
        }


def _as_numpy(view: TensorView, owner: Array) -> numpy.ndarray:
    """A NumPy array over a CPU view's memory."""
    if view.size == 0:
        return numpy.empty(view.shape, NUMPY_DTYPES[view.dtype])
    return numpy.asarray(_HostMemory(view, owner)).view(NUMPY_DTYPES[view.dtype])
