"""Who computes it: cupyflash and its peers, an entry each in ``IMPLEMENTATIONS``.

An entry's function takes a case and its inputs and gives back an :class:`Attention`: a call
without arguments, and how to read the output from what the call returns. It raises
:class:`AbsentError` when the library is not installed, or when the library or the adapter has
nothing for the case; that is recorded, so that a gap in a table has its reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupyflash
from cupyflash.bench.cases import Case
from cupyflash.bench.check import Inputs


class AbsentError(Exception):
    """An implementation has no entry in the results of a case, and why."""


@dataclass(frozen=True, eq=False)
class Attention:
    """A call on the inputs of a case.

    Attributes:
        call: computes; allocates its results or writes the same ones again.
        read: the output, in the layout of the inputs, from what ``call`` returned.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Any] = lambda returned: returned


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
        name: in results and on the command line.
        prepare: makes the call for a case, see the module's text.
        device: the device of the cases that it is for.
        ours: whether a failure of it is ours.
        default: whether it runs unless ``--impls`` says otherwise.
        distributions: the installed packages whose versions say what ran.
    """

    name: str
    prepare: Callable[[Case, Inputs], Attention]
    device: str = "cuda"
    ours: bool = False
    default: bool = True
    distributions: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """Of what is installed: "torch 2.11.0", or "" for nothing."""
        if self.ours:
            return f"cupyflash {cupyflash.__version__}"
        found = []
        for name in self.distributions:
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                continue
        return ", ".join(found)


def import_peer(*names: str) -> Any:
    """The first of these modules that is installed.

    Raises:
        AbsentError: none is.
    """
    errors = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
    raise AbsentError(f"not installed: {' or '.join(names)} ({'; '.join(errors)})")


def first_of(returned: Any) -> Any:
    """The output of a function that may also return the log-sum-exp."""
    return returned[0] if isinstance(returned, tuple) else returned


# --- cupyflash ------------------------------------------------------------------------------------


def prepare_cupyflash(case: Case, inputs: Inputs) -> Attention:
    """``cupyflash.attention`` on the inputs as they are, with the log-sum-exp."""
    options: dict[str, Any] = {"causal": case.causal, "return_lse": True}
    if case.window is not None:
        options["window"] = (case.window, 0 if case.causal else None)
    if case.lengths:
        options |= {
            "cu_seqlens_q": inputs.cu_seqlens,
            "cu_seqlens_kv": inputs.cu_seqlens,
            "max_seqlen_q": case.seqlen_q,
            "max_seqlen_kv": case.seqlen_kv,
        }
    q, k, v = inputs.q, inputs.k, inputs.v
    return Attention(lambda: cupyflash.attention(q, k, v, **options), first_of)


# --- PyTorch --------------------------------------------------------------------------------------


def prepare_sdpa(backend: str) -> Callable[[Case, Inputs], Attention]:
    """PyTorch's scaled_dot_product_attention, held to one of its backends."""

    def prepare(case: Case, inputs: Inputs) -> Attention:
        torch, attention = import_peer("torch"), import_peer("torch.nn.attention")
        if not case.is_plain:
            raise AbsentError("its is_causal knows neither windows, packing nor unequal lengths")
        chosen = getattr(attention.SDPBackend, backend)
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        grouped = case.heads_q != case.heads_kv

        def call() -> Any:
            with attention.sdpa_kernel(chosen), torch.no_grad():
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=grouped
                )

        return Attention(call, lambda out: out.transpose(1, 2))

    return prepare


def prepare_fa2(case: Case, inputs: Inputs) -> Attention:
    """FlashAttention-2 as PyTorch carries it: its SDPA, or ``varlen_attn`` for all that SDPA lacks.

    A dense batch is a packed one of equal lengths to ``varlen_attn``.
    """
    if case.is_plain:
        return prepare_sdpa("FLASH_ATTENTION")(case, inputs)
    torch, varlen = import_peer("torch"), import_peer("torch.nn.attention.varlen")
    q, k, v = inputs.q, inputs.k, inputs.v
    starts_q = starts_kv = inputs.cu_seqlens
    if not case.lengths:
        starts_q, starts_kv = (
            torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * seqlen
            for seqlen in (case.seqlen_q, case.seqlen_kv)
        )
    packed = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    window = (-1 if case.window is None else case.window, 0 if case.causal else -1)
    lengths = (starts_q, starts_kv, case.seqlen_q, case.seqlen_kv)
    options: dict[str, Any] = {"window_size": window}
    if case.heads_q != case.heads_kv:
        options["enable_gqa"] = True

    def call() -> Any:
        with torch.no_grad():
            return varlen.varlen_attn(*packed, *lengths, **options)

    return Attention(call, lambda out: out.reshape(*q.shape[:-1], case.head_dim_v))


def prepare_flex(case: Case, inputs: Inputs) -> Attention:
    """FlexAttention, compiled for the case."""
    torch, flex = import_peer("torch"), import_peer("torch.nn.attention.flex_attention")
    if case.lengths:
        raise AbsentError("the adapter has no packed sequences")
    shift, window = case.seqlen_kv - case.seqlen_q, case.window

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key <= query + shift if case.causal else key >= 0
        return seen if window is None else seen & (key >= query + shift - window)

    blocks = None
    if case.causal or window is not None:
        blocks = flex.create_block_mask(
            visible, None, None, case.seqlen_q, case.seqlen_kv, device=inputs.q.device
        )
    torch._dynamo.reset()  # a limit on compilations would end in an uncompiled one
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    grouped = case.heads_q != case.heads_kv

    def call() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)

    return Attention(call, lambda out: out.transpose(1, 2))


