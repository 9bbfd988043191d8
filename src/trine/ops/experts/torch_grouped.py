"""The portable fast path: sort the (token, expert) pairs once, then one product per expert or one for all of them.

README.md here has the gradients, the rule that picks between the two, and measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A padded batched product does more arithmetic than separate ones and calls the library once. It pays while the
# padding's multiply-adds cost less than the calls they save; README.md has the measurement behind the number.
_CALL_IN_MULTIPLY_ADDS = 60_000
_MOST_PADDING = 4  # and never more than this many times the rows, whatever their width: memory
_CHUNK = 1 << 15  # elements of the activation handled together on the CPU: a few such buffers fit the cache


class Layout(NamedTuple):
    """Where each (token, expert) pair is computed: rows ("slots") grouped by expert.

    Attributes:
        slot_pair_S: pair ``t * K + j`` of each slot, or N (none) for padding.
        pair_slot_N: slot of each pair, or S for pairs that go nowhere (id -1).
        sizes: rows of each expert; equal ones mean the padded layout.
        padded: one batched product instead of one per expert.
        complete: no pair goes nowhere.
    """

    slot_pair_S: Tensor
    pair_slot_N: Tensor
    sizes: Sequence[int]
    padded: bool
    complete: bool


def lay_out(ids_TK: Tensor, experts: int, inner: int, outer: int) -> Layout:
    """Sort pairs by expert, tokens in order within one, and choose padded or separate products.

    Args:
        ids_TK: ``[T, K]`` int64 in [-1, experts).
        experts: number of experts E.
        inner: features of a product's input.
        outer: features of its output.
    """
    ids_N = ids_TK.reshape(-1)
    pairs = ids_N.shape[0]
    counts_E = torch.bincount(ids_N + 1, minlength=experts + 1)
    nowhere, *sizes = counts_E.tolist()
    sorted_N, order_N = torch.sort(ids_N, stable=True)
    sorted_N, order_N = sorted_N[nowhere:], order_N[nowhere:]
    rows = max(sizes)
    padding = rows * experts - (pairs - nowhere)
    used = experts - sizes.count(0)
    padded = (
        padding * inner * outer <= used * _CALL_IN_MULTIPLY_ADDS
        and rows * experts <= _MOST_PADDING * max(1, pairs - nowhere)
        and used > 1
    )
    if padded:
        first_E = counts_E[1:].cumsum(0) - counts_E[1:]
        place_E = torch.arange(experts, device=ids_TK.device) * rows - first_E
        slot_N = torch.arange(sorted_N.shape[0], device=ids_TK.device) + place_E[sorted_N]
        slots = rows * experts
        slot_pair_S = ids_N.new_full((slots,), pairs).index_copy_(0, slot_N, order_N)
        sizes = [rows] * experts
    else:
        slots = pairs - nowhere
        slot_N = torch.arange(slots, device=ids_TK.device)
        slot_pair_S = order_N
    if nowhere:
        pair_slot_N = ids_N.new_full((pairs,), slots).index_copy_(0, order_N, slot_N)
    else:
        pair_slot_N = torch.empty_like(ids_N).index_copy_(0, order_N, slot_N)
    return Layout(slot_pair_S, pair_slot_N, sizes, padded, nowhere == 0)


def _product(rows_SI: Tensor, matrix_EIO: Tensor, layout: Layout) -> Tensor:
    """Each expert's rows times its matrix, ``[S, O]``."""
    experts, inner, outer = matrix_EIO.shape
    if layout.padded:
        return torch.bmm(rows_SI.view(experts, -1, inner), matrix_EIO).view(-1, outer)
    out_SO = rows_SI.new_empty(rows_SI.shape[0], outer)
    parts = zip(layout.sizes, rows_SI.split(layout.sizes), matrix_EIO.unbind(), out_SO.split(layout.sizes), strict=True)
    for size, rows_NI, matrix_IO, out_NO in parts:
        if size:
            torch.mm(rows_NI, matrix_IO, out=out_NO)
    return out_SO


