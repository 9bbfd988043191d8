from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trine.ops.latent_attention import largest
from trine.ops.latent_attention.largest import largest_scores


def brute(q: Tensor, latent: Tensor, shared: Tensor, up: Tensor, bounds: list[int], scale: float) -> Tensor:
    """Every score of every causal pair, one by one."""
    heads = q.shape[1]
    peak = [-float("inf")] * heads
    for first, end in pairwise(bounds):
        for t in range(first, end):
            for j in range(first, t + 1):
                for h in range(heads):
                    key = torch.cat((up[h] @ latent[j], shared[j]))
                    peak[h] = max(peak[h], scale * float(q[t, h] @ key))
    return torch.tensor(peak, dtype=torch.float64)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, content, shared, rank = 3, 4, 2, 5
    shapes = ((tokens, heads, content + shared), (tokens, rank), (tokens, shared), (heads, content, rank))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("bounds", [[0, 23], [0, 1, 1, 9, 23], [0, 0, 22, 23]])
def test_the_largest_causal_score_of_each_head(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "_ROWS", 4)
    monkeypatch.setattr(largest, "_COLUMNS", 3)
    given = inputs(bounds[-1])
    found = largest_scores(*given, torch.tensor(bounds), scale=0.3)
    torch.testing.assert_close(found, brute(*given, bounds, 0.3), rtol=1e-13, atol=0)


def test_later_keys_do_not_count() -> None:
    q, latent, shared, up = inputs(6)
    latent[5] *= 1e3  # only the last query may meet it
    q[5] *= 1e-6
    found = largest_scores(q, latent, shared, up)
    torch.testing.assert_close(found, brute(q, latent, shared, up, [0, 6], 6**-0.5), rtol=1e-13, atol=0)
    assert float(found.max()) < 100


def test_a_bound_that_is_low_enough_is_returned_and_lies_above_the_peak() -> None:
    given = inputs(31)
    exact = largest_scores(*given)
    bound = largest_scores(*given, enough=1e9)
    assert bool((bound >= exact).all()) and not torch.equal(bound, exact)
    assert torch.equal(largest_scores(*given, enough=float(bound.max())), bound)
    assert torch.equal(largest_scores(*given, enough=float(bound.max()) * 0.999), exact)


def test_nothing_and_what_is_no_number() -> None:
    assert torch.equal(largest_scores(*inputs(0)), torch.full((3,), -torch.inf, dtype=torch.float64))
    q, latent, shared, up = inputs(7)
    q[3, 1, 0] = torch.nan
    found = largest_scores(q, latent, shared, up, enough=100.0)
    assert bool(found[1].isnan()) and not bool(found[[0, 2]].isnan().any())
