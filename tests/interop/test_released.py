"""What the released K3 layout cannot say is refused, and why that is so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trine import interop
from trine.config import preset
from trine.ops.router import route


@pytest.mark.parametrize("name", ["k3", "laptop", "smoke"])
def test_a_bias_on_scores_fits(name: str) -> None:
    interop.check_exportable(preset(name))


def test_a_bias_on_logits_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        interop.check_exportable(replace(preset("k3"), score_domain="logit"))
    assert str(error.value).startswith("score_domain: found 'logit', need 'sigmoid': the released K3 layout adds")


def test_the_same_bias_on_scores_would_choose_other_experts() -> None:
    """The reason: read as the layout reads it, a bias that was solved on logits sends tokens elsewhere."""
    torch.manual_seed(0)
    logits_TE, bias_E = 8 * torch.randn(100, 12), torch.linspace(-4, 4, 12)
    chosen = [
        route(logits_TE, bias_E, 2, score_domain=domain).ids_TK.sort(-1).values.tolist()
        for domain in ("logit", "sigmoid")
    ]
    assert sum(a != b for a, b in zip(*chosen, strict=True)) > 50
