from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.config import ModelConfig, preset
from trine.data import IGNORE_INDEX, Batch
from trine.model import Model, _after_next, info


def batch(vocab: int = 97) -> Batch:
    """Three sequences, one of them empty, with an unknown target and weights that differ."""
    ids = torch.randint(vocab, (21,))
    targets = ids[1:].clone()
    targets[6] = IGNORE_INDEX
    bounds = torch.tensor([0, 0, 11, 20], dtype=torch.int32)
    weights = torch.where(targets == IGNORE_INDEX, 0.0, torch.rand(20) + 0.5)
    return Batch(ids[:-1], targets, weights, bounds, torch.zeros(3, dtype=torch.int64))


def test_targets_of_the_token_after_the_next_stay_inside_their_sequence() -> None:
    one = batch()
    targets_T, weights_T = _after_next(one)
    for t in range(20):
        gone = t in (10, 19, 5, 6)  # ends of sequences; before and at the unknown target
        wanted = IGNORE_INDEX if gone else int(one.targets_T[t + 1])
        assert int(targets_T[t]) == wanted, t
        assert float(weights_T[t]) == (0.0 if gone else float(one.weights_T[t + 1])), t


@pytest.fixture
def model(tiny_config: Callable[..., ModelConfig]) -> Model:
    made = Model(tiny_config(mtp=True)).double()
    assert made.mtp is not None
    made.mtp.weight = 0.25
    return made


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, found, strict=True)}


def test_the_loss_keeps_its_value_and_the_gradient_is_that_of_the_sum(model: Model) -> None:
    one = batch()
    loss, _ = model.loss(one)
    together = gradients(model, loss)
    hidden = model(one.tokens_T, one.cu_seqlens_N1, mask_T=one.mask_T)
    ahead, weight = model.mtp_loss(hidden, one)
    assert model.mtp is not None
    assert model.mtp.seen.sums_2.tolist() == pytest.approx([float(ahead), float(weight)])
    alone = gradients(model, ahead)
    model.mtp.weight = 0.0
    plain, _ = model.loss(one)
    assert float(plain) == float(loss)
    for name, value in gradients(model, plain).items():
        torch.testing.assert_close(together[name], value + 0.25 * alone[name], rtol=1e-9, atol=1e-12)
    assert float(alone["mtp.projection.weight"].norm()) > 0 and float(alone["embed.weight"].norm()) > 0


def test_it_sees_one_token_ahead_and_no_further(model: Model) -> None:
    """Logits of position t depend on tokens up to t + 1 of their own sequence, and on nothing after."""
    one = batch()
    known = one.targets_T.clamp(min=0)
    embedded = model.embed(known).detach().requires_grad_()
    hidden = model(one.tokens_T, one.cu_seqlens_N1).detach()
    assert model.mtp is not None
    mtp, layer = model.mtp, model.mtp.layer
    x = mtp.projection(torch.cat((mtp.hidden_norm(hidden), mtp.embedding_norm(embedded)), -1))
    x = x + layer.attend(x, one.cu_seqlens_N1, None, False)[0]
    out = mtp.norm(x + layer.feed(x, None))
    for t in (3, 10, 14):
        (got,) = torch.autograd.grad(out[t].sum(), embedded, retain_graph=True)
        first = 0 if t < 11 else 11
        moved = got.abs().sum(1) > 0
        assert bool(moved[first : t + 1].all()) and not bool(moved[t + 1 :].any()) and not bool(moved[:first].any())


def test_evaluation_and_models_without_it_know_nothing_of_it(
    model: Model, tiny_config: Callable[..., ModelConfig]
) -> None:
    one = batch()
    model.eval()
    model.loss(one)
    assert model.mtp is not None and model.mtp.seen.sums_2.tolist() == [0.0, 0.0]
    plain = Model(tiny_config())
    assert plain.mtp is None and plain.observers() == []
    with pytest.raises(ValueError, match="mtp: found False in the model's configuration, need True"):
        plain.mtp_loss(torch.zeros(20, 64), one)


def test_parameters_are_counted_apart() -> None:
    import dataclasses

    base = info(preset("smoke"))
    more = info(dataclasses.replace(preset("smoke"), mtp=True))
    assert base["parts"]["mtp"] == 0 and more["parts"]["mtp"] > 0
    assert more["total"] == base["total"] + more["parts"]["mtp"] and more["active"] == base["active"]
