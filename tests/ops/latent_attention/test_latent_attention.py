"""Latent attention against its definition, in both forms, with and without a past; causality bit for bit; memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trine.ops import BackendUnavailable
from trine.ops.latent_attention import Latents, latent_attention, plan

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
FORMS = ["expanded", "absorbed"]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error; inputs are of order 1, so a gradient that cancels is measured against 1e-3 an element."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / max(float(want.norm()), 1e-3 * want.numel() ** 0.5))


@dataclass
class Case:
    """Inputs that require gradients, and an upstream gradient."""

    q: Tensor
    latent: Tensor
    shared: Tensor
    key_up: Tensor
    value_up: Tensor
    past: Tensor
    do: Tensor

    @classmethod
    def make(
        cls,
        tokens: int,
        past: int = 0,
        dtype: torch.dtype = torch.float64,
        *,
        heads: int = 3,
        content: int = 6,
        shared: int = 3,
        value: int = 5,
        rank: int = 4,
        batch: int = 1,
    ) -> Case:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype).requires_grad_()

        return cls(
            normal(batch, tokens, heads, content + shared),
            normal(batch, tokens, rank),
            normal(batch, tokens, shared),
            normal(heads, content, rank),
            normal(heads, value, rank),
            normal(past, rank + shared),
            torch.randn(batch, tokens, heads, value, dtype=dtype),
        )

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, self.latent, self.shared, self.key_up, self.value_up]

    def run(self, lengths: list[int] | None, pasts: list[int] | None = None, **keywords: object) -> list[Tensor]:
        """Output, then gradients of q, latent, shared key, key_up, value_up and past rows."""
        cu = None if lengths is None else offsets(lengths)
        past = None if pasts is None else Latents(self.past, offsets(pasts))
        o = latent_attention(*self.inputs, cu_seqlens=cu, past=past, **keywords)  # type: ignore[arg-type]
        wanted = [*self.inputs, self.past]
        return [o, *torch.autograd.grad(o, wanted, self.do, allow_unused=True, materialize_grads=True)]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_outputs_and_gradients_match_the_definition(tokens: int, dtype: torch.dtype) -> None:
    lengths, pasts = [0, tokens, 1, 0, 2], [2, 5, 66, 0, 64]
    case = Case.make(sum(lengths), sum(pasts), dtype)
    for given in (pasts, None):
        want = case.run(lengths, given, backend="reference")
        for form in FORMS:
            got = case.run(lengths, given, form=form)
            assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= TOLERANCE[dtype], (form, given)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(60, 0, 7, 16), (32, 16, 32, 32), (1, 1, 1, 1), (0, 4, 3, 5)])
def test_widths(sizes: tuple[int, int, int, int], form: str) -> None:
    content, shared, value, rank = sizes
    case = Case.make(70, 9, content=content, shared=shared, value=value, rank=rank)
    want = case.run([40, 30], [0, 9], backend="reference")
    got = case.run([40, 30], [0, 9], form=form)
    assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= 1e-10


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_keys_and_split_batches(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many key blocks a tile, many pieces of a batch: the running softmax and its backward."""
    monkeypatch.setattr(plan, "CPU", plan.Tiling(64, 64, 64, 64 * 64))
    lengths, pasts = [200, 200, 3, 130], [0, 0, 300, 130]
    case = Case.make(sum(lengths), sum(pasts))
    want = case.run(lengths, pasts, backend="reference")
    got = case.run(lengths, pasts, form=form)
    assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= 1e-10


