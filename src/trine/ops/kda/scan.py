"""The sequential part of the chunked form: the state's way through the chunks, there and back.

Buffers are flat, ``[chunks * H, ...]`` in the order of ``Layout``: the chunks of one step lie side by side, the
sequences that are still active are a prefix of those of the step before. Every operation writes in place into a
contiguous piece, because batched products with a strided result leave the fast path. C is the number of rows of a
chunk.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from trine.ops.kda._checks import TILE
from trine.ops.kda.layout import Layout

RING_BYTES = 1 << 20  # gradients of states kept at once in the reverse scan: small enough to stay in a cache


def unit_lower_inverse(M: Tensor) -> Tensor:
    """(I + M)^-1 by forward substitution, M being the strictly lower part of ``[tiles, 16, 16]``; the rest is not read.

    The tiles are the last axis while it works, so each of the 15 elimination steps is one operation over all tiles.
    """
    tiles, size, _ = M.shape
    m = M.reshape(tiles, size * size).t().contiguous().view(size, size, tiles)
    x = m.new_zeros(size, size, tiles)
    x.diagonal(dim1=0, dim2=1).fill_(1.0)
    for j in range(size - 1):
        x[j + 1 :, : j + 1].addcmul_(m[j + 1 :, j : j + 1], x[j : j + 1, : j + 1], value=-1.0)
    return x.view(size * size, tiles).t().contiguous().view(tiles, size, size)


def running_sum_(x: Tensor, reverse: bool = False) -> Tensor:
    """Sums over the rows of every tile ``[tiles, 16, K]`` up to and with a row (``reverse``: from a row on), in place.

    Four groups of four rows, then the groups: six quarter passes in a fixed order. A later row enters no earlier sum.
    (``rows[i] += x`` would write twice: Python assigns the view it has just changed to itself.)
    """
    rows = x.view(x.shape[0], 4, 4, x.shape[-1])
    if reverse:
        for i in (2, 1, 0):
            rows[:, :, i].add_(rows[:, :, i + 1])
        for i in (2, 1, 0):
            rows[:, i].add_(rows[:, i + 1, :1])
    else:
        for i in (1, 2, 3):
            rows[:, :, i].add_(rows[:, :, i - 1])
        for i in (1, 2, 3):
            rows[:, i].add_(rows[:, i - 1, 3:])
    return x


def scan(
    layout: Layout,
    heads: int,
    reads: Tensor,
    decay: Tensor,
    R: Tensor,
    v: Tensor,
    state: Tensor,
    unshift: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Run the state through the chunks: ``e = v - k~ S / c`` and ``S <- D S + R^T e``.

    Args:
        layout: the chunks.
        heads: H.
        reads: [q~; k~] tile by tile ``[chunks * H, 2 C, K]``.
        decay: D ``[chunks * H, K, 1]``.
        R: ``[chunks * H, C, K]``.
        v: values ``[*grid, H, split, 16, V]``, any strides.
        state: states that enter the member sequences, ``[n * H, K, V]``.
        unshift: 1 / c.
        keep: keep the states between chunks for the backward pass.

    Returns:
        What the state predicts, ``reads @ S`` ``[chunks * H, 2 C, V]``; the errors e ``[chunks * H, C, V]``; slots
        ``[(n + chunks) * H, K, V]``: the entering states, then the state that leaves each chunk (None unless ``keep``);
        and the last state of every member sequence ``[n * H, K, V]``.
    """
    values = state.shape[-1]
    predicted, e = state.new_empty(*reads.shape[:2], values), state.new_empty(*R.shape[:2], values)
    sizes = [n * heads for n in layout.active]
    last = torch.empty_like(state)
    slots = None
    if keep:
        slots = state.new_empty(sizes[0] + sum(sizes), *state.shape[1:])
        slots[: sizes[0]] = state
        targets = slots[sizes[0] :].split(sizes)
        state = slots[: sizes[0]]
    else:
        pair = [torch.empty_like(state), torch.empty_like(state)]
        targets = tuple(pair[step % 2][:size] for step, size in enumerate(sizes))
    following = [*sizes[1:], 0]
    five = (*layout.grid, heads, layout.split, -1, TILE, values)
    from_keys = layout.by_step(predicted.view(five).select(-3, 1))
    errors = layout.by_step(e.view(five).select(-3, 0))
    parts = (t.split(sizes) for t in (reads, decay, R.mT, predicted, e))
    for reads_s, decay_s, write_s, predicted_s, e_s, leaving, active, v_s, keys_s, error in zip(
        *parts, targets, following, layout.by_step(v), from_keys, errors, strict=True
    ):
        torch.bmm(reads_s, state, out=predicted_s)
        torch.add(v_s, keys_s, alpha=-unshift, out=error)
        torch.mul(state, decay_s, out=leaving)
        leaving.baddbmm_(write_s, e_s)
        state = leaving
        if active != len(leaving):
            last[active : len(leaving)] = leaving[active:]
            state = leaving[:active]
    return predicted, e, slots, last


