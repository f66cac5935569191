"""The CUDA backward kernels, executed on the CPU emulator through the public API: the tests of
``test_forward_emulated.py`` for gradients. The mutants of both are there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupyflash
from tests import cases, mutants, paths
from tests.cases import EMULATED, RACE, WRAP, Case, GeneralCase
from tests.paths import SCHEDULES, EmulatedPath, emulated
from tests.test_forward_emulated import grouped

pytestmark = emulated
TARGETS = paths.TARGETS
# 99 KB of shared memory a block in place of 163: other tiles.
SMALL_TARGET = "sm_86"


def run(target: str, case: Case, deterministic: bool = False, **options: Any) -> Any:
    options.setdefault("num_sms", 1 if WRAP in case.tags else 2)
    path = EmulatedPath(target, options)
    return paths.run_backward(path, case, deterministic=deterministic)


def check(target: str, case: Case, deterministic: bool = False, **options: Any) -> None:
    comparison = case.expected_grads.compare(*run(target, case, deterministic, **options))
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(EMULATED), TARGETS))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:3])
def test_case(target: str, case: Case, schedule: str, seed: int) -> None:
    check(target, case, schedule=schedule, seed=seed)


@pytest.mark.parametrize(
    ("target", "case"),
    grouped([case for case in cases.tagged(EMULATED) if case.head_dim >= 96], (SMALL_TARGET,)),
)
def test_case_in_less_shared_memory(target: str, case: Case) -> None:
    check(target, case, schedule="late")


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(RACE), TARGETS))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_no_race(target: str, case: Case, schedule: str, seed: int) -> None:
    check(target, case, schedule=schedule, seed=seed, race=True)


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(RACE), TARGETS))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_no_race_in_turns(target: str, case: Case, schedule: str, seed: int) -> None:
    """Deterministic additions are ordered, so global memory is looked at too."""
    check(target, case, True, schedule=schedule, seed=seed, race="global", num_sms=3, window=3)


@pytest.mark.parametrize(("target", "case"), grouped(cases.tagged(WRAP), TARGETS))
def test_deterministic_gradients_are_the_same_bits(target: str, case: Case) -> None:
    """In every schedule, with one CTA or several, resident together or one after the other."""
    expected = run(target, case, True)
    comparison = case.expected_grads.compare(*expected)
    assert comparison.ok, comparison.problem
    for (schedule, seed), num_sms, window in zip(SCHEDULES, (3, 2, 5, 1), (3, 1, 2, 1)):
        options = {"schedule": schedule, "seed": seed, "num_sms": num_sms, "window": window}
        for grad, same in zip(run(target, case, True, **options), expected):
            np.testing.assert_array_equal(grad, same)


def groups(tag: str) -> list[Any]:
    return [
        pytest.param(
            target,
            case,
            id=f"{target}-{case}",
            marks=pytest.mark.xdist_group(f"{target}-general-{case.dtype}-{case.head_dim}"),
        )
        for target in TARGETS
        for case in cases.tagged_general(tag)
    ]


@pytest.mark.parametrize(("target", "case"), groups(EMULATED))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_general_case(target: str, case: GeneralCase, schedule: str, seed: int) -> None:
    path = EmulatedPath(target, {"schedule": schedule, "seed": seed, "num_sms": 2})
    problem = case.grads_problem(paths.run_general_backward(path, case))
    assert problem is None, problem


@pytest.mark.parametrize(("target", "case"), groups(RACE))
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_race_in_general_cases(target: str, case: GeneralCase, deterministic: bool) -> None:
    race = "global" if deterministic else True
    path = EmulatedPath(target, {"schedule": "random", "seed": 3, "num_sms": 2, "race": race})
    grads = paths.run_general_backward(path, case, deterministic=deterministic)
    problem = case.grads_problem(grads)
    assert problem is None, problem


SMALL = Case("backward_small", 130, 200, batch=2, heads_q=4, heads_kv=2, causal=True)
WHOLE = Case("backward_whole", 130, 200, batch=2, heads_q=4, heads_kv=2)


def device_arrays(path: EmulatedPath, case: Case) -> list[Any]:
    """dout, q, k, v, out, lse on the device."""
    (dout, _), (out, lse) = case.gradients, case.forward_results
    placed = [dout, *case.inputs, out]
    return [*(path.array(np.ascontiguousarray(x.bshd)) for x in placed), path.array(lse)]


@pytest.mark.parametrize("target", TARGETS)
def test_float_gradients_of_key_sets_add_up(target: str) -> None:
    """Ring attention: parts of the keys with the lse and delta of all, accumulated in float32."""
    case = WHOLE
    path = EmulatedPath(target, {"num_sms": 2})
    dout, q, k, v, out, lse = device_arrays(path, case)
    dlse = case.gradients[1]
    delta = np.einsum(
        "bshd,bshd->bhs",
        case.gradients[0].bshd.astype(np.float32),
        case.forward_results[0].bshd.astype(np.float32),
    )
    delta = path.array((delta - dlse).astype(np.float32))
    before = [np.full(x.shape, 3.0, np.float32) for x in (q, k, v)]
    dq, dk, dv = (path.array(x) for x in before)
    for keys in (slice(0, 70), slice(70, 200)):
        cupyflash.attention_backward(
            dout,
            q,
            k[:, keys],
            v[:, keys],
            None,
            lse,
            delta=delta,
            accumulate=True,
            dq=dq,
            dk=dk[:, keys],
            dv=dv[:, keys],
        )
    grads = [x.numpy() - 3 for x in (dq, dk, dv)]
    comparison = case.expected_grads.compare(*grads)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("target", TARGETS)
def test_accumulation_in_the_inputs_type(target: str) -> None:
    path = EmulatedPath(target, {"num_sms": 2})
    dout, q, k, v, out, lse = device_arrays(path, SMALL)
    dlse = path.array(SMALL.gradients[1])
    grads = [path.array(np.ones(x.shape, x.dtype)) for x in (q, k, v)]
    cupyflash.attention_backward(
        *(dout, q, k, v, out, lse),
        dlse=dlse,
        accumulate=True,
        **dict(zip(("dq", "dk", "dv"), grads)),
        causal=True,
    )
    expected = SMALL.expected_grads
    expected = dataclasses.replace(
        expected,
        **{name: getattr(expected, name) + 1 for name in ("dq", "dk", "dv")},
        bounds=tuple(bound + 2.0**-6 for bound in expected.bounds),  # rounded again, near 4
    )
    comparison = expected.compare(*(x.numpy() for x in grads))
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("target", TARGETS)
def test_a_broadcast_gradient_is_as_good_as_a_copy(target: str) -> None:
    """The gradient of a plain sum has stride 0 everywhere: public case B14."""
    path = EmulatedPath(target, {"num_sms": 2})
    dout, q, k, v, out, lse = device_arrays(path, SMALL)
    one = path.array(np.ones((1, 1, 1, 1), dout.dtype))
    spread = type(one)(one.device, one._memory, np.broadcast_to(one._view, dout.shape))
    copy = path.array(np.ones(dout.shape, dout.dtype))
    options = {"causal": True, "deterministic": True}
    for grad, same in zip(
        cupyflash.attention_backward(spread, q, k, v, out, lse, **options),
        cupyflash.attention_backward(copy, q, k, v, out, lse, **options),
    ):
        np.testing.assert_array_equal(grad.numpy(), same.numpy())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "mask", [{"causal": True}, {"window": (20, None), "align": "top_left"}], ids=str
)
def test_rows_that_see_no_key_may_hold_anything(
    target: str, head_dim: int, mask: dict[str, Any]
) -> None:
    """Also in blocks with rows that see some: the first (causal) or the last (window)."""
    case = Case("backward_keyless", 200, 70, heads_q=2, head_dim=head_dim, **mask)
    path = EmulatedPath(target, {"num_sms": 1, "schedule": "late"})
    clean = device_arrays(path, case)
    q, lse = case.inputs[0].bshd.copy(), case.forward_results[1]
    q[np.isneginf(lse.transpose(0, 2, 1))] = np.nan
    assert np.isnan(q).any() and not np.isnan(q).all()
    poisoned = [clean[0], path.array(q), *clean[2:]]
    grads = cupyflash.attention_backward(*poisoned, dlse=path.array(case.gradients[1]), **mask)
    comparison = case.expected_grads.compare(*(x.numpy() for x in grads))
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("widths", [(128, 96), (128, 80), (192, 128), (64, 128)], ids=str)
def test_values_of_another_width(target: str, widths: tuple[int, int]) -> None:
    """Public case B20: d_qk != d_v."""
    head_dim, head_dim_v = widths
    check(
        target,
        Case(
            f"backward_{head_dim}_{head_dim_v}", 150, 130, heads_q=2, head_dim=head_dim,
            head_dim_v=head_dim_v, causal=True,
        ),
    )  # fmt: skip


def test_nothing_is_launched_for_nothing() -> None:
    path = EmulatedPath("sm_90a", {"num_sms": 2})
    q, k = (path.array(np.zeros((2, n, 2, 64), np.float16)) for n in (0, 5))
    lse = path.array(np.zeros((2, 2, 0), np.float32))
    grads = cupyflash.attention_backward(q, q, k, k, q, lse)
    assert grads.dq.shape == q.shape
    assert not grads.dk.numpy().any() and not grads.dv.numpy().any()


def test_the_wrapping_cases_wrap() -> None:
    """Several steps and tiles for a persistent CTA."""
    for case in cases.tagged(WRAP):
        spec = mutants.chosen("sm_90a", case, "backward")
        assert case.seqlen_q // spec.block_m * (case.heads_q // case.heads_kv) >= spec.stages + 1
