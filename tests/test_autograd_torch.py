"""PyTorch's autograd and torch.compile through ``cupyflash.attention``."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import adapters, api, arrays
from cupyflash.arguments import Options

torch = pytest.importorskip("torch")

SHAPES = ((2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 6))  # two query heads share a key head


def inputs(
    dtype: Any = None, shapes: Any = SHAPES, seed: int = 0, device: str = "cpu"
) -> list[Any]:
    """q, k, v that require grad."""
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype or torch.float64).to(device).requires_grad_() for x in tensors]


def gradients(tensors: list[Any], attend: Any = cupyflash.attention, **options: Any) -> list[Any]:
    """out, lse and the gradients of a loss that weighs every element of both."""
    out, lse = attend(*tensors, return_lse=True, **options)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64) for x in (out, lse)]
    loss = sum(
        (x * w.reshape(x.shape).to(x)).nan_to_num(0, 0, 0).sum()
        for x, w in zip((out, lse), weights)
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)]


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "align": "top_left"},
    "window": {"window": (2, 1)},
    "half_window": {"window": (None, 0), "softmax_scale": 0.7},
    "softcap": {"softcap": 1.5, "causal": True},
    "offsets": {"causal": True, "q_offset": 1, "kv_offset": 2},
    "used": {"seqused_q": [5, 2], "seqused_kv": [3, 6], "causal": True},
    "offset_arrays": {"window": (3, 0), "q_offset": [0, 2]},
}


def options_of_case(name: str) -> dict[str, Any]:
    return {
        key: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for key, value in CASES[name].items()
    }


PACKED_SHAPES = ((9, 4, 8), (11, 2, 8), (11, 2, 6))


def packed_options() -> dict[str, Any]:
    """Three sequences, one of them empty, and rows behind the last."""
    starts_q, starts_kv = [0, 5, 5, 8], [0, 4, 6, 10]
    return {
        "cu_seqlens_q": torch.tensor(starts_q, dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor(starts_kv, dtype=torch.int32),
        "causal": True,
    }


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_derivatives(name: str) -> None:
    """Against finite differences in float64, of out and of lse."""
    options = options_of_case(name)

    def attend(*tensors: Any) -> tuple[Any, Any]:
        out, lse = cupyflash.attention(*tensors, return_lse=True, **options)
        return out, lse.masked_fill(lse == -math.inf, 0)  # rows that see nothing

    assert torch.autograd.gradcheck(attend, inputs())


def test_gradients_are_derivatives_in_the_other_layout() -> None:
    tensors = [x.detach().transpose(1, 2).requires_grad_() for x in inputs()]
    assert not tensors[0].is_contiguous()
    assert torch.autograd.gradcheck(
        lambda *x: cupyflash.attention(*x, causal=True, layout="bhsd", return_lse=True), tensors
    )


def test_gradients_are_derivatives_of_packed_sequences() -> None:
    options = packed_options()

    def attend(*tensors: Any) -> tuple[Any, Any]:
        out, lse = cupyflash.attention(*tensors, return_lse=True, **options)
        return out, lse.masked_fill(lse == -math.inf, 0)

    tensors = inputs(shapes=PACKED_SHAPES)
    assert torch.autograd.gradcheck(attend, tensors)
    *_, dq, dk, dv = gradients(tensors, **options)
    assert not dq[8:].any() and not dk[10:].any() and not dv[10:].any()


def test_the_gradient_of_lse_alone() -> None:
    """With q = 0 every key weighs the same: dq is the mean of the keys, dk and dv are 0."""
    _, k, v = inputs(shapes=((1, 2, 1, 64), (1, 3, 1, 64), (1, 3, 1, 64)))
    q = torch.zeros(1, 2, 1, 64, dtype=torch.float64, requires_grad=True)
    _, lse = cupyflash.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    expected = (64**-0.5 * k.detach().mean(1, keepdim=True)).expand(q.shape)
    torch.testing.assert_close(q.grad, expected)
    assert not k.grad.any() and not v.grad.any()


def test_rows_that_see_nothing_have_no_gradient() -> None:
    """Three queries before the first key: out 0, lse -inf, and a loss of both gives 0."""
    q, k, v = inputs(shapes=((1, 5, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8)))
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    assert (lse[..., :3] == -math.inf).all()
    (out.sum() + lse.sum()).backward()
    assert not q.grad[:, :3].any() and q.grad[:, 3:].any()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_inputs_type(dtype: Any) -> None:
    tensors = inputs(dtype)
    exact = gradients([x.detach().double().requires_grad_() for x in tensors], causal=True)
    out, lse, *grads = gradients(tensors, causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    roundoff = torch.finfo(dtype).eps
    for tensor, grad, expected in zip(tensors, grads, exact[2:]):
        assert grad.dtype == dtype and grad.shape == tensor.shape
        assert (grad.double() - expected).abs().max() <= 8 * roundoff * expected.abs().max()


@pytest.mark.parametrize("wanted", range(3))
def test_only_the_wanted_gradients_are_given(wanted: int) -> None:
    tensors = inputs()
    expected = gradients(tensors)[2 + wanted]
    given = [x.detach().requires_grad_(index == wanted) for index, x in enumerate(tensors)]
    out, lse = cupyflash.attention(*given, return_lse=True)
    assert out.requires_grad and lse.requires_grad
    weights = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64) for x in (out, lse)]
    sum((x * w.reshape(x.shape)).sum() for x, w in zip((out, lse), weights)).backward()
    assert [x.grad is not None for x in given] == [index == wanted for index in range(3)]
    assert torch.equal(given[wanted].grad, expected)


def test_gradients_of_every_kind_of_stride() -> None:
    """A sum hands over a gradient of strides 0, an imaginary part a lazily negated one."""
    tensors = inputs()
    out = cupyflash.attention(*tensors)
    expected = torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    for given in (
        torch.autograd.grad(out.sum(), tensors, retain_graph=True),
        torch.autograd.grad(
            torch.complex(torch.zeros_like(out), -out).conj().imag.sum(), tensors, retain_graph=True
        ),
    ):
        assert all(torch.equal(x, y) for x, y in zip(given, expected))
    ones = torch.ones(2, 4, 6, 5, dtype=torch.float64).permute(0, 3, 1, 2)
    lazy = torch.complex(ones, -ones).conj().imag
    assert lazy.is_neg()
    given = torch.autograd.grad(out, tensors, lazy)
    assert all(torch.equal(x, y) for x, y in zip(given, expected))


# --- what autograd asks for -----------------------------------------------------------------------


def test_a_plain_call_is_not_recorded() -> None:
    tensors = inputs()
    plain = [x.detach() for x in tensors]
    expected = cupyflash.attention(*plain)
    assert expected.grad_fn is None and adapters.recorder(*plain, Options()) is None
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert adapters.recorder(*tensors, Options()) is None
            out = cupyflash.attention(*tensors)
            assert torch.equal(out, expected) and not out.requires_grad
    parameter = torch.nn.Parameter(tensors[0].detach())
    out = cupyflash.attention(parameter, *plain[1:])
    assert torch.equal(out, expected) and out.grad_fn is not None


def test_recorded_and_plain_calls_agree_bit_for_bit() -> None:
    tensors = inputs(torch.float32)
    for options in (*map(options_of_case, CASES), {"window": np.array([1, 1])}):
        recorded = cupyflash.attention(*tensors, return_lse=True, **options)
        with torch.no_grad():
            plain = cupyflash.attention(*tensors, return_lse=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(recorded, plain)), options


def test_a_wrong_call_is_refused_as_ever() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="k: expected shape"):
        cupyflash.attention(q, k[..., :4], v)
    with pytest.raises(TypeError, match="one dtype"):
        cupyflash.attention(q, k.float(), v)
    with pytest.raises(TypeError, match="one library"):
        cupyflash.attention(q, k.detach().numpy(), v)
    with pytest.raises(TypeError, match="q_offset: expected int"):
        cupyflash.attention(q, k, v, q_offset=1.5)
    with pytest.raises(cupyflash.UnsupportedError, match="num_sms"):
        cupyflash.attention(q, k, v, num_sms=4)


def test_an_output_tensor_is_refused() -> None:
    q, k, v = inputs()
    out = torch.zeros(2, 5, 4, 6, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"out: autograd .*no_grad"):
        cupyflash.attention(q, k, v, out=out)
    assert not out.any()
    with torch.no_grad():
        assert cupyflash.attention(q, k, v, out=out) is out and out.any()
    with pytest.raises(cupyflash.UnsupportedError, match=r"stream: .*torch\.cuda\.stream"):
        cupyflash.attention(q, k, v, stream=1)


def test_second_derivatives_are_refused() -> None:
    tensors = inputs()
    expected = gradients(tensors)[2:]
    out, lse = cupyflash.attention(*tensors, return_lse=True)
    weights = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64) for x in (out, lse)]
    loss = sum((x * w.reshape(x.shape)).sum() for x, w in zip((out, lse), weights))
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(grads, expected))
    with pytest.raises(cupyflash.UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(grads[0].sum(), tensors)


def test_forward_mode_and_vmap_are_refused() -> None:
    from torch.autograd import forward_ad

    q, k, v = inputs()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(TypeError, match=r"forward-mode tangent.*detach"):
            cupyflash.attention(q, dual, v)
        assert cupyflash.attention(q, k, v).requires_grad
    with pytest.raises(TypeError, match="forward-mode tangent"):
        torch.func.jvp(lambda x: cupyflash.attention(x, k, v), (q,), (q,))
    with pytest.raises(cupyflash.UnsupportedError, match=r"torch\.func\.vmap"):
        torch.func.vmap(lambda x: cupyflash.attention(x, k, v))(q[None])


def test_functional_gradients() -> None:
    q, k, v = (x.detach() for x in inputs())
    found = torch.func.grad(lambda x: cupyflash.attention(x, k, v).square().sum())(q)
    q.requires_grad_()
    cupyflash.attention(q, k, v).square().sum().backward()
    assert torch.equal(found, q.grad)


def test_inputs_changed_before_the_backward_are_noticed() -> None:
    q, k, v = inputs()
    doubled = q * 2
    out = cupyflash.attention(doubled, k, v)
    doubled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    used = torch.tensor([6, 3], dtype=torch.int32)
    out = cupyflash.attention(q, k, v, seqused_kv=used)
    used[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    used = np.array([6, 3], np.int32)  # nobody watches a NumPy array: it is copied
    expected = torch.autograd.grad(cupyflash.attention(q, k, v, seqused_kv=used).sum(), (q, k, v))
    out = cupyflash.attention(q, k, v, seqused_kv=used)
    used[0] = 1
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = api.attention_backward

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return backward(*arguments, **options)

    monkeypatch.setattr(api, "attention_backward", spy)
    tensors = inputs()
    graph = torch.compile(cupyflash.attention, fullgraph=True, backend="aot_eager")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in (True, False, True):
            torch.use_deterministic_algorithms(wanted)
            for attend in (cupyflash.attention, graph):
                attend(*tensors).sum().backward()
                assert asked.pop() is wanted and not asked
    finally:
        torch.use_deterministic_algorithms(before)


def test_autocast_changes_no_type() -> None:
    for attend in (cupyflash.attention, compiled(cupyflash.attention)):
        tensors = inputs(torch.float32)
        expected = gradients(tensors, causal=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = gradients(tensors, attend, causal=True)
            mixed = torch.nn.functional.linear(tensors[0], torch.ones(8, 8))
            assert mixed.dtype == torch.bfloat16
            with pytest.raises(TypeError, match="one dtype"):
                cupyflash.attention(mixed, *tensors[1:])
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_checkpointing_and_repeated_backwards() -> None:
    from torch.utils.checkpoint import checkpoint

    tensors = inputs()
    out = cupyflash.attention(*tensors)
    first, second = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    again = checkpoint(lambda *x: cupyflash.attention(*x), *tensors, use_reentrant=False)
    third = torch.autograd.grad(again.sum(), tensors)
    for other in (second, third):
        assert all(torch.equal(x, y) for x, y in zip(first, other))


def test_a_graph_holds_its_tensors_no_longer_than_it_lives() -> None:
    q, k, v = inputs()
    hidden = q * 2
    alive = weakref.ref(hidden)
    gc.disable()
    try:
        out, lse = cupyflash.attention(hidden, k, v, return_lse=True)
        del hidden
        assert alive() is not None
        del out, lse
        assert alive() is None
    finally:
        gc.enable()


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = """
        import sys, cupyflash
        cupyflash.attention
        assert not {"torch", "jax"} & set(sys.modules)
        import torch
        x = torch.zeros(1, 4, 1, 8)
        cupyflash.attention(x, x, x)
        assert "cupyflash.adapters.torch" not in sys.modules
        cupyflash.attention(x.requires_grad_(), x, x).sum().backward()
        assert x.grad is not None and not {"jax", "torch._inductor"} & set(sys.modules)
    """
    run_python(code)


def run_python(code: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


# --- graphs ---------------------------------------------------------------------------------------


def compiled(function: Any, **options: Any) -> Any:
    """Without a break, in eager kernels: what is tested is the graph."""
    torch._dynamo.reset()
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager", **options})


@pytest.mark.parametrize("name", CASES)
def test_a_graph_gives_the_same(name: str) -> None:
    tensors, options = inputs(), options_of_case(name)
    found = gradients(tensors, compiled(cupyflash.attention), **options)
    expected = gradients(tensors, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_a_graph_of_packed_sequences_gives_the_same() -> None:
    tensors, options = inputs(shapes=PACKED_SHAPES), packed_options()
    options["max_seqlen_q"] = 5
    found = gradients(tensors, compiled(cupyflash.attention), **options)
    expected = gradients(tensors, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_a_graph_around_attention(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations before and after, under no_grad and not, and where the adapter of GPU tensors,
    through which eager calls take the short way, has been met before."""
    if known:
        monkeypatch.setattr(arrays, "FAST", {torch.Tensor: arrays.TorchAdapter(torch)})

    def block(q: Any, k: Any, v: Any) -> Any:
        by_heads = (x.transpose(1, 2) for x in (q * 2, k, v))
        return cupyflash.attention(*by_heads, causal=True, layout="bhsd").transpose(1, 2) + 1

    tensors = inputs()
    graph = compiled(block)
    out = graph(*tensors)
    monkeypatch.setattr(arrays, "FAST", {})
    expected = block(*tensors)
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(
        torch.equal(x, y) for x, y in zip(found, torch.autograd.grad(expected.sum(), tensors))
    )
    with torch.no_grad():
        out = graph(*tensors)
    assert torch.equal(out, expected) and not out.requires_grad


