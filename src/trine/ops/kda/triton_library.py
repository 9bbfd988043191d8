"""KDA's kernels as operators of ``torch.library``, for whoever traces instead of running: ``torch.compile``, export.

``trine::kda``, ``trine::kda_backward``, ``trine::kda_step`` and ``trine::kda_step_`` have shapes for fake tensors and,
the first, a gradient formula. Running code does not come through here: the dispatcher's way to an operator written in
Python costs more than the whole launch.

A tensor that is absent, where an operator must return one, is an empty one of one dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trine.ops.kda.triton_backward_autograd import (
    Settings,
    backward_from,
    config_of,
    factors_fine,
    factors_fit,
    forward_keeping,
)
from trine.ops.kda.triton_config import CHUNK
from trine.ops.kda.triton_decode import kda_step_triton
from trine.ops.kda.triton_problem import Kept, cuts_of

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, "
_GATE = "Tensor? A_log, Tensor? dt_bias, "
_SETTINGS = (
    "float lower_bound, bool qk_norm, bool beta_is_logit, float beta_max, float? scale, str plan, bool keep_factors, "
    "bool final"
)
_STEP = "Tensor? state_indices, str gate_kind, float lower_bound, bool qk_norm, bool beta_is_logit, float beta_max, "


def _absent(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


def _there(tensor: Tensor) -> Tensor | None:
    return None if tensor.ndim == 1 and tensor.shape[0] == 0 else tensor


def _kda(*arguments: Any) -> tuple[Tensor, ...]:
    given = (*arguments[:9], Settings(*arguments[9:]))
    out, final, kept = forward_keeping(*given)
    return (out, *(_absent(out) if x is None else x for x in (final, *kept.tensors())))


def _kda_backward(*arguments: Any) -> tuple[Tensor, ...]:
    kept = Kept.of([_there(x) for x in arguments[12:19]])
    given = (*arguments[:12], kept, Settings(*arguments[19:]))
    gradients = backward_from(*given)
    return tuple(_absent(arguments[0]) if x is None else x for x in gradients)


_kda_op = torch.library.custom_op(
    "trine::kda",
    _kda,
    mutates_args=(),
    schema=f"({_TENSORS}{_GATE}Tensor? initial_state, Tensor? cu_seqlens, {_SETTINGS}) -> "
    f"({', '.join(['Tensor'] * 9)})",
)
_kda_backward_op = torch.library.custom_op(
    "trine::kda_backward",
    _kda_backward,
    mutates_args=(),
    schema=f"({_TENSORS}{_GATE}Tensor? initial_state, Tensor? cu_seqlens, Tensor out, Tensor? d_out, Tensor? d_final, "
    f"Tensor wqk, Tensor p, Tensor a, Tensor decay, Tensor norms, Tensor states, Tensor maps, {_SETTINGS}) -> "
    f"({', '.join(['Tensor'] * 8)})",
)


@_kda_op.register_fake
def _kda_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    q, v, cu, settings = arguments[0], arguments[2], arguments[8], Settings(*arguments[9:])
    (batch, tokens, _, channels), (heads, values) = q.shape, v.shape[2:]
    sequences = batch if cu is None else cu.shape[0] - 1
    out = v.new_empty(batch, tokens, heads, values)
    full = {"dtype": torch.float32}
    final = v.new_empty(sequences, heads, channels, values, **full) if settings.final else _absent(v)
    config, fine = config_of(q, v, settings), factors_fine(q, v, settings)
    block, cuts = config.key_block, (_absent(v), _absent(v))
    if 0 < config.segment < tokens:
        count = cuts_of(tokens, sequences, config.segment, cu is not None)
        cuts = v.new_empty(count, heads, values, block, **full), v.new_empty(count, heads, block, block, **full)
    if not factors_fit(q, v, settings):
        return out, final, *(_absent(v) for _ in range(5)), *cuts
    slots = batch * ((tokens + CHUNK - 1) // CHUNK) if cu is None else tokens // CHUNK + sequences
    return (
        out,
        final,
        v.new_empty(4 if fine else 3, slots, heads, CHUNK, block, dtype=config.factor),
        v.new_empty(slots, heads, CHUNK, CHUNK, dtype=config.factor),
        v.new_empty(2 if fine else 1, slots, heads, CHUNK, CHUNK, dtype=config.value),
        v.new_empty(slots, heads, block, **full),
        v.new_empty(slots, heads, 2, CHUNK, **full) if settings.qk_norm else _absent(v),
        *cuts,
    )


@_kda_backward_op.register_fake
def _kda_backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    gradients = [x.new_empty(x.shape) for x in arguments[:5]]
    for x in arguments[5:7]:
        gradients.append(_absent(arguments[0]) if x is None else x.new_empty(x.shape))
    state = arguments[7]
    gradients.append(_absent(arguments[0]) if state is None else state.new_empty(state.shape, dtype=torch.float32))
    return tuple(gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # a loss on the output alone needs no zeros for the rest
    ctx.save_for_backward(*inputs[:9], output[0], *output[2:])
    ctx.settings = inputs[9:]


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, settings = ctx.saved_tensors, ctx.settings
    d_out, d_final = gradients[0], gradients[1] if Settings(*settings).final else None
    found = _kda_backward_op(*saved[:10], d_out, d_final, *saved[10:], *settings)
    missing = [saved[i] is None for i in (*range(8),)]
    return (*(None if gone else x for gone, x in zip(missing, found, strict=True)), None, *(None for _ in settings))


_kda_op.register_autograd(_differentiate, setup_context=_keep)


def kda_registered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor | None]:
    """``(output, final_state)`` by ``trine::kda``; arguments as ``forward_keeping``."""
    found = _kda_op(q, k, v, gate, beta, A_log, dt_bias, initial_state, cu_seqlens, *settings)
    return found[0], found[1] if settings.final else None


def _step(inplace: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, (a_log, dt_bias, indices) = arguments[:6], arguments[6:9]
    gate_kind, lower_bound, qk_norm, beta_is_logit, beta_max, scale = arguments[9:]
    return kda_step_triton(
        *tensors, A_log=a_log, dt_bias=dt_bias, state_indices=indices, gate_kind=gate_kind, lower_bound=lower_bound,
        qk_norm=qk_norm, beta_is_logit=beta_is_logit, beta_max=beta_max, scale=scale, inplace=inplace,
    )  # fmt: skip


def _kda_step(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _step(False, *arguments)


def _kda_step_inplace(*arguments: Any) -> Tensor:
    return _step(True, *arguments)[0]


_kda_step_op = torch.library.custom_op(
    "trine::kda_step",
    _kda_step,
    mutates_args=(),
    schema=f"({_TENSORS}Tensor state, {_GATE}{_STEP}float? scale) -> (Tensor, Tensor)",
)
_kda_step_inplace_op = torch.library.custom_op(
    "trine::kda_step_",
    _kda_step_inplace,
    mutates_args=("state",),
    schema=f"({_TENSORS}Tensor(a!) state, {_GATE}{_STEP}float? scale) -> Tensor",
)


@_kda_step_op.register_fake
def _kda_step_shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    return arguments[2].new_empty(arguments[2].shape), arguments[5].new_empty(arguments[5].shape)


@_kda_step_inplace_op.register_fake
def _kda_step_inplace_shapes(*arguments: Any) -> Tensor:
    return arguments[2].new_empty(arguments[2].shape)


def kda_step_registered(*arguments: Any, inplace: bool) -> tuple[Tensor, Tensor]:
    """``(output, state)`` by ``trine::kda_step`` or ``trine::kda_step_``, whose schema names the arguments."""
    if inplace:
        return _kda_step_inplace_op(*arguments), arguments[5]
    found: tuple[Tensor, Tensor] = _kda_step_op(*arguments)
    return found
