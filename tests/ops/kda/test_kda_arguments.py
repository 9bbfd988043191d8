"""Bad arguments: each raises at the call, naming itself, what was found and what is needed."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trine.ops import BackendUnavailable
from trine.ops.kda import _backend, kda

B, T, H, K, V = 1, 6, 2, 5, 3


def arguments(**change: Any) -> dict[str, Any]:
    plain = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "gate": torch.randn(B, T, H, K),
        "beta": torch.randn(B, T, H),
    }
    return plain | change


GOLDEN = [
    ({"q": torch.zeros(T, H, K)}, "q: found shape (6, 2, 5), need [B, T, H, K]"),
    ({"v": torch.zeros(T, H, V)}, "v: found shape (6, 2, 3), need [B, T, HV, V]"),
    ({"k": torch.zeros(B, T, H, 4)}, "k: found shape (1, 6, 2, 4), need [B, T, H, K] = (1, 6, 2, 5)"),
    ({"v": torch.zeros(B, 7, H, V)}, "v: found shape (1, 7, 2, 3), need [B, T, HV, V] = (1, 6, 2, 3)"),
    ({"v": torch.zeros(B, T, 3, V)}, "v: found 3 value heads, need a multiple of the 2 key heads"),
    ({"gate": torch.zeros(B, T, H)}, "gate: found shape (1, 6, 2), need [B, T, HV, K] = (1, 6, 2, 5)"),
    ({"beta": torch.zeros(B, T, H, 1)}, "beta: found shape (1, 6, 2, 1), need [B, T, HV] = (1, 6, 2)"),
    ({"A_log": torch.zeros(3)}, "A_log: found shape (3,), need [HV] = (2,)"),
    ({"dt_bias": torch.zeros(9)}, "dt_bias: found shape (9,), need [HV, K] = (2, 5) or flattened"),
    ({"gate_kind": "linear"}, "gate_kind: found 'linear', need one of ['bounded', 'softplus', 'log_decay']"),
    (
        {"lower_bound": -6.0},
        "lower_bound: found -6.0, need a value in (-5.5, 0): a tile of 16 tokens may span less than 88 in log space; "
        "gate_kind='log_decay' takes decays of any size",
    ),
    (
        {"gate_kind": "log_decay"},
        "gate: found a log-decay of 2, need values <= 0 with gate_kind='log_decay'",
    ),
    (
        {"gate_kind": "log_decay", "A_log": torch.zeros(2)},
        "A_log: found a tensor, need None: with gate_kind='log_decay' the gate is the decay",
    ),
    (
        {"q": torch.zeros(B, T, H, K).long()},
        "q: found dtype torch.int64, need one of float16, bfloat16, float32, float64",
    ),
    ({"scale": math.nan}, "scale: found nan, need a finite number"),
    ({"scale": -math.inf}, "scale: found -inf, need a finite number"),
    ({"scale": [1.0]}, "scale: found [1.0], need a finite number"),
    ({"scale": torch.tensor(1.0)}, "scale: found tensor(1.), need a finite number"),
    ({"scale": "1"}, "scale: found '1', need a finite number"),
    ({"lower_bound": "-5"}, "lower_bound: found '-5', need a number"),
    ({"lower_bound": torch.tensor(-5.0)}, "lower_bound: found tensor(-5.), need a number"),
    ({"q": None}, "q: found None, need a tensor"),
    ({"v": [1, 2]}, "v: found [1, 2], need a tensor"),
    ({"A_log": 0.5}, "A_log: found 0.5, need a tensor"),
    ({"initial_state": 0}, "initial_state: found 0, need a tensor"),
    ({"cu_seqlens": [0, 5]}, "cu_seqlens: found [0, 5], need a tensor"),
    ({"beta_max": [1.0]}, "beta_max: found [1.0], need a finite number > 0"),
    ({"backend": {}}, "backend: found {}, need one of ['auto', 'triton', 'torch', 'reference'] for kda"),
    ({"beta_max": -1.0}, "beta_max: found -1.0, need a finite number > 0"),
    ({"beta_max": math.nan}, "beta_max: found nan, need a finite number > 0"),
    (
        {"plan": "fast"},
        "plan: found 'fast', need one of ['auto', 'serial', 'segmented', 'auto,bf16', 'serial,bf16', 'segmented,bf16']",
    ),
    ({"backend": "cuda"}, "backend: found 'cuda', need one of ['auto', 'triton', 'torch', 'reference'] for kda"),
    (
        {"initial_state": torch.zeros(1, H, V, K)},
        "initial_state: found shape (1, 2, 3, 5), need [N, HV, K, V] = (1, 2, 5, 3); it looks transposed, "
        "[V, K] instead of [K, V]",
    ),
    (
        {"initial_state": torch.zeros(2, H, K, V)},
        "initial_state: found shape (2, 2, 5, 3), need [N, HV, K, V] = (1, 2, 5, 3)",
    ),
    (
        {"initial_state": torch.zeros(1, H, K, V).half()},
        "initial_state: found dtype torch.float16, need torch.float32: states are kept in full precision",
    ),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens: found dtype torch.float32, need int32 or int64"),
    ({"cu_seqlens": torch.tensor([6])}, "cu_seqlens: found shape (1,), need [N+1] with N >= 1"),
    ({"cu_seqlens": torch.tensor([1, 6])}, "cu_seqlens: found first value 1, need 0"),
    (
        {"cu_seqlens": torch.tensor([0, 4, 2, 6])},
        "cu_seqlens: found a decrease from 4 to 2 at index 2, need non-decreasing values",
    ),
    ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens: found last value 5, need the number of tokens, 6"),
    (
        {"cu_seqlens": torch.tensor([0, 3, 6]), "initial_state": torch.zeros(1, H, K, V)},
        "initial_state: found shape (1, 2, 5, 3), need [N, HV, K, V] = (2, 2, 5, 3)",
    ),
]


@pytest.mark.parametrize(("change", "message"), GOLDEN, ids=[m.split(",")[0] for _, m in GOLDEN])
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    call = arguments(**change)
    if "log-decay of" in message:
        call["gate"] = torch.full_like(call["gate"], 2.0)
    with pytest.raises(ValueError) as error:
        kda(**call)
    assert str(error.value) == message


def test_packing_needs_batch_one() -> None:
    two = {name: torch.cat([x, x]) for name, x in arguments().items()}
    with pytest.raises(ValueError, match="cu_seqlens: packed sequences need batch size 1, found 2"):
        kda(**two, cu_seqlens=torch.tensor([0, 6]))


def test_no_heads() -> None:
    with pytest.raises(ValueError, match=r"need B, H, K, HV, V >= 1"):
        kda(**arguments(v=torch.zeros(B, T, 0, V)))


def test_a_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(
        BackendUnavailable, match="kda: backend 'triton' cannot run here: needs CUDA tensors, found cpu"
    ):
        kda(**arguments(), backend="triton")


class _OnCard:
    """A tensor that says it lies on a CUDA card: enough to choose a backend."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device, self.shape, self.dtype = torch.device("cuda"), tensor.shape, tensor.dtype


