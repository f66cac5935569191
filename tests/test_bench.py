"""python -m cupyflash bench and bench-report, timing and adapters, on a machine without a GPU.

Nothing here says how fast anything is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

import cupyflash
from cupyflash import __main__ as command_line
from cupyflash import reference, timing
from cupyflash.bench import implementations, machines, report, results
from cupyflash.bench import run as run_module
from cupyflash.bench.cases import KINDS, Case
from cupyflash.bench.check import Inputs, WrongResultError, check_out
from cupyflash.bench.implementations import IMPLEMENTATIONS, AbsentError, Attention, Implementation
from cupyflash.bench.run import Settings, run

CPU_CASES = KINDS["cpu"]()
SMALL = Case("cpu", 2, 4, 2, 24, 24, 16, 8, dtype="f32", device="cpu")
SHORT = Settings(rounds=2, burst=timing.Burst(milliseconds=0.01, max_calls=3))
PNG = b"\x89PNG\r\n\x1a\n"


def command(*arguments: object) -> int:
    return command_line.main([str(argument) for argument in arguments])


def rows_of(*cases: Case, impls: list[Implementation], settings: Settings = SHORT):
    return [row for rows in run(cases, impls, settings) for row in rows]


def times(case: Case, *rounds: float) -> results.Times:
    samples = [timing.Sample((ms, ms), timing.Clock(1500.0, 650.0)) for ms in rounds]
    return results.summarise(case, samples, "NVML")


def timed_row(case: Case, name: str, *rounds: float, gpu: str = "a GPU") -> results.Row:
    return results.Row(
        results.Run("0123abcd", "2026-01-02 03:04", gpu, None),
        case,
        name,
        IMPLEMENTATIONS[name].ours,
        f"{name} 1.2",
        results.TIMED,
        error=1e-3,
        graph=True,
        times=times(case, *rounds),
    )


# --- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *CPU_CASES,
        replace(SMALL, seqlen_q=40),  # rows that see no key
        replace(SMALL, seqlen_q=7, window=5),
        replace(SMALL, causal=False, window=3),
        replace(SMALL, batch=3, lengths=(9, 0, 24), window=2),
    ],
    ids=lambda case: case.name,
)
def test_visible_pairs_and_flops_by_counting(case):
    pairs = 0
    lengths = case.lengths or (None,) * case.batch
    assert len(lengths) == case.batch
    for length in lengths:
        seqlen_q, seqlen_kv = (
            (case.seqlen_q, case.seqlen_kv) if length is None else (length, length)
        )
        pairs += int(
            reference.visible_keys(
                numpy.arange(seqlen_q),
                seqlen_kv,
                case.window,
                0 if case.causal else None,
                seqlen_kv - seqlen_q,
            ).sum()
        )
    assert case.visible_pairs == pairs
    per_pair = 2 * case.head_dim_qk + 2 * case.head_dim_v  # a product and a sum for each channel
    assert case.flops == case.heads_q * per_pair * pairs


def test_flops_of_large_cases():
    by_name = {case.name: case for kind in KINDS.values() for case in kind()}
    full = by_name["fwd d128 s4096 b4 h16/16 full"]
    assert full.flops == 4 * 4 * 16 * 4096**2 * 128
    causal = by_name["fwd d192/128 s8192 b2 h32/32 causal"]
    assert causal.visible_pairs == 2 * 8192 * 8193 // 2
    assert causal.flops == 2 * 32 * (192 + 128) * causal.visible_pairs
    window = by_name["window d128 s16384 b1 h64/8 window 1024"]
    assert window.visible_pairs == 16384 * 1025 - 1024 * 1025 // 2
    chunk = by_name["chunk d128 s512x32768 b4 h32/8 causal"]
    assert chunk.visible_pairs == 4 * (512 * 32256 + 512 * 513 // 2)


def test_kinds_hold_distinct_named_cases():
    for name, kind in KINDS.items():
        cases = kind()
        assert cases == kind() and {case.kind for case in cases} == {name}
        assert len({case.name for case in cases}) == len(cases)
        assert all(case.heads_q % case.heads_kv == 0 for case in cases)
    (packed, _) = KINDS["varlen"]()
    assert len(packed.lengths) == packed.batch == 64 and max(packed.lengths) == packed.seqlen_q
    assert min(packed.lengths) >= 64 and max(packed.lengths) <= 8192


# --- a run on the CPU -----------------------------------------------------------------------------


def test_cpu_run_and_report(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    wanted = ("--impls", "cupyflash_cpu", "--rounds", 2)
    assert command("bench", out, "--cases", "cpu", "--only", "causal|window", *wanted) == 0
    printed = capsys.readouterr().out
    assert "cpu d64 s512 b1 h4/4 window 100" in printed and "full" not in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    chosen = [case for case in CPU_CASES if case.mask != "full"]
    assert [line["case"] for line in lines] == [case.name for case in chosen]
    for line, case in zip(lines, chosen, strict=True):
        assert line["implementation"] == "cupyflash_cpu" and line["status"] == "timed"
        assert line["version"] == f"cupyflash {cupyflash.__version__}"
        assert line["gpu"] is None and "cores" in line["cpu"]
        assert line["clock_mhz"] is None and line["clock_source"].startswith("none: ")
        low, high = line["quartiles_ms"]
        assert 0 < low <= line["median_ms"] <= high and len(line["rounds_ms"]) == 2
        assert line["tflops"] == pytest.approx(case.flops / line["median_ms"] / 1e9)
        assert 0 < line["error"] < 1e-5 and not line["graph"]
    read = results.read([out])
    assert [row.case for row in read] == chosen
    assert [row.to_json() for row in read] == out.read_text().splitlines()
    assert_report(out, tmp_path / "report", read, capsys)


def assert_report(out: Path, folder: Path, rows: list[results.Row], capsys) -> None:
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    assert command("bench-report", out, "--out", folder) == (0 if has_matplotlib else 1)
    written, error = capsys.readouterr()
    text = (folder / "table.md").read_text()
    assert "| case | cupyflash_cpu | ratio |\n| --- | --- | --- |" in text
    for row in rows:
        figure = report.figure_text(row.times.tflops)
        assert f"| {row.case.name} | **{figure}** | – |" in text
    plot = f"cpu-{rows[0].run.run}.png"
    assert f"![cpu]({plot})" in text
    if not has_matplotlib:
        assert "pip install cupyflash[bench]" in error
        return
    assert written.split() == [str(folder / "table.md"), str(folder / plot)]
    assert (folder / plot).read_bytes().startswith(PNG)


def test_runs_are_appended_and_reported_apart(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        only = ("--only", "s64x512", "--impls", "cupyflash_cpu", "--rounds", 1)
        assert command("bench", out, "--cases", "cpu", *only) == 0
    groups = report.group(results.read([out, out]))
    assert len(groups) == 2 and all(len(group.rows) == 1 for group in groups)


def wrong(case: Case, inputs: Inputs) -> Attention:
    """Right but for the last row: a tail that was forgotten."""
    right = IMPLEMENTATIONS["cupyflash_cpu"].prepare(case, inputs)

    def call():
        out = right.read(right.call())
        out[..., -1, :, :] = 0
        return out

    return Attention(call)


def refusing(case: Case, inputs: Inputs) -> Attention:
    raise cupyflash.UnsupportedError("no kernel for this")


def failing(case: Case, inputs: Inputs) -> Attention:
    raise RuntimeError("illegal memory access; not supported")


def absent(case: Case, inputs: Inputs) -> Attention:
    implementations.import_peer("a_library_that_nobody_wrote")
    raise AssertionError


@pytest.mark.parametrize(
    ("prepare", "ours", "status", "reason", "exit_status"),
    [
        (wrong, True, "wrong", "relative error 1 of a row", 1),
        (wrong, False, "wrong", "relative error 1 of a row", 0),
        (failing, True, "failed", "RuntimeError: illegal memory access", 1),
        (failing, False, "absent", "RuntimeError: illegal memory access; not supported", 0),
        (refusing, True, "absent", "UnsupportedError: no kernel for this", 0),
        (absent, False, "absent", "not installed: a_library_that_nobody_wrote", 0),
    ],
)
def test_what_is_not_timed_has_its_reason(
    tmp_path, monkeypatch, capsys, prepare, ours, status, reason, exit_status
):
    monkeypatch.setitem(
        IMPLEMENTATIONS, "other", Implementation("other", prepare, device="cpu", ours=ours)
    )
    out = tmp_path / "out.jsonl"
    chosen = ("--cases", "cpu", "--only", "s256 b2 .* full", "--rounds", 1)
    assert command("bench", out, *chosen, "--impls", "other,cupyflash_cpu") == exit_status
    row, right = results.read([out])
    assert row.status == status and row.reason.startswith(reason) and row.times is None
    assert right.status == "timed", "others are not held up"
    assert f"other {status}" in capsys.readouterr().out
    (group,) = report.group([row, right])
    text = report.markdown([group])
    assert f"- other {status} in 1 case: {reason}" in text
    assert f"| {row.case.name} | **{report.figure_text(right.times.tflops)}** | – | – |" in text


def test_a_result_of_the_wrong_shape_or_with_nan_is_wrong():
    machine = machines.HostMachine()
    inputs = machine.inputs(SMALL)
    out, _ = reference.attention(inputs.q, inputs.k, inputs.v, right=0)
    assert check_out(SMALL, inputs, out) < 1e-12
    with pytest.raises(WrongResultError, match="shape"):
        check_out(SMALL, inputs, out[:, :, :, :4])
    out[0, 0, 0, 0] = numpy.nan
    with pytest.raises(WrongResultError, match="relative error nan"):
        check_out(SMALL, inputs, out)
    machine.spoil(out)
    assert numpy.isnan(out).all()


def test_a_graph_that_holds_nothing_is_wrong(monkeypatch):
    class EmptyGraphs(timing.WallTimer):
        def prepare(self, call):
            return timing.Prepared(lambda: None, call(), graph=True)

    monkeypatch.setattr(machines, "WallTimer", EmptyGraphs)
    (row,) = rows_of(SMALL, impls=[IMPLEMENTATIONS["cupyflash_cpu"]])
    assert row.status == "wrong" and "nan" in row.reason


def test_a_spent_budget_skips():
    chosen = [IMPLEMENTATIONS[name] for name in ("cupyflash_cpu", "torch_cpu", "cupyflash")]
    rows = rows_of(*CPU_CASES[:2], impls=chosen, settings=replace(SHORT, budget_seconds=0.0))
    assert [(row.case, row.implementation) for row in rows] == [
        (case, name) for case in CPU_CASES[:2] for name in ("cupyflash_cpu", "torch_cpu")
    ]
    assert {row.status for row in rows} == {"skipped"}
    assert {row.reason for row in rows} == {"the budget of 0 s was spent"}
    assert not any(row.is_our_fault for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "cpu,bwd"], "expected some of fwd, varlen, window, chunk, cpu, got 'bwd'"),
        (["--impls", "cupyflash,fa5"], "got 'fa5'"),
        (["--only", "("], "expected a regular expression, got '('"),
        (["--rounds", "0"], "expected an int from 1 on, got '0'"),
        (["--budget", "nan"], "expected a number from 0 on, got 'nan'"),
    ],
)
def test_arguments_that_mean_nothing(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        command("bench", tmp_path / "out.jsonl", *arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_nothing_to_run(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert command("bench", out, "--cases", "cpu", "--only", "d1000") == 1
    assert "leaves none of\n  cpu d64 s256 b2 h4/4 full" in capsys.readouterr().err
    assert command("bench", out, "--cases", "cpu", "--impls", "fa3") == 1
    assert "none of fa3 is for cases on device 'cpu'" in capsys.readouterr().err
    assert not out.exists()
    assert command("bench", tmp_path / "no" / "out.jsonl", "--cases", "cpu") == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_gpu_cases_ask_for_torch(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command("bench", tmp_path / "out.jsonl") == 1
    error = capsys.readouterr().err
    assert "pip install torch" in error and "--cases cpu needs NumPy alone" in error


def test_gpu_cases_ask_for_a_gpu(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command("bench", tmp_path / "out.jsonl") == 1
    assert "sees no GPU" in capsys.readouterr().err


# --- the report -----------------------------------------------------------------------------------


def test_ratio_is_taken_within_rounds():
    case = KINDS["fwd"]()[0]
    ours = timed_row(case, "cupyflash", 1.0, 2.0, 4.0)
    peers = [timed_row(case, "fa3", 1.5, 2.0, 9.0), timed_row(case, "cudnn", 3.0, 2.2, 4.4)]
    assert results.ratio([ours, *peers]) == pytest.approx(1.1)  # of 1.5, 1.0, 1.1
    assert results.ratio([ours]) is None and results.ratio(peers) is None


def test_table_names_versions_clocks_and_gaps():
    first, second = KINDS["fwd"]()[:2]
    peer = timed_row(first, "fa3", 2.0)
    gap = replace(peer, case=second, status="absent", reason="not installed: a | b", times=None)
    rows = [peer, timed_row(first, "cupyflash", 1.0), timed_row(second, "cupyflash", 1.0), gap]
    text = report.markdown(report.group(rows))
    fast, slow = (report.figure_text(first.flops / ms / 1e9) for ms in (1.0, 2.0))
    assert "## a GPU, 2026-01-02 03:04 UTC" in text
    assert "| case | cupyflash | fa3 | ratio |" in text, "ours first, as registered"
    assert f"| {first.name} | **{fast}** | {slow} | 2.000 |" in text
    assert f"| {second.name} | **{report.figure_text(second.flops / 1e9)}** | – | – |" in text
    assert "- fa3: fa3 1.2; SM clock 1500 to 1500 MHz; clock by NVML" in text
    assert "- fa3 absent in 1 case: not installed: a \\| b" in text


def test_plots_of_every_kind(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    cases = [case for kind in ("fwd", "varlen") for case in KINDS[kind]()]
    rows = [timed_row(case, name, 1.0) for case in cases for name in ("fa3", "cupyflash")]
    table, *plots = report.write(rows, tmp_path)
    assert table.name == "table.md"
    assert [path.name for path in plots] == ["fwd-0123abcd.png", "varlen-0123abcd.png"]
    assert all(path.read_bytes().startswith(PNG) for path in plots)


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(cupyflash.UnsupportedError, match=r"pip install cupyflash\[bench\]"):
        report.write([timed_row(KINDS["fwd"]()[0], "fa3", 1.0)], tmp_path)
    assert (tmp_path / "table.md").is_file()


@pytest.mark.parametrize("content", ['{"run": "x"}', "[1]", "not JSON", '{"problem": 3}'])
def test_files_of_something_else_are_refused(tmp_path, capsys, content):
    path = tmp_path / "in.jsonl"
    path.write_text(content + "\n")
    assert command("bench-report", path, "--out", tmp_path) == 1
    assert f"{path}:1: not a line that cupyflash bench wrote" in capsys.readouterr().err


def test_no_results(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    assert command("bench-report", path, "--out", tmp_path) == 1
    assert "No such file" in capsys.readouterr().err
    path.touch()
    assert command("bench-report", path, "--out", tmp_path) == 1
    assert "no results" in capsys.readouterr().err


# --- adapters, on tensors of the CPU --------------------------------------------------------------


def run_adapter(prepare, case: Case) -> float:
    torch = pytest.importorskip("torch")
    inputs = machines.torch_inputs(torch, case, "cpu")
    attention = prepare(case, inputs)
    return check_out(case, inputs, attention.read(attention.call()))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_cupyflash_adapter(case, dtype):
    run_adapter(implementations.prepare_cupyflash, replace(case, dtype=dtype))


@pytest.mark.parametrize("case", CPU_CASES[:3], ids=lambda case: case.name)
def test_sdpa_adapter(case):
    run_adapter(implementations.prepare_sdpa("MATH"), case)


def test_fa2_adapter_of_plain_cases():
    run_adapter(implementations.prepare_fa2, CPU_CASES[1])


@pytest.mark.parametrize("case", CPU_CASES[3:], ids=lambda case: case.name)
def test_fa2_adapter_packs_the_rest(monkeypatch, case):
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def varlen_attn(q, k, v, starts_q, starts_kv, max_q, max_kv, *, window_size, enable_gqa=False):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        left, right = (None if bound < 0 else bound for bound in window_size)
        starts = {"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv}
        lengths = {"max_seqlen_q": max_q, "max_seqlen_kv": max_kv}
        return cupyflash.attention(q, k, v, window=(left, right), **starts, **lengths)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    run_adapter(implementations.prepare_fa2, case)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_flash_adapter(monkeypatch, case):
    def dense(q, k, v, *, causal, window_size=None):
        return cupyflash.attention(q, k, v, causal=causal, window=window_size, return_lse=True)

    def packed(q, k, v, *, cu_seqlens_k, max_seqlen_k, **options):
        kv = {"cu_seqlens_kv": cu_seqlens_k, "max_seqlen_kv": max_seqlen_k}
        return cupyflash.attention(q, k, v, **kv, **options)

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, packed
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    run_adapter(IMPLEMENTATIONS["fa3"].prepare, case)


class Node:
    """A tensor of a cuDNN graph; takes what it is told."""

    def __getattr__(self, name):
        assert name in ("set_output", "set_dim", "set_stride", "set_data_type")
        return lambda value: self


class CudnnGraph:
    """As much of cuDNN's graph as the adapter uses, of one attention; computes it on the CPU."""

    def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (io_data_type, handle) == ("BFLOAT16", "handle")
        self.validate = self.build_operation_graph = self.check_support = lambda: None
        self.build_plans, self.get_workspace_size = lambda: None, lambda: 0
        self.create_execution_plans = lambda modes: None

    def tensor(self, dim, stride, data_type):
        return Node()

    def sdpa(self, q, k, v, *, attn_scale, generate_stats, use_causal_mask):
        self.inputs, self.causal, self.scale = (q, k, v), use_causal_mask, attn_scale
        self.results = (Node(), Node())
        return self.results

    def execute(self, bound, workspace, handle):
        q, k, v = (bound[node] for node in self.inputs)
        options = {"causal": self.causal, "softmax_scale": self.scale, "return_lse": True}
        out, lse = cupyflash.attention(q, k, v, layout="bhsd", **options)
        bound[self.results[0]].copy_(out)
        bound[self.results[1]].copy_(lse[..., None])


