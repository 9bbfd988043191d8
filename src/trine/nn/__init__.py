"""Level 1: modules, one file a mechanism. Their forward passes read like the report's equations."""

from __future__ import annotations

from trine.nn.depth import AttnResidual, ChunkResidual, PlainResidual, ShallowToDeepResidual
from trine.nn.feed_forward import FeedForward
from trine.nn.kda import KdaPast, KimiDeltaAttention
from trine.nn.mla import GatedMLA
from trine.nn.moe import LatentMoE
from trine.nn.norm import RMSNorm
from trine.nn.short_conv import ShortConv

__all__ = [
    "AttnResidual",
    "ChunkResidual",
    "FeedForward",
    "GatedMLA",
    "KdaPast",
    "KimiDeltaAttention",
    "LatentMoE",
    "PlainResidual",
    "RMSNorm",
    "ShallowToDeepResidual",
    "ShortConv",
]
