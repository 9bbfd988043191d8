"""Per-head Muon: momentum, orthogonalised block by block (K3 report, arXiv 2607.24653, section 2.5).

Every matrix is a stack of equal row blocks that are orthogonalised alone: one block for a plain matrix, one a head for
attention's projections, one an expert for expert stacks. A head or an expert with large gradients then cannot drown the
others, as it would if the fused weight were orthogonalised whole.

Constants the report does not restate are those of Kimi K2's recipe (arXiv 2507.20534): momentum 0.95, Nesterov, 5
Newton-Schulz steps, update scale 0.2 sqrt(max(rows, columns)) of the block, decoupled weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

# Quintic Newton-Schulz: drives every singular value in (0, 1] into about [0.68, 1.13] in 5 steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_EPS = 1e-7

# Elements of the blocks orthogonalised together. On a CPU the four tensors of a batch should stay in the second-level
# cache (512 KB each here: a third faster than 2 MB each); a card is filled better by larger batches.
_CHUNK_CPU = 1 << 17
_CHUNK_GPU = 1 << 26


def orthogonalize(blocks_NRC: Tensor, steps: int = _STEPS) -> Tensor:
    """Nearest semi-orthogonal matrix of each block, roughly: all singular values come near 1.

    X <- (aI + bA + cA²) X with A = XXᵀ, from X scaled to Frobenius norm 1 (Newton-Schulz, as in Muon).

    Args:
        blocks_NRC: ``[N, R, C]`` with R <= C for speed; any R, C work. Computed in its own dtype.
        steps: iterations.

    Returns:
        ``[N, R, C]``; a block of zeros stays zero.
    """
    norm_N11 = torch.linalg.vector_norm(blocks_NRC, dim=(-2, -1), keepdim=True).add_(_EPS)
    x_NRC = blocks_NRC / norm_N11
    for _ in range(steps):
        gram_NRR = x_NRC @ x_NRC.mT
        poly_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=_B, alpha=_C)
        poly_NRR.diagonal(dim1=-2, dim2=-1).add_(_A)
        x_NRC = poly_NRR @ x_NRC
    return x_NRC


@dataclass(frozen=True)
class _Piece:
    """Blocks ``start`` to ``stop`` of one parameter."""

    parameter: Tensor
    blocks: int  # in which the parameter is cut
    start: int
    stop: int

    def view(self, tensor: Tensor) -> Tensor:
        """These blocks of ``tensor`` (of the parameter's shape), ``[n, R, C]`` with R <= C."""
        blocks_NRC = tensor.reshape(self.blocks, -1, tensor.shape[-1])[self.start : self.stop]
        return blocks_NRC.mT if blocks_NRC.shape[1] > blocks_NRC.shape[2] else blocks_NRC


class Muon(torch.optim.Optimizer):
    """Muon over blocks; see the module's text.

    Args:
        parameters: 2-D or 3-D contiguous floating-point tensors ``[..., rows, columns]``.
        blocks: for each of them, in how many equal blocks of rows it is cut. For a 3-D stack the rows of all its
            matrices are counted, so E experts are E blocks.
        lr: rate; the schedule writes ``param_groups[...]["lr"]``.
        momentum: of the running sum M <- momentum * M + G; the update uses G + momentum * M (Nesterov).
        weight_decay: decoupled: W <- W - lr * (update + weight_decay * W).
        compute_dtype: of the iteration: bfloat16, float32 or float64; None keeps the parameter's. bfloat16 is enough on
            a card.

    Raises:
        ValueError: a parameter that is no matrix or stack, not contiguous, or whose rows cannot be cut evenly; another
            ``compute_dtype``.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        blocks: Iterable[int],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        parameters, counts = list(parameters), list(blocks)
        if len(parameters) != len(counts):
            raise ValueError(f"blocks: found {len(counts)} numbers, need {len(parameters)}, one a parameter")
        for parameter, count in zip(parameters, counts, strict=True):
            check_blocks("parameters", parameter, count)
        check_dtype("compute_dtype", compute_dtype)
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._compute_dtype = compute_dtype
        self._blocks = dict(zip(parameters, counts, strict=True))
        self._chunks = [_chunks(group["params"], self._blocks) for group in self.param_groups]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; those without keep value, momentum and decay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, chunks in zip(self.param_groups, self._chunks, strict=True):
            for chunk in chunks:
                self._update([piece for piece in chunk if piece.parameter.grad is not None], group)
        return loss

    def _update(self, chunk: list[_Piece], group: Mapping[str, Any]) -> None:
        """One batch of blocks of one shape from momentum to weight, while it is in the cache."""
        if not chunk:
            return
        lr, momentum = group["lr"], group["momentum"]
        sizes = [piece.stop - piece.start for piece in chunk]
        first = chunk[0].view(chunk[0].parameter)
        update_NRC = first.new_empty(sum(sizes), *first.shape[1:])
        for piece, part_NRC in zip(chunk, update_NRC.split(sizes), strict=True):
            state = self.state[piece.parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(piece.parameter, memory_format=torch.contiguous_format)
            assert piece.parameter.grad is not None
            gradient_NRC = piece.view(piece.parameter.grad)
            momentum_NRC = piece.view(state["momentum"]).mul_(momentum).add_(gradient_NRC)
            torch.add(gradient_NRC, momentum_NRC, alpha=momentum, out=part_NRC)
        dtype = self._compute_dtype or update_NRC.dtype
        update_NRC = orthogonalize(update_NRC.to(dtype)).to(update_NRC.dtype)
        scale = 0.2 * math.sqrt(max(update_NRC.shape[1:]))
        for piece, part_NRC in zip(chunk, update_NRC.split(sizes), strict=True):
            weight_NRC = piece.view(piece.parameter)
            weight_NRC.mul_(1 - lr * group["weight_decay"]).add_(part_NRC, alpha=-lr * scale)


def check_blocks(name: str, parameter: Tensor, blocks: int) -> None:
    """Raise ValueError unless ``parameter`` (named ``name``) is a matrix or stack that can be cut in ``blocks``."""
    if parameter.ndim not in (2, 3) or not parameter.is_floating_point():
        raise ValueError(f"{name}: found {parameter.dtype} of shape {tuple(parameter.shape)}, need a 2-D or 3-D matrix")
    if not parameter.is_contiguous():
        raise ValueError(f"{name}: found a tensor that is not contiguous, need a contiguous one")
    rows = math.prod(parameter.shape[:-1])
    cut_across = parameter.ndim == 3 and blocks % parameter.shape[0] != 0
    if blocks < 1 or rows % blocks or cut_across:
        raise ValueError(
            f"{name}: found {blocks} blocks, need a number that cuts shape {tuple(parameter.shape)} evenly"
        )


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the iteration can be computed in ``dtype`` (named ``name``): float16 would overflow."""
    if dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name}: found {dtype!r}, need None, torch.bfloat16, torch.float32 or torch.float64")


def _chunks(parameters: Iterable[Tensor], blocks: Mapping[Tensor, int]) -> list[list[_Piece]]:
    """Cut all parameters into batches of blocks of one shape, dtype and device, each small enough for its cache."""
    open_chunks: dict[tuple[Any, ...], list[_Piece]] = {}
    used: dict[tuple[Any, ...], int] = {}
    done: list[list[_Piece]] = []
    for parameter in parameters:
        count = blocks[parameter]
        shape = (math.prod(parameter.shape[:-1]) // count, parameter.shape[-1])
        key = (min(shape), max(shape), parameter.dtype, parameter.device)
        room = max(1, (_CHUNK_CPU if parameter.device.type == "cpu" else _CHUNK_GPU) // math.prod(shape))
        start = 0
        while start < count:
            free = room - used.get(key, 0)
            stop = min(count, start + free)
            open_chunks.setdefault(key, []).append(_Piece(parameter, count, start, stop))
            used[key] = used.get(key, 0) + stop - start
            if used[key] == room:
                done.append(open_chunks.pop(key))
                used[key] = 0
            start = stop
    return done + list(open_chunks.values())
