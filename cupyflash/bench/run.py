"""Runs cases: makes inputs, checks every implementation, times those that are right in turns."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cupyflash.bench import results
from cupyflash.bench.cases import Case
from cupyflash.bench.check import Inputs, WrongResultError, check_out
from cupyflash.bench.implementations import AbsentError, Implementation
from cupyflash.bench.machines import Machine, open_machine
from cupyflash.bench.results import Row, Run
from cupyflash.errors import UnsupportedError
from cupyflash.timing import Burst, Prepared, interleave

MAX_REASON = 400


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        rounds: bursts of each implementation on each case.
        budget_seconds: a case that would begin later is skipped.
        burst: how long each is.
    """

    rounds: int = 5
    budget_seconds: float = 600.0
    burst: Burst = Burst()


def run(
    cases: Sequence[Case], implementations: Sequence[Implementation], settings: Settings
) -> Iterator[list[Row]]:
    """Runs every case; yields its rows, one for each implementation of its device.

    Raises:
        UnsupportedError: this machine cannot run a case; those before it have been yielded.
    """
    deadline = time.monotonic() + settings.budget_seconds
    identity, date = uuid.uuid4().hex[:8], time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    for device in dict.fromkeys(case.device for case in cases):
        chosen = [entry for entry in implementations if entry.device == device]
        with open_machine(device) as machine:
            names = (machine.name, None) if device == "cuda" else (None, machine.name)
            this_run = Run(identity, date, *names)
            for case in cases:
                if case.device != device:
                    continue
                if time.monotonic() >= deadline:
                    yield [_skipped(this_run, case, entry, settings) for entry in chosen]
                else:
                    yield run_case(this_run, case, chosen, machine, settings)
                    machine.release()


def run_case(
    this_run: Run,
    case: Case,
    implementations: Sequence[Implementation],
    machine: Machine,
    settings: Settings,
) -> list[Row]:
    """The rows of one case."""
    inputs = machine.inputs(case)
    rows: dict[str, Row] = {}
    ready: dict[str, Prepared] = {}
    for entry in implementations:
        row = _row(this_run, case, entry)
        try:
            error, prepared = _prepare(case, inputs, entry, machine)
        except Exception as failure:  # a table of what works must show what does not
            status, reason = _describe(failure, entry)
            rows[entry.name] = replace(row, status=status, reason=reason[:MAX_REASON])
            continue
        ready[entry.name] = prepared
        rows[entry.name] = replace(row, error=error, graph=prepared.graph)
    calls = {name: prepared.call for name, prepared in ready.items()}
    samples = interleave(machine.timer, calls, settings.rounds, settings.burst)
    for name, taken in samples.items():
        times = results.summarise(case, taken, machine.timer.clock_source)
        rows[name] = replace(rows[name], times=times)
    return list(rows.values())


def _prepare(
    case: Case, inputs: Inputs, entry: Implementation, machine: Machine
) -> tuple[float, Prepared]:
    """The largest error of an implementation, and its call ready to be timed."""
    attention = entry.prepare(case, inputs)
    returned = attention.call()
    machine.wait()
    error = check_out(case, inputs, attention.read(returned))
    prepared = machine.timer.prepare(attention.call)
    if prepared.graph:  # does it hold all the work? then it writes the result anew
        out = attention.read(prepared.returned)
        machine.spoil(out)
        prepared.call()
        machine.wait()
        check_out(case, inputs, out)
    return error, prepared


def _row(this_run: Run, case: Case, entry: Implementation) -> Row:
    return Row(this_run, case, entry.name, entry.ours, entry.version, results.TIMED)


def _skipped(this_run: Run, case: Case, entry: Implementation, settings: Settings) -> Row:
    reason = f"the budget of {settings.budget_seconds:g} s was spent"
    return replace(_row(this_run, case, entry), status=results.SKIPPED, reason=reason)


def _describe(failure: Exception, entry: Implementation) -> tuple[str, str]:
    """Status and reason of an implementation that is not timed."""
    if isinstance(failure, AbsentError):
        return results.ABSENT, str(failure)
    if isinstance(failure, WrongResultError):
        return results.WRONG, str(failure)
    reason = f"{type(failure).__name__}: {failure}"
    refused = isinstance(failure, UnsupportedError)
    if not entry.ours:  # others refuse what they lack by many classes of exception
        words = re.search(r"not ?support|unsupported", reason, re.IGNORECASE)
        refused = isinstance(failure, NotImplementedError) or words is not None
    return results.ABSENT if refused else results.FAILED, reason
