"""Grouped experts against the loop in fp64, forward and every gradient; the division into products; determinism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.ops import BackendUnavailable, _tiles
from trine.ops.experts import grouped_experts, torch_grouped
from trine.ops.experts.torch_grouped import divide, lay_out

NAMES = ("x", "weights", "gate", "up", "down")


def inputs(ids_TK: Tensor, experts: int, latent: int, inner: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    tokens, k = ids_TK.shape
    shapes = [
        (tokens, latent),
        (tokens, k),
        (experts, inner, latent),
        (experts, inner, latent),
        (experts, latent, inner),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def run(
    values: list[Tensor], ids_TK: Tensor, backend: str, dtype: torch.dtype | None = None, **caps: float
) -> list[Tensor]:
    """Output and gradients for a fixed upstream gradient."""
    x, weights, gate, up, down = (v.detach().to(dtype or v.dtype).requires_grad_() for v in values)
    y = grouped_experts(x, ids_TK, weights, gate, up, down, backend=backend, **caps)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, weights, gate, up, down), upstream)]


def distinct(tokens: int, experts: int, k: int) -> Tensor:
    return torch.rand(tokens, experts).argsort(1)[:, :k]


def one_gets_all(tokens: int, experts: int, k: int) -> Tensor:
    ids_TK = torch.arange(k).expand(tokens, k).clone()
    ids_TK[:, 0] = experts - 1
    return ids_TK


def skewed(tokens: int, experts: int, k: int) -> Tensor:
    return (torch.rand(tokens, experts) + torch.linspace(1, 0, experts).square()).topk(k).indices


def with_nowhere(tokens: int, experts: int, k: int) -> Tensor:
    ids_TK = distinct(tokens, experts, k)
    ids_TK[::3] = -1
    ids_TK[1:2, 0] = -1
    return ids_TK


CASES = {
    "even": (distinct, 64, 8, 2, 6, 5),
    "one token": (distinct, 1, 8, 2, 6, 5),
    "no token": (distinct, 0, 8, 2, 6, 5),
    "k = 1": (distinct, 33, 8, 1, 4, 7),
    "k = E": (distinct, 20, 4, 4, 4, 7),
    "one expert": (distinct, 9, 1, 1, 3, 4),
    "empty experts": (distinct, 5, 40, 2, 6, 5),
    "one gets all": (one_gets_all, 50, 16, 2, 6, 5),
    "skewed": (skewed, 200, 32, 3, 6, 5),
    "nowhere": (with_nowhere, 64, 8, 2, 6, 5),
    "wide, skewed": (skewed, 60, 6, 2, 96, 72),
}


@pytest.mark.parametrize("call_cost", [None, -1, 1 << 60], ids=["rule", "separate", "together"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name: str, call_cost: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule's own choice, a product an expert, and one product for all must agree."""
    if call_cost is not None:
        monkeypatch.setattr(torch_grouped, "_CALL", call_cost)
    make, tokens, experts, k, latent, inner = CASES[name]
    ids_TK = make(tokens, experts, k)
    values = inputs(ids_TK, experts, latent, inner)
    expected = run(values, ids_TK, "reference")
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        found = run(values, ids_TK, "torch", dtype)
        for what, one, other in zip(("y", *NAMES), found, expected, strict=True):
            assert one.dtype == dtype and one.shape == other.shape
            error = float((one.double() - other).norm())
            assert error <= tolerance * max(1e-30, float(other.norm())), (what, error)


