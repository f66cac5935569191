"""Writes up results: ``table.md``, and a PNG with bars for each kind of case."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyflash.bench import results
from cupyflash.bench.cases import Case
from cupyflash.bench.implementations import IMPLEMENTATIONS
from cupyflash.bench.results import Row, Run
from cupyflash.errors import UnsupportedError

NO_FIGURE = "–"  # noqa: RUF001 (an en dash)
COLUMNS = 2  # of panels in a plot
DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Group:
    """The rows of one run on one processor.

    Attributes:
        run: which.
        cases: in the order in which they ran.
        names: implementations, in the order of the registry.
        rows: by case and implementation; of a pair that ran twice, the later.
    """

    run: Run
    cases: tuple[Case, ...]
    names: tuple[str, ...]
    rows: dict[tuple[Case, str], Row]

    def of_case(self, case: Case) -> list[Row]:
        return [self.rows[case, name] for name in self.names if (case, name) in self.rows]

    def of_implementation(self, name: str) -> list[Row]:
        return [self.rows[case, name] for case in self.cases if (case, name) in self.rows]


def group(rows: Iterable[Row]) -> list[Group]:
    """Rows by run: figures are compared within one, never across."""
    found: dict[Run, list[Row]] = {}
    for row in rows:
        found.setdefault(row.run, []).append(row)
    order = list(IMPLEMENTATIONS)
    groups = []
    for run, members in found.items():
        names = dict.fromkeys(row.implementation for row in members)
        known = [name for name in order if name in names]
        groups.append(
            Group(
                run,
                tuple(dict.fromkeys(row.case for row in members)),
                (*known, *(name for name in names if name not in order)),
                {(row.case, row.implementation): row for row in members},
            )
        )
    return groups


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the table and the plots of some rows.

    Args:
        rows: as ``results.read`` gives them.
        folder: made if it does not exist; files of the same names are overwritten.

    Returns:
        The files written, the table first. It is there even when the plots cannot be drawn.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("the files hold no results")
    folder.mkdir(parents=True, exist_ok=True)
    groups = group(rows)
    path = folder / "table.md"
    path.write_text(markdown(groups), encoding="utf-8")
    return [path, *draw(groups, folder)]


# --- the table ------------------------------------------------------------------------------------


def markdown(groups: Sequence[Group]) -> str:
    """The table of each run, with its plots and the reasons of its gaps."""
    return "\n".join(["# Benchmarks", *(line for each in groups for line in _section(each))]) + "\n"


def _section(group: Group) -> list[str]:
    unit = "TFLOP/s at the median time; the fastest in bold; ratio: time of the fastest peer over"
    return [
        "",
        f"## {_processor(group.run)}, {group.run.date} UTC",
        "",
        f"{unit} that of the fastest of ours, median over rounds.",
        "",
        *_table(group),
        "",
        *(f"- {line}" for line in [*_versions(group), *_gaps(group)]),
        *(
            line
            for kind in _kinds(group)
            if _timed_cases(group, kind)
            for line in ("", f"![{kind}]({plot_name(group, kind)})")
        ),
    ]


def _table(group: Group) -> list[str]:
    lines = [_line("case", *group.names, "ratio"), _line(*["---"] * (len(group.names) + 2))]
    for case in group.cases:
        figures = {
            row.implementation: row.times.tflops
            for row in group.of_case(case)
            if row.times is not None
        }
        best = max(figures.values(), default=math.nan)
        cells = []
        for name in group.names:
            text = figure_text(figures[name]) if name in figures else NO_FIGURE
            cells.append(f"**{text}**" if figures.get(name) == best else text)
        ratio = results.ratio(group.of_case(case))
        lines.append(_line(case.name, *cells, NO_FIGURE if ratio is None else f"{ratio:.3f}"))
    return lines


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def figure_text(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _versions(group: Group) -> list[str]:
    """What each implementation is and at what clock it ran, where it ran at all."""
    lines = []
    for name in group.names:
        rows = [row for row in group.of_implementation(name) if row.times is not None]
        if not rows:
            continue
        parts = [f"{name}: {', '.join(dict.fromkeys(row.version for row in rows))}"]
        clocks = [row.times.clock_mhz for row in rows if row.times and row.times.clock_mhz]
        sources = dict.fromkeys(row.times.clock_source for row in rows if row.times)
        if clocks:
            parts.append(f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz")
        parts.append(f"clock by {', '.join(sources)}" if clocks else f"clock {', '.join(sources)}")
        without = sum(not row.graph for row in rows)
        if group.run.gpu and without:
            parts.append(f"{without} of {len(rows)} cases without a CUDA graph")
        lines.append("; ".join(parts))
    return lines


def _gaps(group: Group) -> list[str]:
    """Why implementations have no figure, and in how many cases."""
    lines = []
    for name in group.names:
        rows = [row for row in group.of_implementation(name) if row.times is None]
        for (status, reason), count in Counter((row.status, row.reason) for row in rows).items():
            first = " ".join(reason.split()).replace("|", "\\|")
            lines.append(f"{name} {status} in {count} case{'s' * (count > 1)}: {first}")
    return lines


def _processor(run: Run) -> str:
    return run.gpu or run.cpu or "unknown processor"


def _kinds(group: Group) -> list[str]:
    return list(dict.fromkeys(case.kind for case in group.cases))


def _timed_cases(group: Group, kind: str) -> list[Case]:
    """The cases of a kind for which there is a bar."""
    return [
        case
        for case in group.cases
        if case.kind == kind and any(row.times is not None for row in group.of_case(case))
    ]


# --- the plots ------------------------------------------------------------------------------------


def plot_name(group: Group, kind: str) -> str:
    return f"{kind}-{group.run.run}.png"


def draw(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Draws a PNG for every kind of case in every run.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        agg = importlib.import_module("matplotlib.backends.backend_agg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            f"plots need matplotlib: pip install cupyflash[bench] ({error}); table.md is written"
        ) from error
    paths = []
    for each in groups:
        for kind in _kinds(each):
            panels = _panels(_timed_cases(each, kind))
            if not panels:
                continue
            path = folder / plot_name(each, kind)
            figure = _figure(figures.Figure, each, kind, panels)
            agg.FigureCanvasAgg(figure)
            figure.savefig(path, dpi=DOTS_PER_INCH)
            paths.append(path)
    return paths


def _panels(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases by head_dim and mask; within a panel by length."""
    panels: dict[str, list[Case]] = {}
    for case in cases:
        panels.setdefault(f"head_dim {case.head_dims[1:]}, {case.mask}", []).append(case)
    return {
        title: sorted(members, key=lambda case: (case.seqlen_kv, case.heads_q, case.batch))
        for title, members in panels.items()
    }