def test_a_graph_of_changing_shapes_and_scales() -> None:
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    def attend(q: Any, k: Any, v: Any, scale: float) -> Any:
        window = (q.shape[1], None)
        return cupyflash.attention(q, k, v, softmax_scale=scale, window=window, q_offset=2)

    graph = compiled(attend, dynamic=True, backend=backend)
    for length, scale in ((5, 0.25), (7, 0.25), (9, 0.25), (9, 0.5), (11, 0.5)):
        tensors = inputs(shapes=((2, length, 4, 8), *SHAPES[1:]))
        assert torch.equal(graph(*tensors, scale), attend(*tensors, scale))
    assert len(graphs) == 2  # one a scale, not one a length


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which torch.compile needs")
def test_the_default_compiler() -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q.transpose(1, 2) * 2, k, v, causal=True).sin()

    q, k, v = inputs(torch.float32)
    tensors = [q.detach().transpose(1, 2).contiguous().requires_grad_(), k, v]
    out, expected = compiled(block, backend="inductor")(*tensors), block(*tensors)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.sum(), tensors)
    for x, y in zip(found, torch.autograd.grad(expected.sum(), tensors)):
        torch.testing.assert_close(x, y)


def test_graphs_refuse_what_they_cannot_express() -> None:
    q, k, v = inputs()
    out = torch.empty(2, 5, 4, 6, dtype=torch.float64)
    with pytest.raises(Exception, match=r"out: autograd and torch\.compile"):
        compiled(lambda *x: cupyflash.attention(*x, out=out))(q, k, v)
    with pytest.raises(Exception, match="out_dtype: expected"):
        compiled(lambda *x: cupyflash.attention(*x, out_dtype=torch.float32))(q, k, v)
    with pytest.raises(Exception, match="scales belong to fp8"):
        compiled(lambda *x: cupyflash.attention(*x, q_scale=q))(q, k, v)
    eighths = [x.detach().to(torch.float8_e4m3fn) for x in (q, k, v)]
    with pytest.raises(Exception, match="no graphs of fp8 arrays"):
        compiled(cupyflash.attention)(*eighths)
    with pytest.raises(cupyflash.UnsupportedError, match="stream: autograd"):
        compiled(lambda *x: cupyflash.attention(*x, stream=1), fullgraph=False)(q, k, v)
    with pytest.raises(ValueError, match="align: expected one of"):
        compiled(lambda *x: cupyflash.attention(*x, align="left"))(q, k, v)
    with pytest.raises(cupyflash.UnsupportedError, match="no second derivatives"):
        out = compiled(cupyflash.attention, backend="eager")(q, k, v)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        grad.sum().backward()
    tangent = q.detach()
    with pytest.raises((TypeError, RuntimeError, NotImplementedError), match="forward-mode"):
        compiled(
            lambda x: torch.func.jvp(lambda y: cupyflash.attention(y, k, v), (x,), (x,)),
            fullgraph=False,
        )(tangent)


