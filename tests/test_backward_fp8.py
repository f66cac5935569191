"""The backward over 8-bit floats: its definition, and its kernels on the CPU emulator.

``fp8_gradients.gradients`` repeats every rounding of the kernel to e4m3. What may differ: the order
of float32 sums, exp2 and log2 by an ulp or two, and through those, where a value lies between two
e4m3 numbers, that one weight of many becomes the other. So a gradient may be off by ``FLIPS`` times
what the format costs (which rounds every weight) and by roundings of float32.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupyflash import arrays, backward_fp8, emulate, fp8, fp8_gradients, reference
from cupyflash.errors import EmulationError, UnsupportedError
from cupyflash.fp8 import Quantized
from cupyflash.fp8_gradients import Fp8Gradients
from cupyflash.problem import Mask, Problem
from cupyflash.tensor import DType
from tests import mutants
from tests.paths import SCHEDULES, emulated

TARGET = "sm_90a"
FLOATS = ("row_lse", "row_delta", "dq_sums")  # of the workspace


def emulated_test(function: Any) -> Any:
    """Marks a test that runs kernels on the emulator."""
    for mark in emulated:
        function = mark(function)
    return function


FLIPS = 0.05
FLOAT_NOISE = 2.0**-18
OUTPUT_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}


@dataclass(frozen=True)
class Case:
    """A backward pass.

    Attributes:
        seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, batch: its shape.
        left, right: bounds of the mask as ``attention`` takes them, bottom-right.
        blocks: what shares a scale, of q, k, v and dout; one for all or four.
        spread: dout of every 64 queries is 2^spread times as large as that of the 64 before, over
            and over: exponents must follow. 0: alike.
        outliers: share of numbers that are ten times as large.
        dtype: of out and the gradients.
    """

    seqlen_q: int
    seqlen_kv: int
    head_dim: int = 64
    heads_q: int = 1
    heads_kv: int = 1
    batch: int = 1
    left: int | None = None
    right: int | None = None
    blocks: Any = (128, None)
    spread: int = 0
    outliers: float = 0.002
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        words = [f"{self.seqlen_q}x{self.seqlen_kv}d{self.head_dim}"]
        words += [f"h{self.heads_q}-{self.heads_kv}b{self.batch}"]
        words += [f"left{self.left}"] * (self.left is not None)
        words += [f"right{self.right}"] * (self.right is not None)
        words += [f"spread{self.spread}"] * (self.spread != 0) + [self.dtype]
        return "-".join([*words, str(self.blocks).replace(" ", "")])

    @property
    def block_of(self) -> dict[str, fp8.Block]:
        """What shares a scale, by tensor."""
        given = self.blocks if isinstance(self.blocks, list) else [self.blocks] * 4
        return dict(zip(("q", "k", "v", "dout"), given))

    @property
    def block_m(self) -> int:
        return 128 if self.head_dim <= 64 else 64

    @property
    def bounds(self) -> dict[str, int | None]:
        """left and right as diagonals j - i."""
        shift = self.seqlen_kv - self.seqlen_q
        left = None if self.left is None else shift - self.left
        return {"left": left, "right": None if self.right is None else shift + self.right}

    @functools.cached_property
    def tensors(self) -> dict[str, Quantized]:
        """q, k, v and dout."""
        rng = np.random.default_rng(self.seqlen_q + self.seqlen_kv + self.head_dim)
        made = {}
        for name, block in self.block_of.items():
            of_q = name in ("q", "dout")
            seqlen = self.seqlen_q if of_q else self.seqlen_kv
            heads = self.heads_q if of_q else self.heads_kv
            x = rng.standard_normal((self.batch, seqlen, heads, self.head_dim))
            x *= np.where(rng.random(x.shape) < self.outliers, 10, 1)
            if name == "dout":
                x *= np.exp2(self.spread * (np.arange(seqlen) // 64 % 3))[:, None, None]
            made[name] = fp8.quantize(x.astype(np.float32), name, block, None, True, None)
        return made

    @functools.cached_property
    def dequantized(self) -> list[NDArray[np.float32]]:
        return [self.tensors[name].dequantize() for name in ("dout", "q", "k", "v")]

    @functools.cached_property
    def forward(self) -> tuple[NDArray, NDArray[np.float32], NDArray[np.float32]]:
        """out in ``dtype``, lse and delta of it."""
        out, lse = reference.attention(*self.dequantized[1:], **self._mask)
        out = out.astype(arrays.NUMPY_DTYPES[DType[self.dtype]])
        delta = np.einsum("bshd,bshd->bhs", out.astype(np.float32), self.dequantized[0])
        return out, lse.astype(np.float32), delta.astype(np.float32)

    @property
    def _mask(self) -> dict[str, Any]:
        shift = self.seqlen_kv - self.seqlen_q
        return {"left": self.left, "right": self.right, "shift": shift}

    @functools.cached_property
    def exact(self) -> tuple[NDArray[np.float64], ...]:
        """dq, dk, dv of the dequantized values."""
        return reference.attention_backward(*self.dequantized, **self._mask)

    @functools.cached_property
    def expected(self) -> Fp8Gradients:
        _, lse, delta = self.forward
        tensors = self.tensors.values()
        return fp8_gradients.gradients(*tensors, lse, delta, block_m=self.block_m, **self.bounds)

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            dtype=DType[self.dtype],
            mask=Mask(self.left, self.right, "bottom_right"),
        )

    def check(self, grads: list[NDArray], dtype: str = "float32") -> None:
        """Compares gradients in ``dtype`` with what is expected."""
        expected = (self.expected.dq, self.expected.dk, self.expected.dv)
        for name, grad, wanted, exact in zip(("dq", "dk", "dv"), grads, expected, self.exact):
            assert np.isfinite(grad).all(), name
            size = rms(wanted)
            allowed = FLIPS * rms(wanted - exact) + FLOAT_NOISE * size
            allowed += OUTPUT_ROUNDING[dtype] * size
            found = rms(grad.astype(np.float32) - wanted)
            assert found <= allowed, f"{name}: off by {found / size:.2e}, {allowed / size:.2e}"


def rms(x: NDArray) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


def cosine(a: NDArray, b: NDArray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


class Gpu:
    """What ``run`` needs of an emulated device, of the current GPU."""

    def __init__(self) -> None:
        import cupy

        from cupyflash.launch import CudaBackend

        backend = CudaBackend(cupy.cuda.Device().id)
        self.info, self.run = backend.info, backend.run
        self.array, self.empty = cupy.asarray, cupy.empty


def run(
    case: Case,
    grad_dtype: str = "float32",
    delta: bool = False,
    deterministic: bool = False,
    device: Any = None,
    **options: Any,
) -> list[NDArray]:
    """dq, dk and dv of the kernels on the emulator, or on another device."""
    if device is None:
        device = emulate.device(TARGET, **({"num_sms": 2} | options))
    spec = backward_fp8.fp8_backward_spec(case.problem, device.info, case.block_of)
    made = backward_fp8.fp8_workspace(case.problem, spec, deterministic)
    out, lse, given_delta = case.forward
    placed = {"lse": device.array(lse)}
    placed |= {"delta": device.array(given_delta)} if delta else {"out": device.array(out)}
    for name, tensor in case.tensors.items():
        natural, transposed = tensor.data, tensor.data_t
        if name == "v":
            natural, transposed = transposed, None
        placed |= {name: device.array(natural), f"{name}_scale": device.array(tensor.scale)}
        if transposed is not None:
            placed[f"{name}_t"] = device.array(transposed)
    element = arrays.NUMPY_DTYPES[DType[grad_dtype]]
    for name in ("q", "k", "v"):
        placed[f"d{name}"] = device.empty(case.tensors[name].shape, element)
    own = {name: device.empty(getattr(made.base, name), np.float32) for name in FLOATS}
    own["slot_scales"] = device.empty(made.slot_scales, np.float32)
    if deterministic:
        own["dq_turns"] = device.empty(made.base.dq_turns, np.int32)
    adapter = arrays.adapter_for(placed)
    views = {name: adapter.view(name, array) for name, array in placed.items()}
    addresses = {name: adapter.view(name, array).pointer for name, array in own.items()}
    if deterministic:
        addresses["tile_counter"] = addresses["dq_turns"] + made.base.counter_place
    for launch in backward_fp8.fp8_backward_launches(
        case.problem, spec, device.info, views, case.block_of, addresses
    ):
        device.run(launch)
    return [adapter.to_numpy(placed[name]) for name in ("dq", "dk", "dv")]


# --- the definition -------------------------------------------------------------------------------

COSINE = 0.999
FORMAT_CASES = [
    Case(256, 256, 64),
    Case(300, 300, 128, right=0, blocks=(None, None)),
    Case(256, 256, 64, blocks=None),
    Case(384, 256, 64, spread=3),
]


@pytest.mark.parametrize("case", FORMAT_CASES, ids=str)
def test_what_the_format_costs(case: Case) -> None:
    expected = case.expected
    for grad, exact in zip((expected.dq, expected.dk, expected.dv), case.exact):
        assert cosine(grad, exact) > COSINE


def test_a_bound_known_in_advance_costs_more() -> None:
    """Weights of at most 1 and norms of rows bound dS by far too much."""
    case = Case(128, 4096, 64, outliers=0)
    _, lse, delta = case.forward
    tensors = list(case.tensors.values())
    dout, _, _, v = case.dequantized
    bound = 2 * np.linalg.norm(dout, axis=-1).max() * np.linalg.norm(v, axis=-1).max()
    bound *= case.tensors["q"].scale.max()
    exponents = (0, int(np.floor(np.log2(448 / bound))))
    loose = fp8_gradients.gradients(*tensors, lse, delta, block_m=128, fixed=exponents)
    for name, exact in zip(("dq", "dk"), case.exact):
        errors = [rms(getattr(made, name) - exact) for made in (loose, case.expected)]
        assert errors[0] > 2 * errors[1]


def test_weights_are_never_saturated() -> None:
    """Blocks of dout that grow by 2^14 from one to the next, and shrink again."""
    case = Case(640, 256, 128, spread=7)
    assert case.expected.changes[0] > 8 and case.expected.changes[1] > 8
    dv = case.expected.dv
    assert cosine(dv, case.exact[2]) > COSINE


@pytest.mark.parametrize(
    ("top", "exponent", "growth"),
    [
        (0.0, 5, 0),
        (8.0, 5, 0),
        (448.0, 5, 0),
        (449.0, 5, -2),
        (7.9, 5, 4),
        (1.0, 94, 0),
        (1.0, 92, 2),
        (2.0**60, 0, -32),
        (np.inf, 0, -32),
    ],
)
def test_growth(top: float, exponent: int, growth: int) -> None:
    assert fp8_gradients.growth_of(np.float32(top), exponent) == growth


# --- the kernels, emulated ------------------------------------------------------------------------

# More steps than the rings have stages, in tiles of one head and of a group; keys and queries that
# end within a tile, and a warpgroup without any; masks; every kind of scale.
CASES = [
    Case(1030, 300, 64, heads_q=2),
    Case(520, 300, 128, heads_q=2, heads_kv=2, blocks=[(64, None), (128, None), (64, None), None]),
    Case(300, 400, 128, heads_q=4, heads_kv=2, right=0, batch=2),
    Case(400, 300, 64, heads_q=6, heads_kv=2, right=0, blocks=(None, None)),
    Case(200, 330, 64, left=30, right=100, batch=2, dtype="float16"),
    Case(300, 140, 128, left=60, blocks=None, dtype="float16"),
    Case(130, 70, 40, right=0),
    Case(200, 200, 96, heads_q=2, heads_kv=1),
]
CHANGING = [Case(640, 160, 128, heads_q=2, heads_kv=1, spread=7), Case(700, 160, 64, spread=7)]
RACED = [*CHANGING, Case(300, 300, 128, heads_q=2, heads_kv=1, right=0), Case(450, 150, 64)]


def grouped(cases: list[Case]) -> list[Any]:
    return [
        pytest.param(
            case, id=str(case), marks=pytest.mark.xdist_group(f"fp8-backward-{case.head_dim}")
        )
        for case in cases
    ]


@emulated_test
@pytest.mark.parametrize("case", grouped([*CASES, *CHANGING]))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[:3])
def test_case(case: Case, schedule: str, seed: int) -> None:
    case.check(run(case, schedule=schedule, seed=seed, delta=seed == 0))


@emulated_test
@pytest.mark.parametrize("case", grouped(RACED))
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:3])
def test_no_race(case: Case, schedule: str, seed: int) -> None:
    case.check(run(case, schedule=schedule, seed=seed, race=True, num_sms=1))


@emulated_test
@pytest.mark.parametrize("case", grouped([CASES[0], CASES[2], CASES[4]]))
def test_gradients_in_16_bits(case: Case) -> None:
    """Through shared memory, in the place of what was loaded there."""
    options = {"schedule": "random", "seed": 3, "race": True, "num_sms": 1}
    case.check(run(case, case.dtype, **options), case.dtype)


@emulated_test
@pytest.mark.parametrize("case", grouped([CHANGING[0], CASES[3]]))
def test_deterministic_gradients_are_the_same_bits(case: Case) -> None:
    """Whatever the schedule, and how many CTAs share the tiles."""
    expected = run(case, deterministic=True)
    case.check(expected)
    for (schedule, seed), num_sms, window in zip(SCHEDULES[1:], (3, 2, 1), (3, 1, 1)):
        options = {"schedule": schedule, "seed": seed, "num_sms": num_sms, "window": window}
        made = run(case, deterministic=True, race="global", **options)
        for grad, same in zip(made, expected):
            np.testing.assert_array_equal(grad, same)


# --- mutants --------------------------------------------------------------------------------------

SHARED_MUTANTS = 19  # of enum BackwardMutant, up to those of the kernels of wide heads
OWN_MUTANTS = {29: "no_retry_fence", 30: "no_retry_barrier"}
MUTANT_RUNS: tuple[dict[str, Any], ...] = (
    {"schedule": "late"},
    {"schedule": "late", "race": True},
    {"schedule": "early"},
    {"schedule": "random", "seed": 2, "race": True},
    {"schedule": "random", "seed": 3},
)
MUTANT_CASES = (
    (CHANGING[1], "float32"),
    (Case(300, 400, 64, heads_q=2, dtype="bfloat16"), "bfloat16"),
    (Case(64, 900, 64), "bfloat16"),
)


def mutant_names() -> dict[int, str]:
    names = [mutant.name for mutant in mutants.of_family("sm90", "backward")]
    assert len(names) == min(OWN_MUTANTS) - 1, "the numbers of this kernel's mutants follow"
    return dict(enumerate(names[:SHARED_MUTANTS], 1)) | OWN_MUTANTS


@emulated_test
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=name, marks=pytest.mark.xdist_group(f"fp8-{name}"))
        for number, name in mutant_names().items()
    ],
)
def test_mutant_is_caught(number: int, record_property: Any) -> None:
    """Without this barrier or wait some run fails, with a report or a wrong result."""
    for case, grad_dtype in MUTANT_CASES:
        for options in MUTANT_RUNS:
            try:
                case.check(
                    run(case, grad_dtype, mutant=number, **{"num_sms": 1, **options}), grad_dtype
                )
            except (EmulationError, AssertionError) as error:
                record_property("caught", f"{case} {options}: {str(error).splitlines()[0]}")
                return
    pytest.fail("every schedule passed, with and without the race detector")


# --- a GPU ----------------------------------------------------------------------------------------

LARGE = [
    Case(4096, 4096, 128, heads_q=2, heads_kv=1),
    Case(4096, 4096, 64, heads_q=2, right=0),
    Case(3000, 5000, 128, heads_q=2, heads_kv=2, right=0, blocks=(None, None)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *CHANGING, *LARGE], ids=str)
def test_gpu(case: Case, poisoned_pool: Any) -> None:
    case.check(run(case, device=Gpu()))
    case.check(run(case, case.dtype, device=Gpu()), case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CHANGING[0], *LARGE], ids=str)
def test_deterministic_on_a_gpu(case: Case, poisoned_pool: Any) -> None:
    first, second = (run(case, deterministic=True, device=Gpu()) for _ in range(2))
    case.check(first)
    for grad, same in zip(first, second):
        np.testing.assert_array_equal(grad, same)


# --- what is refused, and what is compiled --------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 256}, "up to 128, got 256"),
        ({"blocks": [(1, None), *[(128, None)] * 3]}, "q: expected scales of blocks of at least"),
        ({"blocks": (64, None)}, "q: .*128 tokens"),
        ({"blocks": [(128, None), (64, None), *[(128, None)] * 2]}, "k: .*128 tokens"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    case = dataclasses.replace(Case(256, 256, 64), **changes)
    info = emulate.device(TARGET).info
    with pytest.raises(UnsupportedError, match=words):
        backward_fp8.fp8_backward_spec(case.problem, info, case.block_of)


def test_other_problems_are_refused() -> None:
    case = Case(256, 256, 64)
    info, blocks = emulate.device(TARGET).info, case.block_of
    spec_of = backward_fp8.fp8_backward_spec
    for changes, words in (
        ({"softcap": 5.0}, "softcap"),
        ({"lengths": ("seqused_q",)}, "seqused_q is not served"),
        ({"head_dim_v": 32}, "got 64 and 32"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            spec_of(dataclasses.replace(case.problem, **changes), info, blocks)
    with pytest.raises(UnsupportedError, match=r"needs compute capability 9\.0"):
        spec_of(case.problem, emulate.device("sm_80").info, blocks)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_spills(head_dim: int) -> None:
    """Nor an advisory: ``nvrtc.compile`` raises."""
    from cupyflash import nvrtc, select, source

    if nvrtc.installed_version() is None:
        pytest.skip("no NVRTC")
    kinds = [(DType.bfloat16, mask) for mask in ("none", "causal", "window")]
    for dtype, mask in (*kinds, (DType.float16, "window")):
        spec = select.backward_fp8_spec(head_dim, dtype, mask, TARGET)
        assert spec is not None
        compiled = nvrtc.compile(source.translation_unit(spec))
        assert compiled.spill_bytes == compiled.stack_bytes == 0, spec.name
    for dtype in (DType.bfloat16, DType.float16):
        nvrtc.compile(source.translation_unit(select.backward_delta_fp8_spec(dtype, TARGET)))
