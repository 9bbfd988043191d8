"""How well a model answers: loss of the answer's tokens, and whether greedy decoding would have written them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trine.data import DataError
from trine.data.packing import best_fit
from trine.evals.bits import LanguageModel
from trine.ops.cross_entropy import token_losses

TOKENS_PER_CALL = 16_384


@dataclass(frozen=True)
class Asked:
    """Tokens, and which of them are answers to be predicted from those before them.

    Attributes:
        stream: int64 [n], begins with the end-of-document token.
        at: int64 [a], places of the answers' tokens in it, growing, each at least 1.
    """

    stream: NDArray[np.int64]
    at: NDArray[np.int64]

    @property
    def length(self) -> int:
        """Tokens the model reads: those before the last answer's last token."""
        return int(self.at[-1])


@dataclass(frozen=True)
class Answered:
    """The score of one answer.

    Attributes:
        loss: nats, mean over the answer's tokens.
        tokens: tokens of the answer.
        right_tokens: tokens that are the most likely one after the true tokens before them.
    """

    loss: float
    tokens: int
    right_tokens: int

    @property
    def right(self) -> bool:
        """Whether greedy decoding writes the whole answer."""
        return self.right_tokens == self.tokens


def score_answers(
    model: LanguageModel,
    asked: Sequence[Asked],
    *,
    tokens_per_call: int = TOKENS_PER_CALL,
    tick: Callable[[int], None] | None = None,
) -> list[Answered]:
    """Score answers, many in one packed call, without gradients and in evaluation mode (which is put back).

    Scores of all tokens exist for the answers' positions only.

    Args:
        model: see `trine.evals.bits.LanguageModel`.
        asked: what to score.
        tokens_per_call: a call holds about this many tokens; a longer prompt has a call of its own.
        tick: called with the number of tokens done after each call.

    Raises:
        DataError: no answer, or one that has nothing before it.
    """
    for i, one in enumerate(asked):
        if not one.at.size or one.at[0] < 1 or one.at[-1] >= one.stream.size:
            raise DataError(f"answers: number {i} has answers at {one.at.tolist()}, need 1 to {one.stream.size - 1}")
    found: list[Answered | None] = [None] * len(asked)
    lengths = np.array([one.length for one in asked], dtype=np.int64)
    device = model.head.weight.device
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for call in best_fit(lengths, max(tokens_per_call, int(lengths.max(initial=1)))):
                chosen = [asked[i] for i in call]
                tokens = np.concatenate([one.stream[: one.length] for one in chosen])
                bounds = np.concatenate([[0], np.cumsum([one.length for one in chosen])])
                at = np.concatenate([one.at - 1 + begin for one, begin in zip(chosen, bounds[:-1], strict=True)])
                hidden_TD = model(
                    torch.from_numpy(tokens).to(device), torch.from_numpy(bounds.astype(np.int32)).to(device)
                )
                hidden_AD = hidden_TD[torch.from_numpy(at).to(device)]
                targets_A = torch.from_numpy(np.concatenate([one.stream[one.at] for one in chosen])).to(device)
                nll_A = token_losses(hidden_AD, model.head.weight, targets_A).double().cpu().numpy()
                best_A = (hidden_AD.to(model.head.weight.dtype) @ model.head.weight.T).argmax(-1)
                hit_A = (best_A == targets_A).cpu().numpy()
                first = 0
                for i, one in zip(call, chosen, strict=True):
                    last = first + one.at.size
                    found[i] = Answered(float(nll_A[first:last].mean()), one.at.size, int(hit_A[first:last].sum()))
                    first = last
                if tick is not None:
                    tick(int(tokens.size))
    finally:
        model.train(was_training)
    return [one for one in found if one is not None]
