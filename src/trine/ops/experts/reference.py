"""The definition: a loop over experts with masks, plain autograd, any floating dtype. Obviously right, and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from trine.ops.situ import situ_glu


def reference(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_EFL: Tensor,
    up_EFL: Tensor,
    down_ELF: Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """y_t = sum over chosen e of w_te * down_e situ_glu(gate_e x_t, up_e x_t); see `grouped_experts`."""
    wide = torch.promote_types(x_TL.dtype, torch.float32)
    y_TL = torch.zeros(x_TL.shape, dtype=wide, device=x_TL.device)
    for e in range(gate_EFL.shape[0]):
        chosen_TK = ids_TK == e
        if not chosen_TK.any():
            continue
        token_N, rank_N = chosen_TK.nonzero(as_tuple=True)
        x_NL = x_TL[token_N]
        gate_NF, up_NF = x_NL @ gate_EFL[e].t(), x_NL @ up_EFL[e].t()
        hidden_NF = situ_glu(gate_NF, up_NF, beta, linear_beta, backend="reference")
        out_NL = hidden_NF @ down_ELF[e].t()
        y_TL = y_TL.index_add(0, token_N, weights_TK[token_N, rank_N, None].to(wide) * out_NL.to(wide))
    # empty sums: every input has a gradient, if of zeros, whatever was chosen
    for tensor in (x_TL, weights_TK, gate_EFL, up_EFL, down_ELF):
        y_TL = y_TL + tensor[:0].sum().to(wide)
    return y_TL.to(x_TL.dtype)
