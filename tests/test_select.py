"""Candidates, rules and choice: no GPU, no compiler."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy
import pytest

from cupyflash import select, tuning
from cupyflash.errors import UnsupportedError
from cupyflash.problem import DeviceInfo, Mask, Problem
from cupyflash.schedule import describe_work
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


def packed(batch: int, total_q: int, total_kv: int, **changes: object) -> Problem:
    """Packed sequences, of which nothing more is known than the totals."""
    given = {"lengths": ("cu_seqlens_q", "cu_seqlens_kv"), **changes}
    return problem(
        **{"batch": batch, "seqlen_q": total_q, "seqlen_kv": total_kv, **given},
        rows_q=total_q,
        rows_kv=total_kv,
    )


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
        (A100, {"dtype": DType.float8_e4m3fn, "out_dtype": None}, "fp8: has no fp8 kernel yet"),
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


def explain(case: Problem, device: DeviceInfo) -> str:
    return select.explain(case, device, lambda spec: f"found {spec.target}", describe_work)


def test_explain_names_problem_kernel_cubin_and_the_rest():
    text = explain(problem(mask=Mask(None, 0)), H200)
    assert "batch 2, seqlen 1000 x 1000, heads 8/2, head_dim 128, bfloat16" in text
    assert "kernel   forward_sm90_bf16_d128_" in text
    assert "cubin    found sm_90a" in text
    assert "preference: forward_sm90_" in text
    assert re.search(r"\nwork     \d+ of \d+ key blocks visited \(\d\d\.\d %\)\n", text)
    unsupported = explain(problem(dtype=DType.float32, out_dtype=None), H200)
    assert "kernel   none" in unsupported and "serves float16 and bfloat16" in unsupported
    assert "\nother candidates, each" in text and "\ncandidates, each" in unsupported
    assert "\nwork " not in unsupported


def test_explain_says_what_the_device_decides():
    names = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_kv")
    case = packed(7, 5000, 9000, lengths=names, softcap=30.0)
    text = explain(case, H200)
    assert "packed, batch 7, total 5000 x 9000, heads 8/2" in text
    assert "softcap 30" in text and f"on the device {', '.join(names)}" in text
    assert f"work     known on the device only, by {', '.join(names)}\n" in text
    assert "_general_causal for sm_90a" in text


def test_explain_knows_what_limits_a_call():
    shifted = problem(mask=Mask(None, 0), position_offset=-7)
    assert "(bottom_right) offset -7" in explain(shifted, H200)
    text = explain(problem(num_sms=8), A100)
    assert "kernel   none" in text and "num_sms: the kernel runs one block a tile" in text
    assert chosen(H200, num_sms=8).scheduler == "persistent"


def test_names_are_unique_within_a_target():
    for family in tuning.FAMILIES.values():
        names = [
            select.spec_for(family, tile, "sm_80", dtype, mask, general).name
            for tile in family.tiles
            for dtype in tile.dtypes
            for mask in tile.masks
            for general in (False, True)
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
    assert not any(plan.ragged for plan in plans.values())
    assert select.tensor_maps(chosen(A100)) == ()


def test_tensor_maps_of_general_kernels_are_ragged():
    for device in (H200, B200):
        spec = chosen(device, lengths=("seqused_kv",))
        assert [plan.ragged for plan in select.tensor_maps(spec)] == [True] * 4
    assert select.tensor_maps(chosen(A100, softcap=1.0)) == ()


# --- general kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [A100, A10, H200, B200, RTX5090], ids=lambda d: d.name)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 136, 192, 256])
def test_lengths_and_softcap_are_served_everywhere(device, head_dim):
    masks = (Mask(), Mask(None, 0), Mask(100, 0))
    given = ({"softcap": 30.0}, {"lengths": ("seqused_q",)}, {"lengths": ("q_offset",)})
    for mask, changes in itertools.product(masks, given):
        spec = chosen(device, head_dim, mask=mask, **changes)
        assert spec.general and f"_general_{spec.mask}" in spec.name
        assert spec.mask in ("causal", "window"), "general kernels have no kind without a bound"
        assert spec.shared_bytes <= device.shared_memory_per_block
        assert not chosen(device, head_dim, mask=mask).general
        case = packed(4, 3000, 5000, head_dim_qk=head_dim, head_dim_v=head_dim, mask=mask)
        assert select.select(case, device).spec.general


def test_the_mask_kind_of_lengths_that_the_host_does_not_know():
    """What may hide a key somewhere counts, whatever the bounds of the lengths say."""
    unknown = {"lengths": ("seqused_kv",)}
    one = {"seqlen_q": 1, "mask": Mask(None, 0)}
    assert problem(**one).mask_kind == "none", "one query, aligned to the last key, sees all"
    for changes in (one, {}, {"mask": Mask(None, 10**9)}):
        assert problem(**changes, **unknown).mask_kind == "causal"
    assert problem(mask=Mask(10**9, None), **unknown).mask_kind == "window"
    assert problem(mask=Mask(10**9, None)).mask_kind == "none"
    assert problem(softcap=1.0).mask_kind == "causal"
    assert problem(softcap=1.0, mask=Mask(10**9, None)).mask_kind == "causal"


def test_a_family_without_general_kernels_is_ruled_out_whole(monkeypatch):
    monkeypatch.setitem(
        tuning.FAMILIES, "sm90", dataclasses.replace(tuning.FAMILIES["sm90"], general=False)
    )
    for changes, reason in (
        ({"softcap": 5.0}, "lengths: has no softcap yet"),
        ({"lengths": ("seqused_kv", "q_offset")}, "lengths: does not read seqused_kv yet"),
    ):
        choice = select.select(problem(**changes), H200)
        assert (choice.spec.family, choice.spec.target) == ("sm80", "sm_90")
        assert dict(choice.rejections)[whole("sm90")] == reason
    assert chosen(H200).family == "sm90"


def test_siblings_are_of_the_same_kind():
    for changes in ({}, {"softcap": 1.0}):
        spec = chosen(H200, 64, mask=Mask(None, 0), **changes)
        others = select.siblings(spec)
        assert others and {other.general for other in others} == {spec.general}
        assert {other.mask for other in others} == {spec.mask}


# --- rules of one tile ----------------------------------------------------------------------------


def test_tiles_for_short_sequences_serve_no_longer_ones():
    """The two tiles differ in their size; the limit is that of queries and of keys."""
    limited = [tile for tile in tuning.FAMILIES["sm90"].tiles if tile.max_seqlen is not None]
    assert limited
    for tile in limited:
        width, limit = tile.head_dim_qk, tile.max_seqlen
        causal = {"mask": Mask(None, 0), "heads_kv": 8}  # no pairs of heads
        short = problem(width, seqlen_q=limit, seqlen_kv=limit, **causal)
        spec = select.select(short, H200).spec
        assert (spec.block_m, spec.block_n) == (tile.block_m, tile.block_n)
        for longer in ({"seqlen_q": limit + 1}, {"seqlen_kv": limit + 1}):
            case = problem(width, **{"seqlen_q": limit, "seqlen_kv": limit, **longer, **causal})
            choice = select.select(case, H200)
            assert choice.spec != spec
            reason = dict(choice.rejections)[spec.name]
            wanted = f"at most {limit} queries and keys, got {limit + 1}"
            assert reason == f"lengths: the tile is for {wanted}"
    # A bound of packed lengths says as much.
    for bound, expected in ((limit, True), (limit + 1, False)):
        case = packed(9, 9000, 9000, seqlen_q=bound, seqlen_kv=bound, **causal)
        case = dataclasses.replace(case, head_dim_qk=width, head_dim_v=width)
        assert (select.select(case, H200).spec.block_m == tile.block_m) is expected


@pytest.mark.parametrize(("heads", "pairs"), [((8, 2), True), ((8, 8), False), ((9, 3), False)])
def test_pairs_of_heads_share_their_keys(heads, pairs):
    heads_q, heads_kv = heads
    case = {"heads_q": heads_q, "heads_kv": heads_kv, "seqlen_q": 4096, "seqlen_kv": 4096}
    choice = select.select(problem(mask=Mask(None, 0), **case), H200)
    spec = choice.spec
    assert (spec.option("PairHeads") == 1) is (spec.cluster == 2) is pairs
    assert ("_heads1_" in spec.name) is pairs
    assert spec.slot_heads == (2 if pairs else 1) and spec.slot_rows == spec.block_m
    if not pairs:
        group = heads_q // heads_kv
        words = f"cluster: {group} query heads share a key head, its blocks take them in pairs"
        assert words in dict(choice.rejections).values()


def test_blocks_of_a_cluster_on_neighbouring_queries():
    spec = chosen(H200, seqlen_q=4096)
    assert (spec.cluster, spec.slot_heads, spec.slot_rows) == (2, 1, 2 * spec.block_m)
    assert spec.option("PairHeads") == spec.option("no such option") == 0
    assert spec.m_blocks(problem(seqlen_q=4096)) == 4096 // (2 * spec.block_m)
    odd = select.select(problem(seqlen_q=spec.block_m), H200)
    assert odd.spec.cluster == 1
    reason = dict(odd.rejections)[spec.name]
    assert reason == "cluster: 1 of the 2 blocks of a head, 2 in a cluster, would be idle"


@pytest.mark.parametrize("mask", [Mask(), Mask(None, 0)])
def test_a_launch_without_clusters_gets_none(mask):
    """As CuPy's RawKernel is launched (raw_kernel)."""
    case = problem(seqlen_q=4096, seqlen_kv=4096, mask=mask)
    assert select.select(case, H200).spec.cluster == 2
    choice = select.select(dataclasses.replace(case, clusters=False), H200)
    assert choice.spec.cluster == 1
    assert "cluster: the launch has no clusters of blocks" in dict(choice.rejections).values()
    for family in tuning.FAMILIES.values():
        for tile in family.tiles:
            served = {mask for other in family.tiles if other.cluster == 1 for mask in other.masks}
            assert set(tile.masks) <= served


