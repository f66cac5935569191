"""The kernels that a wheel carries are those that its devices choose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from aot import recipes
from cupyflash import select
from cupyflash.problem import DeviceInfo, Mask, Problem
from cupyflash.tensor import DType

KIB = 1024
DEVICES = [
    DeviceInfo("A100", (8, 0), 108, 163 * KIB, 40 << 20),
    DeviceInfo("L40", (8, 9), 142, 99 * KIB, 96 << 20),
    DeviceInfo("H200", (9, 0), 132, 227 * KIB, 60 << 20),
    DeviceInfo("B200", (10, 0), 148, 227 * KIB, 126 << 20),
    DeviceInfo("RTX 5090", (12, 0), 170, 99 * KIB, 96 << 20),
]
MASKS = (Mask(), Mask(right=0), Mask(left=64, right=0))
# An odd number of query blocks, which a cluster would not take, and an even; too many for the tiles
# that are for few.
SEQLENS = (100, 1024, 4096)
HEADS = ((4, 4), (8, 2))  # of which a cluster takes two query heads together, and not
# Those that a general kernel serves have another name, whichever of its inputs they use.
KINDS: tuple[dict[str, Any], ...] = ({}, {"softcap": 30.0}, {"lengths": ("seqused_kv",)})


def problems(
    widths: Iterable[tuple[int, int]],
    dtypes: tuple[DType, ...] = (DType.bfloat16, DType.float16),
    masks: tuple[Mask, ...] = MASKS,
) -> Iterator[Problem]:
    """Problems of these head dimensions, of every length, number of heads and kind."""
    for (qk, v), dtype, mask, seqlen, heads, kind in itertools.product(
        widths, dtypes, masks, SEQLENS, HEADS, KINDS
    ):
        keys = max(seqlen, 1024)
        yield Problem(1, seqlen, keys, *heads, qk, v, dtype, mask, **kind)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_the_full_recipe_serves_every_device(device, head_dims):
    carried = set(recipes.specs("full"))
    for problem in problems([head_dims]):
        assert select.select(problem, device).spec in carried


def test_the_core_recipe_serves_its_devices_without_nvrtc():
    carried = set(recipes.specs("core"))
    widths = [(head_dim, head_dim) for head_dim in range(8, 257, 8)]
    for problem in problems(widths, (DType.bfloat16,)):
        for device in DEVICES[:3]:
            assert select.select(problem, device).spec in carried


def test_nothing_is_carried_twice_or_for_nobody():
    specs = recipes.specs("core")
    assert len(specs) == len(set(specs))
    widths = [(qk, v) for qk in range(8, 257, 8) for v in {qk, min(qk, 128)}]
    chosen = {
        select.select(problem, device).spec
        for problem in problems(widths)
        for device in DEVICES[:4]
    }
    assert {spec for spec in specs if spec.kernel == "forward"} <= chosen


def test_packed_sequences_and_launches_without_clusters_are_served():
    """raw_kernel asks for no clusters; lengths of packed sequences are bounds, or totals."""
    carried = set(recipes.specs("core"))
    for problem in problems([(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]):
        alone = dataclasses.replace(problem, clusters=False)
        packed = dataclasses.replace(
            problem, batch=3, rows_q=9000, lengths=("cu_seqlens_q", "cu_seqlens_kv")
        )
        for device in DEVICES[:3]:
            for case in (alone, packed):
                assert select.select(case, device).spec in carried


def test_general_kernels_are_carried_where_a_mask_has_bounds():
    specs = set(recipes.specs("core"))
    general = {spec for spec in specs if spec.general}
    assert general and {spec.mask for spec in general} == {"causal", "window"}
    plain = {dataclasses.replace(spec, general=False) for spec in general}
    assert plain == {spec for spec in specs - general if spec.mask != "none"}


def test_targets_replace_the_recipes_own():
    assert {spec.target for spec in recipes.specs("core", ("sm_120",))} == {"sm_120"}
    assert recipes.specs("none", ("sm_120",)) == ()
    with pytest.raises(ValueError, match="sm_42"):
        recipes.specs("core", ("sm_42",))
    with pytest.raises(ValueError, match="recipe"):
        recipes.specs("everything")
