"""python -m cupyflash: what it prints and how it exits, without a GPU and without compiling."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import cupyflash
from cupyflash import __main__ as command_line
from cupyflash import cache, nvrtc, reference
from tests.test_cache import CUBIN, Compiler


@pytest.fixture
def store(tmp_path, monkeypatch) -> cache.CubinCache:
    """A cache of our own, with a compiler that only pretends, and no GPU."""
    made = cache.CubinCache(None, tmp_path, compiler=Compiler())
    monkeypatch.setattr(cache, "default_cache", lambda: made)
    monkeypatch.setattr(nvrtc, "installed_version", lambda: "13.5.37")
    monkeypatch.setattr(command_line, "_gpu_infos", list)
    monkeypatch.delenv("CUPYFLASH_FAMILY", raising=False)
    return made


def run(*arguments: str) -> int:
    return command_line.main(arguments)


def test_info(store, capsys):
    assert run("info") == 0
    out = capsys.readouterr().out
    assert f"cupyflash  {cupyflash.__version__}" in out and "numpy" in out
    assert run("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["launcher"].endswith(("libcupyflash.so", "built at the first call"))
    assert {"driver", "launcher", "nvrtc", "packaged", "cache"} <= facts.keys()


def test_explain(store, capsys):
    assert run("explain", "--target", "sm_90a", "--head-dim", "64", "--causal") == 0
    out = capsys.readouterr().out
    assert "kernel   forward_sm90_bf16_d64_" in out and "_causal for sm_90a" in out
    assert "compiled by NVRTC at the first call" in out
    assert run("explain", "--target", "sm_90a", "--head-dim", "100") == 0
    assert "kernel   none" in capsys.readouterr().out


def test_explain_takes_mask_and_layout(store, capsys):
    common = ("explain", "--target", "sm_90a", "--seqlen", "512", "--seqlen-kv", "1024")
    assert run(*common, "--window", "128", "none", "--align", "top_left") == 0
    assert "window left 128 (top_left)" in capsys.readouterr().out
    assert run(*common, "--window", "none", "none", "--layout", "bhsd") == 0
    assert "no mask" in capsys.readouterr().out
    assert run("explain", "--target", "sm_90a", "--seqlen", "0") == 0
    assert "nothing is launched" in capsys.readouterr().out
    wide = (*common, "--heads", str(2**32))  # the next query is too far for TMA, the next head not
    assert run(*wide) == 0
    assert "TMA cannot address q: seqlen stride" in capsys.readouterr().out
    assert run(*wide, "--layout", "bhsd") == 0
    assert "TMA cannot address" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head-dim", "0"], "--head-dim: expected an int from 1 on, got '0'"),
        (["--head-dim-v", "0"], "--head-dim-v: expected an int from 1 on"),
        (["--seqlen", "-3"], "--seqlen: expected an int from 0 on, got '-3'"),
        (["--seqlen-kv", "1.5"], "--seqlen-kv: expected an int"),
        (["--heads-kv", "0"], "--heads-kv: expected an int from 1 on"),
        (["--window", "-1", "0"], "--window: expected an int from 0 on or none, got '-1'"),
    ],
    ids=str,
)
def test_sizes_that_mean_nothing(store, capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        run("explain", "--target", "sm_90a", *arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "4", "--heads-kv", "3"], "multiple of the heads of k and v"),
        (["--seqlen", str(2**29 + 1)], "seqlen is at most"),
        (["--window", str(2**31), "0"], "window left"),
    ],
    ids=str,
)
def test_explain_checks_what_attention_checks(store, capsys, arguments, words):
    assert run("explain", "--target", "sm_90a", *arguments) == 1
    captured = capsys.readouterr()
    assert words in captured.err and not captured.out


def test_warmup_of_no_width(store, capsys):
    with pytest.raises(SystemExit):
        run("warmup", "--target", "sm_90a", "--head-dim", "64", "0")
    assert "expected an int from 1 on" in capsys.readouterr().err


def test_explain_without_a_gpu_asks_for_a_target(store, capsys):
    assert run("explain") == 1
    assert "--target" in capsys.readouterr().err


def test_warmup_and_cache(store, capsys):
    assert run("warmup", "--target", "sm_80", "--head-dim", "64", "--dtype", "bf16", "f16") == 0
    out = capsys.readouterr().out
    assert "[4/4] " in out and out.count("compiled") == 4
    assert run("cache", "list") == 0
    assert "4 kernels" in capsys.readouterr().out
    assert run("cache", "verify") == 0
    assert "4 of 4 kernels" in capsys.readouterr().out
    victim = next(store.entries()).path
    victim.write_bytes(CUBIN[:-1])
    assert run("cache", "verify") == 1
    assert f"corrupt: {victim}" in capsys.readouterr().out
    emulated = store.directory / "emulate" / "kernel.so"
    emulated.parent.mkdir()
    emulated.write_bytes(b"")
    assert run("cache", "clear") == 0
    assert "4 kernels removed, 1 files of the emulator" in capsys.readouterr().out
    assert not list(store.entries()) and not emulated.exists()


def comparison(problem: str | None) -> reference.Comparison:
    return reference.Comparison(1e-3, 2e-3, 0.0, 1e-4, problem)


def skipped() -> tuple[str, reference.Comparison]:
    raise command_line._SkippedError("there is no such GPU")


def broken() -> tuple[str, reference.Comparison]:
    raise RuntimeError("deadlock at line 3")


@pytest.mark.parametrize(
    ("rows", "status", "words"),
    [
        ({"a": lambda: ("kernel", comparison(None))}, 0, ["ok", "1 passed, 0 failed"]),
        ({"a": lambda: ("kernel", comparison("out: NaN"))}, 1, ["FAILED", "0 passed, 1 failed"]),
        ({"a": broken}, 1, ["RuntimeError", "0 passed, 1 failed"]),
        (
            {"a": lambda: ("kernel", comparison(None)), "b": skipped},
            0,
            ["skipped: there is no such GPU", "1 passed, 0 failed, 1 skipped"],
        ),
    ],
)
def test_check_reports_and_exits(store, monkeypatch, capsys, rows, status, words):
    monkeypatch.setattr(command_line, "_checks", lambda: iter(rows.items()))
    assert run("check") == status
    captured = capsys.readouterr()
    for word in words:
        assert word in captured.out
    if "out: NaN" in str(rows):
        assert "out: NaN" in captured.err


def test_check_covers_every_family_without_a_gpu(store):
    labels = [label for label, _ in command_line._checks()]
    assert labels == [
        "cpu (NumPy)",
        "sm_80 (emulated)",
        "sm_90a (emulated)",
        "sm_100f (emulated)",
    ]


def test_check_of_the_cpu_path_passes(store):
    _, result = command_line._check_cpu()
    assert result.ok and result.error <= result.bound


def test_it_is_a_module_and_says_what_it_can_do():
    process = subprocess.run(
        [sys.executable, "-m", "cupyflash", "--help"], capture_output=True, text=True, check=True
    )
    for name in ("info", "check", "explain", "warmup", "cache", "bench", "bench-report"):
        assert name in process.stdout
