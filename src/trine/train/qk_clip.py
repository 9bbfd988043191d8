"""QK-clip: a head whose attention scores grow too large is scaled down right after the step that saw it.

Kimi K2's rule (arXiv 2507.20534, section 2.1), which K3 keeps (arXiv 2607.24653, section 2.5): with S the largest
scaled score of a head in the step and gamma = tau / S < 1, its content queries and content keys are multiplied by
sqrt(gamma), its part of the query that meets the shared key by gamma, and the shared key, which all heads read, stays.
Every score of the head is then gamma times what it was; the other heads are what they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trine.nn.mla import GatedMLA, HeadPeaks
from trine.train.optimizers import Optimizers


@dataclass(frozen=True)
class ClippedHead:
    """One head that was scaled down."""

    module: str  # name of the attention in the model
    head: int
    peak: float  # its largest scaled score before


def watch_heads(model: nn.Module, limit: float) -> None:
    """Let every `GatedMLA` of ``model`` note its heads' largest scores while training; ``limit`` 0 ends it."""
    for module in model.modules():
        if isinstance(module, GatedMLA):
            module.peaks = HeadPeaks(module.heads, limit) if limit > 0 else None


@torch.no_grad()
def qk_clip(model: nn.Module, optimizers: Optimizers) -> list[ClippedHead]:
    """Scale down each head whose peak in the step exceeded the limit it is watched with.

    Args:
        model: whose heads `watch_heads` watches.
        optimizers: hold the float32 masters of 16-bit weights, which are scaled as well.

    Returns:
        The heads that were scaled, in the model's order.
    """
    clipped: list[ClippedHead] = []
    for name, module in model.named_modules():
        if not isinstance(module, GatedMLA) or module.peaks is None:
            continue
        limit = module.peaks.limit
        peaks = module.peaks.peak_H.tolist()
        over = [head for head, peak in enumerate(peaks) if peak > limit]
        if not over:
            continue
        gamma = [limit / peaks[head] if head in over else 1.0 for head in range(module.heads)]
        query_R, key_R = head_factors(module, torch.tensor(gamma, dtype=torch.float64))
        optimizers.scale_rows(f"{name}.q_up.weight", query_R)
        optimizers.scale_rows(f"{name}.kv_up.weight", key_R)
        clipped += [ClippedHead(name, head, peaks[head]) for head in over]
    return clipped


def head_factors(module: GatedMLA, gamma_H: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the rows of ``q_up`` and of ``kv_up`` that multiply every score of head h by ``gamma_H[h]``."""
    heads, content = module.heads, module.head_dim
    shared = module.q_up.weight.shape[0] // heads - content
    root_H1, gamma_H1 = gamma_H.sqrt()[:, None], gamma_H[:, None]
    query_HC = torch.cat((root_H1.expand(heads, content), gamma_H1.expand(heads, shared)), 1)
    key_HC = torch.cat((root_H1.expand(heads, content), torch.ones(heads, content, dtype=gamma_H.dtype)), 1)
    return query_HC.flatten(), key_HC.flatten()
