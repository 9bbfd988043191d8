"""What the data side hands to the model: one packed row of several independent sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target of a position that is not supervised."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: a packed row of T tokens that holds N sequences which never see each other.

    Sequence n occupies positions ``cu_seqlens_N1[n]`` to ``cu_seqlens_N1[n + 1] - 1``. A target is the token that
    follows its input inside the same document, so ``targets_T[t]`` is *not* always ``tokens_T[t + 1]``: the last target
    of a sequence is the first input of the sequence that continues the same document (wherever that is packed).

    Attributes:
        tokens_T: int64 inputs.
        targets_T: int64 next tokens, ``IGNORE_INDEX`` where there is none.
        weights_T: float32 weight of each target in the loss, 0 where there is no target.
        cu_seqlens_N1: int32 boundaries of the sequences, from 0 to T.
        source_N: int64 index of each sequence's source in the manifest, -1 for padding.
        images: reserved for pixels; None for text.
        document_N: int64 index of each sequence's document in the shards, -1 for padding.
        start_N: int64 offset of each sequence's first input within its document's stream, -1 for padding.
        supervised_bytes: bytes of text that the weighted targets stand for; the divisor of bits per byte.
    """

    tokens_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    cu_seqlens_N1: Tensor
    source_N: Tensor
    images: Tensor | None = None
    document_N: Tensor | None = None
    start_N: Tensor | None = None
    supervised_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse rows whose parts do not fit together (ValueError naming the field)."""
        tokens = self.tokens_T.shape
        if len(tokens) != 1 or tokens[0] == 0:
            raise ValueError(f"tokens_T: found shape {tuple(tokens)}, need [T] with T >= 1")
        for name in ("targets_T", "weights_T"):
            found = getattr(self, name).shape
            if found != tokens:
                raise ValueError(f"{name}: found shape {tuple(found)}, need {tuple(tokens)} as tokens_T")
        for name, dtype in (("tokens_T", torch.int64), ("targets_T", torch.int64), ("weights_T", torch.float32)):
            if getattr(self, name).dtype != dtype:
                raise ValueError(f"{name}: found dtype {getattr(self, name).dtype}, need {dtype}")
        if self.cu_seqlens_N1.ndim != 1 or self.cu_seqlens_N1.numel() < 2:
            raise ValueError(f"cu_seqlens_N1: found shape {tuple(self.cu_seqlens_N1.shape)}, need [N+1] with N >= 1")
        sequences = self.cu_seqlens_N1.numel() - 1
        for name in ("source_N", "document_N", "start_N"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (sequences,):
                raise ValueError(f"{name}: found shape {tuple(value.shape)}, need [{sequences}] as cu_seqlens_N1 says")

    @property
    def tokens(self) -> int:
        """Positions in the row, padding included."""
        return self.tokens_T.numel()

    @property
    def sequences(self) -> int:
        """Sequences in the row, padding included."""
        return self.cu_seqlens_N1.numel() - 1

    @property
    def bytes(self) -> int:
        """Bytes of text that the weighted targets stand for."""
        return self.supervised_bytes

    @property
    def mask_T(self) -> Tensor | None:
        """bool [T], False at padding, whose tokens must not count in router statistics; None without padding."""
        real_N = self.source_N >= 0
        if self.source_N.device.type == "cpu" and bool(real_N.all()):
            return None
        lengths_N = (self.cu_seqlens_N1[1:] - self.cu_seqlens_N1[:-1]).to(torch.int64)
        return torch.repeat_interleave(real_N, lengths_N, output_size=self.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``; the batch itself when it is there already."""
        moved = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        if all(moved[name] is getattr(self, name) for name in moved):
            return self
        return replace(self, **moved)  # type: ignore[arg-type]
