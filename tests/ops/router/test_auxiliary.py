"""The auxiliary loss against its definition, and its gradient in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trine.ops.router.auxiliary import LoadPressure, auxiliary_loss, relative_loads

T, E, K = 13, 7, 3


def by_definition(scores_TE: Tensor, loads_E: list[int]) -> float:
    """DeepSeek-V3, Eq. 17-20, with the shares given: sum of f_j P_j."""
    total = 0.0
    for j in range(E):
        f = E * loads_E[j] / sum(loads_E)
        p = sum(float(row[j] / row.sum()) for row in scores_TE) / len(scores_TE)
        total += f * p
    return total


def test_mean_over_tokens_is_the_loss_of_the_papers() -> None:
    scores_TE = torch.rand(T, E, dtype=torch.float64) + 0.01
    loads = [0, 5, 1, 9, 2, 2, 20]
    relative_E = relative_loads(torch.tensor(loads))
    assert relative_E.dtype == torch.float32
    found = auxiliary_loss(scores_TE, relative_E)
    assert found.shape == (T,) and found.dtype == torch.float64
    assert float(found.mean()) == pytest.approx(by_definition(scores_TE, loads), rel=1e-6)


def test_it_is_one_when_even_and_e_when_one_expert_has_everything() -> None:
    scores_TE = torch.rand(T, E)
    torch.testing.assert_close(auxiliary_loss(scores_TE, torch.ones(E)), torch.ones(T))
    alone_TE = torch.zeros(T, E)
    alone_TE[:, 2] = 0.9
    relative_E = relative_loads(torch.tensor([0, 0, 50, 0, 0, 0, 0]))
    torch.testing.assert_close(auxiliary_loss(alone_TE, relative_E), torch.full((T,), float(E)))


def test_gradient_in_float64() -> None:
    logits_TE = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    relative_E = relative_loads(torch.randint(0, 40, (E,)))
    weights_T = torch.rand(T, dtype=torch.float64)

    def loss(logits: Tensor) -> Tensor:
        return auxiliary_loss(torch.sigmoid(logits), relative_E) @ weights_T

    assert torch.autograd.gradcheck(loss, (logits_TE,))
    loss(logits_TE).backward()
    # by hand: dp_j/ds_i = (delta_ij - p_j) / sum s, ds/dz = s (1 - s)
    s_TE = torch.sigmoid(logits_TE.detach())
    p_TE = s_TE / s_TE.sum(1, keepdim=True)
    pulled_T1 = (p_TE * relative_E).sum(1, keepdim=True)
    expected_TE = weights_T[:, None] * (relative_E - pulled_T1) / s_TE.sum(1, keepdim=True) * s_TE * (1 - s_TE)
    torch.testing.assert_close(logits_TE.grad, expected_TE, rtol=1e-12, atol=1e-15)


def test_single_precision_gradient_is_near_float64s() -> None:
    logits_TE, relative_E = torch.randn(64, 33), relative_loads(torch.randint(0, 40, (33,)))
    grads = []
    for dtype in (torch.float32, torch.float64):
        z = logits_TE.detach().to(dtype, copy=True).requires_grad_()
        auxiliary_loss(torch.sigmoid(z), relative_E).mean().backward()
        grads.append(z.grad.double())
    error = (grads[0] - grads[1]).square().mean().sqrt() / grads[1].square().mean().sqrt()
    assert float(error) < 1e-5


def test_before_the_first_step_nothing_presses() -> None:
    scores_TE = torch.rand(T, E, requires_grad=True)
    found_T = auxiliary_loss(scores_TE, LoadPressure(0.1).layer(3))
    found_T.sum().backward()
    assert found_T.tolist() == [1.0] * T and not scores_TE.grad.any()
    assert auxiliary_loss(torch.empty(0, E), None).shape == (0,)
    assert auxiliary_loss(torch.empty(0, E), torch.ones(E)).shape == (0,)


def test_layers_read_their_own_row() -> None:
    pressure = LoadPressure(0.1)
    pressure.relative_LE = relative_loads(torch.tensor([[1, 3], [0, 0], [5, 5]]))
    assert [pressure.layer(i).tolist() for i in range(3)] == [[0.5, 1.5], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_weight(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight: found .* need a finite number above 0"):
        LoadPressure(weight)


def test_bad_shape() -> None:
    with pytest.raises(ValueError, match=r"relative_E: found shape \(3,\), need \[7\], one value an expert"):
        auxiliary_loss(torch.rand(T, E), torch.ones(3))