def test_forms_agree_at_the_training_shape() -> None:
    case = Case.make(1024, dtype=torch.float32, heads=4, content=32, shared=16, value=32, rank=32)
    expanded, absorbed = (case.run([256] * 4, form=form) for form in FORMS)
    assert max(error(a, b) for a, b in zip(expanded, absorbed, strict=True)) <= 1e-5
    assert torch.equal(case.run([256] * 4, form="auto")[0], absorbed[0])  # 2R <= K + V
    wide = Case.make(50, dtype=torch.float32, content=8, value=8, rank=16)
    assert torch.equal(wide.run([50], form="auto")[0], wide.run([50], form="expanded")[0])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_batch_are_sequences(form: str) -> None:
    case = Case.make(70, batch=2)
    got = case.run(None, form=form)
    assert max(error(a, b) for a, b in zip(got, case.run(None, backend="reference"), strict=True)) <= 1e-10


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("form", FORMS)
def test_one_shot_equals_pieces_with_a_past(form: str) -> None:
    lengths = [150, 90]
    case = Case.make(sum(lengths), dtype=torch.float64)
    rows = torch.cat([case.latent, case.shared], -1)[0]
    whole = case.run(lengths, form=form)[0][0]
    past = Latents.empty(2, 7, dtype=torch.float64)
    place, outputs = [0, 150], [[], []]  # type: ignore[var-annotated]
    for piece in ([100, 1], [0, 60], [49, 28], [1, 1]):
        index = torch.cat([torch.arange(place[n], place[n] + piece[n]) for n in range(2)])
        part = [case.q[:, index], case.latent[:, index], case.shared[:, index], case.key_up, case.value_up]
        o = latent_attention(*part, cu_seqlens=offsets(piece), past=past, form=form)[0]
        past = past.append(rows[index], offsets(piece))
        for n, rows_n in enumerate(o.split(piece)):
            outputs[n].append(rows_n)
            place[n] += piece[n]
    joined = torch.cat([torch.cat(parts) for parts in outputs])
    assert error(joined, whole) <= 1e-12
    got = torch.autograd.grad(joined, case.inputs, case.do[0])
    want = case.run(lengths, form=form)[1:6]
    assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decode_of_ragged_sequences_matches_the_definition(dtype: torch.dtype) -> None:
    lengths = [1, 1, 0, 1, 1, 1, 1]
    pasts = [0, 1, 9, 255, 256, 257, 700]
    case = Case.make(6, sum(pasts), dtype)
    want = case.run(lengths, pasts, backend="reference")[0]
    with torch.no_grad():
        past = Latents.empty(7, 7, dtype=dtype).append(case.past, offsets(pasts))
        got = latent_attention(*case.inputs, cu_seqlens=offsets(lengths), past=past, form="absorbed")
        assert error(got, want) <= TOLERANCE[dtype]
        general = latent_attention(*case.inputs, cu_seqlens=offsets(lengths), past=past, form="expanded")
        assert error(general, want) <= TOLERANCE[dtype]


def test_decode_bits_depend_on_the_own_sequence_only() -> None:
    pasts = [5, 300, 700]
    case = Case.make(3, sum(pasts), torch.float32, heads=4, content=32, shared=16, value=32, rank=32)
    with torch.no_grad():
        past = Latents(case.past, offsets(pasts))
        together = latent_attention(*case.inputs, cu_seqlens=offsets([1, 1, 1]), past=past, form="absorbed")
        for n in range(3):
            one = [v[:, n : n + 1] for v in case.inputs[:3]] + case.inputs[3:]
            alone = latent_attention(*one, cu_seqlens=offsets([1]), past=past.select([n]), form="absorbed")
            assert torch.equal(alone[0, 0], together[0, n])
        fork = past.append(torch.full((3, 48), torch.nan))  # another holder writes into the shared buffer
        again = latent_attention(*case.inputs, cu_seqlens=offsets([1, 1, 1]), past=past, form="absorbed")
        assert torch.equal(again, together) and bool(fork.rows_PM.isnan().any())


def before_t(case: Case, lengths: list[int], pasts: list[int] | None, t: int, form: str) -> tuple[list[Tensor], Tensor]:
    """What must keep its bits (outputs before t and the gradients of a loss on them), and what must be zero."""
    copies = [v.detach().clone().requires_grad_() for v in case.inputs]
    rows = case.past.detach().clone().requires_grad_()
    past = None if pasts is None else Latents(rows, offsets([*pasts, *[0] * (len(lengths) - len(pasts))]))
    o = latent_attention(*copies, cu_seqlens=offsets(lengths), past=past, form=form)
    grads = torch.autograd.grad(o[:, :t], [*copies, rows], case.do[:, :t], allow_unused=True, materialize_grads=True)
    early = [g[:, :t] for g in grads[:3]] + list(grads[3:])
    return [o[:, :t], *early], torch.cat([g[:, t:].flatten() for g in grads[:3]])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_past", [False, True])
