"""The portable fast path: sort the (token, expert) pairs once, then one product per expert or one for all of them.

README.md here has the gradients, the rule that picks between the two, and measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trine.ops import _tiles
from trine.ops._autograd import differentiable_once

# Work is counted in multiply-adds of one product. A call into the library costs as much as _CALL of them, copying a
# matrix element _COPY, reading one in vain _READ, an activation (its share a product) _ACTIVATION. README.md has the
# measurements behind the numbers, and the estimates for a card, where calls are what is dear.
_CALL = 100_000
_COPY = 10
_READ = 4
_ACTIVATION = 64
_CARD_COSTS = (100_000_000, 50, 25, 400)  # the same four
_FEW_PAIRS = 16  # in inference, so many pairs get a copy of their expert's matrices each, if these are small
_SMALL_MATRIX = 1 << 14
_CHUNK = 1 << 14  # elements of the activation handled together, a thread: a few such buffers fit the cache


class Block(NamedTuple):
    """Experts computed in one batched product: ``size`` times ``rows`` slots from slot ``start`` on.

    Attributes:
        experts: None for all of them in order (their matrices are used in place), one id, or ``[size]`` int64 ids.
        size: how many.
        rows: slots of each, the largest load among them; the others' last slots are padding.
        start: first slot.
    """

    experts: Tensor | int | None
    size: int
    rows: int
    start: int


class Layout(NamedTuple):
    """Where each (token, expert) pair is computed.

    Attributes:
        slot_pair_S: pair ``t * K + j`` of each slot, or N (none) for padding.
        pair_slot_N: slot of each pair, or S for pairs that go nowhere (id -1).
        blocks: the products; experts without tokens are in none unless all are in one.
        padded: some slot is padding.
        complete: no pair goes nowhere.
    """

    slot_pair_S: Tensor
    pair_slot_N: Tensor
    blocks: Sequence[Block]
    padded: bool
    complete: bool


def divide(loads: Sequence[int], inner: int, latent: int, card: bool = False) -> list[tuple[list[int], int]]:
    """Group experts into batched products: (ids, rows of each) with the least estimated work.

    Loads that are nearly even (Quantile Balancing's usual ones): one product over all experts, matrices in place.
    Otherwise, from the fullest expert down: an expert joins the open group while its padding and the copy of its
    matrices cost less than a call of its own. Big matrices thus get one product each, tiny ones few calls.

    Args:
        loads: tokens of each expert.
        inner: width F of an expert.
        latent: width L of a token.
        card: estimate for a card instead of a CPU.
    """
    call, copy, read, activation = _CARD_COSTS if card else (_CALL, _COPY, _READ, _ACTIVATION)
    row = inner * (latent + activation)
    most, used = max(loads), len(loads) - loads.count(0)
    spare = (most * len(loads) - sum(loads)) * row + (len(loads) - used) * read * inner * latent
    if used > 1 and spare <= used * call:
        return [(list(range(len(loads))), most)]
    groups: list[tuple[list[int], int]] = []
    for expert in sorted((e for e, load in enumerate(loads) if load), key=lambda e: -loads[e]):
        if groups and (groups[-1][1] - loads[expert]) * row + copy * inner * latent <= call:
            groups[-1][0].append(expert)
        else:
            groups.append(([expert], loads[expert]))
    return groups


def lay_out(ids_TK: Tensor, experts: int, inner: int, latent: int) -> Layout:
    """Sort pairs by expert, tokens in order within one, and give every pair a slot.

    Args:
        ids_TK: ``[T, K]`` int64 in [-1, experts).
        experts: number of experts E.
        inner: width F of an expert.
        latent: width L of a token.

    Raises:
        ValueError: an id outside that range.
    """
    ids_N = ids_TK.reshape(-1)
    pairs, device = ids_N.shape[0], ids_N.device
    sorted_N, order_N = torch.sort(ids_N, stable=True)
    # Where each id from -2 on ends among the sorted: the only values that are read from the device, all at once.
    wrong, *ends = torch.searchsorted(sorted_N, torch.arange(-2, experts, device=device), right=True).tolist()
    if wrong or ends[-1] < pairs:
        raise ValueError(f"ids_TK: found {wrong} ids below -1 and {pairs - ends[-1]} above {experts - 1}, need none")
    nowhere, loads = ends[0], [stop - start for start, stop in pairwise(ends)]
    sorted_N, order_N = sorted_N[nowhere:], order_N[nowhere:]
    blocks, base, slots = [], [0] * experts, 0
    for ids, rows in divide(loads, inner, latent, _tiles.on_card(device)):
        index: Tensor | int | None = ids[0] if len(ids) == 1 else torch.tensor(ids, device=device)
        blocks.append(Block(None if len(ids) == experts > 1 and ids[0] == 0 else index, len(ids), rows, slots))
        for place, expert in enumerate(ids):
            base[expert] = slots + place * rows
        slots += len(ids) * rows
    # slot = expert's first slot + rank of the pair within the expert
    shift_E = torch.tensor([slot - (end - nowhere) for slot, end in zip(base, ends[:-1], strict=True)], device=device)
    slot_N = torch.arange(pairs - nowhere, device=device) + shift_E[sorted_N]
    slot_pair_S = ids_N.new_full((slots,), pairs).index_copy_(0, slot_N, order_N)
    pair_slot_N = ids_N.new_full((pairs,), slots).index_copy_(0, order_N, slot_N)
    return Layout(slot_pair_S, pair_slot_N, blocks, slots > pairs - nowhere, nowhere == 0)


def _product(rows_SI: Tensor, weight_EXY: Tensor, layout: Layout, transpose: bool) -> Tensor:
    """Each expert's rows times its matrix (or its transpose), ``[S, O]``."""
    out_SO = rows_SI.new_empty(rows_SI.shape[0], weight_EXY.shape[1 if transpose else 2])
    for experts, size, rows, start in layout.blocks:
        part_NI, out_NO = rows_SI[start : start + size * rows], out_SO[start : start + size * rows]
        if isinstance(experts, int):
            matrix_XY = weight_EXY[experts]
            torch.mm(part_NI, matrix_XY.t() if transpose else matrix_XY, out=out_NO)
            continue
        matrix_EXY = weight_EXY if experts is None else weight_EXY.index_select(0, experts)
        matrix_EIO = matrix_EXY.transpose(1, 2) if transpose else matrix_EXY
        torch.bmm(part_NI.view(size, rows, -1), matrix_EIO, out=out_NO.view(size, rows, -1))
    return out_SO


def _outer_product(left_SO: Tensor, right_SI: Tensor, layout: Layout, experts: int) -> Tensor:
    """Sum over each expert's rows of left x right, ``[E, O, I]``; zeros for an expert without rows."""
    used = sum(block.size for block in layout.blocks)
    shape = (experts, left_SO.shape[1], right_SI.shape[1])
    out_EOI = left_SO.new_zeros(shape) if used < experts else left_SO.new_empty(shape)
    for ids, size, rows, start in layout.blocks:
        left_NO, right_NI = left_SO[start : start + size * rows], right_SI[start : start + size * rows]
        if isinstance(ids, int):
            torch.mm(left_NO.t(), right_NI, out=out_EOI[ids])
            continue
        left_MOR, right_MRI = left_NO.view(size, rows, -1).transpose(1, 2), right_NI.view(size, rows, -1)
        if ids is None:
            torch.bmm(left_MOR, right_MRI, out=out_EOI)
        else:
            out_EOI.index_copy_(0, ids, torch.bmm(left_MOR, right_MRI))
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
    if k == 1:
        return values_SL.index_select(0, layout.pair_slot_N)
    if values_SL.dtype in (torch.float32, torch.float64) and tokens:
        return embedding_bag(layout.pair_slot_N.view(tokens, k), values_SL, mode="sum")
    return values_SL.index_select(0, layout.pair_slot_N).view(tokens, k, values_SL.shape[1]).sum(1)


def _weights_to_slots(weights_TK: Tensor, layout: Layout) -> Tensor:
    weights_N = weights_TK.reshape(-1)
    if layout.padded:
        weights_N = torch.cat((weights_N, weights_N.new_zeros(1)))
    return weights_N.index_select(0, layout.slot_pair_S)


def _rows_a_chunk(values_SF: Tensor) -> int:
    if _tiles.on_card(values_SF.device):
        return _tiles.tile_rows(values_SF.shape[1], values_SF.device)
    return max(1, _CHUNK * torch.get_num_threads() // max(1, values_SF.shape[1]))


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def weighted_situ(gate_SF: Tensor, up_SF: Tensor, weight_S: Tensor, beta: float, linear_beta: float) -> Tensor:
    """w * situ_glu(gate, up) (K3 report Eq. 12), row by row; computed in fp32 or fp64, stored as ``gate_SF``."""
    out_SF = torch.empty_like(gate_SF)
    rows = _rows_a_chunk(gate_SF)
    factor_S1 = _wide(weight_S)[:, None] * (beta * linear_beta)
    for gate, up, factor, out in zip(*(x.split(rows) for x in (gate_SF, up_SF, factor_S1, out_SF)), strict=True):
        gate, up = _wide(gate), _wide(up)
        value = (gate * (1 / beta)).tanh_().mul_(torch.sigmoid(gate)).mul_((up * (1 / linear_beta)).tanh_())
        torch.mul(value, factor, out=out)
    return out_SF


def weighted_situ_backward(
    gate_SF: Tensor, up_SF: Tensor, weight_S: Tensor, grad_SF: Tensor, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `weighted_situ`, and its value again, as nothing of it was stored.

    With t = tanh(gate / beta), s = sigmoid(gate), v = tanh(up / linear_beta), c = w beta linear_beta: the value is
    c t s v, its slope in gate c v s ((1 - t^2) / beta + t (1 - s)), in up c t s (1 - v^2) / linear_beta.

    Returns:
        d gate ``[S, F]``, d up ``[S, F]``, d weight ``[S]``, w * situ_glu ``[S, F]``.
    """
    dgate_SF, dup_SF, value_SF = torch.empty_like(gate_SF), torch.empty_like(gate_SF), torch.empty_like(gate_SF)
    dfactor_S = _wide(weight_S).new_empty(weight_S.shape)
    rows = _rows_a_chunk(gate_SF)
    factor_S1 = _wide(weight_S)[:, None] * (beta * linear_beta)
    inputs, results = (gate_SF, up_SF, factor_S1, grad_SF), (dgate_SF, dup_SF, dfactor_S, value_SF)
    chunks = (tensor.split(rows) for tensor in (*inputs, *results))
    for gate, up, factor, grad, dgate, dup, dfactor, value in zip(*chunks, strict=True):
        gate, up, grad = _wide(gate), _wide(up), _wide(grad)
        t, s, v = (gate * (1 / beta)).tanh_(), torch.sigmoid(gate), (up * (1 / linear_beta)).tanh_()
        ts = t * s
        tsv = ts * v
        torch.sum(grad * tsv, 1, out=dfactor)
        torch.mul(tsv, factor, out=value)
        grad = grad * factor
        slope = torch.sub(t, ts).addcmul_(t, t, value=-1 / beta).add_(1 / beta).mul_(s).mul_(v)
        torch.mul(slope, grad, out=dgate)
        torch.mul(ts.addcmul_(tsv, v, value=-1.0), grad.mul_(1 / linear_beta), out=dup)
    return dgate_SF, dup_SF, dfactor_S.mul_(beta * linear_beta).to(weight_S.dtype), value_SF


def _forward(
    x_TL: Tensor,
    weights_TK: Tensor,
    gate_EFL: Tensor,
    up_EFL: Tensor,
    down_ELF: Tensor,
    layout: Layout,
    k: int,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[T, L]`` and the two pre-activations ``[S, F]``."""
    x_SL = _to_slots(x_TL, layout, k)
    gate_SF = _product(x_SL, gate_EFL, layout, transpose=True)
    up_SF = _product(x_SL, up_EFL, layout, transpose=True)
    hidden_SF = weighted_situ(gate_SF, up_SF, _weights_to_slots(weights_TK, layout), beta, linear_beta)
    out_SL = _product(hidden_SF, down_ELF, layout, transpose=True)
    return _from_slots(out_SL, layout, x_TL.shape[0], k), gate_SF, up_SF


def infer(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_EFL: Tensor,
    up_EFL: Tensor,
    down_ELF: Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """`grouped_experts` where nothing needs a gradient. A decoding step's few pairs are not worth sorting."""
    experts, inner, latent = gate_EFL.shape
    pairs = ids_TK.numel()
    if 0 < pairs <= _FEW_PAIRS and inner * latent <= _SMALL_MATRIX and int(ids_TK.min()) >= 0:
        slots_S = torch.arange(pairs, device=ids_TK.device)
        layout = Layout(slots_S, slots_S, [Block(ids_TK.reshape(-1), pairs, 1, 0)], padded=False, complete=True)
    else:
        layout = lay_out(ids_TK, experts, inner, latent)
    return _forward(x_TL, weights_TK, gate_EFL, up_EFL, down_ELF, layout, ids_TK.shape[1], beta, linear_beta)[0]


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
        layout = lay_out(ids_TK, *gate_EFL.shape)
        out_TL, gate_SF, up_SF = _forward(
            x_TL, weights_TK, gate_EFL, up_EFL, down_ELF, layout, ids_TK.shape[1], beta, linear_beta
        )
        ctx.save_for_backward(x_TL, weights_TK, gate_EFL, up_EFL, down_ELF, gate_SF, up_SF, *layout[:2])
        ctx.rest = (layout[2:], ids_TK.shape[1], beta, linear_beta)
        return out_TL

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weights, gate, up, down."""
        x_TL, weights_TK, gate_EFL, up_EFL, down_ELF, gate_SF, up_SF, slot_pair_S, pair_slot_N = ctx.saved_tensors
        rest, k, beta, linear_beta = ctx.rest
        experts = gate_EFL.shape[0]
        layout = Layout(slot_pair_S, pair_slot_N, *rest)
        want_x, _, want_weights, want_gate, want_up, want_down = ctx.needs_input_grad[:6]
        grad_SL = _to_slots(grad_TL, layout, k)
        weight_S = _weights_to_slots(weights_TK, layout)
        dhidden_SF = _product(grad_SL, down_ELF, layout, transpose=False)
        dgate_SF, dup_SF, dweight_S, hidden_SF = weighted_situ_backward(
            gate_SF, up_SF, weight_S, dhidden_SF, beta, linear_beta
        )
        ddown_ELF = _outer_product(grad_SL, hidden_SF, layout, experts) if want_down else None
        dweights_TK = None
        if want_weights:
            dweights_TK = _from_slots(dweight_S[:, None], layout, weights_TK.numel(), 1).view_as(weights_TK)
        dgate_EFL = dup_EFL = dx_TL = None
        if want_gate or want_up:
            x_SL = _to_slots(x_TL, layout, k)
            dgate_EFL = _outer_product(dgate_SF, x_SL, layout, experts) if want_gate else None
            dup_EFL = _outer_product(dup_SF, x_SL, layout, experts) if want_up else None
        if want_x:
            dx_SL = _product(dgate_SF, gate_EFL, layout, transpose=False).add_(
                _product(dup_SF, up_EFL, layout, transpose=False)
            )
            dx_TL = _from_slots(dx_SL, layout, x_TL.shape[0], k)
        return dx_TL, None, dweights_TK, dgate_EFL, dup_EFL, ddown_ELF, None, None
