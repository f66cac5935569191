"""Every function of the device headers has a twin with the same name, template and arguments."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from cupyflash import source

PTX = source.include_root() / "ptx"
DEVICE_HEADERS = (
    "common.cuh",
    "sm80.cuh",
    "sm90.cuh",
    "wgmma.cuh",
    "wgmma_e4m3.cuh",
    "sm100.cuh",
    "unrecorded.cuh",
)
FUNCTION = re.compile(
    r"(?:template\s*<(?P<template>[^<>]*)>\s*)?"
    r"CF_DEVICE(?P<constexpr>\s+constexpr)?\s+(?P<type>[\w:]+)\s+(?P<name>\w+)(?P<special><[\w:]+>)?"
    r"\s*\((?P<arguments>(?:[^()]|\(&\w*\))*)\)\s*[{;]"
)


def functions(text: str) -> dict[tuple[str, str], str]:
    """(name, argument types) to the whole signature without names of arguments."""
    text = re.sub(r"//[^\n]*", "", text)
    text = _expand_binary(text)
    found = {}
    for match in FUNCTION.finditer(text):
        if match["special"] or match["name"].startswith("emulated_"):
            continue
        arguments = [
            " ".join(argument.split())
            for argument in match["arguments"].split(",")
            if argument.strip() not in ("", "CF_WHERE", "emulate::Where where")
        ]
        types = tuple(_without_name(argument) for argument in arguments)
        template = " ".join((match["template"] or "").split())
        signature = f"<{template}> {match['type']} {match['name']}({', '.join(types)})"
        found[match["name"], str(types)] = signature
    return found


def _without_name(argument: str) -> str:
    """ "saddr a" to "saddr", "float (&d)[kN / 2]" to "float (&)[kN / 2]"."""
    if "(&" in argument:
        return re.sub(r"\(&\w*\)", "(&)", argument)
    return re.sub(r"(?<=[\s*&])\w+$", "", argument).strip() if " " in argument else argument


def _expand_binary(text: str) -> str:
    """sm100.cuh makes three functions by a macro."""
    macro = re.search(r"CF_DEVICE void name\(([^)]*)\)", text)
    if macro is None:
        return text
    for name in re.findall(r"CF_F32X2_BINARY\((\w+), \"", text):
        text += f"\nCF_DEVICE void {name}({macro[1]}) {{"
    return text.replace("CF_DEVICE void name(", "void name(")


def device_functions() -> dict[tuple[str, str], str]:
    found = {}
    for header in DEVICE_HEADERS:
        found.update(functions((PTX / header).read_text(encoding="utf-8")))
    return found


def twins() -> dict[tuple[str, str], str]:
    return functions((PTX.parent / "emulate" / "ptx.hpp").read_text(encoding="utf-8"))


def test_the_headers_are_understood() -> None:
    names = {name for name, _ in device_functions()}
    assert {"tid", "pack2", "ldmatrix_x4", "tma_load_4d", "wgmma_ss", "tcgen05_ld"} <= names
    assert len(names) > 80


def test_no_other_header_of_instructions() -> None:
    assert {path.name for path in PTX.glob("*.cuh")} == {"ptx.cuh", *DEVICE_HEADERS}


def test_every_function_has_a_twin() -> None:
    device, host = device_functions(), twins()
    missing = [signature for key, signature in device.items() if key not in host]
    assert not missing, "no twin in emulate/ptx.hpp: " + "; ".join(missing)
    differing = [(device[key], host[key]) for key in device if device[key] != host[key]]
    assert not differing


def test_no_twin_of_nothing() -> None:
    superfluous = [signature for key, signature in twins().items() if key not in device_functions()]
    assert not superfluous, "in emulate/ptx.hpp only: " + "; ".join(superfluous)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_thin_header_includes_no_standard_header() -> None:
    """It is compiled with every kernel; 10000 lines of <vector> would double that time."""
    result = subprocess.run(
        ["g++", "-std=c++20", "-DCF_ARCH=90", f"-I{PTX.parent}", "-E", "-x", "c++", "-"],
        input='#include "ptx/ptx.cuh"\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert "/include/c++/" not in result.stdout
    assert result.stdout.count("\n") < 2000
