"""Adaptors for the implementations that Trine knows by name; each imports its library when it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from trine import __version__
from trine.decay.audit.target import Target, TargetError, one_line


def trine_backend(backend: str) -> Target:
    """One backend of ``trine.ops.kda.kda``, with ``kda_step`` and ``short_conv``."""
    from trine.ops.kda import kda, kda_step
    from trine.ops.short_conv import short_conv

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *,
        A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float = -5.0,
        scale: float | None = None, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        gate_kind: str = "bounded",
    ) -> Any:  # fmt: skip
        return kda(
            q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, backend=backend,
            initial_state=initial_state, cu_seqlens=cu_seqlens, output_final_state=True, gate_kind=gate_kind,
        )  # fmt: skip

    def conv(x_BTC: Tensor, weight_CW: Tensor, window: Tensor | None) -> Any:
        return short_conv(x_BTC, weight_CW, window_NWC=window, output_window=True)

    triton = backend == "triton"
    return Target(
        f"trine:{backend}",
        run,
        form="raw",
        step=kda_step,
        dtypes=("bfloat16", "float32") if triton else ("float32", "bfloat16"),
        # The kernels' products of float32 inputs are not plain float32; the portable paths compute everything in it.
        precision=(("float32", "tf32"),) if triton else (("bfloat16", "fp32"),),
        lower_bounds=(-5.0, -1.0, -5.4) if not triton else (-5.0, -1.0),
        unbounded=partial(run, gate_kind="softplus"),
        conv=conv,
        version=__version__,
    )


def fla_chunk() -> Target:
    """fla-core's Triton kernels: ``chunk_kda`` in raw form, ``fused_recurrent_kda`` as its step (a card is needed)."""
    kda = _module("fla.ops.kda", "fla-core")

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *,
        A_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0, scale: float | None = None,
        initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, safe_gate: bool = True,
    ) -> Any:  # fmt: skip
        return kda.chunk_kda(
            q, k, v, gate, beta, scale=scale, initial_state=initial_state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=safe_gate, lower_bound=lower_bound if safe_gate else None, A_log=A_log,
            dt_bias=dt_bias.reshape(-1), cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        )  # fmt: skip

    def step(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor, *,
        A_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0, scale: float | None = None,
    ) -> Any:  # fmt: skip
        out, new = kda.fused_recurrent_kda(
            *(x.unsqueeze(1) for x in (q, k, v, gate, beta)), A_log=A_log, dt_bias=dt_bias.reshape(-1), scale=scale,
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=lower_bound,
        )  # fmt: skip
        return out.squeeze(1), new

    return Target(
        "fla-core:chunk",
        run,
        form="raw",
        step=step,
        dtypes=("bfloat16", "float32"),
        precision=(("float32", "tf32"),),
        lower_bounds=(-5.0, -1.0),
        unbounded=partial(run, safe_gate=False),
        version=_version("fla-core"),
    )


def fla_naive(name: str) -> Target:
    """fla-core's plain PyTorch forms, ``naive_chunk_kda`` and ``naive_recurrent_kda``; they run on a CPU."""
    function = getattr(_module("fla.ops.kda.naive", "fla-core"), f"naive_{name}_kda")

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
        scale: float | None = None, initial_state: Tensor | None = None,
    ) -> Any:  # fmt: skip
        return function(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True)

    return Target(
        f"fla-core:naive-{name}",
        run,
        dtypes=("float32", "bfloat16"),
        precision=(("bfloat16", "fp32"),),
        multiple=64 if name == "chunk" else 1,
        lower_bounds=(-5.0, -1.0, -30.0),
        version=_version("fla-core"),
    )