def test_the_choice_for_cuda_tensors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from trine.ops.kda import _choice

    q, v = (_OnCard(arguments()[name]) for name in ("q", "v"))
    assert _backend("auto", q, v, "bounded", -5.0) is None  # the kernels
    _choice.say_slow.cache_clear()
    with caplog.at_level(logging.WARNING, logger="trine"):
        for _ in range(2):
            assert _backend("auto", q, v, "softplus", -5.0).__name__ == "_run_torch"
    (record,) = caplog.records
    assert "need gate_kind 'bounded', found 'softplus'; this call" in record.getMessage()
    with pytest.raises(BackendUnavailable, match=r"backend 'triton' cannot run here: .*need gate_kind 'bounded'"):
        _backend("triton", q, v, "softplus", -5.0)
    double = _OnCard(arguments()["beta"].double())
    assert _backend("auto", q, v, "bounded", -5.0, double).__name__ == "_run_torch"
    monkeypatch.setattr(_choice, "triton_is_there", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"needs the package triton .*, found none"):
        _backend("triton", q, v, "bounded", -5.0)


def test_what_may_be_kept_for_the_backward_pass() -> None:
    with pytest.raises(ValueError, match=r"save: found 'all', need one of \['inputs', 'factors'\]"):
        kda(**arguments(), save="all")
    given = arguments()
    assert torch.equal(kda(**given, save="factors")[0], kda(**given)[0])


def test_tensors_on_another_device() -> None:
    with pytest.raises(ValueError, match="beta: found device meta, need that of q, cpu"):
        kda(**arguments(beta=torch.zeros(B, T, H, device="meta")))
    with pytest.raises(ValueError, match="cu_seqlens: found device meta, need cpu"):
        kda(**arguments(cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")))


def test_auto_says_once_which_path_it_took(caplog: pytest.LogCaptureFixture) -> None:
    from trine.ops._backend import _say_once

    _say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="trine"):
        kda(**arguments())
        kda(**arguments())
    assert [r.getMessage() for r in caplog.records] == ["kda runs on backend 'torch' for cpu tensors"]


def test_backends_agree(lab: SimpleNamespace) -> None:
    inputs = lab.draw(30)
    runs = [lab.run(kda, inputs, backend=backend) for backend in ("auto", "torch", "reference")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert max(lab.relative_errors(runs[0], runs[2]).values()) <= 1e-12
