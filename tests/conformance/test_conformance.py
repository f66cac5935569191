"""The emulator against the PTX manual and against the record of the same kernels on a GPU."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests.conformance import run, suite
from tests.conformance.worlds import Device, Emulator

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=pytest.mark.xdist_group(c.group)) for c in suite.CASES],
)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    try:
        return run.load_record()
    except run.RecordError as error:
        if run.RECORD.exists():
            raise
        pytest.skip(str(error))


@needs_compiler
@pytest.mark.emulated
@every_case
def test_the_emulator_does_what_the_gpu_did(case: suite.Case, record: dict[str, Any]) -> None:
    fault = run.disagreement(case, record)
    assert fault is None, fault


@needs_compiler
@pytest.mark.emulated
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=str(c), marks=pytest.mark.xdist_group(c.group))
        for c in suite.CASES
        if c.expected is not None
    ],
)
def test_the_emulator_does_what_the_manual_says(case: suite.Case) -> None:
    fault = run.unexpected(case, Emulator())
    assert fault is None, fault


@needs_compiler
@pytest.mark.emulated
@every_case
def test_schedules_do_not_matter(case: suite.Case) -> None:
    if case.name == "mbarrier_sequence":
        pytest.skip("a random schedule lets try_wait fail, as hardware may")
    expected = Emulator("early").run(case)
    for schedule, seed in (("late", 0), ("random", 1)):
        np.testing.assert_array_equal(Emulator(schedule, seed).run(case), expected)


def test_the_record_belongs_to_these_wrappers(record: dict[str, Any]) -> None:
    assert record["wrappers"] == suite.wrapper_digest(), (
        "wrappers or cases changed since the record was made: run "
        "`python -m tests.conformance.run --device` on a GPU of compute capability 9.0"
    )
    assert set(record["cases"]) == {case.name for case in suite.CASES}


@pytest.mark.parametrize("device", [{}, {"uuid": "emulator", "driver": "13.0"}, {"uuid": "GPU-1"}])
def test_a_record_that_no_gpu_signed_is_refused(
    device: dict[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = tmp_path / "sm90.json"
    forged.write_text(json.dumps({"device": device, "cases": {}, "wrappers": ""}))
    monkeypatch.setattr(run, "RECORD", forged)
    with pytest.raises(run.RecordError, match="does not name the GPU"):
        run.load_record()


def test_distance_in_ulps() -> None:
    one = np.array([1.0, -1.0, 0.0], np.float32)
    next_up = np.nextafter(one, np.float32(2))
    assert run.ulps_apart(one.view(np.uint8), next_up.view(np.uint8)) == 1
    assert run.ulps_apart(one.view(np.uint8), one.view(np.uint8)) == 0


@pytest.mark.gpu
@every_case
def test_this_gpu_does_what_the_record_says(case: suite.Case, record: dict[str, Any]) -> None:
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the record is of compute capability 9.0")
    assert run.stored(case, Device().run(case)) == record["cases"][case.name]