@pytest.mark.parametrize("seed", range(5))
def test_packed_sequences_have_query_blocks_enough(seed):
    """The slots of attn/scheduler.cuh: sequence b owns those from start / rows + b on."""
    rng = numpy.random.default_rng(seed)
    spec = chosen(H200, mask=Mask(None, 0))
    rows = spec.slot_rows
    for lengths in (rng.integers(0, 3 * rows, 40), [0] * 7, [rows] * 9, [1] * 300, []):
        starts = numpy.cumsum([0, *lengths])
        case = packed(len(lengths), int(starts[-1]), 100)
        first = starts // rows + numpy.arange(len(starts))
        assert first[-1] == spec.m_blocks(case)
        assert (numpy.diff(first) >= -(-numpy.asarray(lengths) // rows)).all()
    assert spec.m_blocks(problem(seqlen_q=rows + 1)) == 2


def test_a_grid_holds_the_blocks_of_all_packed_sequences():
    case = packed(2, (1 << 29) - 1, 1000, heads_q=8)
    tiles = chosen(A100).m_blocks(case) * 8
    assert tiles < select.MAX_TILES and select.select(case, A100)
    with pytest.raises(UnsupportedError) as caught:
        select.select(dataclasses.replace(case, heads_q=2 * 8 * select.MAX_TILES // tiles), A100)
    assert any("tiles exceed" in reason for _, reason in caught.value.rejections)


def test_tuning_rows_are_complete():
    for family in tuning.FAMILIES.values():
        known = {option.name for option in family.options}
        limit = 227 * KIB if family.uses_tma else 163 * KIB
        for tile in family.tiles:
            assert tile.reason and len(tile.date) == len("2026-01-01")
            assert {name for name, _ in tile.options} <= known
            assert set(tile.masks) <= set(tuning.MASKS)
            assert family.shared_bytes(tile) <= limit