def _outer_product(left_SO: Tensor, right_SI: Tensor, layout: Layout) -> Tensor:
    """Sum over each expert's rows of left x right, ``[E, O, I]``; zeros for an expert without rows."""
    experts = len(layout.sizes)
    if layout.padded:
        left_EMO = left_SO.view(experts, -1, left_SO.shape[1])
        return torch.bmm(left_EMO.transpose(1, 2), right_SI.view(experts, -1, right_SI.shape[1]))
    out_EOI = left_SO.new_empty(experts, left_SO.shape[1], right_SI.shape[1])
    parts = zip(layout.sizes, left_SO.split(layout.sizes), right_SI.split(layout.sizes), out_EOI.unbind(), strict=True)
    for size, left_NO, right_NI, out_OI in parts:
        if size:
            torch.mm(left_NO.t(), right_NI, out=out_OI)
        else:
            out_OI.zero_()
    return out_EOI


def _to_slots(values_TL: Tensor, layout: Layout, k: int) -> Tensor:
    """Copy each token's row to its slots; padding gets zeros (a real row there could carry NaN into every expert)."""
    token_S = layout.slot_pair_S // k if k > 1 else layout.slot_pair_S
    if layout.padded:
        values_TL = torch.cat((values_TL, values_TL.new_zeros(1, values_TL.shape[1])))
    return values_TL.index_select(0, token_S)


def _from_slots(values_SL: Tensor, layout: Layout, tokens: int, k: int) -> Tensor:
    """Sum over each token's k slots in the order of its choices: no atomics, so the same bits every time."""
    if not layout.complete:
        values_SL = torch.cat((values_SL, values_SL.new_zeros(1, values_SL.shape[1])))
    picked_NL = values_SL.index_select(0, layout.pair_slot_N)
    return picked_NL.view(tokens, k, -1).sum(1) if k > 1 else picked_NL


def _weights_to_slots(weights_TK: Tensor, layout: Layout) -> Tensor:
    weights_N = weights_TK.reshape(-1)
    if layout.padded:
        weights_N = torch.cat((weights_N, weights_N.new_zeros(1)))
    return weights_N.index_select(0, layout.slot_pair_S)


