"""python -m cupyflash bench | bench-report."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from cupyflash.bench import report, results
from cupyflash.bench.cases import KINDS, Case
from cupyflash.bench.implementations import IMPLEMENTATIONS, Implementation
from cupyflash.bench.results import Row
from cupyflash.bench.run import Settings, run


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``."""
    settings = Settings()
    parser.add_argument("out", type=Path, metavar="OUT.jsonl", help="results are appended to it")
    parser.add_argument(
        "--cases",
        type=_kinds,
        default=["fwd"],
        metavar="KIND,...",
        help=f"of {', '.join(KINDS)} (default: fwd; cpu needs no GPU)",
    )
    parser.add_argument(
        "--only",
        type=_pattern,
        default=re.compile(""),
        metavar="REGEX",
        help="cases whose name, such as 'fwd d128 s4096 b4 h16/16 causal', has a match",
    )
    defaults = [name for name, entry in IMPLEMENTATIONS.items() if entry.default]
    parser.add_argument(
        "--impls",
        type=_implementations,
        default=[IMPLEMENTATIONS[name] for name in defaults],
        metavar="NAME,...",
        help=f"of {', '.join(IMPLEMENTATIONS)} (default: {', '.join(defaults)})",
    )
    parser.add_argument("--rounds", type=_count, default=settings.rounds, metavar="N")
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=settings.budget_seconds,
        metavar="SECONDS",
        help="no case begins later (default: %(default)g)",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench-report``."""
    parser.add_argument("results", type=Path, nargs="+", metavar="IN.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")


def _kinds(text: str) -> list[str]:
    return _known(text, list(KINDS))


def _implementations(text: str) -> list[Implementation]:
    return [IMPLEMENTATIONS[name] for name in _known(text, list(IMPLEMENTATIONS))]


def _known(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {name!r}")
    return names


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"expected a regular expression, got {text!r}: {error}"
        ) from error


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected an int from 1 on, got {text!r}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")


# --- bench ----------------------------------------------------------------------------------------


def run_bench(options: argparse.Namespace) -> int:
    """Runs cases and appends a line for each with each implementation.

    Returns:
        1 if an implementation of ours failed or gave a wrong result, else 0.

    Raises:
        ValueError: nothing is left to run; the file cannot be written.
        UnsupportedError: this machine cannot run the cases.
    """
    cases = _chosen_cases(options)
    settings = Settings(options.rounds, options.budget)
    faults = count = 0
    try:
        file = options.out.open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{options.out}: {error}") from error
    with file:
        for rows in run(cases, options.impls, settings):
            for row in rows:
                print(row.to_json(), file=file, flush=True)
            _print_case(rows)
            count += len(rows)
            faults += sum(row.is_our_fault for row in rows)
    print(f"{count} results in {options.out}, {faults} of ours wrong or failed")
    return 1 if faults else 0


def _chosen_cases(options: argparse.Namespace) -> list[Case]:
    every = [case for kind in options.cases for case in KINDS[kind]()]
    matching = [case for case in every if options.only.search(case.name)]
    if not matching:
        names = "\n  ".join(case.name for case in every)
        raise ValueError(f"--only {options.only.pattern!r} leaves none of\n  {names}")
    devices = {entry.device for entry in options.impls}
    cases = [case for case in matching if case.device in devices]
    if not cases:
        names = ", ".join(entry.name for entry in options.impls)
        raise ValueError(f"none of {names} is for cases on device {matching[0].device!r}")
    return cases


def _print_case(rows: Sequence[Row]) -> None:
    """One line: TFLOP/s of each and the ratio; then what went wrong."""
    cells = [f"{rows[0].case.name:<46}"]
    for row in rows:
        figure = row.status if row.times is None else f"{report.figure_text(row.times.tflops):>5}"
        cells.append(f"{row.implementation} {figure}")
    ratio = results.ratio(rows)
    cells.append("" if ratio is None else f"ratio {ratio:.3f}")
    print("  ".join(cells).rstrip(), flush=True)
    for row in rows:
        if row.status in (results.WRONG, results.FAILED):
            print(f"  {row.implementation} {row.status}: {row.reason}", flush=True)


# --- bench-report ---------------------------------------------------------------------------------


def run_report(options: argparse.Namespace) -> int:
    """Writes the table and the plots of some files of results."""
    for path in report.write(results.read(options.results), options.out):
        print(path)
    return 0