def _figure(kind_of: Any, group: Group, kind: str, panels: dict[str, list[Case]]) -> Any:
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = kind_of(figsize=(7.0 * columns, 3.2 * rows + 1.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (title, cases) in zip(axes, panels.items()):
        _panel(axis, group, title, cases)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    shown = [name for name in group.names if name in handles]
    labels = [_label(group, name) for name in shown]
    figure.legend(
        [handles[name] for name in shown],
        labels,
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(f"{kind}: {_processor(group.run)}, {group.run.date} UTC", fontsize=11)
    return figure


def _panel(axis: Any, group: Group, title: str, cases: Sequence[Case]) -> None:
    """Bars grouped by length; whiskers from quartile to quartile."""
    names = [
        name
        for name in group.names
        if any((row := group.rows.get((case, name))) and row.times for case in cases)
    ]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        for position, case in enumerate(cases):
            row = group.rows.get((case, name))
            if row is None or row.times is None:
                continue
            at = position - 0.4 + (index + 0.5) * width
            height = row.times.tflops
            slow, fast = (case.flops / ms / 1e9 for ms in reversed(row.times.quartiles_ms))
            axis.bar(at, height, 0.92 * width, color=_colour(group, name), label=name)
            axis.errorbar(
                *(at, height),
                yerr=[[max(0.0, height - slow)], [max(0.0, fast - height)]],
                color="black",
                linewidth=0.8,
            )
            text = figure_text(height)
            axis.annotate(text, (at, fast), (0, 2), textcoords="offset points", ha="center", size=7)
    axis.set_title(title, fontsize=10)
    axis.set_ylabel("TFLOP/s")
    axis.set_xticks(range(len(cases)), [_tick(case) for case in cases], fontsize=8)
    axis.set_xlim(-0.6, len(cases) - 0.4)
    axis.margins(y=0.12)
    axis.grid(axis="y", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _tick(case: Case) -> str:
    return f"{case.seqlens} tokens\nbatch {case.batch}, heads {case.heads}"


def _colour(group: Group, name: str) -> str:
    """The same for an implementation in every plot."""
    order = list(IMPLEMENTATIONS)
    index = order.index(name) if name in order else len(order) + group.names.index(name)
    return f"C{index % 10}"


def _label(group: Group, name: str) -> str:
    version = next((row.version for row in group.of_implementation(name) if row.times), "")
    return version if version.startswith(f"{name} ") else f"{name} ({version})"
