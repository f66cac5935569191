"""Mutants: kernels with one barrier or wait taken out, which the emulator must catch.

A family's ``forward.cuh`` and ``backward.cuh`` number their mutants from 1 and leave the wait out
where ``ptx::kMutant`` is that number; ``kForwardMutants`` counts them, ``enum ForwardMutant`` names
them (``kBackwardMutants``, ``enum BackwardMutant``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash import select, source
from tests import cases, paths
from tests.cases import Case

TARGETS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100f"}

# With and without masked blocks, because some waits exist only beside one of them; more tiles and
# blocks than any ring has slots, because most waits matter only on the second trip; and scores
# whose maximum grows on the way, because rescaled and repeated blocks have waits of their own.
# Tiles of one block let sm100's softmax run ahead of its output; with head_dim 256, sm90's output
# takes the place of its queries; in pairs of heads one CTA claims tiles for both.
CASES = tuple(
    next(case for case in cases.tagged(cases.EMULATED) if case.name == name)
    for name in (
        "ring_wraps",
        "causal_ring_wraps",
        "falling_ring_wraps",
        "causal_falling_ring_wraps",
        "many_tiles_of_one_block",
        "f16_d256_ring_wraps",
        "causal_pairs_ring_wrap",
        "causal_long_ring_wraps",
    )
)
# The backward's rings are those of queries; tiles of few queries let the writer of dq fall behind;
# the widest head has one slot for some rings.
BACKWARD_CASES = tuple(
    next(case for case in cases.tagged(cases.EMULATED) if case.name == name)
    for name in (
        "ring_wraps",
        "causal_pairs_ring_wrap",
        "many_tiles_of_one_block",
        "f16_d128_causal",
        "causal_long_ring_wraps",
        "f16_d256_ring_wraps",
        "d192_causal",
        "causal_more_queries_than_keys",
    )
)
NUM_SMS = 1
RUNS = (
    {"schedule": "late"},
    {"schedule": "early"},
    {"schedule": "random", "seed": 1},
    {"schedule": "late", "race": True},
    {"schedule": "random", "seed": 2, "race": True},
    {"schedule": "random", "seed": 3},
)
# Turns matter where several CTAs add to the same rows; and order them all.
BACKWARD_RUNS = (
    {"schedule": "late", "num_sms": 3, "window": 3, "race": "global", "deterministic": True},
    {"schedule": "random", "seed": 1, "num_sms": 3, "window": 3, "race": "global",
     "deterministic": True},
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One synchronisation of one family, taken out."""

    family: str
    number: int
    name: str
    kernel: str = "forward"

    def __str__(self) -> str:
        kernel = "" if self.kernel == "forward" else f"-{self.kernel}"
        return f"{self.family}{kernel}-{self.number}{'-' + self.name if self.name else ''}"


def of_family(family: str, kernel: str = "forward") -> tuple[Mutant, ...]:
    """The mutants that a family's kernel declares."""
    folder = source.include_root() / family
    # sm90's backward kernels share theirs.
    headers = [folder / f"{kernel}{part}.cuh" for part in ("", "_tiles")]
    text = "".join(header.read_text() for header in headers if header.is_file())
    text = re.sub(r"//[^\n]*", "", text)
    enum = re.search(rf"enum {kernel.title()}Mutant[^{{]*\{{(.*?)\}}", text, re.S)
    if enum is not None:
        names = re.findall(r"\bk(\w+)", enum.group(1))
        names = [name for name in names if name != "MutantEnd"]
    else:
        count = re.search(rf"k{kernel.title()}Mutants = (\d+)", text)
        names = [""] * int(count.group(1)) if count else []
    return tuple(Mutant(family, number, name, kernel) for number, name in enumerate(names, 1))


ALL = tuple(
    mutant
    for family in TARGETS
    for kernel in ("forward", "backward")
    for mutant in of_family(family, kernel)
)


def chosen(target: str, case: Case, kernel: str = "forward") -> select.KernelSpec:
    """The kernel that serves a case on an emulated device."""
    from cupyflash import emulate
    from cupyflash.problem import Mask, Problem
    from cupyflash.tensor import DType

    bounds = case.bounds
    problem = Problem(
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        seqlen_kv=case.seqlen_kv,
        heads_q=case.heads_q,
        heads_kv=case.heads_kv,
        head_dim_qk=case.head_dim,
        head_dim_v=case.value_dim,
        dtype=DType[case.dtype],
        mask=Mask(bounds["left"], bounds["right"], case.align),
        want_lse=True,
    )
    return select.select(problem, emulate.device(target).info, kernel).spec


def catch(mutant: Mutant) -> str | None:
    """Run a mutant until something is wrong with it.

    Returns:
        Which run caught it and how, or None.
    """
    backward = mutant.kernel == "backward"
    for case in BACKWARD_CASES if backward else CASES:
        for options in (*RUNS, *BACKWARD_RUNS) if backward else RUNS:
            found = _fault(mutant, case, {"num_sms": NUM_SMS, **options})
            if found is not None:
                how = ", ".join(f"{key} {value}" for key, value in options.items())
                return f"{case} ({how}): {found}"
    return None


def _changed_bits(mutant: Mutant, path: paths.EmulatedPath, case: Case) -> str | None:
    """Additions out of turn race with nothing and are right but for their order: for the bits."""
    right = paths.EmulatedPath(TARGETS[mutant.family], {"schedule": "early", "num_sms": NUM_SMS})
    options: dict[str, Any] = {"deterministic": True, "float_grads": True}
    grads = paths.run_backward(path, case, **options)
    for name, grad, same in zip(
        ("dq", "dk", "dv"), grads, paths.run_backward(right, case, **options)
    ):
        if not np.array_equal(grad, same):
            return f"{name} depends on the schedule"
    return None


def _fault(mutant: Mutant, case: Case, options: dict[str, Any]) -> str | None:
    from cupyflash.errors import EmulationError

    if chosen(TARGETS[mutant.family], case, mutant.kernel).family != mutant.family:
        return None  # another family serves this case there
    deterministic = options.pop("deterministic", False)
    path = paths.EmulatedPath(TARGETS[mutant.family], {"mutant": mutant.number, **options})
    try:
        if mutant.kernel == "backward":
            if deterministic:
                return _changed_bits(mutant, path, case)
            return case.expected_grads.compare(*paths.run_backward(path, case)).problem
        out, lse = paths.run(path, case)
    except EmulationError as error:
        return str(error).splitlines()[0]
    return case.compare(out, lse).problem
