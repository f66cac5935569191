"""The CUDA forward kernels, executed on the CPU emulator through the public API.

Every case of a family runs under four schedules of its threads and asynchronous copies; the small
ones also under the race detector. Fresh memory, outputs and whatever lies between arrays hold NaN.
A mutant is a kernel with one barrier or wait taken out: some run must catch each of them, or the
other tests prove less than they seem to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import cases, mutants, paths
from tests.cases import EMULATED, RACE, WRAP, Case
from tests.paths import SCHEDULES, TARGETS, EmulatedPath, emulated

pytestmark = emulated
# 99 KB of shared memory a block in place of 163: wide heads get other tiles.
SMALL_TARGET = "sm_86"


def grouped(values: Any, targets: tuple[str, ...] = TARGETS) -> list[Any]:
    """Parameters marked for ``pytest -n 2 --dist loadgroup``: one worker builds each kernel."""
    return [
        pytest.param(
            target,
            case,
            id=f"{target}-{case}",
            marks=pytest.mark.xdist_group(
                f"{target}-{case.dtype}-{case.head_dim}-{bool(case.causal)}-{bool(case.window)}"
            ),
        )
        for target in targets
        for case in values
    ]


def run(target: str, case: Case, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    # One CTA takes all tiles of the wrapping cases, so that its rings wrap; two share the others'.
    options.setdefault("num_sms", 1 if WRAP in case.tags else 2)
    path = EmulatedPath(target, options)
    return paths.run(path, case)


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(EMULATED)))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_case(target: str, case: Case, schedule: str, seed: int) -> None:
    out, lse = run(target, case, schedule=schedule, seed=seed)
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize(
    ("target", "case"),
    grouped([case for case in cases.tagged(EMULATED) if case.head_dim >= 128], (SMALL_TARGET,)),
)
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_case_in_less_shared_memory(target: str, case: Case, schedule: str, seed: int) -> None:
    out, lse = run(target, case, schedule=schedule, seed=seed)
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(RACE)))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_no_race(target: str, case: Case, schedule: str, seed: int) -> None:
    out, lse = run(target, case, schedule=schedule, seed=seed, race=True)
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(RACE)))
def test_more_schedules(target: str, case: Case, pytestconfig: pytest.Config) -> None:
    """Random orders and random priorities, one to three clusters at a time, one or two CTAs."""
    seeds = pytestconfig.getoption("--seeds")
    if not seeds:
        pytest.skip("--seeds N runs N more schedules")
    for seed in range(3, 3 + seeds):
        for schedule in ("random", "pct"):
            options = {"schedule": schedule, "seed": seed, "race": True, "window": 1 + seed % 3}
            out, lse = run(target, case, num_sms=1 + seed % 2, **options)
            comparison = case.compare(out, lse)
            assert comparison.ok, f"{schedule}, seed {seed}: {comparison.problem}"


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(WRAP)[:3]))
def test_the_order_of_events_changes_no_bit(target: str, case: Case) -> None:
    results = [run(target, case, schedule=name, seed=seed) for name, seed in SCHEDULES]
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(WRAP)))
def test_the_wrapping_cases_wrap(target: str, case: Case) -> None:
    """Two trips round every ring, and several tiles for a persistent CTA."""
    spec = mutants.chosen(target, case)
    keys = case.seqlen_kv if case.window is None else sum(case.window) + 1
    # On sm100, K and V tiles take turns in one ring.
    slots_used = keys // spec.block_n * (2 if spec.family == "sm100" else 1)
    assert slots_used >= 2 * spec.stages + 1
    tiles = -(-case.seqlen_q // spec.block_m) * case.heads_q * case.batch
    assert spec.scheduler == "single" or tiles >= 5


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=str(mutant), marks=pytest.mark.xdist_group(str(mutant)))
        for mutant in mutants.ALL
    ],
)
def test_mutant_is_caught(mutant: mutants.Mutant, record_property: Any) -> None:
    """Without this barrier or wait some run fails, with a report or a wrong result."""
    caught = mutants.catch(mutant)
    record_property("caught", caught or "nowhere")
    assert caught, f"{mutant}: every schedule passed, with and without the race detector"