def test_causality_bit_for_bit(form: str, dtype: torch.dtype, with_past: bool) -> None:
    lengths, t = [150, 1, 0, 130, 20], 230  # t lies inside the fourth sequence and inside a tile
    pasts = [0, 70, 3, 64, 1] if with_past else None
    sizes = {"heads": 4, "content": 20, "shared": 12, "value": 24, "rank": 20}
    case = Case.make(sum(lengths) + 700, 138, dtype, **sizes)  # type: ignore[arg-type]

    def first(tokens: int, change: str = "") -> Case:
        tensors = [v.detach().clone() for v in (case.q[:, :tokens], case.latent[:, :tokens], case.shared[:, :tokens])]
        for v in tensors:
            if change == "edited":
                v[:, t:] = torch.randn_like(v[:, t:]) * 20
            elif change == "huge":
                v[:, t:] = 1e30
            elif change == "not finite":
                v[:, t], v[:, t + 1 :] = torch.inf, torch.nan
        return Case(*tensors, case.key_up, case.value_up, case.past, case.do)

    total = sum(lengths)
    want, later = before_t(first(total), lengths, pasts, t, form)
    assert not bool(later.any())
    cases = {
        "edited": (first(total, "edited"), lengths),
        "huge": (first(total, "huge"), lengths),
        "not finite": (first(total, "not finite"), lengths),
        "last document longer": (first(total + 700), [150, 1, 0, 130, 720]),
        "documents appended": (first(total + 700), [*lengths, 150, 0, 5, 130, 415]),
        "own document longer": (first(total + 700), [150, 1, 0, 850]),
        "cut right after t": (first(t + 1), [150, 1, 0, t + 1 - 151]),
    }
    for name, (other, other_lengths) in cases.items():
        if pasts is not None and len(other_lengths) < len(pasts):
            continue  # the past of a sequence that is gone has no place in the arguments
        got, later = before_t(other, other_lengths, pasts, t, form)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), (name, i)
        assert not bool(later.any()), name


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("form", FORMS)
def test_a_neighbour_document_changes_nothing(form: str) -> None:
    lengths = [100, 150, 40]
    case = Case.make(290, dtype=torch.float32, heads=4, content=32, shared=16, value=32, rank=32)
    other = Case(
        *(v.detach().clone() for v in (case.q, case.latent, case.shared)), *case.inputs[3:], case.past, case.do
    )
    for v in (other.q, other.latent, other.shared):
        v[:, :100], v[:, 250:] = 7.0, -3.0
        v.requires_grad_()
    wanted = slice(100, 250)
    results = []
    for c in (case, other):
        o = latent_attention(*c.inputs, cu_seqlens=offsets(lengths), form=form)[:, wanted]
        grads = torch.autograd.grad(o, c.inputs, c.do[:, wanted])
        results.append([o, *(g[:, wanted] for g in grads[:3]), *grads[3:]])
        assert not any(bool(g[:, :100].any()) or bool(g[:, 250:].any()) for g in grads[:3])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_token_that_is_not_finite_spoils_itself_and_what_follows_it() -> None:
    case = Case.make(20)
    q, latent = case.q.detach().clone(), case.latent.detach().clone()
    q[0, 3] = torch.nan
    latent[0, 7] = torch.inf
    o = latent_attention(q, latent, *case.inputs[2:], cu_seqlens=offsets([10, 10]))
    spoilt = o[0].isnan().all(-1).all(-1)
    assert spoilt.tolist() == [t in (3, 7, 8, 9) for t in range(20)]
    assert error(o[0, 10:], case.run([10, 10])[0][0, 10:]) == 0.0


