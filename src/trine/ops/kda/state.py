"""What a sequence carries through the operator, and the algebra of segments.

A segment of tokens maps the state that enters it to the one that leaves it by an affine map, the same for every value
column: ``S_out = transition @ S_in + offset`` (K3 report, arXiv 2607.24653, Eq. 17). Maps compose associatively, which
is what lets segments of one sequence be worked on at the same time, or on different devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.kda.gate import full_precision


def zero_state(
    sequences: int, value_heads: int, key_dim: int, value_dim: int, device: torch.device | str | None = None
) -> Tensor:
    """State of sequences that have seen no token: zeros ``[N, HV, K, V]``, float32."""
    return torch.zeros(sequences, value_heads, key_dim, value_dim, dtype=torch.float32, device=device)


def compose(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two segments in a row, ``first`` being the earlier one.

    Args:
        first, second: (transition ``[..., K, K]``, offset ``[..., K, V]``).

    Returns:
        (transition, offset) of the joined segment, also under autocast in the precision of the two.

    Raises:
        ValueError: maps of other shapes than each other.
    """
    (a_transition, a_offset), (b_transition, b_offset) = first, second
    if a_transition.shape != b_transition.shape or a_offset.shape != b_offset.shape:
        found = [tuple(x.shape) for x in (a_transition, a_offset)]
        need = [tuple(x.shape) for x in (b_transition, b_offset)]
        raise ValueError(f"first: found transition and offset of shapes {found}, need those of second, {need}")
    with full_precision(a_transition.device):
        return b_transition @ a_transition, b_transition @ a_offset + b_offset


def advance(segment: tuple[Tensor, Tensor], state_NHKV: Tensor) -> Tensor:
    """State after a segment: ``transition @ state + offset``."""
    transition, offset = segment
    with full_precision(offset.device):
        return transition @ state_NHKV + offset