def test_the_operators_keep_their_promises() -> None:
    q, k, v = inputs()
    cupyflash.attention(q, k, v)  # defines them
    check = torch.library.opcheck
    attend = torch.ops.cupyflash.attention.default
    used = (None, None, torch.tensor([2, 5]), torch.tensor([6, 3]))
    for arguments, options in (
        ((q, k, v), {}),
        ((q, k, v, *used), {"causal": True, "softcap": 2.0, "window_left": 2, "q_position": 1}),
        ([x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)], {"layout": "bhsd"}),
        (
            (*inputs(shapes=PACKED_SHAPES), *list(packed_options().values())[:2]),
            {"max_seqlen_kv": 4},
        ),
    ):
        check(attend, tuple(arguments), options)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    plain = [x.detach() for x in (out, lse, q, k, v, out, lse)]
    check(torch.ops.cupyflash.attention_backward.default, tuple(plain), {"softmax_scale": 0.5})
    with pytest.raises(cupyflash.UnsupportedError, match=r"torch\.func\.vmap"):
        torch.func.vmap(lambda x: attend(x, k, v)[0])(q.detach()[None])


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return cupyflash.attention(q, k, v, causal=True)

    tensors = inputs()
    program = torch.export.export(Attend(), tuple(tensors), strict=strict)
    assert "cupyflash.attention" in str(program.graph)
    other = inputs(seed=1)
    assert torch.equal(program.module()(*other), cupyflash.attention(*other, causal=True))