def scan_back(
    layout: Layout,
    heads: int,
    reads: Tensor,
    decay: Tensor,
    R: Tensor,
    y: Tensor,
    slots: Tensor,
    X: Tensor,
    de: Tensor,
    d_last: Tensor | None,
    unshift: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reverse scan, and the gradients that need a state or its gradient.

    Step by step ``de += R dS'``, ``X = [do; -de]``, ``dS = D dS' + reads^T X / c``. Every few steps, while their dS'
    are still in a cache, the products with them.

    Args:
        layout, heads, reads, decay, R, slots, unshift: as in ``scan``.
        y: ``[chunks * H, C, V]``.
        X: [do; .] tile by tile ``[chunks * H, 2 C, V]``; the second halves are filled with -de.
        de: B^T do ``[chunks * H, C, V]``, overwritten by the gradient of v.
        d_last: gradient of the last states in member order ``[n * H, K, V]``; None is zero.

    Returns:
        ``X S^T / c`` ``[chunks * H, 2 C, K]``, ``y dS'^T`` ``[chunks * H, C, K]``, the sums over values of S' dS'
        ``[chunks * H, K]``, and the gradient of the entering states ``[n * H, K, V]``.
    """
    sizes = [n * heads for n in layout.active]
    starts = [0, *accumulate(sizes)]
    chunks, _, channels = reads.shape
    values = y.shape[-1]
    d_reads, d_write, d_decay = torch.empty_like(reads), torch.empty_like(R), R.new_empty(chunks, channels)
    split = (chunks, layout.split, -1, TILE, values)
    errors, minus_errors = de.view(split).select(2, 0), X.view(split).select(2, 1)
    parts = tuple(t.split(sizes) for t in (de, errors, minus_errors, X, R, reads.mT, decay))
    span = max(1, RING_BYTES // (sizes[0] * channels * values * y.element_size()))

    def buffer(first: int, end: int) -> Tensor:
        return y.new_empty(starts[end] - starts[first], channels, values)

    end = len(sizes)
    first = max(0, end - span)
    ring = buffer(first, end)
    d_enter = ring
    incoming = 0  # rows of the step's dS' that the following step has filled
    while end > 0:
        before = max(0, first - span)
        ring_before = buffer(before, first) if first else y.new_empty(sizes[0], channels, values)
        views = ring.split(sizes[first:end])
        for step in range(end - 1, first - 1, -1):
            de_s, error, minus_error, X_s, R_s, reads_s, decay_s = (part[step] for part in parts)
            d_leave = views[step - first]
            if incoming < sizes[step]:
                d_leave[incoming:] = 0.0 if d_last is None else d_last[incoming : sizes[step]]
            de_s.baddbmm_(R_s, d_leave)
            torch.neg(error, out=minus_error)
            if step > first:
                d_enter = views[step - first - 1][: sizes[step]]
            elif first:
                d_enter = ring_before[starts[first - 1] - starts[before] :][: sizes[step]]
            else:
                d_enter = ring_before
            torch.mul(d_leave, decay_s, out=d_enter)
            d_enter.baddbmm_(reads_s, X_s, alpha=unshift)
            incoming = sizes[step]
        block = slice(starts[first], starts[end])
        into = d_reads[block]
        torch.baddbmm(into, X[block], _entering(layout, heads, slots, first, end).mT, beta=0, alpha=unshift, out=into)
        torch.bmm(y[block], ring.mT, out=d_write[block])
        ring.mul_(slots[sizes[0] :][block])
        torch.sum(ring, -1, out=d_decay[block])
        ring, end, first = ring_before, first, before
    return d_reads, d_write, d_decay, d_enter


def _entering(layout: Layout, heads: int, slots: Tensor, first: int, end: int) -> Tensor:
    """States that enter the chunks of steps ``first`` to ``end - 1``; a view where no sequence ends on the way."""
    counts = layout.active[max(0, first - 1) : end]
    start, stop = sum(layout.active[:first]), sum(layout.active[:end])
    if counts[0] == counts[-1]:
        # One step back from the chunk itself; the slots begin with the states that enter the sequences.
        back = layout.active[0] - counts[0]
        return slots[(start + back) * heads : (stop + back) * heads]
    assert layout.enter is not None
    return slots.view(-1, heads, *slots.shape[1:])[layout.enter[start:stop]].flatten(0, 1)