@pytest.mark.parametrize("call_cost", [None, 30_000], ids=["rule", "groups"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("card_tiles")
def test_a_cards_division_equals_the_loop(name: str, call_cost: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if call_cost is not None:
        monkeypatch.setattr(torch_grouped, "_CARD_COSTS", (call_cost, *torch_grouped._CARD_COSTS[1:]))
        monkeypatch.setattr(_tiles, "CARD", 100)
    make, tokens, experts, k, latent, inner = CASES[name]
    ids_TK = make(tokens, experts, k)
    values = inputs(ids_TK, experts, latent, inner)
    for one, other in zip(run(values, ids_TK, "torch"), run(values, ids_TK, "reference"), strict=True):
        assert float((one - other).norm()) <= 1e-10 * max(1e-30, float(other.norm()))


@pytest.mark.parametrize("make", [distinct, skewed, with_nowhere, one_gets_all])
@pytest.mark.usefixtures("card_tiles")
def test_few_calls_on_a_card_for_any_number_of_tokens(
    make: Callable[[int, int, int], Tensor], dispatched: Callable[[Callable[[], object]], int]
) -> None:
    counts = []
    for tokens in (50, 2000):
        ids_TK = make(tokens, 32, 3)
        values = inputs(ids_TK, 32, 16, 12, torch.float32)
        counts.append(dispatched(lambda: run(values, ids_TK, "torch")))  # noqa: B023
    assert max(counts) <= 220 and counts[1] <= counts[0] + 20  # in a padded layout or not


@pytest.mark.usefixtures("card_tiles")
def test_ids_that_the_check_did_not_read_are_refused_by_the_layout() -> None:
    for ids, message in (([[0, 4]], "0 ids below -1 and 1 above 3"), ([[-2, -3]], "2 ids below -1 and 0 above 3")):
        with pytest.raises(ValueError, match=f"ids_TK: found {message}, need none"):
            lay_out(torch.tensor(ids), 4, 8, 8)


def test_gradcheck() -> None:
    ids_TK = with_nowhere(6, 4, 2)
    values = inputs(ids_TK, 4, 3, 2)
    call = lambda x, w, gate, up, down: grouped_experts(x, ids_TK, w, gate, up, down, beta=1.5, linear_beta=2.0)  # noqa: E731
    assert torch.autograd.gradcheck(call, values)


def test_caps_reach_the_activation() -> None:
    ids_TK = distinct(30, 4, 2)
    values = inputs(ids_TK, 4, 6, 5)
    tight, loose = (run(values, ids_TK, "torch", beta=b, linear_beta=b) for b in (0.5, 1e6))
    for one, other in zip(tight, run(values, ids_TK, "reference", beta=0.5, linear_beta=0.5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    x, weights, gate, up, down = values
    swiglu = torch.zeros_like(x)
    for t in range(30):
        for e, w in zip(ids_TK[t].tolist(), weights[t], strict=True):
            swiglu[t] += w * (down[e] @ (torch.nn.functional.silu(gate[e] @ x[t]) * (up[e] @ x[t])))
    torch.testing.assert_close(loose[0], swiglu.detach(), rtol=1e-8, atol=1e-8)


def test_bf16_is_as_good_as_its_inputs() -> None:
    ids_TK = distinct(64, 8, 2)
    values = [v.detach().bfloat16() for v in inputs(ids_TK, 8, 16, 12)]
    values[1] = values[1].float()
    found = run(values, ids_TK, "torch")
    expected = run([v.double() for v in values], ids_TK, "reference")
    assert found[0].dtype == torch.bfloat16 and found[2].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.02


def test_experts_without_tokens_get_exact_zeros_and_no_others() -> None:
    ids_TK = torch.tensor([[0, 2], [2, 5], [0, 5]])
    for backend in ("torch", "reference"):
        gate, up, down = run(inputs(ids_TK, 7, 4, 3), ids_TK, backend)[3:]
        for gradient in (gate, up, down):
            assert [bool(g.any()) for g in gradient] == [True, False, True, False, False, True, False]


@pytest.mark.parametrize("call_cost", [-1, 1 << 60])
def test_a_bad_token_spoils_only_its_own_experts(call_cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_grouped, "_CALL", call_cost)
    ids_TK = torch.tensor([[0, 1], [1, 2], [3, 2], [3, 0], [-1, -1]])
    values = inputs(ids_TK, 4, 4, 3)
    with torch.no_grad():
        values[0][0] = torch.nan  # experts 0 and 1
        values[0][4] = torch.nan  # padding: goes nowhere
    y, x, _, gate, _, down = run(values, ids_TK, "torch")
    assert bool(y[0].isnan().all()) and bool(y[1:].isfinite().all()) and not y[4].any()
    assert not x[4].any() and bool(x[1:].isfinite().all())
    for gradient in (gate, down):
        assert [bool(g.isfinite().all()) for g in gradient] == [False, False, True, True]


def test_bits_repeat_and_do_not_depend_on_other_runs() -> None:
    ids_TK = skewed(500, 40, 4)
    values = inputs(ids_TK, 40, 16, 16, torch.float32)
    first = run(values, ids_TK, "torch")
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, run(values, ids_TK, "torch"), strict=True))


def test_order_of_a_tokens_choices_does_not_matter() -> None:
    ids_TK = distinct(40, 8, 3)
    values = inputs(ids_TK, 8, 5, 4)
    y = run(values, ids_TK, "torch")[0]
    swapped = [values[0], values[1].flip(1), *values[2:]]
    torch.testing.assert_close(run(swapped, ids_TK.flip(1), "torch")[0], y, rtol=1e-12, atol=1e-12)


def test_only_wanted_gradients_and_inference() -> None:
    ids_TK = distinct(20, 4, 2)
    values = inputs(ids_TK, 4, 5, 3)
    everything = run(values, ids_TK, "torch")
    for i in range(5):
        frozen = [v.detach().requires_grad_(j == i) for j, v in enumerate(values)]
        y = grouped_experts(frozen[0], ids_TK, *frozen[1:])
        upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        (gradient,) = torch.autograd.grad(y, frozen[i], upstream)
        assert torch.equal(gradient, everything[1 + i])
    with torch.no_grad():
        y = grouped_experts(values[0], ids_TK, *values[1:])
    assert torch.equal(y, everything[0]) and y.grad_fn is None


@pytest.mark.parametrize("tokens", [1, 3, 8, 9])  # 8 x 2 pairs are the most that are not sorted
def test_a_decoding_step_equals_the_loop(tokens: int) -> None:
    for make in (distinct, with_nowhere, one_gets_all):
        ids_TK = make(tokens, 8, 2)
        values = [v.detach() for v in inputs(ids_TK, 8, 6, 5)]
        y = grouped_experts(values[0], ids_TK, *values[1:])
        expected = grouped_experts(values[0], ids_TK, *values[1:], backend="reference")
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        assert y.grad_fn is None


def test_saved_for_backward_holds_no_expert_output() -> None:
    """Inputs, two pre-activations and the layout: nothing of width L per (token, expert) pair."""
    tokens, experts, k, latent, inner = 64, 4, 2, 24, 8
    ids_TK = distinct(tokens, experts, k)
    values = inputs(ids_TK, experts, latent, inner, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        grouped_experts(values[0], ids_TK, *values[1:])
    shapes = sorted(tuple(t.shape) for t in saved if t.is_floating_point())
    slots = lay_out(ids_TK, experts, latent, inner).slot_pair_S.numel()
    assert shapes == sorted([*(tuple(v.shape) for v in values), (slots, inner), (slots, inner)])


def test_non_contiguous_inputs() -> None:
    ids_TK = distinct(20, 4, 2)
    values = inputs(ids_TK, 4, 6, 6)
    strided = [values[0].detach().t().contiguous().t(), values[1], *[v.detach().transpose(1, 2) for v in values[2:]]]
    for one, other in zip(run(strided, ids_TK, "torch"), run(strided, ids_TK, "reference"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# -- division into products ------------------------------------------------------------------------------------------


def test_even_tiny_experts_share_one_product_without_copies() -> None:
    assert divide([70, 75, 73, 72] * 100, 32, 32) == [(list(range(400)), 75)]


def test_big_matrices_are_multiplied_one_by_one() -> None:
    assert divide([64, 0, 60, 62], 384, 320) == [([0], 64), ([3], 62), ([2], 60)]


def test_uneven_tiny_experts_share_products_with_those_of_like_load() -> None:
    loads = [900, 3, 880, 0, 5, 4, 870, 6] * 16
    groups = divide(loads, 32, 32)
    assert sorted(e for ids, _ in groups for e in ids) == [e for e, load in enumerate(loads) if load]
    assert all(rows == max(loads[e] for e in ids) for ids, rows in groups)
    slots = sum(len(ids) * rows for ids, rows in groups)
    assert len(groups) <= 6 and slots <= 1.05 * sum(loads)


def test_a_card_takes_few_products_and_bounded_padding() -> None:
    """64 experts of the 130m preset and 32 768 pairs: loads like those of a balanced router, then worse ones."""
    even = [400 + 7 * (e % 32) for e in range(64)]
    assert divide(even, 320, 384, card=True) == [(list(range(64)), max(even))]
    powers = [32 * 2 ** (e % 8) for e in range(64)]
    one_has_most = [8192] + [390] * 63
    for loads, most in ((powers, 5), (one_has_most, 2)):
        groups = divide(loads, 320, 384, card=True)
        assert sorted(e for ids, _ in groups for e in ids) == list(range(64)) and len(groups) <= most
        assert sum(len(ids) * rows for ids, rows in groups) <= 2 * sum(loads)


def test_no_load_no_product() -> None:
    assert divide([0, 0, 0], 8, 8) == []


@pytest.mark.parametrize("make", [distinct, skewed, with_nowhere, one_gets_all])
def test_every_pair_has_its_slot(make) -> None:
    ids_TK = make(90, 24, 3)
    layout = lay_out(ids_TK, 24, 16, 16)
    ids_N, pairs, slots = ids_TK.reshape(-1), ids_TK.numel(), layout.slot_pair_S.numel()
    going_N = ids_N >= 0
    assert torch.equal(layout.slot_pair_S[layout.pair_slot_N[going_N]], torch.arange(pairs)[going_N])
    assert bool((layout.pair_slot_N[~going_N] == slots).all()) and layout.complete == bool(going_N.all())
    assert int((layout.slot_pair_S < pairs).sum()) == int(going_N.sum())
    for block in layout.blocks:
        experts = range(24) if block.experts is None else torch.as_tensor(block.experts).reshape(-1).tolist()
        for place, expert in enumerate(experts):
            start = block.start + place * block.rows
            held = layout.slot_pair_S[start : start + block.rows]
            assert held[held < pairs].tolist() == (ids_N == expert).nonzero()[:, 0].tolist()


# -- refusals ----------------------------------------------------------------------------------------------------------

BAD = {
    "x rank": ({"x": torch.zeros(3)}, "x_TL: found shape (3,) of torch.float32, need a floating-point [T, L]"),
    "ids dtype": (
        {"ids": torch.zeros(3, 2, dtype=torch.int32)},
        "ids_TK: found shape (3, 2) of torch.int32, need [3, K] int64 with K >= 1",
    ),
    "ids tokens": (
        {"ids": torch.zeros(4, 2, dtype=torch.int64)},
        "ids_TK: found shape (4, 2) of torch.int64, need [3, K] int64 with K >= 1",
    ),
    "ids too large": (
        {"ids": torch.tensor([[0, 1], [4, 0], [1, 2]])},
        "ids_TK: found 4, need 0 <= id < 4, or -1 for no expert",
    ),
    "ids too small": (
        {"ids": torch.tensor([[0, 1], [-2, 0], [1, 2]])},
        "ids_TK: found -2, need 0 <= id < 4, or -1 for no expert",
    ),
    "weights shape": (
        {"weights": torch.zeros(3, 3)},
        "weights_TK: found shape (3, 3) of torch.float32, need [3, 2] of float32 or torch.float32",
    ),
    "weights dtype": (
        {"weights": torch.zeros(3, 2, dtype=torch.float64)},
        "weights_TK: found shape (3, 2) of torch.float64, need [3, 2] of float32 or torch.float32",
    ),
    "gate": ({"gate": torch.zeros(4, 6, 4)}, "gate_EFL: found shape (4, 6, 4), need [E, F, 5]"),
    "up": ({"up": torch.zeros(4, 5, 5)}, "up_EFL: found shape (4, 5, 5), need [4, 6, 5], that of gate_EFL"),
    "down": ({"down": torch.zeros(4, 6, 5)}, "down_ELF: found shape (4, 6, 5), need [4, 5, 6]"),
    "dtype": (
        {"up": torch.zeros(4, 6, 5).bfloat16()},
        "up_EFL: found dtype torch.bfloat16, need torch.float32, that of x_TL",
    ),
    "device": ({"up": torch.zeros(4, 6, 5, device="meta")}, "up_EFL: found device meta, need cpu, that of x_TL"),
    "cap": ({"beta": 0.0}, "beta: found 0.0, need a positive number"),
    "backend": (
        {"backend": "fast"},
        "backend: found 'fast', need one of ['auto', 'torch', 'reference', 'triton'] for grouped_experts",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, message = BAD[name]
    arguments = {
        "x": torch.zeros(3, 5),
        "ids": torch.zeros(3, 2, dtype=torch.int64),
        "weights": torch.zeros(3, 2),
        "gate": torch.zeros(4, 6, 5),
        "up": torch.zeros(4, 6, 5),
        "down": torch.zeros(4, 5, 6),
        **changes,
    }
    order = ("x", "ids", "weights", "gate", "up", "down")
    rest = {name: value for name, value in arguments.items() if name not in order}
    with pytest.raises(ValueError) as error:
        grouped_experts(*(arguments[name] for name in order), **rest)
    assert str(error.value) == message


def test_a_backend_that_cannot_run_says_why() -> None:
    ids_TK = distinct(3, 4, 2)
    values = inputs(ids_TK, 4, 3, 2)
    with pytest.raises(BackendUnavailable) as error:
        grouped_experts(values[0], ids_TK, *values[1:], backend="triton")
    assert str(error.value) == (
        "grouped_experts: backend 'triton' cannot run here: needs a kernel that this version does not have"
    )
