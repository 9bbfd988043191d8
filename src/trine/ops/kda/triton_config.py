"""The committed choices: tile sizes, warps, number formats and plan of the KDA kernels for one card.

Everything here is a function of the card, the heads, K, V, the dtypes and the caller's ``plan``; nothing depends on the
number of tokens or on data, so a prefix's results do not change by one bit when tokens are appended (a plan that cuts
the sequence every ``segment`` tokens leaves sequences that are no longer than that uncut, which changes no arithmetic).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from trine.ops.kda.triton_launch import Options
from trine.ops.kda.triton_table import FORWARD, SEGMENTS

CHUNK = 32
"""Tokens a tile. With |g| <= 5 the half-span anchor keeps 2^(G+c) and 2^(-c-G) within 2^+-116 for 32 tokens."""

MAX_CHANNELS = 256
LOG2E = 1.4426950408889634
MAX_DECAY = 5.4
"""Largest |lower_bound|: 32 steps of it, halved by the anchor, stay inside the exponent range of bf16 and fp32."""


@dataclass(frozen=True, eq=False)
class Config:
    """How one call runs. Compared by identity (``choose`` makes each once), so that look-ups by it cost nothing.

    Attributes:
        key_block: K padded to a power of two; factors are stored with this many channels.
        value_block: value channels of one program of the scan.
        factor: dtype of the stored factors W, Q+, K- and P, and of the state and the corrected values as operands.
        value: dtype in which v is multiplied.
        tile: dtype of the operands of the diagonal tiles (needs bf16's exponent range).
        single_warp: prepare tiles with the Gluon kernel, where dtypes are 16-bit and strides allow 16-byte loads.
        prepare, scan, transition, combine: how the kernels are compiled.
        segment: tokens a segment of the exact segmented scan; 0 walks a sequence from end to end.
        combine_block: value rows of one program that joins segments.
        fine: store K- in fp16 too and A in two parts, for the backward's walk over states. Needs 16-bit factors.
    """

    key_block: int
    value_block: int
    factor: torch.dtype
    value: torch.dtype
    tile: torch.dtype
    single_warp: bool
    prepare: Options
    scan: Options
    transition: Options
    combine: Options
    segment: int
    combine_block: int
    fine: bool = False

    @property
    def precision(self) -> str:
        """Triton's ``input_precision`` for products whose operands are fp32."""
        return "tf32x3" if self.factor == torch.float32 else "tf32"


@cache
def refined(config: Config) -> Config:
    """``config`` with fine factors."""
    return replace(config, fine=True)


def anchor(lower_bound: float) -> int:
    """Half the span of 32 steps of ``lower_bound`` in powers of two, rounded to an integer so that scaling is exact."""
    return round(0.5 * CHUNK * abs(lower_bound) * LOG2E)


def segment_length(heads: int, key_width: int, value_width: int) -> int:
    """Tokens a segment for a scan over ``heads`` value heads, 0 for none.

    A launch that finds the segments' maps has room for three programs a multiprocessor, 396 on an H200, and the walk
    itself for two, 264. A length is good where neither begins a round that it cannot fill. Measured on H200, forward,
    K = V = 128, ms:

    ======  =====  ============================================================================
    tokens  heads  tokens a segment: ms
    ======  =====  ============================================================================
      8192     64  0: 0.556, 4096: 0.674
      8192     32  0: 0.410, 1024: 0.373, 2048: 0.322, 4096: 0.390
      8192     24  1376: 0.318, 1664: 0.262, 2048: 0.278
      8192     20  1184: 0.275, 1376: 0.227, 1664: 0.237, 2048: 0.249
      8192     16  0: 0.340, 512: 0.237, 1024: 0.208, 1184: 0.192, 1376: 0.200, 2048: 0.221
      8192     12  832: 0.174, 928: 0.159, 1024: 0.161, 1184: 0.167
      8192      8  512: 0.137, 928: 0.128, 1024: 0.129, 2048: 0.174, 4096: 0.272
     65536      8  2048: 0.733, 4096: 0.719, 4736: 0.754, 5056: 0.674, 5472: 0.697
     16384      4  512: 0.168, 1024: 0.144, 1376: 0.154, 2048: 0.183
    131072      1  1024: 0.461, 1376: 0.366, 2048: 0.329, 4096: 0.376
    ======  =====  ============================================================================

    The best length grows with the tokens, which must not decide: 5 to 8 heads take what is best for long sequences.
    """
    return next((tokens for limit, tokens in SEGMENTS if heads <= limit), 0)


@cache
def choose(
    heads: int, key_width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype, bounded: bool, plan: str
) -> Config:
    """The configuration for one call on Hopper.

    Args:
        heads: value heads, HV.
        key_width, value_width: K and V.
        dtype: dtype of q, k and the gate input.
        value_dtype: dtype of v.
        bounded: keys and queries are normalised, so that every stored factor is at most about 1 and fits fp16.
        plan: ``"auto"``, ``"serial"``, ``"segmented"`` or ``"segmented:TOKENS"``, each optionally followed by
            ``",bf16"`` or ``",fp16"`` to choose the dtype of the factors: bf16 has fp32's range, fp16 an error three
            times smaller, for values v between about 1e-4 and 1e4.

    Raises:
        ValueError: a plan that is none of these, or a segment length that is no positive multiple of 32.
    """
    kind, _, number_format = plan.partition(",")
    name, _, tokens = kind.partition(":")
    if name not in ("auto", "serial", "segmented") or number_format not in ("", "bf16", "fp16"):
        raise ValueError(
            f"plan: found {plan!r}, need 'auto', 'serial', 'segmented' or 'segmented:TOKENS', "
            "optionally followed by ',bf16' or ',fp16'"
        )
    if tokens:
        segment = int(tokens) if tokens.isdecimal() else -1
        if name != "segmented" or segment <= 0 or segment % CHUNK:
            raise ValueError(f"plan: found {plan!r}, need a segment of a positive multiple of {CHUNK} tokens")
    elif name == "serial":
        segment = 0
    else:
        segment = segment_length(heads, key_width, value_width)
        if name == "segmented" and not segment:
            segment = 4096
    return make_config(key_width, value_width, dtype, value_dtype, bounded, number_format, segment)


def make_config(
    key_width: int,
    value_width: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    bounded: bool,
    number_format: str,
    segment: int,
    row: tuple[int, int, int, int] | None = None,
) -> Config:
    """A configuration with the table's launch parameters, or those of `row` (`trine tune`); arguments as `choose`."""
    key_block = max(32, 1 << math.ceil(math.log2(key_width)))
    full = torch.float32 in (dtype, value_dtype)
    value_block, warps, stages, prepare_warps = row or FORWARD["fp32" if full else "16-bit", key_block]
    value_block = min(value_block, max(32, 1 << (value_width - 1).bit_length()))
    scan = Options(num_warps=warps, num_stages=stages)
    if full:
        return Config(
            key_block=key_block,
            value_block=value_block,
            factor=torch.float32,
            value=torch.float32,
            tile=torch.float32,
            single_warp=False,
            prepare=Options(num_warps=prepare_warps),
            scan=scan,
            transition=scan,
            combine=Options(num_warps=4, num_stages=1),
            segment=segment,
            combine_block=16,
        )
    factor = torch.float16 if number_format == "fp16" or (bounded and not number_format) else torch.bfloat16
    return Config(
        key_block=key_block,
        value_block=value_block,
        factor=factor,
        value=torch.bfloat16 if not bounded else value_dtype,
        tile=torch.bfloat16,
        single_warp=key_block >= 64,
        prepare=Options(num_warps=prepare_warps),
        scan=scan,
        transition=scan,
        combine=Options(num_warps=4, num_stages=2 if key_block <= 128 else 1),  # two stages of 256 channels do not fit
        segment=segment,
        combine_block=16,
    )
