"""The kernels that a wheel carries are those that its devices choose."""

from __future__ import annotations

import itertools

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
SEQLENS = (100, 1024)  # an odd number of query blocks, which a cluster would not take, and an even


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_the_full_recipe_serves_every_device(device, head_dims):
    carried = set(recipes.specs("full"))
    for dtype, mask, seqlen in itertools.product((DType.bfloat16, DType.float16), MASKS, SEQLENS):
        problem = Problem(1, seqlen, 1024, 4, 4, *head_dims, dtype, mask)
        assert select.select(problem, device).spec in carried


def test_the_core_recipe_serves_its_devices_without_nvrtc():
    carried = set(recipes.specs("core"))
    for device in DEVICES[:3]:
        for head_dim, seqlen in itertools.product(range(8, 257, 8), SEQLENS):
            problem = Problem(1, seqlen, 1024, 4, 4, head_dim, head_dim, DType.bfloat16)
            assert select.select(problem, device).spec in carried


def test_nothing_is_carried_twice_or_for_nobody():
    specs = recipes.specs("core")
    assert len(specs) == len(set(specs))
    chosen = {
        select.select(Problem(1, seqlen, 1024, 4, 4, qk, v, dtype, mask), device).spec
        for device in DEVICES[:4]
        for qk in range(8, 257, 8)
        for v in {qk, min(qk, 128)}
        for dtype in (DType.bfloat16, DType.float16)
        for mask in MASKS
        for seqlen in SEQLENS
    }
    assert set(specs) <= chosen


def test_targets_replace_the_recipes_own():
    assert {spec.target for spec in recipes.specs("core", ("sm_120",))} == {"sm_120"}
    assert recipes.specs("none", ("sm_120",)) == ()
    with pytest.raises(ValueError, match="sm_42"):
        recipes.specs("core", ("sm_42",))
    with pytest.raises(ValueError, match="recipe"):
        recipes.specs("everything")
