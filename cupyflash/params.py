"""The launch struct of a kernel: one field list for Python and for the check in CUDA.

A header of ``kernels_cu`` declares the struct, this file says where each field lies, and every
translation unit asserts that the two agree (``source.py``). A launch fills one buffer per call:

* ``FORWARD.pack(heads_q=8, ...)`` makes a zeroed buffer from named values (readable, for tests);
* ``FORWARD.scalars.pack_into(buffer, FORWARD.scalars_offset, *values)`` writes everything behind
  the tensor maps in one call, in the order of ``FORWARD.scalar_names`` (1.2 us for 74 fields);
* the tensor maps are encoded into the buffer by libcupyflash or by the emulator, each from one
  ``TensorMapRequest``.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

# kind: (size, alignment, struct code, NumPy type)
_KINDS: dict[str, tuple[int, int, str, Any]] = {
    "tensor_map": (128, 64, "128s", "V128"),
    "pointer": (8, 8, "Q", "<u8"),
    "int64": (8, 8, "q", "<i8"),
    "int32": (4, 4, "i", "<i4"),
    "float": (4, 4, "f", "<f4"),
}


@dataclass(frozen=True)
class Field:
    """A member of the struct: its name, its kind (a key of ``_KINDS``) and its byte offset."""

    name: str
    kind: str
    offset: int


@dataclass(frozen=True)
class StructLayout:
    """Where the members of one parameter struct lie, by the rules of C.

    Attributes:
        cpp_name: name of the struct.
        fields: members in order; tensor maps come first.
        size: ``sizeof``, bytes.
        header: where it is declared, below ``kernels_cu``.
    """

    cpp_name: str
    fields: tuple[Field, ...]
    size: int
    header: str = "params.cuh"

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each member."""
        return {field.name: field.offset for field in self.fields}

    @functools.cached_property
    def pointers(self) -> tuple[str, ...]:
        """Members that are addresses, in order, but the tile counter, if there is one, last."""
        names = [field.name for field in self.fields if field.kind == "pointer"]
        return tuple(sorted(names, key=lambda name: name == "tile_counter"))

    @functools.cached_property
    def mapped(self) -> tuple[str, ...]:
        """Tensors that have a tensor map, in order."""
        fields = (field for field in self.fields if field.kind == "tensor_map")
        return tuple(field.name.removesuffix("_map") for field in fields)

    @functools.cached_property
    def scalars_offset(self) -> int:
        """Offset of the first member that is not a tensor map."""
        return next(field.offset for field in self.fields if field.kind != "tensor_map")

    @functools.cached_property
    def scalar_names(self) -> tuple[str, ...]:
        """Members behind the tensor maps, in the order that ``scalars`` packs them."""
        return tuple(field.name for field in self.fields if field.kind != "tensor_map")

    @functools.cached_property
    def scalars(self) -> struct.Struct:
        """Packs all members behind the tensor maps in one call."""
        codes = []
        position = self.scalars_offset
        for field in self.fields:
            if field.kind == "tensor_map":
                continue
            size, _, code, _ = _KINDS[field.kind]
            codes.append("x" * (field.offset - position) + code)
            position = field.offset + size
        return struct.Struct("<" + "".join(codes))

    @functools.cached_property
    def dtype(self) -> Any:
        """The struct as a NumPy structured dtype (``cupy.RawKernel`` takes one by value)."""
        import numpy

        return numpy.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [_KINDS[field.kind][3] for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.size,
            }
        )

    def pack(self, **values: int | float) -> bytearray:
        """A buffer with these members set, zero elsewhere; tensor maps stay zero.

        Raises:
            TypeError: a name is not a member, or is a tensor map.
        """
        unknown = values.keys() - set(self.scalar_names)
        if unknown:
            raise TypeError(f"{self.cpp_name} has no scalar member {', '.join(sorted(unknown))}")
        buffer = bytearray(self.size)
        ordered = (values.get(name, 0) for name in self.scalar_names)
        self.scalars.pack_into(buffer, self.scalars_offset, *ordered)
        return buffer

    def unpack(self, buffer: bytes | bytearray | memoryview) -> dict[str, int | float]:
        """The scalar members of a packed buffer, by name (for messages and tests)."""
        values = self.scalars.unpack_from(buffer, self.scalars_offset)
        return dict(zip(self.scalar_names, values))


