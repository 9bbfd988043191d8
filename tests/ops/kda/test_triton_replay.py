"""Replayed calls of the kernels: bit for bit what the plain code gives, whatever the next call's tensors are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from trine.ops.kda import _CHECKED, _choice, kda, triton_backward, triton_forward, triton_replay  # noqa: E402
from trine.ops.kda.triton_entry import kda_triton  # noqa: E402
from trine.ops.kda.triton_launch import Kernel, repair_interpreter  # noqa: E402
from trine.ops.kda.triton_replay import Memory, Replay, new  # noqa: E402

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
STREAMS = ("q", "k", "v", "gate", "beta")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is known yet, fresh memory holds NaN, and no buffers are small enough to live as long as the call."""
    monkeypatch.setattr(triton_replay, "_SMALL", 0)
    monkeypatch.setattr(triton_forward, "MEMORY", Memory())
    monkeypatch.setattr(triton_backward, "MEMORY", Memory())
    plain = torch.empty

    def poisoned(*args: Any, **keywords: Any) -> Tensor:
        tensor = plain(*args, **keywords)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every call that was replayed: its launches."""
    counted: list[int] = []
    run = Replay.run

    def counting(self: Replay, *args: Any) -> Any:
        counted.append(sum(launch is not None for *_, launch in self.rounds))
        return run(self, *args)

    monkeypatch.setattr(Replay, "run", counting)
    return counted


def draw(tokens: int = 33, sequences: int = 1, heads: int = 1, groups: int = 1) -> dict[str, Tensor]:
    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes).to(DEVICE)

    wide = heads * groups
    data = {"q": normal(1, tokens, heads, 32), "k": normal(1, tokens, heads, 32), "v": normal(1, tokens, wide, 32)}
    data |= {"gate": normal(1, tokens, wide, 32), "beta": normal(1, tokens, wide)}
    data |= {"A_log": 0.3 * normal(wide), "dt_bias": normal(wide, 32)}
    return data | {"initial_state": normal(sequences, wide, 32, 32)}


def run(data: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Output, final state and all gradients of a fixed loss."""
    leaves = [x.detach().requires_grad_() for x in data.values()]
    out, final = kda_triton(**dict(zip(data, leaves, strict=True)), output_final_state=True, **options)
    assert final is not None
    grads = torch.autograd.grad([out, final], leaves, [torch.ones_like(out), torch.ones_like(final)])
    return [out.detach(), final.detach(), *grads]


def forget() -> None:
    triton_forward.MEMORY._kept.clear()
    triton_backward.MEMORY._kept.clear()


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, [2, 5]),
        ({"save": "factors"}, [2, 4]),
        ({"plan": "segmented:32"}, [4, 7]),
    ],
)
def test_the_second_call_repeats_the_first_ones_launches(
    options: dict[str, Any], launches: list[int], replays: list[int]
) -> None:
    tokens = 65 if "plan" in options else 33  # three segments
    run(draw(tokens), **options)
    assert replays == []
    data = draw(tokens)
    found = run(data, **options)
    assert replays == launches
    forget()
    for a, b in zip(found, run(data, **options), strict=True):
        assert torch.equal(a, b)


def test_bounds_may_change_between_replays(replays: list[int]) -> None:
    data = draw(33, sequences=2)
    for bounds in ([0, 7, 33], [0, 32, 33]):
        cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        kept = triton_forward.MEMORY._kept.copy(), triton_backward.MEMORY._kept.copy()
        found = run(data, cu_seqlens=cu)
        forget()
        for a, b in zip(found, run(data, cu_seqlens=cu), strict=True):
            assert torch.equal(a, b), bounds
        triton_forward.MEMORY._kept |= kept[0]
        triton_backward.MEMORY._kept |= kept[1]
    assert replays == [3, 6]


