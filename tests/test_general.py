"""Lengths on the device, offsets of each sequence and capped scores, on every path.

Rows that belong to no sequence hold NaN in the inputs: none may reach a result. In an output that
the call allocates they are 0, in the caller's they stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from tests import cases, paths
from tests.cases import EMULATED, RACE, GeneralCase
from tests.paths import SCHEDULES, TARGETS, EmulatedPath, emulated


def grouped(values: Any) -> list[Any]:
    """Parameters marked for ``pytest -n 2 --dist loadgroup``: one worker builds each kernel."""
    return [
        pytest.param(
            target,
            case,
            id=f"{target}-{case}",
            marks=[
                *emulated,
                pytest.mark.xdist_group(f"{target}-{case.dtype}-{case.head_dim}-{case.window}"),
            ],
        )
        for target in TARGETS
        for case in values
    ]


def check(path: paths.Path, case: GeneralCase, **more: Any) -> None:
    for given_output in (False, True):
        out, lse = paths.run_general(path, case, given_output, **more)
        assert out.dtype == cases.DTYPES[case.dtype] and lse.dtype == np.float32
        assert case.problem_with(out, lse, cleared=not given_output) is None


@pytest.mark.parametrize("case", cases.GENERAL, ids=str)
def test_numpy(case: GeneralCase) -> None:
    check(paths.NUMPY, case)


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged_general(EMULATED)))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_emulated(target: str, case: GeneralCase, schedule: str, seed: int) -> None:
    check(EmulatedPath(target, {"schedule": schedule, "seed": seed, "num_sms": 2}), case)


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged_general(RACE)))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_no_race(target: str, case: GeneralCase, schedule: str, seed: int) -> None:
    options = {"schedule": schedule, "seed": seed, "num_sms": 2, "race": True}
    check(EmulatedPath(target, options), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.GENERAL, ids=str)
def test_gpu(case: GeneralCase, family: str, poisoned_pool: Any) -> None:
    check(paths.CUPY, case)


@pytest.mark.gpu
def test_the_same_bits_every_time(family: str, poisoned_pool: Any) -> None:
    case = next(case for case in cases.GENERAL if case.name == "packed_long")
    arrays = [paths.CUPY.array(x) for x in case.inputs]
    lengths = {name: paths.CUPY.array(x) for name, x in case.lengths.items()}
    options = {"return_lse": True, **lengths, **case.options}
    first, first_lse = cupyflash.attention(*arrays, **options)
    for _ in range(200):
        out, lse = cupyflash.attention(*arrays, **options)
        assert (out.view(np.uint16) == first.view(np.uint16)).all()
        assert (lse.view(np.uint32) == first_lse.view(np.uint32)).all()


@pytest.mark.parametrize("target", [pytest.param(t, marks=emulated) for t in TARGETS])
def test_wrong_lengths_stay_inside_the_arrays(target: str) -> None:
    """Lengths are clamped: guard pages lie behind every array."""
    device = EmulatedPath(target, {"num_sms": 2}).device
    x = device.array(np.ones((100, 1, 64), np.float16))
    for starts in ([0, 300, 50], [-5, 40, 100], [90, 10, 400], [99, 99, 99], [100, 0, 0]):
        lengths = device.array(np.array(starts, np.int32))
        out = cupyflash.attention(x, x, x, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        assert out.shape == (100, 1, 64)
    used = device.array(np.array([10**9], np.int32))
    y = device.array(np.ones((1, 70, 1, 64), np.float16))
    out = cupyflash.attention(y, y, y, seqused_q=used, seqused_kv=used, causal=True).numpy()
    np.testing.assert_array_equal(out, 1)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"cu_seqlens_q": [0, 60, 50], "cu_seqlens_kv": [0, 50, 100]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 50, 100], "cu_seqlens_kv": [0, 50, 101]}, "cu_seqlens_kv"),
        ({"cu_seqlens_q": [1, 50, 100], "cu_seqlens_kv": [0, 50, 100]}, "0 first"),
        (
            {"cu_seqlens_q": [0, 50], "cu_seqlens_kv": [0, 50], "seqused_kv": [51]},
            "seqused_kv: expected lengths from 0 to",
        ),
    ],
)
@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_check_finds_wrong_lengths(
    target: str, lengths: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    device = EmulatedPath(target, {"num_sms": 2}).device
    x = device.array(np.ones((100, 1, 64), np.float16))
    options = {name: device.array(np.array(v, np.int32)) for name, v in lengths.items()}
    with pytest.raises(ValueError, match=message):
        cupyflash.attention(x, x, x, **options)


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_lengths_are_int32_beside_q(target: str) -> None:
    device = EmulatedPath(target, {}).device
    x = device.array(np.ones((100, 1, 64), np.float16))
    good = device.array(np.array([0, 100], np.int32))
    with pytest.raises(TypeError, match="cu_seqlens_q: expected int32"):
        wide = device.array(np.array([0, 100], np.int64))
        cupyflash.attention(x, x, x, cu_seqlens_q=wide, cu_seqlens_kv=good)
    with pytest.raises(TypeError, match="cu_seqlens_kv"):
        cupyflash.attention(x, x, x, cu_seqlens_q=good, cu_seqlens_kv=np.array([0, 100]))
    with pytest.raises(ValueError, match=r"as many entries in both, got 2 and 3"):
        longer = device.array(np.array([0, 50, 100], np.int32))
        cupyflash.attention(x, x, x, cu_seqlens_q=good, cu_seqlens_kv=longer)
    with pytest.raises(ValueError, match=r"seqused_q: expected shape \[1\]"):
        cupyflash.attention(x, x, x, cu_seqlens_q=good, cu_seqlens_kv=good, seqused_q=good)
    with pytest.raises(ValueError, match="contiguous"):
        pairs = device.array(np.zeros((2, 2), np.int32))[:, 0]
        cupyflash.attention(x, x, x, cu_seqlens_q=pairs, cu_seqlens_kv=pairs)
