"""What passes between the KDA kernels: one call's inputs as they read them, and what the first kernel makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.ops.kda.triton_config import CHUNK, Config
from trine.ops.kda.triton_replay import new


@dataclass(slots=True)
class Problem:
    """One call's inputs in the form the kernels take, and the sizes they share.

    ``slots`` 32-token tiles are provided for: exactly those of a batch of equal lengths, an upper bound (tokens // 32 +
    sequences) of a packed row, whose ``table`` says which sequence each belongs to. Strides are in units of ``align``
    elements for q, k, gate and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor
    a_log: Tensor | None
    bias: Tensor | None
    cu: Tensor | None
    table: Tensor | None
    tokens: int
    sequences: int
    slots: int
    tiles_a_sequence: int
    heads: int
    group: int
    key_width: int
    value_width: int
    align: int
    norm: bool
    logit: bool
    bound: float
    beta_max: float
    scale: float
    config: Config


@dataclass(slots=True)
class Factors:
    """What the scan needs of every tile (slot-major, then heads): see `trine.ops.kda.triton_prepare`.

    ``wqk`` is ``[3, slots, heads, 32, BK]`` with -W, Q+ and K-; ``p`` is ``[slots, heads, 32, 32]`` and ``a``
    ``[1, slots, heads, 32, 32]``; in fp32 are ``decay`` ``[slots, heads, BK]`` and ``norms`` ``[slots, heads, 2, 32]``,
    the reciprocal norms of the rows of q and k, None where nobody asked for unit vectors. Fine ones have a plane
    more of two: ``a[1]`` is what rounding left of ``a[0]``, and ``wqk[2:]`` is in memory ``[slots, heads, 2, 32, BK]``,
    a tile's K- and then its K- in fp16 (a known offset costs no register). Tiles that no sequence uses hold garbage.
    """

    wqk: Tensor
    p: Tensor
    a: Tensor
    decay: Tensor
    norms: Tensor | None

    @property
    def fine(self) -> bool:
        """Whether the second K- and the rest of A are there."""
        return self.a.shape[0] == 2

    def keys(self) -> tuple[Tensor, Tensor | None]:
        """K-, and K- in fp16 if it is there: ``[slots, heads, 32, BK]``, apart by twice a tile where both are."""
        if not self.fine:
            return self.wqk[2], None
        both = self.wqk[2:].view(*self.wqk.shape[1:3], 2, *self.wqk.shape[3:])
        return both[:, :, 0], both.view(torch.float16)[:, :, 1]


@dataclass(slots=True)
class Cuts:
    """What a segmented walk finds at its cuts, all transposed and fp32: cut j lies behind segment j of a sequence.

    ``states`` ``[cuts, heads, V, BK]`` is the state at each cut, ``maps`` ``[cuts, heads, BK, BK]`` the transition of
    the segment before it; those of first segments are not written, as nobody needs them. Unpacked, sequence n owns
    ``ceil(T / segment) - 1`` cuts; packed, those from ``start // segment`` on, of ``T // segment`` in all.
    """

    states: Tensor
    maps: Tensor


class Kept(NamedTuple):
    """What a forward pass may hand to its backward pass, to save it the work."""

    factors: Factors | None = None
    cuts: Cuts | None = None

    def tensors(self) -> list[Tensor | None]:
        """Its seven tensors in order, None where there is none."""
        factors: list[Tensor | None] = [None] * 5
        if (made := self.factors) is not None:
            factors = [made.wqk, made.p, made.a, made.decay, made.norms]
        return [*factors, *((None, None) if self.cuts is None else (self.cuts.states, self.cuts.maps))]

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Kept:
        """What ``tensors`` gave."""
        factors = None if tensors[0] is None else Factors(*tensors[:5])
        return cls(factors, None if tensors[5] is None else Cuts(*tensors[5:7]))


NOTHING = Kept()


def cuts_of(tokens: int, sequences: int, segment: int, packed: bool) -> int:
    """Cuts that are provided for; 0 where sequences are walked whole."""
    if not 0 < segment < tokens:
        return 0
    return tokens // segment if packed else sequences * (-(-tokens // segment) - 1)


def new_cuts(cuts: int, heads: int, value_width: int, key_block: int, device: torch.device) -> Cuts:
    """Memory for ``cuts`` of them."""
    return Cuts(
        new((cuts, heads, value_width, key_block), torch.float32, device),
        new((cuts, heads, key_block, key_block), torch.float32, device),
    )


def in_memory(tensor: Tensor | None) -> Tensor | None:
    """``tensor`` itself if its memory holds its values; a copy of a negated view and of zeros that have no memory."""
    if tensor is None or not (tensor.is_neg() or tensor._is_zerotensor()):
        return tensor
    return tensor.resolve_neg() if tensor.is_neg() else torch.zeros(tensor.shape).to(tensor)


def even_rows(tensor: Tensor) -> Tensor:
    """``[B, T, H, X]`` itself if its rows are contiguous and its address is 16-byte aligned, else a copy that is.

    A copy too where a chunk of tokens spans 2^31 elements: kernels count inside a chunk in 32 bits.
    """
    if tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and tensor.stride(1) * CHUNK < 1 << 31:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def alignment(*tensors: Tensor) -> int:
    """Largest of 8, 4, 2, 1 elements that divides every stride but the last; dimensions of size 1 do not count."""
    bits = 8
    for tensor in tensors:
        for stride in tensor.stride()[:-1]:
            bits |= stride
    if bits & 7:
        bits = 8
        for tensor in tensors:
            for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
                if size > 1:
                    bits |= stride
    return bits & -bits


def parameter(tensor: Tensor | None) -> Tensor | None:
    """A gate parameter as the kernels read it: fp32, contiguous; itself if it is that already."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):
        return tensor
    return tensor.detach().float().contiguous()
