"""The CUDA forward of 8-bit floats, executed on the CPU emulator through the public API."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import emulate, select, tuning
from cupyflash.errors import EmulationError
from tests import cases, mutants, paths
from tests.cases import RACE, WRAP, Fp8Case
from tests.paths import SCHEDULES, EmulatedPath, emulated

pytestmark = emulated
TARGET = "sm_90a"


def is_served(case: Fp8Case) -> bool:
    """Whether the kernel takes the case; the others must be refused."""
    return not case.plain and case.of.used_kv is None


SERVED = [case for case in cases.FP8 if is_served(case)]


def parameters(chosen: list[Fp8Case]) -> list[Any]:
    """Cases of one translation unit run in one process, which then builds it once."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"fp8-{case.of.head_dim}"))
        for case in chosen
    ]


def check(case: Fp8Case, **options: Any) -> None:
    options.setdefault("num_sms", 1 if WRAP in case.of.tags else 2)
    out, lse = paths.run_fp8(EmulatedPath(TARGET, options), case, given_output=True)
    problem = case.problem_with(out, lse, cleared=False)
    assert problem is None, problem


@pytest.mark.parametrize("case", parameters(SERVED))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:3])
def test_case(case: Fp8Case, schedule: str, seed: int) -> None:
    check(case, schedule=schedule, seed=seed)


@pytest.mark.parametrize(
    "case", parameters([case for case in SERVED if case.of.tags & {RACE, WRAP}])
)
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_no_race(case: Fp8Case, schedule: str, seed: int) -> None:
    check(case, schedule=schedule, seed=seed, race=True)


@pytest.mark.parametrize("case", parameters(SERVED[:3]))
def test_an_output_allocated_here(case: Fp8Case) -> None:
    """Rows of no sequence are 0."""
    out, lse = paths.run_fp8(EmulatedPath(TARGET), case, given_output=False)
    problem = case.problem_with(out, lse, cleared=True)
    assert problem is None, problem


@pytest.mark.parametrize("case", parameters(SERVED[:3]))
def test_every_schedule_gives_the_same_bits(case: Fp8Case) -> None:
    first = paths.run_fp8(EmulatedPath(TARGET, {"num_sms": 1}), case, given_output=True)
    for schedule, seed in SCHEDULES[1:]:
        path = EmulatedPath(TARGET, {"num_sms": 3, "schedule": schedule, "seed": seed})
        for result, same in zip(paths.run_fp8(path, case, given_output=True), first):
            np.testing.assert_array_equal(result, same)


@pytest.mark.parametrize("case", [case for case in cases.FP8 if not is_served(case)], ids=str)
def test_the_others_are_refused_with_the_reason(case: Fp8Case) -> None:
    words = "row-major" if case.plain else "seqused_kv"
    with pytest.raises(cupyflash.UnsupportedError, match=words):
        paths.run_fp8(EmulatedPath(TARGET), case, given_output=True)


# -- sums of two levels, which the table keeps for many keys ---------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[select.KernelSpec]:
    """The kernels that run from here on."""
    found = []
    run = emulate.EmulatedDevice.run

    def record(device: emulate.EmulatedDevice, launch: Any) -> None:
        found.append(launch.spec)
        run(device, launch)

    monkeypatch.setattr(emulate.EmulatedDevice, "run", record)
    return found


@pytest.mark.parametrize(
    "case",
    parameters([case for case in SERVED if "ring" in str(case) or "head_dim" in str(case)]),
)
def test_sums_of_two_levels(
    case: Fp8Case, launched: list[select.KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = tuning.FAMILIES["sm90"]
    assert family.fp8 is not None
    rows = tuple(tile for tile in family.fp8.tiles if dict(tile.options).get("TwoLevel"))
    if all(
        case.of.head_dim > tile.head_dim_qk or case.of.value_dim > tile.head_dim_v for tile in rows
    ):
        pytest.skip("no row with two levels is as wide: registers")
    only_these = dataclasses.replace(
        family.fp8, tiles=tuple(dataclasses.replace(tile, max_seqlen=None) for tile in rows)
    )
    monkeypatch.setitem(
        tuning.FAMILIES, "sm90", dataclasses.replace(family, fp8=only_these)
    )  # fmt: skip
    check(case, schedule="late", race=WRAP in case.of.tags)
    (spec,) = launched
    assert spec.option("TwoLevel") == 1


# -- mutants ---------------------------------------------------------------------------------------

# No row of the table has clusters; K is given back when its scores are in registers, and every warp
# of a warpgroup waits for the same product.
_NOT_HERE = ("OwnReleaseOnly", "NoExitSync", "NoTicketWait", "EarlyKRelease")
MUTANTS = [mutant for mutant in mutants.of_family("sm90") if mutant.name not in _NOT_HERE]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: mutants.Mutant) -> None:
    """Without this barrier or wait some run fails, with a report or a wrong result."""
    chosen = [case for case in SERVED if WRAP in case.of.tags]
    for options in mutants.RUNS:
        for case in chosen:
            path = EmulatedPath(TARGET, {"num_sms": 1, "mutant": mutant.number, **options})
            try:
                out, lse = paths.run_fp8(path, case, given_output=True)
            except EmulationError:
                return
            if case.problem_with(out, lse, cleared=False) is not None:
                return
    raise AssertionError(f"{mutant}: every schedule passed, with and without the race detector")


@pytest.mark.parametrize("case", parameters([c for c in SERVED if WRAP in c.of.tags]))
def test_the_wrapping_cases_wrap(case: Fp8Case, launched: list[select.KernelSpec]) -> None:
    """More key blocks than the rings have stages, and several tiles."""
    check(case)
    (spec,) = launched
    assert max(case.of.lens_kv) // spec.block_n > spec.stages
    assert max(case.of.lens_q) > spec.block_m
