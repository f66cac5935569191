"""Candidates, rules and choice: no GPU, no compiler."""

from __future__ import annotations

import dataclasses

import pytest

from cupyflash import select, tuning
from cupyflash.errors import UnsupportedError
from cupyflash.problem import DeviceInfo, Mask, Problem
from cupyflash.tensor import DType

KIB = 1024
A100 = DeviceInfo("A100", (8, 0), 108, 163 * KIB, 40 << 20)
A10 = DeviceInfo("A10", (8, 6), 72, 99 * KIB, 6 << 20)
L40 = DeviceInfo("L40", (8, 9), 142, 99 * KIB, 96 << 20)
H200 = DeviceInfo("H200", (9, 0), 132, 227 * KIB, 60 << 20)
B200 = DeviceInfo("B200", (10, 0), 148, 227 * KIB, 126 << 20)
B300 = DeviceInfo("B300", (10, 3), 148, 227 * KIB, 126 << 20)
RTX5090 = DeviceInfo("RTX 5090", (12, 0), 170, 99 * KIB, 96 << 20)
V100 = DeviceInfo("V100", (7, 0), 80, 96 * KIB, 6 << 20)


def problem(head_dim: int = 128, **changes: object) -> Problem:
    base = Problem(2, 1000, 1000, 8, 2, head_dim, head_dim, DType.bfloat16)
    return dataclasses.replace(base, **changes)


def whole(family: str) -> str:
    """Label of a family that is ruled out as a whole."""
    return f"{family} (all {len(tuning.FAMILIES[family].tiles)} tiles)"


def chosen(device: DeviceInfo, head_dim: int = 128, **changes: object) -> select.KernelSpec:
    return select.select(problem(head_dim, **changes), device).spec


