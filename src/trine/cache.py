"""What sequences carry through a model: KDA states, convolution windows and MLA latents, always together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trine.config import ModelConfig, from_dict, to_dict
from trine.nn import KdaPast
from trine.ops.latent_attention import Latents

FORMAT_VERSION = 1


class HybridCache:
    """The state of N sequences in every layer.

    A forward pass replaces entries and never writes into a tensor it was given, so a snapshot or a fork shares memory
    with its origin until one of them moves on.

    Attributes:
        layers: one entry a decoder layer: `KdaPast` (state `[N,H,K,V]` float32, window `[N,3,C]`) or `Latents`.
        lengths_N: tokens seen so far, int64 on the CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_sequences: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if n_sequences < 1:
            raise ValueError(f"n_sequences: found {n_sequences}, need at least 1")
        self.config = config
        self.lengths_N = torch.zeros(n_sequences, dtype=torch.int64)
        self.layers: list[KdaPast | Latents] = []
        n, h, k = n_sequences, config.heads, config.head_dim
        state_dtype = torch.promote_types(dtype, torch.float32)
        for i in range(config.layers):
            if i in config.mla_layers:
                width = config.kv_rank + config.shared_key_dim
                self.layers.append(Latents.empty(n, width, dtype=dtype, device=device))
            else:
                state_NHKV = torch.zeros(n, h, k, k, dtype=state_dtype, device=device)
                window_NWC = torch.zeros(n, config.conv_kernel - 1, 3 * h * k, dtype=dtype, device=device)
                self.layers.append(KdaPast(state_NHKV, window_NWC))

    @property
    def n_sequences(self) -> int:
        """N."""
        return self.lengths_N.numel()

    def is_step(self, tokens: int, cu_seqlens_N1: Tensor | None) -> bool:
        """Whether a forward pass of `tokens` tokens is one new token for each sequence.

        Raises:
            ValueError: lengths that do not fit the number of sequences.
        """
        n = self.n_sequences
        if cu_seqlens_N1 is not None:
            if cu_seqlens_N1.numel() != n + 1:
                raise ValueError(f"cu_seqlens: found {cu_seqlens_N1.numel() - 1} sequences, the cache holds {n}")
            return False
        if n > 1 and tokens != n:
            raise ValueError(f"tokens_T: found {tokens} tokens for {n} sequences, need {n} or cu_seqlens")
        return tokens == n

    def advance(self, tokens: int, cu_seqlens_N1: Tensor | None) -> None:
        """Add the new tokens to `lengths_N`; the model calls this after a forward pass."""
        if cu_seqlens_N1 is not None:
            self.lengths_N = self.lengths_N + cu_seqlens_N1.diff().to("cpu", torch.int64)
        else:
            self.lengths_N = self.lengths_N + tokens // self.n_sequences

    def snapshot(self) -> HybridCache:
        """The present state under another name; costs no memory until one of the two moves on."""
        return self.select(None)

    def restore(self, snapshot: HybridCache) -> None:
        """Go back to a snapshot; the snapshot stays usable."""
        self.lengths_N, self.layers = snapshot.lengths_N, list(snapshot.layers)

    def fork(self, copies: int) -> HybridCache:
        """Every sequence `copies` times, copies of one sequence side by side."""
        if copies < 1:
            raise ValueError(f"copies: found {copies}, need at least 1")
        return self.select([i for i in range(self.n_sequences) for _ in range(copies)])

    def select(self, indices: Sequence[int] | None) -> HybridCache:
        """A cache of the sequences `indices`, in that order, repeats allowed; None keeps all.

        Raises:
            ValueError: an index outside 0 to N-1, or none at all.
        """
        out = object.__new__(HybridCache)
        out.config = self.config
        if indices is None:
            out.lengths_N, out.layers = self.lengths_N, list(self.layers)
            return out
        if not indices:
            raise ValueError("indices: found none, need at least one sequence")
        for i in indices:
            if not 0 <= i < self.n_sequences:
                raise ValueError(f"indices: found {i}, need 0 to {self.n_sequences - 1}")
        index_M = torch.tensor(list(indices))
        out.lengths_N = self.lengths_N[index_M]
        out.layers = []
        for entry in self.layers:
            if isinstance(entry, KdaPast):
                on_device_M = index_M.to(entry.state_NHKV.device)
                out.layers.append(KdaPast(entry.state_NHKV[on_device_M], entry.window_NWC[on_device_M]))
            else:
                out.layers.append(entry.select(index_M))
        return out

    @staticmethod
    def cat(caches: Sequence[HybridCache]) -> HybridCache:
        """One cache of all the sequences of `caches`, in order."""
        if not caches:
            raise ValueError("caches: found none, need at least one")
        out = caches[0].snapshot()
        out.lengths_N = torch.cat([c.lengths_N for c in caches])
        for i, first in enumerate(caches[0].layers):
            entries = [c.layers[i] for c in caches]
            if isinstance(first, KdaPast):
                out.layers[i] = KdaPast(*(torch.cat(parts) for parts in zip(*entries, strict=True)))  # type: ignore[arg-type]
            else:
                out.layers[i] = Latents.cat(entries)  # type: ignore[arg-type]
        return out

    def bytes(self) -> int:
        """Memory of the states, windows and latents that this cache can see."""
        tensors = self._tensors()
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def _tensors(self) -> dict[str, Tensor]:
        out = {"lengths_N": self.lengths_N}
        for i, entry in enumerate(self.layers):
            if isinstance(entry, KdaPast):
                out[f"{i}.state_NHKV"], out[f"{i}.window_NWC"] = entry.state_NHKV, entry.window_NWC
            else:
                out[f"{i}.rows_PM"], out[f"{i}.cu_seqlens_N1"] = entry.rows_PM, entry.cu_seqlens_N1
        return out

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file, under a temporary name first."""
        path = Path(path)
        tensors = {name: t.detach().to("cpu").contiguous() for name, t in self._tensors().items()}
        meta = {"format_version": str(FORMAT_VERSION), "config": json.dumps(to_dict(self.config))}
        temporary = path.with_name(path.name + ".tmp")
        save_file(tensors, temporary, metadata=meta)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> HybridCache:
        """Read what `save` wrote.

        Raises:
            ValueError: not a cache file, a damaged one, or one of a newer format.
        """
        try:
            with safe_open(path, framework="pt", device=str(device)) as f:
                meta = f.metadata() or {}
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a readable cache file ({error})") from error
        version = meta.get("format_version", "none")
        if version != str(FORMAT_VERSION):
            raise ValueError(f"{path}: found cache format {version}, need {FORMAT_VERSION}")
        try:
            return cls._from(from_dict(json.loads(meta["config"])), tensors)
        except KeyError as error:
            raise ValueError(f"{path}: damaged cache file, found no {error.args[0]}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: damaged cache file ({error})") from error

    @classmethod
    def _from(cls, config: ModelConfig, tensors: dict[str, Tensor]) -> HybridCache:
        """A cache of what `_tensors` gave. Raises KeyError for what is absent, ValueError for what does not fit."""
        out = object.__new__(cls)
        out.config = config
        out.lengths_N = tensors["lengths_N"].to("cpu")
        out.layers = []
        n, h, k = out.lengths_N.numel(), config.heads, config.head_dim
        for i in range(config.layers):
            if i in config.mla_layers:
                rows_PM, cu_seqlens_N1 = tensors[f"{i}.rows_PM"], tensors[f"{i}.cu_seqlens_N1"]
                _need_shape(f"{i}.rows_PM", rows_PM, (int(out.lengths_N.sum()), config.kv_rank + config.shared_key_dim))
                _need_shape(f"{i}.cu_seqlens_N1", cu_seqlens_N1, (n + 1,))
                out.layers.append(Latents(rows_PM, cu_seqlens_N1))
            else:
                state_NHKV, window_NWC = tensors[f"{i}.state_NHKV"], tensors[f"{i}.window_NWC"]
                _need_shape(f"{i}.state_NHKV", state_NHKV, (n, h, k, k))
                _need_shape(f"{i}.window_NWC", window_NWC, (n, config.conv_kernel - 1, 3 * h * k))
                out.layers.append(KdaPast(state_NHKV, window_NWC))
        return out


def _need_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: found shape {tuple(tensor.shape)}, need {shape}")
