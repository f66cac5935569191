"""What is computed: the shapes of the benchmarks, by kind."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One attention problem, aligned bottom-right.

    Attributes:
        kind: the list that it stands in, a key of ``KINDS``.
        batch: sequences.
        heads_q, heads_kv: query heads, key and value heads.
        seqlen_q, seqlen_kv: lengths; the longest of packed sequences.
        head_dim_qk, head_dim_v: widths.
        causal: whether keys after the query's position are hidden.
        window: keys visible before the query's position, not counting the one at it; None for all.
        lengths: of packed sequences, queries and keys alike; empty for a dense batch.
        dtype: "bf16", "f16" or "f32", of the inputs.
        device: where it runs, "cuda" or "cpu".
    """

    kind: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    causal: bool = True
    window: int | None = None
    lengths: tuple[int, ...] = ()
    dtype: str = "bf16"
    device: str = "cuda"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.head_dims} {self.size} {self.mask}"

    @property
    def head_dims(self) -> str:
        equal = self.head_dim_qk == self.head_dim_v
        return f"d{self.head_dim_qk}" if equal else f"d{self.head_dim_qk}/{self.head_dim_v}"

    @property
    def size(self) -> str:
        return f"s{self.seqlens} b{self.batch} h{self.heads}"

    @property
    def seqlens(self) -> str:
        if self.lengths:
            return f"{min(self.lengths)}-{max(self.lengths)}"
        equal = self.seqlen_q == self.seqlen_kv
        return f"{self.seqlen_q}" if equal else f"{self.seqlen_q}x{self.seqlen_kv}"

    @property
    def heads(self) -> str:
        return f"{self.heads_q}/{self.heads_kv}"

    @property
    def mask(self) -> str:
        if self.window is not None:
            return f"window {self.window}" if self.causal else f"left window {self.window}"
        return "causal" if self.causal else "full"

    @property
    def is_plain(self) -> bool:
        """Whether it has neither packed sequences, nor a window, nor unequal lengths."""
        return not self.lengths and self.window is None and self.seqlen_q == self.seqlen_kv

    @functools.cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask leaves visible, over the batch: exact."""
        sequences = self.lengths or (None,) * self.batch
        count = functools.cache(self._visible_pairs_of)
        return sum(
            count(self.seqlen_q, self.seqlen_kv) if length is None else count(length, length)
            for length in sequences
        )

    def _visible_pairs_of(self, seqlen_q: int, seqlen_kv: int) -> int:
        pairs = 0
        for position in range(seqlen_kv - seqlen_q, seqlen_kv):  # of each query, among the keys
            end = min(position + 1, seqlen_kv) if self.causal else seqlen_kv
            begin = 0 if self.window is None else max(0, position - self.window)
            pairs += max(0, end - begin)
        return pairs

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products, forward.

        2 * heads_q * (head_dim_qk + head_dim_v) for every visible pair; the softmax is not counted.
        """
        return 2 * self.heads_q * (self.head_dim_qk + self.head_dim_v) * self.visible_pairs


def _forward() -> tuple[Case, ...]:
    """Batches of 16,384 tokens and 2,048 channels; then grouped heads and other widths."""
    tokens = 16384
    cases = [
        Case("fwd", tokens // seqlen, heads, heads, seqlen, seqlen, width, width, causal)
        for width, heads in ((64, 32), (128, 16), (256, 8))
        for seqlen in (1024, 4096, 16384)
        for causal in (False, True)
    ]
    cases += [Case("fwd", 1, 64, 8, tokens, tokens, 128, 128, causal) for causal in (False, True)]
    cases += [
        Case("fwd", 2, 32, 32, 8192, 8192, 192, 128),
        Case("fwd", 2, 16, 16, 8192, 8192, 96, 96),
    ]
    return tuple(cases)


def _varlen() -> tuple[Case, ...]:
    """64 packed sequences, lengths log-uniform from 64 to 8,192, the same in every run."""
    draw = random.Random(0)
    lengths = tuple(int(64 * 128 ** draw.random()) for _ in range(64))
    longest = max(lengths)
    return tuple(
        Case("varlen", 64, heads_q, heads_kv, longest, longest, 128, 128, lengths=lengths)
        for heads_q, heads_kv in ((16, 16), (32, 8))
    )


def _window() -> tuple[Case, ...]:
    """A sliding window of 1,024 keys before the query."""
    return tuple(
        Case("window", 1, heads_q, heads_kv, 16384, 16384, 128, 128, window=1024)
        for heads_q, heads_kv in ((16, 16), (64, 8))
    )


def _chunk() -> tuple[Case, ...]:
    """Chunked prefill: 512 new queries after 32,256 keys, and their own."""
    return tuple(Case("chunk", batch, 32, 8, 512, 32768, 128, 128) for batch in (1, 4))


def _cpu() -> tuple[Case, ...]:
    """Small, float32, one of every form: for the CPU path, and to try all this without a GPU."""
    forms = (
        Case("cpu", 2, 4, 4, 256, 256, 64, 64, causal=False),
        Case("cpu", 2, 4, 4, 256, 256, 64, 64),
        Case("cpu", 1, 8, 2, 512, 512, 128, 64),
        Case("cpu", 1, 4, 4, 512, 512, 64, 64, window=100),
        Case("cpu", 1, 4, 2, 64, 512, 64, 64),
        Case("cpu", 3, 4, 2, 300, 300, 64, 64, lengths=(300, 1, 77)),
    )
    return tuple(replace(form, dtype="f32", device="cpu") for form in forms)


KINDS: dict[str, Callable[[], tuple[Case, ...]]] = {
    "fwd": _forward,
    "varlen": _varlen,
    "window": _window,
    "chunk": _chunk,
    "cpu": _cpu,
}
"""The lists of cases by name, as ``--cases`` takes them."""