@pytest.mark.parametrize(
    ("device", "family", "target"),
    [
        (A100, "sm80", "sm_80"),
        (A10, "sm80", "sm_80"),
        (L40, "sm80", "sm_80"),
        (H200, "sm90", "sm_90a"),
        (B200, "sm100", "sm_100f"),
        (B300, "sm100", "sm_100f"),
        (RTX5090, "sm80", "sm_120"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_family_and_target_follow_the_device(device, family, target):
    spec = chosen(device)
    assert (spec.family, spec.target) == (family, target)


@pytest.mark.parametrize("device", [A100, A10, L40, H200, B200, RTX5090], ids=lambda d: d.name)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_multiple_of_8_up_to_256_has_a_kernel_that_fits(device, head_dim):
    for mask in (Mask(), Mask(None, 0), Mask(100, 0)):
        spec = chosen(device, head_dim, mask=mask)
        assert spec.head_dim_qk >= head_dim and spec.head_dim_v >= head_dim
        assert spec.shared_bytes <= device.shared_memory_per_block


@pytest.mark.parametrize(
    ("head_dim", "width"),
    [(8, 64), (64, 64), (72, 96), (96, 96), (104, 128), (136, 192), (200, 256)],
)
def test_the_narrowest_tile_is_chosen(head_dim, width):
    assert chosen(H200, head_dim).head_dim_qk == width


def test_wide_keys_with_narrower_values_have_a_tile_of_their_own():
    spec = chosen(H200, 192, head_dim_v=128)
    assert (spec.head_dim_qk, spec.head_dim_v) == (192, 128)
    assert "_d192v128_" in spec.name


def test_blackwell_serves_other_widths_with_the_sm80_family():
    choice = select.select(problem(256), B200)
    assert (choice.spec.family, choice.spec.target) == ("sm80", "sm_100")
    reasons = dict(choice.rejections)
    assert any("256" in reason for name, reason in reasons.items() if "sm100" in name)


@pytest.mark.parametrize(
    ("mask", "kind"), [(Mask(), "none"), (Mask(None, 0), "causal"), (Mask(64, 0), "window")]
)
def test_mask_kind_is_part_of_the_kernel(mask, kind):
    spec = chosen(H200, mask=mask)
    assert spec.mask == kind and spec.name.endswith(f"_{kind}")


def test_tensors_that_tma_cannot_address_fall_to_the_sm80_family():
    strided = problem(no_tma=(("k", "a negative stride"),))
    choice = select.select(strided, H200)
    assert (choice.spec.family, choice.spec.target) == ("sm80", "sm_90")
    reason = dict(choice.rejections)[whole("sm90")]
    assert reason == "addresses: TMA cannot address k: a negative stride"


@pytest.mark.parametrize(
    ("device", "changes", "words"),
    [
        (V100, {}, "device: needs compute capability"),
        (A100, {"dtype": DType.float32, "out_dtype": None}, "dtype: serves float16 and bfloat16"),
        (A100, {"dtype": DType.float8_e4m3fn, "out_dtype": None}, "dtype: serves"),
        (A100, {"head_dim_qk": 100}, "head_dim of q and k must be a multiple of 8"),
        (A100, {"head_dim_v": 264}, "head_dim of v must be a multiple of 8 up to 256, got 264"),
        (A100, {"unaligned": (("v", "an odd base"),)}, "cp.async cannot address v: an odd base"),
        (A100, {"batch": 1 << 20, "heads_q": 1 << 12}, "tiles exceed"),
    ],
)
def test_what_no_kernel_serves_lists_every_candidate(device, changes, words):
    with pytest.raises(UnsupportedError) as caught:
        chosen(device, **changes)
    error = caught.value
    assert isinstance(error, NotImplementedError)
    assert any(words in reason for _, reason in error.rejections)
    assert {"sm80", "sm90", "sm100"} <= {
        family for family in tuning.FAMILIES for name, _ in error.rejections if family in name
    }
    for name, reason in error.rejections:
        assert name in str(error) and reason in str(error)


def test_every_candidate_but_the_chosen_is_accounted_for():
    case = problem()
    choice = select.select(case, A10)
    labels = [name for name, _ in choice.rejections]
    specs = [candidate.spec for candidate in select.candidates(case, A10)]
    alive = [spec.name for spec in specs if spec.family == "sm80"]
    assert sorted([*labels, choice.spec.name]) == sorted([*alive, whole("sm90"), whole("sm100")])


def test_forced_family(monkeypatch, caplog):
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm80")
    with caplog.at_level("INFO", "cupyflash"):
        spec = chosen(H200)
    assert (spec.family, spec.target) == ("sm80", "sm_90")
    assert "CUPYFLASH_FAMILY=sm80" in caplog.text
    monkeypatch.setenv("CUPYFLASH_FAMILY", "sm90")
    with pytest.raises(UnsupportedError, match="CUPYFLASH_FAMILY=sm90 is set"):
        chosen(A100)
    monkeypatch.setenv("CUPYFLASH_FAMILY", "volta")
    with pytest.raises(ValueError, match="expected one of"):
        chosen(A100)


def test_explain_names_problem_kernel_cubin_and_the_rest():
    text = select.explain(problem(mask=Mask(None, 0)), H200, lambda spec: f"found {spec.target}")
    assert "batch 2, seqlen 1000 x 1000, heads 8/2, head_dim 128, bfloat16" in text
    assert "kernel   forward_sm90_bf16_d128_" in text
    assert "cubin    found sm_90a" in text
    assert "preference: forward_sm90_" in text
    unsupported = select.explain(problem(dtype=DType.float32, out_dtype=None), H200, str)
    assert "kernel   none" in unsupported and "serves float16 and bfloat16" in unsupported
    assert "\nother candidates, each" in text and "\ncandidates, each" in unsupported


def test_explain_knows_what_limits_a_call():
    shifted = problem(mask=Mask(None, 0), position_offset=-7)
    assert "(bottom_right) offset -7" in select.explain(shifted, H200, str)
    text = select.explain(problem(num_sms=8), A100, str)
    assert "kernel   none" in text and "num_sms: the kernel runs one block a tile" in text
    assert chosen(H200, num_sms=8).scheduler == "persistent"


def test_names_are_unique_within_a_target():
    for family in tuning.FAMILIES.values():
        names = [
            select.spec_for(family, tile, "sm_80", dtype, mask).name
            for tile in family.tiles
            for dtype in tile.dtypes
            for mask in tile.masks
        ]
        assert len(names) == len(set(names))


def test_specs_can_be_pasted_back():
    spec = chosen(H200)
    namespace = {"KernelSpec": select.KernelSpec, "DType": DType}
    assert eval(repr(spec), namespace) == spec


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_tensor_maps_cut_tiles_into_swizzle_spans(head_dim):
    spec = chosen(H200, head_dim)
    plans = {plan.tensor: plan for plan in select.tensor_maps(spec)}
    assert list(plans) == ["q", "k", "v", "out"]
    for plan in plans.values():
        assert plan.chunk * 2 == plan.swizzle == (64 if head_dim == 96 else 128)
        assert spec.head_dim_qk % plan.chunk == 0 and plan.rows <= 256
    assert plans["k"].rows == plans["v"].rows == spec.block_n // spec.cluster
    assert plans["q"].rows == plans["out"].rows == 64
    assert select.tensor_maps(chosen(A100)) == ()


def test_tuning_rows_are_complete():
    for family in tuning.FAMILIES.values():
        known = {option.name for option in family.options}
        limit = 227 * KIB if family.uses_tma else 163 * KIB
        for tile in family.tiles:
            assert tile.reason and len(tile.date) == len("2026-01-01")
            assert {name for name, _ in tile.options} <= known
            assert set(tile.masks) <= set(tuning.MASKS)
            assert family.shared_bytes(tile) <= limit