class _Watch(TorchDispatchMode):
    """Largest tensor returned by any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_linear_in_tokens(form: str) -> None:
    """Kept for backward: the same per token at twice the length; never a T x T matrix."""
    kept = []
    for tokens in (512, 1024):
        case = Case.make(tokens, dtype=torch.float32, heads=2, content=4, shared=2, value=4, rank=4)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):  # type: ignore[misc]
            o = latent_attention(*case.inputs, form=form)
        with _Watch() as watch:
            o.sum().backward()
        kept.append(sum(sizes))
        assert watch.numel <= max(plan.CPU.scratch, tokens * 64)
    assert kept[1] <= 2.05 * kept[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("card_tiles")
def test_few_calls_on_a_card(form: str, dispatched: Callable[[Callable[[], object]], int]) -> None:
    """None more for more documents of like length; a step of 512 tokens of the longest one adds a tile."""

    def count(lengths: list[int]) -> int:
        case = Case.make(sum(lengths), dtype=torch.float32, heads=2)
        return dispatched(lambda: case.run(lengths, form=form))

    few, many = count([200]), count([100, 200, 150, 7, 256, 1, 0, 256, 250])
    assert many <= few + 60 and few <= 350  # 60: rows moved to a padded layout and back
    short, long = count([1024]), count([2048])
    assert long - short <= 2 * 130


@pytest.mark.parametrize("form", FORMS)
def test_strided_and_expanded_inputs_are_read_and_not_written(form: str) -> None:
    case = Case.make(30)
    q = case.q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    latent = case.latent.detach()[:, :1].expand(1, 30, 4)
    up = torch.cat([case.key_up, case.value_up], 1).detach()
    arguments = [q, latent, case.shared.detach(), up[:, :6], up[:, 6:]]
    kept = [v.clone() for v in arguments]
    got = latent_attention(*arguments, cu_seqlens=offsets([30]), form=form)
    want = latent_attention(*kept, cu_seqlens=offsets([30]), backend="reference")
    assert error(got, want) <= 1e-12
    assert all(torch.equal(a, b) for a, b in zip(kept, arguments, strict=True))


def test_bfloat16_inputs_give_float32_outputs() -> None:
    case = Case.make(40, dtype=torch.float32)
    arguments = [v.detach().bfloat16().requires_grad_() for v in case.inputs]
    for form in FORMS:
        o = latent_attention(*arguments, form=form)
        assert o.dtype == torch.float32
        assert error(o, latent_attention(*(v.double() for v in arguments), backend="reference").float()) <= 1e-5
        assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(o.sum(), arguments))
    past = Latents.empty(1, 7, dtype=torch.bfloat16).append(torch.randn(3, 7).bfloat16())
    assert latent_attention(*arguments, past=past).dtype == torch.float32


def test_positions_do_not_exist() -> None:
    """B011: no rotation; the order of earlier tokens does not matter to a later one."""
    case = Case.make(12)
    order = torch.cat([torch.randperm(11), torch.tensor([11])])
    shuffled = latent_attention(case.q, case.latent[:, order], case.shared[:, order], case.key_up, case.value_up)
    plain = latent_attention(*case.inputs)
    assert error(shuffled[:, 11], plain[:, 11]) <= 1e-12
    halved = latent_attention(case.q * 2, *case.inputs[1:], scale=0.5 * 9**-0.5)
    assert error(halved, plain) <= 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_and_no_tokens(form: str) -> None:
    case = Case.make(5, 3, heads=2, content=2, shared=1, value=2, rank=2)

    def function(*inputs: Tensor) -> Tensor:
        past = Latents(inputs[5], offsets([1, 2]))
        return latent_attention(*inputs[:5], cu_seqlens=offsets([2, 3]), past=past, form=form)

    assert torch.autograd.gradcheck(function, (*case.inputs, case.past))
    empty = Case.make(0)
    o = latent_attention(*empty.inputs, cu_seqlens=offsets([0, 0]), form=form)
    o.sum().backward()
    assert o.shape == (1, 0, 3, 5)


def test_golden_errors() -> None:
    case = Case.make(6)
    q, latent, shared, key_up, value_up = (v.detach() for v in case.inputs)

    def message(*arguments: object, **keywords: object) -> str:
        with pytest.raises(ValueError) as caught:
            latent_attention(*arguments, **keywords)  # type: ignore[arg-type]
        return str(caught.value)

    rest = (latent, shared, key_up, value_up)
    assert message(q[0], *rest) == "q_BTHC: found shape (6, 3, 9), need [B, T, H, C]"
    assert message(q.int(), *rest) == "q_BTHC: found dtype torch.int32, need a floating dtype"
    assert message(q[..., :2], *rest) == (
        "q_BTHC: found shape (1, 6, 3, 2), need H >= 1 and C = K + S with S = 3 of shared_key_BTS"
    )
    assert message(q, latent[:, :5], *rest[1:]) == "latent_BTR: found shape (1, 5, 4), need [B, T, R] = [1, 6, 4]"
    assert message(q, latent, shared, key_up.mT, value_up) == (
        "key_up_HKR: found shape (3, 4, 6), need [H, K, R] = [3, 6, 4]"
    )
    assert message(q, latent, shared, key_up, value_up[:2]) == (
        "value_up_HVR: found shape (2, 5, 4), need [H, V, R] = [3, 5, 4]"
    )
    assert message(q, *rest, form="fast") == "form: found 'fast', need one of ['expanded', 'absorbed', 'auto']"
    assert message(q, *rest, scale=float("nan")) == "scale: found nan, need a finite number"
    assert message(q, *rest, past=Latents.empty(2, 7)) == "past: found 2 sequences, need 1"
    assert message(q, *rest, past=Latents.empty(1, 8)) == "past: found rows of width 8, need M = R + S = 7"
    assert message(q, *rest, cu_seqlens=torch.tensor([1, 6])) == "cu_seqlens: found first value 1, need 0"
    assert message(q, *rest, cu_seqlens=torch.tensor([0, 7])) == (
        "cu_seqlens: found last value 7, need the number of tokens, 6"
    )
    with pytest.raises(BackendUnavailable, match="latent_attention: backend 'triton' cannot run here"):
        latent_attention(q, *rest, backend="triton")