@pytest.mark.parametrize("case", CPU_CASES[:3], ids=lambda case: case.name)
def test_cudnn_adapter(monkeypatch, case):
    torch = pytest.importorskip("torch")
    cudnn = types.ModuleType("cudnn")
    cudnn.data_type = types.SimpleNamespace(FLOAT="FLOAT", BFLOAT16="BFLOAT16", HALF="HALF")
    cudnn.heur_mode = types.SimpleNamespace(A="A")
    cudnn.pygraph, cudnn.create_handle = CudnnGraph, lambda: "handle"
    cudnn.set_stream = lambda handle, stream: None
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    run_adapter(implementations.prepare_cudnn, replace(case, dtype="bf16"))


def test_cudnn_counts_the_position_itself_into_the_window():
    cudnn = types.SimpleNamespace(diagonal_alignment=types.SimpleNamespace(BOTTOM_RIGHT="corner"))
    mask = implementations._cudnn_mask
    assert mask(cudnn, KINDS["fwd"]()[1]) == {"use_causal_mask": True}
    assert mask(cudnn, KINDS["chunk"]()[0]) == {
        "diagonal_alignment": "corner",
        "diagonal_band_right_bound": 0,
    }
    assert mask(cudnn, KINDS["window"]()[0])["diagonal_band_left_bound"] == 1025