def flash_kda() -> Target:
    """MoonshotAI's FlashKDA: forward only, bfloat16, 128 channels, states ``[N, HV, V, K]`` written into buffers."""
    library = _module("flash_kda", "flash_kda")

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *,
        A_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0, scale: float | None = None,
        initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Any:  # fmt: skip
        n = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        out, final = torch.empty_like(v), q.new_empty(n, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
        library.fwd(
            q, k, v, gate, beta, q.shape[-1] ** -0.5 if scale is None else scale, out, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, initial_state=None if initial_state is None else initial_state.mT.contiguous(),
            final_state=final, cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        )  # fmt: skip
        return out, final.mT

    return Target(
        "flash_kda", run, form="raw", dtypes=("bfloat16",), head_dims=((128, 128),), grouped=False, gradients=False,
        version=_version("flash_kda"),
    )  # fmt: skip


def cudnn() -> Target:
    """NVIDIA's cudnn-frontend ``kimi_delta_attention``: packed ``[tokens, H, K]``, states ``[N, HV, V, K]``."""
    library = _module("cudnn.linear_attention", "nvidia-cudnn-frontend")

    def run(
        q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, *,
        A_log: Tensor, dt_bias: Tensor, lower_bound: float = -5.0, scale: float | None = None,
        initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> Any:  # fmt: skip
        batch, tokens = q.shape[:2]
        bounds = torch.arange(batch + 1, device=q.device) * tokens if cu_seqlens is None else cu_seqlens
        out, final, *_ = library.kimi_delta_attention(
            *(x.flatten(0, 1) for x in (q, k, v, gate.float(), beta.float())), bounds.int(), scale=scale,
            initial_state=None if initial_state is None else initial_state.mT.contiguous(), output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
            gate_lower_bound=lower_bound, a_log=A_log, dt_bias=dt_bias,
        )  # fmt: skip
        return out.view_as(v), None if final is None else final.mT

    return Target(
        "cudnn", run, form="raw", dtypes=("bfloat16",), head_dims=((128, 128),),
        version=_version("nvidia-cudnn-frontend"),
    )  # fmt: skip


def transformers_eager(name: str) -> Target:
    """The eager forms of transformers' ``kimi_linear``: ``chunk`` and ``recurrent``; they run on a CPU."""
    module = _module("transformers.models.kimi_linear.modeling_kimi_linear", "transformers")
    # The decorated name may be replaced by a hub kernel; the plain function is what is audited.
    function = inspect.unwrap(getattr(module, f"{name}_kimi_delta_attention"))

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None = None) -> Any:
        return function(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)

    return Target(
        f"transformers:{name}",
        run,
        dtypes=("float32", "bfloat16"),
        precision=(("bfloat16", "fp32"),),
        grouped=False,
        lower_bounds=(-5.0, -1.0, -30.0),
        version=_version("transformers"),
    )


ADAPTORS: dict[str, Callable[[], Target]] = {
    "trine:reference": partial(trine_backend, "reference"),
    "trine:torch": partial(trine_backend, "torch"),
    "trine:triton": partial(trine_backend, "triton"),
    "fla-core:chunk": fla_chunk,
    "fla-core:naive-chunk": partial(fla_naive, "chunk"),
    "fla-core:naive-recurrent": partial(fla_naive, "recurrent"),
    "flash_kda": flash_kda,
    "cudnn": cudnn,
    "transformers:chunk": partial(transformers_eager, "chunk"),
    "transformers:recurrent": partial(transformers_eager, "recurrent"),
}

# Which of them make sense where, and the module that each needs.
_ON_CARD = ("trine:triton", "fla-core:chunk", "flash_kda", "cudnn")
_NEEDS = {
    "trine": "torch",
    "fla-core": "fla",
    "flash_kda": "flash_kda",
    "cudnn": "cudnn",
    "transformers": "transformers",
}


def names(device: str) -> list[str]:
    """Names of the known targets that are installed and run on ``device`` ("cpu" or "cuda")."""
    found = [name for name in ADAPTORS if importlib.util.find_spec(_NEEDS[name.split(":")[0]]) is not None]
    return [name for name in found if device == "cuda" or name not in _ON_CARD]


def expand(name: str, device: str) -> list[str]:
    """The targets that a word of the command line stands for.

    ``installed`` is every known one that runs on ``device``; a library's name (``trine``, ``fla`` or ``fla-core``,
    ``transformers``) is all of its forms that do; anything else is itself.

    Raises:
        ValueError: none of the library's forms runs there.
    """
    if name == "installed":
        return names(device)
    family = "fla-core" if name == "fla" else name
    forms = [known for known in ADAPTORS if known.startswith(f"{family}:")]
    if not forms:
        return [name]
    # Where kernels can run they are what is asked about: the plain forms are audited on a CPU.
    kernels = [known for known in forms if known in _ON_CARD]
    chosen = kernels if device == "cuda" and kernels else [known for known in forms if known not in kernels]
    if not chosen or importlib.util.find_spec(_NEEDS[family]) is None:
        raise ValueError(f"target: found {name!r}, which is not installed or has nothing that runs on {device}")
    return chosen


def own(device: str) -> list[str]:
    """Trine's own backends for ``device``: what is audited when no target is named."""
    return ["trine:triton"] if device == "cuda" else ["trine:reference", "trine:torch"]


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise TargetError(f"target: {package} cannot be imported: {type(error).__name__}: {one_line(error)}") from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
