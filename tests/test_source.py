"""The translation unit and its digest."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy
import pytest

from cupyflash import driver, params, select, source, tuning
from cupyflash.tensor import DType


def spec_of(family: str = "sm90", row: int = 0, mask: str = "causal") -> select.KernelSpec:
    target = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100f"}[family]
    chosen = tuning.FAMILIES[family]
    return select.spec_for(chosen, chosen.tiles[row], target, DType.bfloat16, mask)


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Path:
    """A copy of kernels_cu that a test may edit."""
    copy = tmp_path / "kernels_cu"
    shutil.copytree(source.include_root(), copy)
    monkeypatch.setattr(source, "include_root", lambda: copy)
    return copy


def test_text_holds_the_spec():
    spec = spec_of()
    text = source.translation_unit(spec).text
    assert '#include "sm90/forward.cuh"' in text
    assert "using Element = cf::bf16_t;" in text
    assert "using Mask = cf::CausalMask;" in text
    assert f"static constexpr int kBlockM = {spec.block_m};" in text
    assert f"ForwardLayout<Config>::kBytes == {spec.shared_bytes}" in text
    bounds = f"{spec.threads}, {spec.min_blocks}, {spec.cluster}"
    assert f"CF_KERNEL({spec.name}, cf::ForwardParams, {bounds})" in text
    for name, value in spec.options:
        assert f"static constexpr int k{name} = {value};" in text


def test_text_asserts_the_struct():
    text = source.translation_unit(spec_of()).text
    for field in params.FORWARD.fields:
        assert f"CF_OFFSETOF(cf::ForwardParams, {field.name}) == {field.offset}" in text
    assert f"sizeof(cf::ForwardParams) == {params.FORWARD.size}" in text


@pytest.mark.parametrize("family", tuning.FAMILIES)
def test_includes_are_transitive_and_leave_the_emulator_out(family):
    includes = source.translation_unit(spec_of(family)).includes
    assert {f"{family}/forward.cuh", "params.cuh", "types.cuh", "ptx/ptx.cuh"} <= set(includes)
    assert not any(name.startswith("emulate/") for name in includes)
    assert list(includes) == sorted(includes)


def test_digest_follows_what_is_compiled(kernels):
    spec = spec_of()
    first = source.translation_unit(spec)
    assert source.translation_unit(spec) == first
    others = [
        dataclasses.replace(spec, mask="none"),
        dataclasses.replace(spec, target="sm_90"),
        dataclasses.replace(spec, stages=3),
        dataclasses.replace(spec, dtype=DType.float16),
    ]
    digests = {first.digest, *(source.translation_unit(other).digest for other in others)}
    assert len(digests) == 1 + len(others)


def test_digest_follows_an_indirect_header(kernels):
    spec = spec_of()
    before = source.translation_unit(spec).digest
    header = kernels / "types.cuh"
    header.write_text(header.read_text() + "// edited\n")
    os.utime(header, ns=(1, 1))
    after = source.translation_unit(spec).digest
    assert before != after
    (kernels / "emulate" / "ptx.hpp").write_text("// not part of a cubin\n")
    assert source.translation_unit(spec).digest == after


def test_digest_ignores_where_the_sources_lie(tmp_path, monkeypatch):
    here = source.translation_unit(spec_of())
    copy = tmp_path / "kernels_cu"
    shutil.copytree(here.include_root, copy)
    monkeypatch.setattr(source, "include_root", lambda: copy)
    moved = source.translation_unit(spec_of())
    assert moved.include_root == copy != here.include_root
    assert moved.digest == here.digest


def test_line_info_is_asked_for_by_the_environment(monkeypatch):
    plain = source.translation_unit(spec_of())
    monkeypatch.setenv("CUPYFLASH_LINEINFO", "1")
    with_lines = source.translation_unit(spec_of())
    assert "--generate-line-info" in with_lines.options
    assert "--generate-line-info" not in plain.options
    assert with_lines.digest != plain.digest


@pytest.mark.parametrize(("threads", "registers"), [(384, 168), (512, 128)])
def test_registers_are_prescribed_where_the_kernel_moves_them(threads, registers):
    assert source.translation_unit(spec_of("sm80")).registers is None
    spec = dataclasses.replace(spec_of("sm90"), threads=threads)
    assert source.translation_unit(spec).registers == registers


def test_struct_layout_agrees_with_numpy():
    layout = params.FORWARD
    aligned = numpy.dtype([("head", layout.dtype), ("tail", "V1")])
    assert aligned["head"].itemsize == layout.size == layout.dtype.itemsize
    assert layout.size % 64 == 0
    for field in layout.fields:
        assert layout.dtype.fields[field.name][1] == field.offset


def test_the_tile_counter_is_the_last_address():
    for layout in (params.FORWARD, params.BACKWARD):
        assert layout.pointers[-1] == "tile_counter"
        addresses = {field.name for field in layout.fields if field.kind == "pointer"}
        assert len(layout.pointers) == len(addresses) and addresses == set(layout.pointers)
        assert len(addresses) <= driver.MAX_POINTERS


def test_pack_and_unpack():
    layout = params.FORWARD
    values = {name: index + 1 for index, name in enumerate(layout.scalar_names)}
    buffer = layout.pack(**values)
    assert len(buffer) == layout.size
    assert layout.unpack(buffer) == values
    record = numpy.frombuffer(buffer, layout.dtype)[0]
    assert all(record[name] == value for name, value in values.items())
    assert not any(buffer[: layout.scalars_offset])
    with pytest.raises(TypeError, match="q_map"):
        layout.pack(q_map=1)
    with pytest.raises(TypeError, match="no scalar member colour"):
        layout.pack(colour=1)


def test_pack_rejects_what_does_not_fit():
    import struct

    with pytest.raises(struct.error):
        params.FORWARD.pack(batch=2**31)
