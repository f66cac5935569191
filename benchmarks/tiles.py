"""Times tiles that are not in the table yet: how the rows of ``cupyflash/tuning.py`` are found.

    python benchmarks/tiles.py compile FOLDER            no GPU needed; pinned NVRTC
    python benchmarks/tiles.py run FOLDER [--seqlens 16384 4096 1024] [--rounds 3]

``compile`` builds the tiles named in ``TILES`` below (edit it), with the gates of every build;
``run`` checks each against float32 arithmetic and times them interleaved, in the sustained,
power-limited regime: bursts of back-to-back calls after a warm-up, the L2 cache flushed before each
call. Prints one line a shape, TFLOP/s of every tile; compare within a line only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cupyflash import launch, nvrtc, source, timing
from cupyflash.errors import CompileError
from cupyflash.problem import DeviceInfo, Mask, Problem
from cupyflash.select import KernelSpec, spec_for
from cupyflash.tensor import Device, DeviceKind, DType, TensorView
from cupyflash.tuning import SM90, Tile

HEADS = {64: 32, 96: 16, 128: 16, 192: 32, 256: 8}
TOKENS = 16384


def sm90(
    qk: int, v: int, warpgroups: int, n: int, stages: int = 2, cluster: int = 1, **options: int
) -> Tile:
    """A tile of the sm90 family with ``warpgroups`` consumer warpgroups."""
    given = (("ConsumerWarpgroups", warpgroups), *options.items())
    return Tile(
        *(qk, v, 64 * warpgroups, n, stages, 128 * (warpgroups + 1), "candidate", "-"),
        cluster=cluster,
        scheduler="persistent",
        options=given,
    )


OWN_OUTPUT = {"OutBuffer": 1, "QStages": 2}
TILES: list[tuple[Tile, str]] = [
    (sm90(128, 128, 2, 128, **OWN_OUTPUT), "causal"),
    (sm90(128, 128, 2, 96, **OWN_OUTPUT), "causal"),
    (sm90(128, 128, 2, 112, **OWN_OUTPUT), "causal"),
    (sm90(128, 128, 2, 80, stages=3, **OWN_OUTPUT), "causal"),
    (sm90(192, 128, 2, 128), "causal"),
    (sm90(192, 128, 2, 96, OutBuffer=1, QStages=1), "causal"),
    (sm90(192, 128, 2, 112), "causal"),
    (sm90(256, 256, 2, 80, cluster=2), "none"),
    (sm90(256, 256, 2, 64, cluster=2), "none"),
    (sm90(96, 96, 2, 128, **OWN_OUTPUT), "causal"),
    (sm90(96, 96, 3, 96, **OWN_OUTPUT), "causal"),
]


def compile_tiles(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for index, (tile, mask) in enumerate(TILES):
        spec = spec_for(SM90, tile, "sm_90a", DType.bfloat16, mask)
        try:
            compiled = nvrtc.compile(source.translation_unit(spec))
        except CompileError as error:
            print(f"{spec.name}: {str(error).splitlines()[0]}")
            continue
        (folder / f"{index}.cubin").write_bytes(compiled.cubin)
        kept.append(index)
        print(f"{spec.name}: {compiled.registers} registers, {compiled.seconds:.1f} s")
    (folder / "kept.json").write_text(json.dumps(kept))
    return 0 if kept else 1


class Candidate:
    """One tile, loaded."""

    def __init__(self, folder: Path, index: int) -> None:
        from cupyflash import driver

        tile, self.mask = TILES[index]
        self.spec: KernelSpec = spec_for(SM90, tile, "sm_90a", DType.bfloat16, self.mask)
        loaded = driver.default_driver()
        cubin = (folder / f"{index}.cubin").read_bytes()
        function = loaded.load(0, cubin, self.spec.name, self.spec.shared_bytes)
        self.kernel = launch.Kernel(self.spec, 0, loaded.context(0), function, "candidate")
        self.info: DeviceInfo = loaded.device_info(0)

    def call(self, tensors: dict[str, Any], stream: int) -> Callable[[], None]:
        """A launch of the tile on these tensors."""
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        mask = Mask(right=0) if self.mask == "causal" else Mask()
        problem = Problem(
            *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
            DType.bfloat16,
            mask,
        )
        views = {
            name: TensorView(
                tensor.data_ptr(),
                tuple(tensor.shape),
                tensor.stride(),
                DType.float32 if name == "lse" else DType.bfloat16,
                Device(DeviceKind.cuda, 0),
                False,
            )
            for name, tensor in tensors.items()
        }
        made = launch.forward_launch(problem, self.spec, self.info, views, stream)
        plan = launch.Plan([self.kernel], [made])
        return lambda: plan.run(stream, *made.pointers)


def worst_row(tensors: dict[str, Any], causal: bool) -> float:
    """Largest relative error of some rows of the first and the last head."""
    import torch

    q, k, v, out = (tensors[name] for name in ("q", "k", "v", "out"))
    rows = torch.arange(0, q.shape[1], max(q.shape[1] // 37, 1), device=q.device)
    worst = 0.0
    for batch, head in ((0, 0), (q.shape[0] - 1, q.shape[2] - 1)):
        scores = q[batch, rows, head].float() @ k[batch, :, head].float().T * q.shape[3] ** -0.5
        if causal:
            hidden = torch.arange(k.shape[1], device=q.device)[None] > rows[:, None]
            scores.masked_fill_(hidden, float("-inf"))
        expected = scores.softmax(-1) @ v[batch, :, head].float()
        error = (out[batch, rows, head].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(error.max()))
    return worst


def run_tiles(folder: Path, seqlens: list[int], rounds: int) -> int:
    import torch

    candidates = [
        Candidate(folder, index) for index in json.loads((folder / "kept.json").read_text())
    ]
    groups: dict[tuple[int, int, str], list[Candidate]] = {}
    for candidate in candidates:
        spec = candidate.spec
        groups.setdefault((spec.head_dim_qk, spec.head_dim_v, spec.mask), []).append(candidate)
    wrong = 0
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        contextlib.closing(timing.CudaTimer()) as timer,
    ):
        stream = torch.cuda.current_stream().cuda_stream
        for (qk, v, mask), members in groups.items():
            for seqlen in seqlens:
                batch, heads = max(1, TOKENS // seqlen), HEADS[qk]
                tensors = {
                    name: torch.randn(batch, seqlen, heads, width, device="cuda").bfloat16()
                    for name, width in (("q", qk), ("k", qk), ("v", v))
                }
                tensors["out"] = torch.empty_like(tensors["v"])
                tensors["lse"] = torch.empty(batch, heads, seqlen, device="cuda")
                times: dict[str, list[float]] = {}
                for candidate in members:
                    tensors["out"].fill_(float("nan"))
                    candidate.call(tensors, stream)()
                    error = worst_row(tensors, mask == "causal")
                    if not error < 0.02:
                        print(f"{candidate.spec.name}: WRONG, relative error of a row {error:.3g}")
                        wrong += 1
                for turn in range(rounds):
                    first = turn % len(members)
                    for candidate in members[first:] + members[:first]:
                        call = candidate.call(tensors, stream)
                        taken = timing.sample(timer, call, timing.Burst())
                        times.setdefault(candidate.spec.name, []).append(taken.median)
                flop = 2.0 * batch * heads * (qk + v) * seqlen**2 * (0.5 if mask == "causal" else 1)
                line = [f"d{qk}/{v} {seqlen} {mask}:"]
                for name, ms in times.items():
                    rate = flop / statistics.median(ms) / 1e9
                    line.append(f"{name.removeprefix('forward_sm90_bf16_')} {rate:.0f}")
                print("  ".join(line), flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("compile", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[16384, 4096, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.action == "compile":
        return compile_tiles(options.folder)
    return run_tiles(options.folder, options.seqlens, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
