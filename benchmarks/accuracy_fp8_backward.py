"""What gradients with 8-bit products cost in accuracy, by what shares a scale; on the CPU.

    python benchmarks/accuracy_fp8_backward.py [--seqlen 1024] [--head-dim 128]

Prints a Markdown table: cosine and relative error of dq, dk and dv as the kernel for 9.0 computes
them (``cupyflash.fp8_gradients``), against float64 gradients of the dequantized values (what the
products cost) and of the values before they were quantized (what quantizing costs as well).
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

import cupyflash
from cupyflash import fp8_gradients, reference

MODES = {
    "tensor": None,
    "head": (None, None),
    "128 tokens": (128, None),
    "64 tokens, of k 128": (64, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128))
    options = parser.parse_args()
    block_m = 128 if options.head_dim == 64 else 64
    print(f"seqlen {options.seqlen}, head_dim {options.head_dim}, causal, 1 head")
    print("| data | scales | products: cosine | error, dq dk dv | all: error, dq dk dv |")
    print("| --- | --- | --- | --- | --- |")
    for data, share in (("normal", 0.0), ("0.1 % times 10", 0.001)):
        values = draw(options.seqlen, options.head_dim, share)
        for mode, block in MODES.items():
            if block == (64, None) and block_m > 64:
                continue
            found, right, given = compute(values, block, block_m)
            cosine = min(_cosine(x, y) for x, y in zip(found, right))
            of_products = " ".join(f"{_error(x, y):.4f}" for x, y in zip(found, right))
            of_all = " ".join(f"{_error(x, y):.4f}" for x, y in zip(found, given))
            print(f"| {data} | {mode} | {cosine:.5f} | {of_products} | {of_all} |")


def draw(seqlen: int, head_dim: int, share: float) -> list[NDArray[np.float32]]:
    """q, k, v and dout: normal, a share of them times 10."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(4):
        x = rng.standard_normal((1, seqlen, 1, head_dim))
        found.append((x * np.where(rng.random(x.shape) < share, 10, 1)).astype(np.float32))
    return found


Grads = tuple[NDArray, NDArray, NDArray]


def compute(
    values: list[NDArray[np.float32]], block: object, block_m: int
) -> tuple[Grads, Grads, Grads]:
    """Gradients with 8-bit products; exact ones of what was multiplied, and of ``values``."""
    tensors = []
    for x, role in zip(values, ("q", "k", "v", "dout")):
        of_role = (128, None) if block == (64, None) and role == "k" else block  # a step's keys
        tensors.append(cupyflash.quantize(x, role, block=of_role, for_backward=True))
    q, k, v, dout = (x.dequantize() for x in tensors)
    out, lse = reference.attention(q, k, v, right=0)
    delta = np.einsum("bshd,bshd->bhs", out, dout).astype(np.float32)
    made = fp8_gradients.gradients(
        *tensors, lse.astype(np.float32), delta, block_m=block_m, right=0
    )
    right = reference.attention_backward(dout, q, k, v, right=0)
    given = reference.attention_backward(values[3], *values[:3], right=0)
    return (made.dq, made.dk, made.dv), right, given


def _cosine(x: NDArray, y: NDArray) -> float:
    x, y = x.astype(np.float64).ravel(), y.ravel()
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def _error(x: NDArray, y: NDArray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


if __name__ == "__main__":
    main()
