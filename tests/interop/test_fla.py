"""fla's names for our KDA: every argument against the definition with the arguments mapped by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trine.interop.fla import chunk_kda, fused_recurrent_kda
from trine.ops.kda import kda_reference

B, T, H, HV, K, V = 2, 35, 2, 4, 6, 5


def draw() -> dict[str, Tensor]:
    """Raw inputs under fla's names, float64."""
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def definition(x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """The reference with everything spelled out: decays, strengths and norms are made here, not by it."""
    out, final = kda_reference(
        x["q"], x["k"], x["v"], x["g"], x["beta"], gate_kind="log_decay", qk_norm=False, beta_is_logit=False,
        output_final_state=True, **options,
    )  # fmt: skip
    assert final is not None
    return out, final


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def same(found: Tensor | None, wanted: Tensor) -> None:
    assert found is not None and (found - wanted).norm() <= 1e-10 * wanted.norm()


def test_plain_arguments_are_used_as_they_are() -> None:
    x = draw()
    x["g"], x["beta"], x["k"] = -x["g"].abs(), x["beta"].sigmoid(), 0.3 * x["k"]
    out, final = chunk_kda(**x, scale=0.7, output_final_state=True)
    wanted, wanted_final = definition(x, scale=0.7)
    same(out, wanted)
    same(final, wanted_final)
    assert chunk_kda(**x)[1] is None


@pytest.mark.parametrize(("bound", "slope"), [(-5.0, True), (-3.0, False), (None, True)])
def test_gate_norm_and_sigmoid_inside(bound: float | None, slope: bool) -> None:
    x = draw()
    A_log = 0.3 * torch.randn(HV, dtype=torch.float64) if slope else None
    dt_bias = torch.randn(HV * K, dtype=torch.float64)
    rate = 1.0 if A_log is None else A_log.exp()[:, None]
    y = x["g"] + dt_bias.view(HV, K)
    g = -rate * torch.nn.functional.softplus(y) if bound is None else bound * torch.sigmoid(rate * y)
    plain = x | {"g": g, "q": unit(x["q"]), "k": unit(x["k"]), "beta": 2 * x["beta"].sigmoid()}
    out, final = chunk_kda(
        **x, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, safe_gate=bound is not None, lower_bound=bound, A_log=A_log, dt_bias=dt_bias,
        output_final_state=True, disable_recompute=True,
    )  # fmt: skip
    wanted, wanted_final = definition(plain)
    same(out, wanted)
    same(final, wanted_final)


def test_states_in_either_layout_and_packed_rows() -> None:
    x = {name: t[:1] for name, t in draw().items()}
    x["g"], x["beta"], x["k"] = -x["g"].abs(), x["beta"].sigmoid(), unit(x["k"])
    state = torch.randn(3, HV, K, V, dtype=torch.float64)
    bounds = torch.tensor([0, 12, 12, T])
    wanted, wanted_final = definition(x, initial_state=state, cu_seqlens=bounds)
    for v_first in (False, True):
        given = state.mT.contiguous() if v_first else state
        out, final = chunk_kda(
            **x, initial_state=given, output_final_state=True, cu_seqlens=bounds, state_v_first=v_first
        )
        same(out, wanted)
        same(final, wanted_final.mT if v_first else wanted_final)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_recurrent_form(tokens: int) -> None:
    x = {name: t[:, :tokens].requires_grad_() for name, t in draw().items()}
    state = torch.randn(B, HV, V, K, dtype=torch.float64)
    out, final = fused_recurrent_kda(
        **x, initial_state=state, state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, lower_bound=-5.0, output_final_state=True,
    )  # fmt: skip
    plain = x | {
        "g": -5 * x["g"].sigmoid(),
        "q": unit(x["q"]),
        "k": unit(x["k"]),
        "beta": x["beta"].sigmoid(),
    }
    wanted, wanted_final = definition(plain, initial_state=state.mT)
    assert not out.requires_grad
    same(out, wanted)
    same(final, wanted_final.mT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow_neg_eigval": True}, "allow_neg_eigval: found True, need use_beta_sigmoid_in_kernel"),
        ({"use_gate_in_kernel": True}, "A_log: found None"),
        ({"use_gate_in_kernel": True, "safe_gate": True}, "lower_bound: found None"),
        ({"return_intermediate_states": True}, "return_intermediate_states"),
        ({"cp_context": object()}, "cp_context"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_kda(**draw(), **options)


def test_errors_inside_name_the_arguments_of_fla() -> None:
    x = draw()
    x["g"] = -x["g"].abs()
    batch, _, _, key = x["q"].shape
    heads, value = x["v"].shape[2:]
    state = torch.zeros(batch, heads, value, key)
    for call in (chunk_kda, fused_recurrent_kda):
        with pytest.raises(
            ValueError, match=r"^g: found a log-decay of .* need values <= 0 without use_gate_in_kernel"
        ):
            call(**(x | {"g": -x["g"]}))
        with pytest.raises(ValueError, match=r"^g: found shape"):
            call(**(x | {"g": x["g"][..., 1:]}))
        with pytest.raises(ValueError, match=r"^q: found shape .* need \[B, T, H, K\]"):
            call(**(x | {"q": x["q"][None]}))
        with pytest.raises(
            ValueError, match=r"^initial_state: found shape \(2,\), need \[N, HV, V, K\] with state_v_first"
        ):
            call(**x, initial_state=torch.zeros(2), state_v_first=True)
        with pytest.raises(ValueError, match=r"^initial_state: .*as seen after state_v_first=True turned"):
            call(**x, initial_state=state.mT, state_v_first=True)
        with pytest.raises(ValueError, match=r"^lower_bound: .*g as log decays, without use_gate_in_kernel"):
            call(**x, use_gate_in_kernel=True, lower_bound=-6.0, A_log=torch.zeros(heads))