def _rows_a_chunk(values_SF: Tensor) -> int:
    return max(1, _CHUNK // max(1, values_SF.shape[1])) if values_SF.device.type == "cpu" else max(1, len(values_SF))


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def weighted_situ(gate_SF: Tensor, up_SF: Tensor, weight_S: Tensor, beta: float, linear_beta: float) -> Tensor:
    """w * situ_glu(gate, up) (K3 report Eq. 12), row by row; computed in fp32 or fp64, stored as ``gate_SF``."""
    out_SF = torch.empty_like(gate_SF)
    rows = _rows_a_chunk(gate_SF)
    for gate, up, weight, out in zip(
        gate_SF.split(rows), up_SF.split(rows), weight_S.split(rows), out_SF.split(rows), strict=True
    ):
        gate, up = _wide(gate), _wide(up)
        value = torch.tanh(gate / beta).mul_(torch.sigmoid(gate))
        value.mul_((up / linear_beta).tanh_()).mul_(weight[:, None].to(value.dtype) * (beta * linear_beta))
        out.copy_(value)
    return out_SF


def weighted_situ_backward(
    gate_SF: Tensor, up_SF: Tensor, weight_S: Tensor, grad_SF: Tensor, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `weighted_situ` and its value again: nothing of it was stored.

    Returns:
        d gate ``[S, F]``, d up ``[S, F]``, d weight ``[S]``, w * situ_glu ``[S, F]``. ``grad_SF`` may be overwritten.
    """
    dgate_SF, dup_SF, value_SF = torch.empty_like(gate_SF), torch.empty_like(gate_SF), torch.empty_like(gate_SF)
    dweight_S = torch.empty_like(weight_S)
    rows = _rows_a_chunk(gate_SF)
    chunks = (
        tensor.split(rows) for tensor in (gate_SF, up_SF, weight_S, grad_SF, dgate_SF, dup_SF, dweight_S, value_SF)
    )
    for gate, up, weight, grad, dgate, dup, dweight, value in zip(*chunks, strict=True):
        gate, up, grad = _wide(gate), _wide(up), _wide(grad)
        weight_N1 = weight[:, None].to(gate.dtype)
        t = torch.tanh(gate / beta)
        s = torch.sigmoid(gate)
        v = torch.tanh(up / linear_beta)
        left = (t * s).mul_(beta)  # Tg
        right = v * linear_beta  # Tu
        activation = left * right
        dweight.copy_((grad * activation).sum(1))
        value.copy_(activation * weight_N1)
        grad = grad * weight_N1
        # Tg' = s (1 - t^2) + Tg (1 - s);  Tu' = 1 - v^2
        slope = torch.addcmul(s, t * s, t, value=-1.0).add_(left * (1.0 - s))
        dgate.copy_(slope.mul_(right).mul_(grad))
        dup.copy_(left.mul_(grad).mul_(1.0 - v * v))
    return dgate_SF, dup_SF, dweight_S, value_SF


class GroupedExperts(torch.autograd.Function):
    """sum over k of w * down_e situ_glu(gate_e x, up_e x), with the weight folded in before ``down``.

    Saved: inputs and the two pre-activations. No expert's output is stored: the gradient of w is the product of the
    activation and what comes back through ``down`` (K3 report section 5.2.2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TL: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_EFL: Tensor,
        up_EFL: Tensor,
        down_ELF: Tensor,
        beta: float,
        linear_beta: float,
    ) -> Tensor:
        """See `grouped_experts`."""
        tokens, k = ids_TK.shape
        experts, inner, width = gate_EFL.shape
        layout = lay_out(ids_TK, experts, inner, width)
        x_SL = _to_slots(x_TL, layout, k)
        gate_SF = _product(x_SL, gate_EFL.transpose(1, 2), layout)
        up_SF = _product(x_SL, up_EFL.transpose(1, 2), layout)
        weight_S = _weights_to_slots(weights_TK, layout)
        hidden_SF = weighted_situ(gate_SF, up_SF, weight_S, beta, linear_beta)
        out_SL = _product(hidden_SF, down_ELF.transpose(1, 2), layout)
        ctx.save_for_backward(x_TL, weights_TK, gate_EFL, up_EFL, down_ELF, gate_SF, up_SF, *layout[:2])
        ctx.rest = (layout[2:], k, beta, linear_beta)
        return _from_slots(out_SL, layout, tokens, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weights, gate, up, down."""
        x_TL, weights_TK, gate_EFL, up_EFL, down_ELF, gate_SF, up_SF, slot_pair_S, pair_slot_N = ctx.saved_tensors
        rest, k, beta, linear_beta = ctx.rest
        layout = Layout(slot_pair_S, pair_slot_N, *rest)
        want_x, _, want_weights, want_gate, want_up, want_down = ctx.needs_input_grad[:6]
        grad_SL = _to_slots(grad_TL, layout, k)
        weight_S = _weights_to_slots(weights_TK, layout)
        dhidden_SF = _product(grad_SL, down_ELF, layout)
        dgate_SF, dup_SF, dweight_S, hidden_SF = weighted_situ_backward(
            gate_SF, up_SF, weight_S, dhidden_SF, beta, linear_beta
        )
        ddown_ELF = _outer_product(grad_SL, hidden_SF, layout) if want_down else None
        dweights_TK = None
        if want_weights:
            dweights_TK = _from_slots(dweight_S[:, None], layout, weights_TK.numel(), 1).view_as(weights_TK)
        dgate_EFL = dup_EFL = dx_TL = None
        if want_gate or want_up:
            x_SL = _to_slots(x_TL, layout, k)
            dgate_EFL = _outer_product(dgate_SF, x_SL, layout) if want_gate else None
            dup_EFL = _outer_product(dup_SF, x_SL, layout) if want_up else None
        if want_x:
            dx_SL = _product(dgate_SF, gate_EFL, layout).add_(_product(dup_SF, up_EFL, layout))
            dx_TL = _from_slots(dx_SL, layout, x_TL.shape[0], k)
        return dx_TL, None, dweights_TK, dgate_EFL, dup_EFL, ddown_ELF, None, None