# --- on a GPU -------------------------------------------------------------------------------------

GPU_SHAPES = ((2, 300, 8, 128), (2, 300, 2, 128), (2, 300, 2, 128))


def close_on_a_gpu(found: list[Any], tensors: list[Any], **options: Any) -> bool:
    """Against the same numbers in float64 on the CPU."""
    exact = [x.detach().cpu().double().requires_grad_() for x in tensors]
    return all(
        x.is_cuda and (x.cpu().double() - y).abs().max() <= 0.02 * y.abs().max()
        for x, y in zip(found, gradients(exact, **options))
    )


@pytest.fixture
def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch.cuda


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 0)}], ids=str)
def test_gradients_on_a_gpu(cuda: Any, dtype: Any, options: dict[str, Any]) -> None:
    tensors = inputs(dtype, GPU_SHAPES, device="cuda")
    for attend in (cupyflash.attention, compiled(cupyflash.attention), cupyflash.attention):
        assert close_on_a_gpu(gradients(tensors, attend, **options), tensors, **options)


@pytest.mark.gpu
def test_gradients_on_a_stream_of_ones_own(cuda: Any) -> None:
    """Autograd runs the backward on the stream of the forward."""
    tensors = inputs(torch.float16, GPU_SHAPES, device="cuda")
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        found = gradients(tensors, causal=True)
    stream.synchronize()
    assert close_on_a_gpu(found, tensors, causal=True)


