"""What a sequence carries through latent attention: the rows ``[latent ; shared key]`` of all its past tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trine.ops._sequences import check_cu_seqlens

PAGE = 256  # rows; buffers hold whole pages, so that decoding reads blocks of one size whatever a buffer's history


def interleave(first: Tensor, cu_first: Tensor, second: Tensor, cu_second: Tensor) -> tuple[Tensor, Tensor]:
    """Join two packed sets of N sequences into one, each sequence being [its first rows ; its second rows].

    Returns the joined rows [P+T, M] and their offsets [N+1]; differentiable in both.
    """
    cu_first, cu_second = cu_first.long(), cu_second.long()
    joined = torch.cat([first, second])
    cu = cu_first + cu_second
    if cu.numel() == 2 or joined.shape[0] == 0:
        return joined, cu
    sequence = torch.repeat_interleave(torch.arange(cu.numel() - 1, device=cu.device), cu.diff())
    place = torch.arange(joined.shape[0], device=cu.device) - cu[sequence]
    past = cu_first.diff()[sequence]
    index = torch.where(place < past, cu_first[sequence] + place, first.shape[0] + cu_second[sequence] + place - past)
    return joined.index_select(0, index), cu


class _Store:
    """A padded buffer [N, capacity, M] that several ``Latents`` may share; ``used``: how far each one is written."""

    def __init__(self, sequences: int, needed: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        capacity = -(-max(needed, 1) // PAGE) * PAGE
        self.rows_NLM = torch.empty(sequences, capacity, width, dtype=dtype, device=device)
        self.used = [0] * sequences

    @property
    def capacity(self) -> int:
        """Rows a sequence may hold before the buffer has to grow."""
        return self.rows_NLM.shape[1]


class Latents:
    """Past rows ``[latent ; shared key]`` of N sequences. A value: no operation changes one that someone holds.

    Rows are packed [P, M] when made from packed rows, or when they carry gradients; ``append`` without gradients moves
    them to a buffer with room to grow. Holders share that buffer for as long as they agree: the first to append past a
    common end writes in place, another that appends there copies first. So appending costs O(new rows) on average, and
    a snapshot or a fork costs nothing until it diverges.

    Args:
        rows_PM: packed rows, M = R + S.
        cu_seqlens_N1: int32 or int64 offsets of the N sequences.

    Raises:
        ValueError: rows that are not [P, M] of a floating dtype, or offsets that do not fit them.
    """

    def __init__(self, rows_PM: Tensor, cu_seqlens_N1: Tensor) -> None:
        if rows_PM.ndim != 2 or not rows_PM.is_floating_point():
            raise ValueError(f"rows_PM: found {rows_PM.dtype} {tuple(rows_PM.shape)}, need [P, M] of a floating dtype")
        check_cu_seqlens(cu_seqlens_N1, 1, rows_PM.shape[0])
        self._rows: Tensor | None = rows_PM
        self._store: _Store | None = None
        self._lengths: list[int] = cu_seqlens_N1.diff().tolist()
        self._dtype, self._device, self._width = rows_PM.dtype, rows_PM.device, rows_PM.shape[1]

    @classmethod
    def empty(
        cls, n: int, width: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Latents:
        """N sequences without a past; ``width`` = M = R + S."""
        rows = torch.empty(0, width, dtype=dtype, device=device)
        return cls(rows, torch.zeros(n + 1, dtype=torch.int64, device=device))

    @classmethod
    def _of_store(cls, store: _Store, lengths: list[int]) -> Latents:
        self = cls.__new__(cls)
        self._rows, self._store, self._lengths = None, store, lengths
        self._dtype, self._device, self._width = store.rows_NLM.dtype, store.rows_NLM.device, store.rows_NLM.shape[2]
        return self

    @property
    def n_sequences(self) -> int:
        """N."""
        return len(self._lengths)

    @property
    def width(self) -> int:
        """M = R + S, channels of a row."""
        return self._width

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the rows."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._device

    @property
    def lengths_N(self) -> Tensor:
        """Past tokens of each sequence, int64 on the CPU."""
        return torch.tensor(self._lengths, dtype=torch.int64)

    @property
    def cu_seqlens_N1(self) -> Tensor:
        """Offsets of the sequences in ``rows_PM``, int64 on the rows' device."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths_N.cumsum(0)]).to(self._device)

    @property
    def rows_PM(self) -> Tensor:
        """All rows, packed (a copy where they lie in a buffer)."""
        if self._rows is not None:
            return self._rows
        assert self._store is not None
        return self._store.rows_NLM.flatten(0, 1).index_select(
            0, self._places(self._lengths, self._store, at_ends=False)
        )

    def requires_grad(self) -> bool:
        """Whether a gradient would flow to these rows."""
        return self._rows is not None and self._rows.requires_grad

    def padded(self) -> tuple[Tensor, Tensor]:
        """Rows [N, L, M] with L a multiple of 256, and lengths_N; what lies past a length is arbitrary. Read only."""
        if self._store is None:
            self._store = self._copy_store(max(self._lengths, default=0))
        return self._store.rows_NLM, self.lengths_N

    def append(self, rows_TM: Tensor, cu_seqlens_N1: Tensor | None = None) -> Latents:
        """These sequences with new rows at their ends; ``self`` keeps seeing what it saw.

        Args:
            rows_TM: new rows, packed; a dtype that the rows' own dtype holds without loss.
            cu_seqlens_N1: offsets of the N sequences in them; ``None`` = one row each (or N = 1).

        Raises:
            ValueError: rows of another width, device or wider dtype, or offsets that do not fit.
        """
        if rows_TM.ndim != 2 or rows_TM.shape[1] != self._width:
            raise ValueError(f"rows_TM: found shape {tuple(rows_TM.shape)}, need [T, M] with M = {self._width}")
        if torch.promote_types(rows_TM.dtype, self._dtype) != self._dtype:
            raise ValueError(f"rows_TM: found dtype {rows_TM.dtype}, need one that fits the past's {self._dtype}")
        if rows_TM.device != self._device:
            raise ValueError(f"rows_TM: found device {rows_TM.device}, need that of the past, {self._device}")
        tokens, sequences = rows_TM.shape[0], self.n_sequences
        if cu_seqlens_N1 is None:
            if sequences not in (1, tokens):
                raise ValueError(f"rows_TM: found {tokens} rows for {sequences} sequences, need cu_seqlens_N1")
            cu_seqlens_N1 = torch.tensor([0, tokens]) if sequences == 1 else torch.arange(sequences + 1)
        check_cu_seqlens(cu_seqlens_N1, 1, tokens)
        if cu_seqlens_N1.numel() != sequences + 1:
            found = cu_seqlens_N1.numel() - 1
            raise ValueError(f"cu_seqlens_N1: found {found} sequences, need the past's {sequences}")
        rows_TM = rows_TM.to(self._dtype)
        if torch.is_grad_enabled() and (rows_TM.requires_grad or self.requires_grad()):
            return Latents(*interleave(self.rows_PM, self.cu_seqlens_N1, rows_TM, cu_seqlens_N1.to(self._device)))
        added = cu_seqlens_N1.diff().tolist()
        lengths = [a + b for a, b in zip(self._lengths, added, strict=True)]
        store = self._store
        if store is None or not self._may_write(store, lengths):
            needed = max(lengths, default=0)
            held = 0 if store is None else store.capacity
            # Half as much again when a buffer is full: the copies of a growing sequence cost O(1) a row on average.
            store = self._copy_store(needed if needed <= held else max(needed + needed // 8, held + held // 2))
        store.rows_NLM.flatten(0, 1).index_copy_(0, self._places(added, store, at_ends=True), rows_TM.detach())
        store.used = [max(u, n) for u, n in zip(store.used, lengths, strict=True)]
        return Latents._of_store(store, lengths)

    def select(self, indices: Tensor | Sequence[int]) -> Latents:
        """The sequences ``indices``, in that order, repeats allowed; a copy, except that gradients flow through.

        Raises:
            ValueError: an index outside 0..N-1.
        """
        chosen = indices.tolist() if isinstance(indices, Tensor) else [int(i) for i in indices]
        for i in chosen:
            if not 0 <= i < self.n_sequences:
                raise ValueError(f"indices: found {i}, need 0..{self.n_sequences - 1}")
        lengths = [self._lengths[i] for i in chosen]
        if self._store is not None and not self.requires_grad():
            longest = max(lengths, default=0)
            store = _Store(len(chosen), longest, self._width, self._dtype, self._device)
            index = torch.tensor(chosen, dtype=torch.int64, device=self._device)
            store.rows_NLM[:, :longest] = self._store.rows_NLM[:, :longest].index_select(0, index)
            store.used = list(lengths)
            return Latents._of_store(store, lengths)
        starts = self.cu_seqlens_N1.tolist()
        parts = [torch.arange(starts[i], starts[i + 1]) for i in chosen]
        index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        cu = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        return Latents(self.rows_PM.index_select(0, index.to(self._device)), cu.to(self._device))

    @staticmethod
    def cat(parts: Sequence[Latents]) -> Latents:
        """All sequences of all ``parts``, in order.

        Raises:
            ValueError: no part, or unequal widths, dtypes or devices.
        """
        if not parts:
            raise ValueError("parts: found none, need at least one Latents")
        kinds = {(p.width, p.dtype, p.device) for p in parts}
        if len(kinds) > 1:
            raise ValueError(
                f"parts: found different (width, dtype, device) {sorted(map(str, kinds))}, need equal ones"
            )
        lengths = torch.tensor([0, *(n for p in parts for n in p._lengths)], dtype=torch.int64)
        return Latents(torch.cat([p.rows_PM for p in parts]), lengths.cumsum(0).to(parts[0].device))

    def _may_write(self, store: _Store, lengths: list[int]) -> bool:
        """Whether rows from our ends up to ``lengths`` are free in the shared buffer, and writable in this mode."""
        if max(lengths, default=0) > store.capacity:
            return False
        if store.rows_NLM.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return all(n in (used, new) for n, used, new in zip(self._lengths, store.used, lengths, strict=True))

    def _copy_store(self, needed: int) -> _Store:
        store = _Store(self.n_sequences, needed, self._width, self._dtype, self._device)
        longest = max(self._lengths, default=0)
        if self._store is not None:
            store.rows_NLM[:, :longest] = self._store.rows_NLM[:, :longest]
        elif longest:
            assert self._rows is not None
            places = self._places(self._lengths, store, at_ends=False)
            store.rows_NLM.flatten(0, 1).index_copy_(0, places, self._rows.detach())
        store.used = list(self._lengths)
        return store

    def _places(self, counts: list[int], store: _Store, *, at_ends: bool) -> Tensor:
        """Flat places in a buffer of ``counts[n]`` rows for each sequence, from its row 0 or from its present end."""
        counts_N = torch.tensor(counts, dtype=torch.int64)
        first_N = torch.arange(len(counts)) * store.capacity
        if at_ends:
            first_N = first_N + self.lengths_N
        before_N = counts_N.cumsum(0) - counts_N
        places = torch.repeat_interleave(first_N - before_N, counts_N) + torch.arange(int(counts_N.sum()))
        return places.to(self._device)