class TensorsOfTheCpu(machines.GpuMachine):
    """Stands in for a GPU: the same tensors, on the CPU."""

    def inputs(self, case):
        return machines.torch_inputs(self.torch, case, "cpu")

    def wait(self):
        return None


def test_a_run_of_the_implementations_for_gpus(monkeypatch):
    torch = pytest.importorskip("torch")
    stand_in = TensorsOfTheCpu(torch, timing.WallTimer(), "a GPU")
    monkeypatch.setattr(run_module, "open_machine", lambda device: contextlib.nullcontext(stand_in))
    for module in ("cudnn", "fa3_fwd_interface", "flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)
    case = replace(CPU_CASES[1], kind="fwd", dtype="bf16", device="cuda")
    rows = rows_of(case, impls=[entry for entry in IMPLEMENTATIONS.values() if entry.default])
    assert {row.implementation: row.status for row in rows} == {
        "cupyflash": "timed",
        "cudnn": "absent",
        "fa2": "timed",
        "fa3": "absent",
        "fa4": "absent",
    }
    assert all(row.run.gpu == "a GPU" and row.run.cpu is None for row in rows)
    assert results.ratio(rows) is not None
    assert results.from_json(rows[0].to_json()) == rows[0]


@pytest.mark.parametrize(
    "name", [name for name, entry in IMPLEMENTATIONS.items() if not entry.ours]
)
def test_peers_that_are_not_installed_say_so(monkeypatch, name):
    blocked = ("torch", "cudnn", "fa3_fwd_interface", "flash_attn_interface", "flash_attn")
    for module in list(sys.modules):
        if module.split(".")[0] in blocked:
            monkeypatch.setitem(sys.modules, module, None)
    for module in blocked:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(AbsentError, match="not installed: "):
        IMPLEMENTATIONS[name].prepare(SMALL, machines.HostMachine().inputs(SMALL))


def test_registry_agrees_with_itself():
    assert all(name == entry.name for name, entry in IMPLEMENTATIONS.items())
    assert IMPLEMENTATIONS["cupyflash"].version == f"cupyflash {cupyflash.__version__}"
    other = Implementation("x", wrong, distributions=("numpy", "a-package-that-nobody-wrote"))
    assert other.version == f"numpy {numpy.__version__}"


# --- timing ---------------------------------------------------------------------------------------


def test_rounds_begin_with_each_in_turn():
    assert list(timing.turns(["a", "b", "c"], 4)) == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert list(timing.turns([], 1)) == [[]]


class CountingTimer(timing.WallTimer):
    """Says that every call took 10 ms."""

    def run(self, call, count):
        for _ in range(count):
            call()
        return timing.Sample((10.0,) * count)


def test_bursts_are_as_long_as_asked_and_warm():
    calls: list[str] = []
    burst = timing.Burst(milliseconds=60)
    samples = timing.interleave(
        CountingTimer(), {name: lambda name=name: calls.append(name) for name in "ab"}, 2, burst
    )
    runs = [(name, len(list(group))) for name, group in itertools.groupby(calls)]
    each = 1 + 3 + 6  # the one that is counted by, the warm-up, the burst
    assert runs == [("a", each), ("b", 2 * each), ("a", each)]
    assert [len(sample.milliseconds) for sample in samples["a"]] == [6, 6]
    assert burst.num_calls(1000.0) == 3 and burst.num_calls(0.0) == 200


class FakeTorch(types.ModuleType):
    """As much of PyTorch as :class:`timing.CudaTimer` uses; writes down what happens."""

    int8 = "int8"

    def __init__(self, captures: bool) -> None:
        super().__init__("torch")
        self.log: list[str] = []
        self.captures = captures
        self.cuda = types.SimpleNamespace(
            current_device=lambda: 0,
            get_device_properties=lambda index: types.SimpleNamespace(
                name="a GPU", uuid="1-2", L2_cache_size=100 << 20
            ),
            current_stream=lambda: "stream",
            synchronize=lambda: self.log.append("synchronize"),
            CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: self.log.append("replay")),
            graph=self.graph,
            Event=self.event,
        )

    def empty(self, num_bytes, dtype, device):
        assert num_bytes == 200 << 20 and dtype == self.int8 and device == "cuda"
        return types.SimpleNamespace(zero_=lambda: self.log.append("flush"))

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        yield
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    def event(self, enable_timing):
        return types.SimpleNamespace(
            record=lambda: self.log.append("record"), elapsed_time=lambda other: 1.5
        )