def prepare_torch_cpu(case: Case, inputs: Inputs) -> Attention:
    """PyTorch's scaled_dot_product_attention on the CPU, whichever way it chooses."""
    torch = import_peer("torch")
    if not case.is_plain:
        raise AbsentError("its is_causal knows neither windows, packing nor unequal lengths")
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    grouped = case.heads_q != case.heads_kv

    def call() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=grouped
        )

    return Attention(call, lambda out: out.transpose(1, 2))


# --- FlashAttention-3 and -4 ----------------------------------------------------------------------


def prepare_flash(*modules: str) -> Callable[[Case, Inputs], Attention]:
    """FlashAttention's own Python interface, by any of the module's names."""

    def prepare(case: Case, inputs: Inputs) -> Attention:
        torch, module = import_peer("torch"), import_peer(*modules)
        options: dict[str, Any] = {"causal": case.causal}
        if case.window is not None:
            options["window_size"] = (case.window, 0)
        function = module.flash_attn_func
        if case.lengths:
            function = module.flash_attn_varlen_func
            options |= {
                "cu_seqlens_q": inputs.cu_seqlens,
                "cu_seqlens_k": inputs.cu_seqlens,
                "max_seqlen_q": case.seqlen_q,
                "max_seqlen_k": case.seqlen_kv,
            }
        q, k, v = inputs.q, inputs.k, inputs.v

        def call() -> Any:
            with torch.no_grad():
                return function(q, k, v, **options)

        return Attention(call, first_of)

    return prepare


# --- cuDNN ----------------------------------------------------------------------------------------


def prepare_cudnn(case: Case, inputs: Inputs) -> Attention:
    """cuDNN through its own frontend: one graph of one operation, log-sum-exp included."""
    torch, cudnn = import_peer("torch"), import_peer("cudnn")
    if case.lengths:
        raise AbsentError("the adapter has no packed sequences")
    single = cudnn.data_type.FLOAT
    dtype = {"bf16": cudnn.data_type.BFLOAT16, "f16": cudnn.data_type.HALF}[case.dtype]
    handle = _cudnn_handle(cudnn)
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=single,
        compute_data_type=single,
        handle=handle,
    )
    arrays = [x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]  # bhsd, by strides
    out = torch.empty(
        (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v),
        dtype=inputs.q.dtype,
        device=inputs.q.device,
    )
    stats = torch.empty(
        (case.batch, case.heads_q, case.seqlen_q, 1), dtype=torch.float32, device=out.device
    )
    q, k, v = nodes = [
        graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=dtype) for x in arrays
    ]
    results = graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=case.head_dim_qk**-0.5,
        generate_stats=True,
        **_cudnn_mask(cudnn, case),
    )
    arrays += [out.transpose(1, 2), stats]
    for node, x, kind in zip(results, arrays[3:], (dtype, single), strict=True):
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
        node.set_data_type(kind)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    num_bytes = max(1, graph.get_workspace_size())
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=out.device)
    bound = dict(zip([*nodes, *results], arrays, strict=True))

    def call() -> Any:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, workspace, handle=handle)
        return out

    return Attention(call)


@functools.cache
def _cudnn_handle(cudnn: Any) -> Any:
    return cudnn.create_handle()


def _cudnn_mask(cudnn: Any, case: Case) -> dict[str, Any]:
    """The mask as options of cuDNN, whose left bound counts the key at the query's position."""
    if case.is_plain:
        return {"use_causal_mask": case.causal}
    options: dict[str, Any] = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT}
    if case.causal:
        options["diagonal_band_right_bound"] = 0
    if case.window is not None:
        options["diagonal_band_left_bound"] = case.window + 1
    return options


# --- the registry ---------------------------------------------------------------------------------

_CUDNN = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

IMPLEMENTATIONS: dict[str, Implementation] = {
    entry.name: entry
    for entry in (
        Implementation("cupyflash", prepare_cupyflash, ours=True),
        Implementation("cudnn", prepare_cudnn, distributions=_CUDNN),
        Implementation("fa2", prepare_fa2, distributions=("torch",)),
        Implementation(
            "fa3",
            prepare_flash("fa3_fwd_interface", "flash_attn_interface"),
            distributions=("fa3-fwd", "flash-attn-3"),
        ),
        Implementation(
            "fa4", prepare_flash("flash_attn.cute.interface"), distributions=("flash-attn-4",)
        ),
        Implementation(
            "sdpa_cudnn",
            prepare_sdpa("CUDNN_ATTENTION"),
            default=False,
            distributions=("torch", *_CUDNN[1:]),
        ),
        Implementation("flex", prepare_flex, default=False, distributions=("torch", "triton")),
        Implementation("cupyflash_cpu", prepare_cupyflash, device="cpu", ours=True),
        Implementation("torch_cpu", prepare_torch_cpu, device="cpu", distributions=("torch",)),
    )
}
"""Every implementation by name; the order is that of columns and colours."""
