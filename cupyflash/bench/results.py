"""What a run leaves: one JSON object a line, a case with an implementation each."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyflash.bench.cases import Case
from cupyflash.timing import Sample

TIMED, ABSENT, WRONG, FAILED, SKIPPED = "timed", "absent", "wrong", "failed", "skipped"


@dataclass(frozen=True)
class Run:
    """What the rows of one run of the command have in common.

    Attributes:
        run: tells it from other runs.
        date: when it began, UTC.
        gpu, cpu: name of what computed; the other is None.
    """

    run: str
    date: str
    gpu: str | None
    cpu: str | None


@dataclass(frozen=True)
class Times:
    """The samples of one implementation.

    Attributes:
        calls: number of calls timed, of all rounds.
        median_ms: the middle of their times.
        quartiles_ms: a quarter of them was faster than the first, a quarter slower than the second.
        rounds_ms: the median of each round.
        tflops: 1e12 operations a second at the median.
        clock_mhz, watts: clock of the multiprocessors and power of the board, medians of what was
            read, once a round while it ran; None where they could not be read.
        clock_source: by what they were read, or why not.
    """

    calls: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    rounds_ms: tuple[float, ...]
    tflops: float
    clock_mhz: float | None
    watts: float | None
    clock_source: str


@dataclass(frozen=True)
class Row:
    """One implementation on one case.

    Attributes:
        run: when and where.
        case: what was computed.
        implementation: its name.
        ours: whether it is cupyflash.
        version: of the libraries that ran.
        status: "timed"; "absent": not installed or nothing for this case; "wrong": its result is
            not attention, so it was not timed; "failed": it raised; "skipped": no time was left.
        reason: of any status but "timed".
        error: largest relative error of the rows looked at, None if it did not get there.
        graph: whether a CUDA graph was replayed; without one, host cost counts.
        times: None unless timed.
    """

    run: Run
    case: Case
    implementation: str
    ours: bool
    version: str
    status: str
    reason: str = ""
    error: float | None = None
    graph: bool = False
    times: Times | None = None

    @property
    def is_our_fault(self) -> bool:
        return self.ours and self.status in (WRONG, FAILED)

    def to_json(self) -> str:
        """One line, flat but for the case's sizes: ``case`` is its name, ``problem`` its fields."""
        values = dataclasses.asdict(self)
        times = values.pop("times") or dict.fromkeys(_names(Times))
        facts = {**values.pop("run"), "case": self.case.name, "problem": values.pop("case")}
        counts = {"visible_pairs": self.case.visible_pairs, "flops": self.case.flops}
        return json.dumps({**facts, **counts, **values, **times})


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def from_json(line: str) -> Row:
    """The row of a line that :meth:`Row.to_json` made.

    Raises:
        ValueError: it is something else.
    """
    try:
        values: dict[str, Any] = json.loads(line)
        problem = {**values["problem"], "lengths": tuple(values["problem"]["lengths"])}
        times = {name: values[name] for name in _names(Times)}
        for name in ("quartiles_ms", "rounds_ms"):
            times[name] = tuple(times[name] or ())
        own = set(_names(Row)) - {"run", "case", "times"}
        return Row(
            run=Run(**{name: values[name] for name in _names(Run)}),
            case=Case(**problem),
            times=Times(**times) if values["status"] == TIMED else None,
            **{name: values[name] for name in own},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"not a line that cupyflash bench wrote ({type(error).__name__}: {error}): {line[:80]}"
        ) from error


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of some files, in order.

    Raises:
        ValueError: a file cannot be read, or holds something else.
    """
    rows = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                rows.append(from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return rows


def summarise(case: Case, samples: Sequence[Sample], clock_source: str) -> Times:
    """Times of a case from the samples of its rounds."""
    calls = [ms for sample in samples for ms in sample.milliseconds]
    first, median, third = statistics.quantiles(calls, n=4, method="inclusive")
    clocks = [sample.clock for sample in samples if sample.clock is not None]
    return Times(
        calls=len(calls),
        median_ms=median,
        quartiles_ms=(first, third),
        rounds_ms=tuple(sample.median for sample in samples),
        tflops=case.flops / median / 1e9,
        clock_mhz=statistics.median(clock.sm_mhz for clock in clocks) if clocks else None,
        watts=statistics.median(clock.watts for clock in clocks) if clocks else None,
        clock_source=clock_source,
    )


def ratio(rows: Iterable[Row]) -> float | None:
    """How many times as long the fastest peer takes as the fastest of ours.

    Args:
        rows: of one case in one run.

    Returns:
        The median over rounds of the ratio within a round, above 1 where we are faster; None where
        nothing of ours or no peer was timed.
    """
    timed = [(row.ours, row.times.rounds_ms) for row in rows if row.times is not None]
    ours = [rounds for is_ours, rounds in timed if is_ours]
    peers = [rounds for is_ours, rounds in timed if not is_ours]
    if not ours or not peers:
        return None
    pairs = zip(zip(*peers, strict=True), zip(*ours, strict=True), strict=True)
    return statistics.median(min(theirs) / min(mine) for theirs, mine in pairs)