@pytest.mark.parametrize("captures", [True, False])
def test_cuda_timer(monkeypatch, captures):
    torch = FakeTorch(captures)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(timing, "open_clock", lambda uuid: timing.NoClock(f"of {uuid}"))
    timer = timing.CudaTimer()
    assert timer.gpu == "a GPU GPU-1-2" and timer.clock_source == "none: of GPU-1-2"
    prepared = timer.prepare(lambda: torch.log.append("call") or "out")
    assert prepared.graph == captures and prepared.returned == "out"
    torch.log.clear()
    sample = timer.run(prepared.call, 2)
    one = ["flush", "record", "replay" if captures else "call", "record"]
    assert torch.log == [*one, *one, "synchronize"]
    assert sample == timing.Sample((1.5, 1.5), None)
    timer.close()


def test_clock_by_nvml(monkeypatch):
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError, nvml.NVML_CLOCK_SM = KeyError, 1
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = {"GPU-1": "handle"}.__getitem__
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: {("handle", 1): 1485}[handle, kind]
    nvml.nvmlDeviceGetPowerUsage = {"handle": 690500}.__getitem__
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = timing.open_clock("GPU-1")
    assert reader.source == "NVML" and reader.read() == timing.Clock(1485.0, 690.5)
    reader.close()
    with pytest.raises(KeyError):
        timing.NvmlClock("GPU-2")


def test_clock_by_nvidia_smi(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "[N/A], 1"\necho "1485, 690.50"\nexec sleep 60\n')
    program.chmod(0o755)
    reader = timing.SmiClock("GPU-1", str(program))
    reader.max_age_seconds = 60
    assert reader.read() == timing.Clock(1485.0, 690.5)
    reader.max_age_seconds = 0
    assert reader.read() is None, "an old reading is none"
    reader.close()
    program.write_text("#!/bin/sh\necho 'No devices were found'\n")
    with pytest.raises(RuntimeError, match="prints no clock"):
        timing.SmiClock("GPU-1", str(program))


def test_no_clock_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    reader = timing.open_clock("GPU-1")
    assert reader.read() is None
    assert reader.source.startswith("none: NvmlClock: ") and "SmiClock: " in reader.source
    reader.close()