@pytest.mark.gpu
def test_deterministic_gradients_on_a_gpu(cuda: Any) -> None:
    tensors = inputs(torch.float16, GPU_SHAPES, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(tensors, causal=True)
        for _ in range(5):
            again = gradients(tensors, causal=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again))
    finally:
        torch.use_deterministic_algorithms(False)


# --- training -------------------------------------------------------------------------------------

WIDTH, HEADS, LAYERS, LENGTH, BATCH, TOKENS, STEPS = 32, 2, 2, 64, 4, 8, 200


def scaled_dot_product_attention(q: Any, k: Any, v: Any) -> Any:
    """PyTorch's own, from plain operations."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        by_heads = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*by_heads, is_causal=True)
    return out.transpose(1, 2)


def causal_attention(q: Any, k: Any, v: Any) -> Any:
    return cupyflash.attention(q, k, v, causal=True)


def in_bfloat16(attend: Any) -> Any:
    """Attention of rounded inputs, inside of a model in float32."""
    return lambda *given: attend(*(x.bfloat16() for x in given)).float()


def make_gpt(attend: Any) -> Any:
    """A GPT of two layers."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norms[0](x)).reshape(BATCH, -1, 3, HEADS, 16).unbind(2)
            x = x + self.project(attend(q, k, v).flatten(2))
            return x + self.narrow(nn.functional.gelu(self.widen(self.norms[1](x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(TOKENS, WIDTH)
            self.positions = nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            return self.head(self.norm(self.blocks(x)))

    return Gpt()


def train(attend: Any, seed: int, device: str = "cpu") -> np.ndarray:
    """Losses of a copy task: the second half of a sequence repeats the first."""
    torch.manual_seed(seed)
    model = make_gpt(attend).to(device)  # the same weights on every device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)  # the same for all: only the weights differ
    losses = []
    for _ in range(STEPS):
        half = torch.randint(TOKENS, (BATCH, LENGTH // 2), generator=data).to(device)
        tokens = torch.cat([half, half], 1)
        logits = model(tokens[:, :-1])[:, LENGTH // 2 - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return np.array(losses)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's own threads spin while they wait, and matrices this small need none."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def distances(wrap: Any, device: str) -> tuple[np.ndarray, np.ndarray]:
    """At each step, of the loss with our attention from that with PyTorch's and the same weights,
    and of PyTorch's from PyTorch's with other weights."""
    theirs = wrap(scaled_dot_product_attention)
    first, other = (train(theirs, seed, device) for seed in (1, 2))
    ours = train(wrap(causal_attention), 1, device)
    assert first[-20:].mean() < 0.2 * first[0], "the task is learned"
    return np.abs(ours - first), np.abs(other - first)


def test_training_a_gpt_follows_pytorch(one_thread: None) -> None:
    gap, spread = distances(lambda attend: attend, "cpu")
    assert gap[:20].max() < 1e-5  # before differences of rounding have grown
    assert gap.mean() < 0.1 * spread.mean() and gap.max() < 0.1 * spread.max()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_a_gpt_in_bfloat16_follows_pytorch(device: str, one_thread: None) -> None:
    """On a GPU with its kernels for both directions.

    On the CPU the gap is 0.005 in a spread of 0.21 by means, at most 0.06 in 1.3, and 2e-5 in the
    first steps. With dq a tenth too small that is 2.2e-4, with dv 5.7e-4, and a lost dk makes the
    gap wider than the spread.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    gap, spread = distances(in_bfloat16, device)
    assert gap[:20].max() < 2e-4
    assert gap.mean() < 0.25 * spread.mean() and gap.max() < 0.5 * spread.max()
