"""Error of the forward on a GPU: RMSE against float64, beside PyTorch's own arithmetic and peers.

    python benchmarks/accuracy.py

For each case and kind of data: the root mean square error of out for cupyflash, for the plain
computation in PyTorch in the same element type (matrix product, softmax, matrix product) and for
FlashAttention-3 where it is installed (``fa3_fwd_interface``); the ratios; and whether 200 repeats
of cupyflash agree bit for bit. Exit status 1 if a ratio exceeds 2 against PyTorch or 1.05 against
FlashAttention-3, or a repeat differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REPEATS = 200
MAX_RATIO_TO_PYTORCH = 2.0
MAX_RATIO_TO_FA3 = 1.05


@dataclass(frozen=True)
class Case:
    """Shapes, element type and data of one comparison."""

    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str = "bfloat16"
    data: str = "normal"

    def __str__(self) -> str:
        width = f"{self.head_dim}" + (
            f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        )
        return (
            f"d{width} {self.batch}x{self.seqlen_q}x{self.seqlen_kv} "
            f"h{self.heads_q}/{self.heads_kv} "
            f"{'causal' if self.causal else 'full'} {self.dtype} {self.data}"
        )


CASES = (
    *(
        Case(1, s, s, 4, 4, d, d, causal, dtype)
        for d in (64, 128, 256)
        for s in (1024, 4096)
        for causal in (False, True)
        for dtype in ("bfloat16", "float16")
    ),
    Case(1, 2048, 2048, 8, 2, 128, 128, True),
    Case(2, 1000, 3000, 4, 4, 96, 96, True),
    Case(1, 2048, 2048, 4, 4, 192, 128, True),
    *(
        Case(1, 2048, 2048, 4, 4, 128, 128, True, "bfloat16", data)
        for data in ("outliers", "large", "constant", "shifted")
    ),
)


def inputs(case: Case) -> tuple[Any, Any, Any]:
    """q, k and v of the case's kind of data."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(seqlen: int, heads: int, width: int) -> Any:
        return torch.randn(case.batch, seqlen, heads, width, device="cuda", generator=generator)

    q = normal(case.seqlen_q, case.heads_q, case.head_dim)
    k = normal(case.seqlen_kv, case.heads_kv, case.head_dim)
    v = normal(case.seqlen_kv, case.heads_kv, case.head_dim_v)
    if case.data == "outliers":
        for x in (q, k, v):
            x[..., ::17] *= 10
    elif case.data == "large":
        q, k = 4 * q, 4 * k
    elif case.data == "constant":
        q, k = 0 * q, 0 * k
    elif case.data == "shifted":
        q, k, v = q + 1, k + 1, v + 3
    dtype = getattr(torch, case.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def plain(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """softmax(q k^T scale) v in the arithmetic of the inputs' element type."""
    import torch

    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        rows, keys = scores.shape[2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores.masked_fill_(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def peer() -> Callable[..., Any] | None:
    """FlashAttention-3's function, or None."""
    try:
        import fa3_fwd_interface
    except ImportError:
        return None
    return fa3_fwd_interface.flash_attn_func


def main() -> int:
    import torch

    import cupyflash

    fa3 = peer()
    if fa3 is None:
        print("FlashAttention-3 is not installed: no ratio to it")
    failed = 0
    print("case: RMSE cupyflash, PyTorch (ratio), FlashAttention-3 (ratio)")
    with torch.no_grad():
        for case in CASES:
            q, k, v = inputs(case)
            exact = plain(q.double(), k.double(), v.double(), case.causal)

            def rmse(out: Any) -> float:
                return float((out.double() - exact).square().mean().sqrt())  # noqa: B023

            def ours() -> Any:
                return cupyflash.attention(q, k, v, causal=case.causal)  # noqa: B023

            out = ours()
            own, theirs = rmse(out), rmse(plain(q, k, v, case.causal))
            text = f"{case}: {own:.3g}, {theirs:.3g} ({own / theirs:.2f})"
            wrong = own > MAX_RATIO_TO_PYTORCH * theirs
            if fa3 is not None:
                try:
                    result = fa3(q, k, v, causal=case.causal)
                except Exception as error:
                    text += f", FlashAttention-3: {type(error).__name__}"
                else:
                    other = rmse(result[0] if isinstance(result, tuple) else result)
                    text += f", {other:.3g} ({own / other:.3f})"
                    wrong |= own > MAX_RATIO_TO_FA3 * other
            differing = sum(not torch.equal(ours(), out) for _ in range(REPEATS))
            if differing:
                text += f", {differing} of {REPEATS} repeats differ"
            failed += wrong or differing > 0
            print(text + (" TOO LARGE" if wrong else ""), flush=True)
    print(f"{len(CASES)} cases, {failed} beyond the bounds, {REPEATS} repeats each")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
