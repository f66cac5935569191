"""Records what the wrappers do on a GPU, or compares the emulator with such a record.

python -m tests.conformance.run --device     on an H100 or H200: writes tests/conformance/sm90.json
python -m tests.conformance.run              anywhere: replays the emulator against that file
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.conformance import suite
from tests.conformance.suite import Case
from tests.conformance.worlds import Device, Emulator

RECORD = Path(__file__).with_name("sm90.json")


class RecordError(RuntimeError):
    """There is no record that can be trusted."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="store_true", help="run on the GPU and write the record")
    parser.add_argument("--output", type=Path, default=RECORD, help="where to write the record")
    options = parser.parse_args()
    if options.device:
        device = Device()
        record = make_record(device)
        faults = [fault for case in suite.CASES if (fault := unexpected(case, device)) is not None]
        options.output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{len(record['cases'])} cases on {record['device']['name']}: {options.output}")
        print("\n".join(faults) or "all that the manual states is so")
        return 1 if faults else 0
    record = load_record()
    faults = [fault for case in suite.CASES if (fault := disagreement(case, record)) is not None]
    print("\n".join(faults) or f"{len(suite.CASES)} cases agree with {record['device']['name']}")
    return 1 if faults else 0


def make_record(device: Device) -> dict[str, Any]:
    """Run every case on the GPU, twice: what is not reproducible is no record."""
    results = {}
    for case in suite.CASES:
        try:
            output = device.run(case)
        except Exception as error:  # a fault ends the process's use of the GPU: say whose it was
            raise RecordError(f"{case}: {error}") from error
        if not np.array_equal(output, device.run(case)):
            raise RecordError(f"{case}: two runs on the GPU differ")
        results[case.name] = stored(case, output)
    return {
        "device": device.describe(),
        "target": suite.TARGET,
        "wrappers": suite.wrapper_digest(),
        "cases": results,
    }


def stored(case: Case, output: NDArray[np.uint8]) -> str:
    """What a record holds of a result: its hash, or its words where they may differ by ulps."""
    if case.ulps:
        return output.tobytes().hex()
    return hashlib.sha256(output.tobytes()).hexdigest()


def load_record() -> dict[str, Any]:
    """The record in the repository.

    Raises:
        RecordError: there is none, it does not name the GPU that made it, or it was made from
            other wrappers than these.
    """
    if not RECORD.exists():
        raise RecordError(
            f"no {RECORD.name}: python -m tests.conformance.run --device on a GPU makes it"
        )
    record = json.loads(RECORD.read_text())
    device = record.get("device", {})
    if not str(device.get("uuid", "")).startswith("GPU-") or not device.get("driver"):
        raise RecordError(
            f"{RECORD.name} does not name the GPU that wrote it; the emulator must not"
        )
    return record


def disagreement(case: Case, record: dict[str, Any], world: Emulator | None = None) -> str | None:
    """How the emulator's result differs from the GPU's, None if it does not."""
    if case.name not in record["cases"]:
        return f"{case}: not in the record"
    output = (world or Emulator()).run(case)
    expected = record["cases"][case.name]
    if not case.ulps:
        return None if stored(case, output) == expected else f"{case}: other bytes than on the GPU"
    distance = ulps_apart(output, np.frombuffer(bytes.fromhex(expected), np.uint8))
    return None if distance <= case.ulps else f"{case}: {distance} ulps from the GPU"


def ulps_apart(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> int:
    """Largest distance of two arrays of float32 in units in the last place."""

    def ordered(x: NDArray[np.uint8]) -> NDArray[np.int64]:
        bits = x.copy().view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int(np.abs(ordered(first) - ordered(second)).max())


def unexpected(case: Case, world: Device | Emulator) -> str | None:
    """How a result differs from what the PTX manual says, None if it does not or says nothing."""
    if case.expected is None:
        return None
    output, expected = world.run(case), case.expected(case.input)
    wrong = np.flatnonzero(output != expected)
    if not wrong.size:
        return None
    return f"{case}: {wrong.size} of {output.size} bytes are not the manual's, first {wrong[0]}"


if __name__ == "__main__":
    sys.exit(main())