def _layout(
    cpp_name: str, members: list[tuple[str, str]], header: str = "params.cuh"
) -> StructLayout:
    fields = []
    position = 0
    largest = 1
    for name, kind in members:
        size, alignment, _, _ = _KINDS[kind]
        position = -(-position // alignment) * alignment
        fields.append(Field(name, kind, position))
        position += size
        largest = max(largest, alignment)
    return StructLayout(cpp_name, tuple(fields), -(-position // largest) * largest, header)


def _strides(tensor: str) -> list[tuple[str, str]]:
    return [(f"{tensor}_stride_{axis}", "int64") for axis in ("batch", "seqlen", "head")]


DEVICE_LENGTHS = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "seqused_q",
    "seqused_kv",
    "q_offset",
    "kv_offset",
)
"""Arrays of lengths and positions that general kernels read on the device."""

SCALE_KINDS = ("tensor", "head", "block", "token")
"""``cf::ScaleKind``, by number: ``fp8.Arrangement.kind``."""

SCALED = ("q", "k", "v")
"""Operands that have scales of their own where they are 8-bit floats."""

SCALES = (*(f"{tensor}_scale" for tensor in SCALED), "out_scale")
"""Arrays of scales that kernels of 8-bit floats read on the device."""

FORWARD = _layout(
    "cf::ForwardParams",
    [
        *((f"{tensor}_map", "tensor_map") for tensor in ("q", "k", "v", "out")),
        *((tensor, "pointer") for tensor in ("q", "k", "v", "out", "lse")),
        *((array, "pointer") for array in DEVICE_LENGTHS),
        ("tile_counter", "pointer"),
        *_strides("q"),
        *_strides("k"),
        *_strides("v"),
        *_strides("out"),
        ("lse_stride_batch", "int64"),
        ("lse_stride_head", "int64"),
        ("mask_left", "int64"),
        ("mask_right", "int64"),
        *(
            (name, "int32")
            for name in (
                "batch",
                "seqlen_q",
                "seqlen_kv",
                "heads_q",
                "heads_kv",
                "head_dim_qk",
                "head_dim_v",
                "group",
                "rows_q",
                "rows_kv",
                "q_batch_rows",
                "k_batch_rows",
                "v_batch_rows",
                "bottom_right",
                "num_m_blocks",
                "num_tiles",
                "section_heads",
                "section_rows",
                "tail_heads",
                "clear_out",
            )
        ),
        *(
            (name, "float")
            for name in ("softmax_scale", "softmax_scale_log2", "softcap", "softcap_slope")
        ),
        *((array, "pointer") for array in SCALES),
        ("v_stride_dim", "int64"),
        *(
            (f"{tensor}_scale_stride_{axis}", "int64")
            for tensor in SCALED
            for axis in ("batch", "head", "block")
        ),
        *(
            (f"{tensor}_scale_{what}", "int32")
            for tensor in SCALED
            for what in ("kind", "tokens_log2")
        ),
        ("v_slot_log2", "int32"),
        ("v_columns", "int32"),
    ],
)
"""Layout of ``cf::ForwardParams``; ``kernels_cu/params.cuh`` says what each member means."""

MAPPED_BACKWARD = ("q", "k", "v", "dout", "dq", "dk", "dv")
"""Tensors of a backward pass that have a tensor map, in the order of ``cf::BackwardParams``."""

BACKWARD = _layout(
    "cf::BackwardParams",
    [
        *((f"{tensor}_map", "tensor_map") for tensor in MAPPED_BACKWARD),
        *(
            (array, "pointer")
            for array in (
                *("q", "k", "v", "out", "dout", "dout_given", "lse", "dlse", "delta"),
                *("dq", "dk", "dv"),
                *("row_lse", "row_delta", "dq_sums", "dq_turns"),
                *DEVICE_LENGTHS,
                "tile_counter",
            )
        ),
        *_strides("q"),
        *_strides("k"),
        *_strides("v"),
        *_strides("out"),
        *_strides("dout"),
        *_strides("dout_given"),
        ("dout_given_stride_dim", "int64"),
        *_strides("dq"),
        *_strides("dk"),
        *_strides("dv"),
        *(
            (f"{tensor}_stride_{axis}", "int64")
            for tensor in ("lse", "dlse", "delta")
            for axis in ("batch", "head", "seqlen")
        ),
        ("mask_left", "int64"),
        ("mask_right", "int64"),
        *(
            (name, "int32")
            for name in (
                *("batch", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv"),
                *("head_dim_qk", "head_dim_v", "group", "rows_q", "rows_kv"),
                *("q_batch_rows", "k_batch_rows", "v_batch_rows", "dout_batch_rows"),
                *("bottom_right", "block_m", "width_qk", "num_m_blocks", "num_slots"),
                *("num_n_blocks", "num_tiles", "section_heads"),
                *("num_query_blocks", "num_query_tiles", "query_section_heads"),
                *("float_grads", "accumulate", "clear_grads", "copy_dout", "vectors"),
            )
        ),
        *(
            (name, "float")
            for name in (
                *("softmax_scale", "softmax_scale_log2", "softcap", "softcap_slope"),
                "grad_scale",
            )
        ),
    ],
    header="backward_params.cuh",
)
"""Layout of ``cf::BackwardParams``; ``kernels_cu/backward_params.cuh`` says what each member means.
"""

SCALED_BACKWARD = ("q", "k", "v", "dout")
"""Tensors that come with scales where a backward pass is over 8-bit floats."""


def _backward_fp8() -> StructLayout:
    """The members of ``cf::BackwardFp8Params``: its own, then those of its ``base``."""
    own = _layout(
        "cf::BackwardFp8Params",
        [
            *((f"{tensor}_t_map", "tensor_map") for tensor in ("q", "k", "dout")),
            *((f"{tensor}_t", "pointer") for tensor in ("q", "k", "dout")),
            *((f"{tensor}_scale", "pointer") for tensor in SCALED_BACKWARD),
            ("slot_scales", "pointer"),
            *(
                (f"{tensor}_scales.{member}", "int64")
                for tensor in SCALED_BACKWARD
                for member in ("batch", "head", "block", "tokens_log2")
            ),
        ],
        header="backward_fp8_params.cuh",
    )
    nested = tuple(
        Field(f"base.{field.name}", field.kind, own.size + field.offset)
        for field in BACKWARD.fields
    )
    return StructLayout(
        own.cpp_name, own.fields + nested, own.size + BACKWARD.size, header=own.header
    )


BACKWARD_FP8 = _backward_fp8()
"""Layout of ``cf::BackwardFp8Params``; ``kernels_cu/backward_fp8_params.cuh`` says what each member
means."""

MAX_MERGE_PARTS = 32
"""Parts that one launch merges: ``cf::kMaxMergeParts``."""

MERGE_STRIDES = tuple(
    f"{array}_stride_{axis}"
    for array, axes in (("out", ("batch", "seqlen", "head")), ("lse", ("batch", "head", "seqlen")))
    for axis in axes
)
"""Strides of a part of a merge, and of its result."""

MERGE = _layout(
    "cf::MergeParams",
    [
        ("out", "pointer"),
        ("lse", "pointer"),
        *((stride, "int64") for stride in MERGE_STRIDES),
        *(
            (name, "int32")
            for name in (
                "seqlen",
                "heads",
                "head_dim",
                "num_rows",
                "num_parts",
                "lanes_log2",
                "vectors",
            )
        ),
        *(
            (f"parts[{part}].{name}", kind)
            for part in range(MAX_MERGE_PARTS)
            for name, kind in (
                ("out", "pointer"),
                ("lse", "pointer"),
                *((stride, "int64") for stride in MERGE_STRIDES),
            )
        ),
    ],
    header="any/params.cuh",
)
"""Layout of ``cf::MergeParams``, its array of parts member by member."""

QUANTIZE_STAGES = ("whole", "tops", "reduce", "convert")
"""``cf::QuantizeStage``, by number."""
MAX_PIECES = 16
"""Pieces of 16 channels of a token: ``cf::kMaxPieces``."""

QUANTIZE = _layout(
    "cf::QuantizeParams",
    [
        *((array, "pointer") for array in ("x", "data", "data_t", "scale", "tops", "cu_seqlens")),
        *_strides("x"),
        *_strides("data"),
        *((f"data_t_stride_{axis}", "int64") for axis in ("batch", "head", "channel")),
        *((f"scale_stride_{axis}", "int64") for axis in ("batch", "head")),
        *(
            (name, "int32")
            for name in (
                *("sequences", "rows", "heads", "head_dim", "pieces", "reciprocal", "slot_log2"),
                *("num_slots", "num_tiles", "stage", "kind", "row_pairs", "rotation_width"),
                *(f"negated[{piece}]" for piece in range(MAX_PIECES)),
            )
        ),
        ("rotation_factor", "float"),
    ],
    header="any/quantize_params.cuh",
)
"""Layout of ``cf::QuantizeParams``; ``kernels_cu/any/quantize_params.cuh`` says what each member
means."""


@dataclass(frozen=True)
class TensorMapRequest:
    """One TMA tensor map to encode into a parameter buffer.

    Attributes:
        offset: byte offset of the map in the parameter struct.
        pointer: address of element 0; 16-byte aligned.
        shift_bytes: what to add to ``pointer`` for the base address of the map.
        element_bytes: size of an element.
        dims: extents in elements, fastest first.
        strides_bytes: strides of all dimensions but the fastest; multiples of 16.
        box: elements copied along each dimension by one instruction.
        swizzle: span in bytes (0 for none, 32, 64 or 128); at least ``box[0] * element_bytes``.
    """

    offset: int
    pointer: int
    element_bytes: int
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    shift_bytes: int = 0
