"""Short convolution against its definition, and the contracts of a sequence operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trine.ops import BackendUnavailable
from trine.ops.short_conv import short_conv
from trine.ops.short_conv.torch_rows import _sigmoid

LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; inputs are of order 1, so a vanishing ``want`` is measured against 1e-3."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.detach(), want.detach()
    if want.numel() == 0:
        return 0.0
    return float((got - want).norm() / max(float(want.norm()), 1e-3 * want.numel() ** 0.5))


def run(
    x: Tensor, weight: Tensor, cu: Tensor | None, window: Tensor | None, dy: Tensor, dwindow: Tensor, **keywords: object
) -> list[Tensor]:
    """Output, window and all gradients."""
    y, last = short_conv(x, weight, cu_seqlens=cu, window_NWC=window, output_window=True, **keywords)  # type: ignore[arg-type]
    assert last is not None
    inputs = [x, weight] if window is None else [x, weight, window]
    loss = (y * dy).sum() + (last * dwindow).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [y, last, *grads]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_packed_outputs_windows_and_gradients_match_the_definition(tokens: int, dtype: torch.dtype) -> None:
    lengths = [0, tokens, 1, 0, 2]
    channels, taps = 5, 4
    total = sum(lengths)
    x = torch.randn(1, total, channels, dtype=dtype, requires_grad=True)
    weight = torch.randn(channels, taps, dtype=dtype, requires_grad=True)
    window = torch.randn(len(lengths), taps - 1, channels, dtype=dtype, requires_grad=True)
    dy, dwindow = torch.randn_like(x), torch.randn_like(window)
    for carried in (window, None):
        got = run(x, weight, offsets(lengths), carried, dy, dwindow)
        want = run(x, weight, offsets(lengths), carried, dy, dwindow, backend="reference")
        for name, a, b in zip(["y", "window", "dx", "dweight", "dwindow"], got, want, strict=False):
            assert error(a, b) <= TOLERANCE[dtype], name


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
def test_rows_of_a_batch_are_sequences_for_every_filter_length(taps: int, activation: str | None) -> None:
    x = torch.randn(3, 9, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, taps, dtype=torch.float64, requires_grad=True)
    window = torch.randn(3, taps - 1, 4, dtype=torch.float64, requires_grad=True)
    dy, dwindow = torch.randn_like(x), torch.randn_like(window)
    got = run(x, weight, None, window, dy, dwindow, activation=activation)
    want = run(x, weight, None, window, dy, dwindow, activation=activation, backend="reference")
    assert max(error(a, b) for a, b in zip(got, want, strict=True)) <= 1e-12
    alone = short_conv(x[1:2], weight, window_NWC=window[1:2], activation=activation)[0]
    assert error(got[0][1:2], alone) <= 1e-14


def test_values_by_hand() -> None:
    x = torch.tensor([[[1.0], [2.0], [3.0]]])
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])  # oldest tap first
    y, window = short_conv(x, weight, activation=None, output_window=True)
    assert y.flatten().tolist() == [1000.0, 2100.0, 3210.0]
    assert window is not None and window.flatten().tolist() == [1.0, 2.0, 3.0]
    y, _ = short_conv(x, weight, activation=None, window_NWC=torch.tensor([[[7.0], [8.0], [9.0]]]))
    assert y.flatten().tolist() == [1987.0, 2198.0, 3219.0]
    y, _ = short_conv(torch.full((1, 1, 1), -200.0), torch.ones(1, 1))
    assert y.item() == 0.0  # e^200 overflows; silu(-200) is 0 to float32


def test_window_of_a_short_sequence_keeps_older_entries() -> None:
    window = torch.tensor([[[1.0], [2.0], [3.0]]]).repeat(3, 1, 1)
    x = torch.tensor([[[4.0], [5.0], [6.0]]])
    _, last = short_conv(x, torch.ones(1, 4), cu_seqlens=offsets([0, 1, 2]), window_NWC=window, output_window=True)
    assert last is not None and last.squeeze(-1).tolist() == [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0], [3.0, 5.0, 6.0]]
    _, last = short_conv(x, torch.ones(1, 4), cu_seqlens=offsets([0, 1, 2]), output_window=True)
    assert last is not None and last.squeeze(-1).tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 4.0], [0.0, 5.0, 6.0]]


@pytest.mark.parametrize("prompt", [[1], [2], [3], [1, 1], [5, 0, 2]])
def test_conv_cache_after_a_prompt_shorter_than_the_kernel(prompt: list[int]) -> None:
    """B010: prompts of 1, 2, 3 tokens, or two prefills of one token, then five single tokens."""
    pieces = [*prompt, 1, 1, 1, 1, 1]
    x, weight = torch.randn(1, sum(pieces), 6), torch.randn(6, 4)
    whole, last_whole = short_conv(x, weight, output_window=True)
    window: Tensor | None = None
    outputs = []
    for part in x.split(pieces, 1):
        y, window = short_conv(part, weight, window_NWC=window, output_window=True)
        outputs.append(y)
    assert error(torch.cat(outputs, 1), whole) <= 1e-6
    assert window is not None and last_whole is not None and torch.equal(window, last_whole)


def test_one_token_each_for_many_sequences_equals_the_definition() -> None:
    x = torch.randn(1, 7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    window = torch.randn(7, 3, 3, dtype=torch.float64, requires_grad=True)
    arguments = (x, weight, torch.arange(8, dtype=torch.int32), window, torch.randn_like(x), torch.randn_like(window))
    for a, b in zip(run(*arguments), run(*arguments, backend="reference"), strict=True):
        assert error(a, b) <= 1e-12


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_causality_bit_for_bit(dtype: torch.dtype) -> None:
    channels, taps, t = 37, 4, 700
    lengths = [300, 1, 0, 450, 60]
    weight = torch.randn(channels, taps, dtype=dtype, requires_grad=True)
    x = torch.randn(1, sum(lengths), channels, dtype=dtype)
    window = torch.randn(8, taps - 1, channels, dtype=dtype)
    dy = torch.randn(1, t, channels, dtype=dtype)

    def before_t(x: Tensor, lengths: list[int]) -> tuple[list[Tensor], Tensor]:
        x = x.clone().requires_grad_()
        carried = window[: len(lengths)].clone().requires_grad_()
        y, _ = short_conv(x, weight, cu_seqlens=offsets(lengths), window_NWC=carried)
        dx, dweight, dwindow = torch.autograd.grad((y[:, :t] * dy).sum(), [x, weight, carried])
        # the fourth sequence holds row t-1; later ones see nothing of the loss
        return [y[:, :t], dx[:, :t], dweight, dwindow[:4]], torch.cat([dx[:, t:].flatten(), dwindow[4:].flatten()])

    want, _ = before_t(x, lengths)
    edited = torch.cat([x[:, :t], torch.randn_like(x[:, t:]) * 50], 1)
    longer = torch.cat([x, torch.randn(1, 1000, channels, dtype=dtype)], 1)
    poisoned = x.clone()
    poisoned[:, t] = torch.inf
    poisoned[:, t + 1 :] = torch.nan
    cases = {
        "later tokens edited": (edited, lengths),
        "last document longer": (longer, [300, 1, 0, 450, 1060]),
        "documents appended": (longer, [*lengths, 3, 0, 997]),
        "cut right after t": (x[:, : t + 1], [300, 1, 0, 400]),
        "later tokens not finite": (poisoned, lengths),
    }
    for name, (other, other_lengths) in cases.items():
        got, later = before_t(other, other_lengths)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), name
        assert not bool(later.any()), name


def test_a_neighbour_document_changes_nothing() -> None:
    weight = torch.randn(8, 4)
    x = torch.randn(1, 90, 8)
    other = x.clone()
    other[:, :40] = torch.randn(1, 40, 8)
    cu = offsets([40, 50])
    a, b = (short_conv(v, weight, cu_seqlens=cu)[0][:, 40:] for v in (x, other))
    assert torch.equal(a, b)


def test_sigmoid_bits_do_not_depend_on_position() -> None:
    z = torch.randn(1000) * 4
    whole = _sigmoid(z)
    for start, stop in [(0, 1), (3, 20), (7, 8), (500, 999)]:
        assert torch.equal(_sigmoid(z[start:stop].clone()), whole[start:stop])


@pytest.mark.usefixtures("tiles")
def test_strided_and_expanded_inputs_are_read_and_not_written() -> None:
    base = torch.randn(6, 20, 1, dtype=torch.float64)
    x = base.transpose(0, 1).unsqueeze(0)[..., 0]  # [1, 20, 6], strided
    expanded = torch.randn(1, 20, 1, dtype=torch.float64).expand(1, 20, 6)
    weight = torch.randn(4, 6, dtype=torch.float64).t()
    window = torch.randn(1, 1, 6, dtype=torch.float64).expand(2, 3, 6)
    kept = [v.clone() for v in (base, expanded, weight, window)]
    cu = offsets([7, 13])
    for v in (x, expanded):
        got = short_conv(v, weight, cu_seqlens=cu, window_NWC=window)[0]
        want = short_conv(v.contiguous(), weight, cu_seqlens=cu, window_NWC=window, backend="reference")[0]
        assert error(got, want) <= 1e-12
    assert all(torch.equal(a, b) for a, b in zip(kept, (base, expanded, weight, window), strict=True))


@pytest.mark.usefixtures("tiles")
def test_no_tokens() -> None:
    window = torch.randn(2, 3, 5)
    x = torch.zeros(1, 0, 5, requires_grad=True)
    y, last = short_conv(x, torch.randn(5, 4), cu_seqlens=offsets([0, 0]), window_NWC=window, output_window=True)
    assert y.shape == (1, 0, 5) and last is not None and torch.equal(last, window)
    y.sum().backward()
    assert short_conv(torch.zeros(3, 0, 5), torch.randn(5, 4))[0].shape == (3, 0, 5)


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    x, weight = torch.randn(1, 50, 16).bfloat16(), torch.randn(16, 4, requires_grad=True)
    y, window = short_conv(x, weight, output_window=True)
    assert y.dtype == torch.bfloat16 and window is not None and window.dtype == torch.bfloat16
    exact = short_conv(x.double(), weight.double(), backend="reference")[0]
    assert torch.equal(y, exact.float().bfloat16())  # one rounding, at the end
    (dweight,) = torch.autograd.grad(y.float().sum(), [weight])
    assert dweight.dtype == torch.float32


def test_gradcheck() -> None:
    x = torch.randn(1, 7, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    window = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *a: short_conv(a[0], a[1], cu_seqlens=offsets([1, 6]), window_NWC=a[2])[0], (x, weight, window)
    )


@pytest.mark.usefixtures("card_tiles")
def test_few_calls_on_a_card_for_any_number_of_tokens(dispatched: Callable[[Callable[[], object]], int]) -> None:
    counts = []
    for documents in (2, 100):
        x, weight = torch.randn(1, 40 * documents, 64, requires_grad=True), torch.randn(64, 4, requires_grad=True)
        cu, dy = offsets([40] * documents), torch.randn_like(x)

        def call(x: Tensor = x, weight: Tensor = weight, cu: Tensor = cu, dy: Tensor = dy) -> object:
            return torch.autograd.grad(short_conv(x, weight, cu_seqlens=cu)[0], [x, weight], dy)

        counts.append(dispatched(call))
    assert counts[0] == counts[1] <= 200


def test_golden_errors() -> None:
    x, weight = torch.randn(1, 6, 4), torch.randn(4, 3)

    def message(*arguments: object, **keywords: object) -> str:
        with pytest.raises(ValueError) as caught:
            short_conv(*arguments, **keywords)  # type: ignore[arg-type]
        return str(caught.value)

    assert message(x[0], weight) == "x_BTC: found shape (6, 4), need [B, T, C]"
    assert message(x.int(), weight) == "x_BTC: found dtype torch.int32, need a floating dtype"
    assert message(x, weight.t()) == "weight_CW: found shape (3, 4), need [C, W] = [4, W >= 1]"
    assert message(x, weight, activation="relu") == "activation: found 'relu', need 'silu' or None"
    assert (
        message(x, weight, window_NWC=torch.zeros(2, 2, 4))
        == "window_NWC: found shape (2, 2, 4), need [N, W-1, C] = [1, 2, 4]"
    )
    assert (
        message(x, weight, cu_seqlens=torch.tensor([0, 4, 2, 6]))
        == "cu_seqlens: found a decrease from 4 to 2 at index 2, need non-decreasing values"
    )
    assert (
        message(x, weight, cu_seqlens=torch.tensor([0, 9]))
        == "cu_seqlens: found last value 9, need the number of tokens, 6"
    )
    assert (
        message(x, weight, cu_seqlens=torch.tensor([0.0, 6.0]))
        == "cu_seqlens: found dtype torch.float32, need int32 or int64"
    )
    assert (
        message(x, weight, backend="cuda")
        == "backend: found 'cuda', need one of ['auto', 'torch', 'reference', 'triton'] for short_conv"
    )
    with pytest.raises(BackendUnavailable) as caught:
        short_conv(x, weight, backend="triton")
    assert str(caught.value) == (
        "short_conv: backend 'triton' cannot run here: short_conv has no triton kernel; "
        "found only 'torch' and 'reference'"
    )