def test_one_tensor_in_two_places_is_not_taken_for_one_place(replays: list[int]) -> None:
    data = draw()
    twice = data | {"k": data["q"]}
    run(twice)
    found = run(data)  # the same forms, but q and k differ
    assert replays == []
    again = run(twice)  # recorded by now from distinct tensors
    assert len(replays) == 2
    assert not torch.equal(found[0], again[0])
    forget()
    for a, b in zip(again, run(twice), strict=True):
        assert torch.equal(a, b)


def test_other_forms_flags_and_addresses_are_other_calls(replays: list[int]) -> None:
    data = draw(heads=2)
    with torch.no_grad():
        kda_triton(**data)
        for change in ({"beta_max": 2.0}, {"scale": 0.5}, {"lower_bound": -1.0}, {"output_final_state": True}):
            kda_triton(**data, **change)
        kda_triton(**(data | {"v": data["v"].transpose(1, 2).contiguous().transpose(1, 2)}))
        kda_triton(**{name: x for name, x in data.items() if name != "dt_bias"})
        kda_triton(**{name: x[:, :32] if name in STREAMS else x for name, x in data.items()})
        odd = torch.cat([data["v"].flatten()[:1], data["v"].flatten()])[1:].view(data["v"].shape)
        assert odd.data_ptr() % 16
        kda_triton(**(data | {"v": odd}))
        assert replays == []
        kda_triton(**data)
        assert replays == [2]


def test_a_call_that_does_more_than_launch_is_never_replayed(replays: list[int]) -> None:
    data = draw(heads=1, groups=2)
    first, second = run(data), run(data)
    assert replays == [2]  # the backward sums the gradients of grouped heads itself
    assert list(triton_backward.MEMORY._kept.values()) == [None]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_buffers_of_one_life_are_one_allocation_and_go_when_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    run(draw())
    (replay,) = triton_backward.MEMORY._kept.values()
    assert replay is not None
    assert sum(len(before) for _, before, _ in replay.rounds) == 8 + 7  # gradients, and workspaces between launches
    monkeypatch.setattr(triton_replay, "_SMALL", 1 << 20)
    monkeypatch.setattr(triton_backward, "MEMORY", Memory())
    run(draw())
    (small,) = triton_backward.MEMORY._kept.values()
    assert small is not None
    assert sum(len(before) for _, before, _ in small.rounds) == 8 + 1
    assert not any(gone for gone, _, _ in small.rounds)
    assert [len(gone) for gone, *_ in replay.rounds] == [0, 0, 1, 2, 0, 0]


def test_a_recording_without_launches_is_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    with torch.no_grad():
        kda_triton(**draw())
    assert list(triton_forward.MEMORY._kept.values()) == [None]
    assert new((3,), torch.float32, DEVICE).isnan().all()


def test_checks_are_skipped_for_what_has_passed_them_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choice, "why_no_card", lambda q: None)
    _CHECKED.clear()
    data = draw(5)
    with torch.no_grad():
        first = kda(**data)[0]
        assert len(_CHECKED) == 1
        assert torch.equal(kda(**data)[0], first) and len(_CHECKED) == 1
        for change, message in (
            ({"beta": data["beta"][:, :4]}, "beta: found shape"),
            ({"beta": data["beta"].int()}, "beta: found dtype"),
            ({"A_log": torch.zeros(3)}, "A_log"),
            ({"initial_state": data["initial_state"].mT[..., :31]}, "initial_state"),
            ({"scale": float("inf")}, "scale"),
            ({"beta_max": 0.0}, "beta_max"),
            ({"lower_bound": 1.0}, "lower_bound"),
            ({"plan": "fast"}, "plan"),
            ({"save": "all"}, "save"),
            ({"backend": "cuda"}, "backend"),
            ({"backend": {}}, "backend"),  # values without a hash, and no tensor at all
            ({"scale": [1.0]}, "scale"),
            ({"save": []}, "save"),
        ):
            with pytest.raises(ValueError, match=message):
                kda(**(data | change))
        for bounds in ([0, 5], [0, 4]):  # values on the host are read at every call
            if bounds[-1] == 5:
                kda(**data, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
            else:
                with pytest.raises(ValueError, match="cu_seqlens"):
                    kda(**data, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    _CHECKED.clear()
