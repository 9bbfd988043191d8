"""The layout of the released K3 checkpoint (K3 report, arXiv 2607.24653): what fits in it."""

from __future__ import annotations

from trine.config import ModelConfig


def check_exportable(config: ModelConfig) -> None:
    """Refuse a model that the released K3 layout cannot say, before anything of it is written.

    The layout has one vector a router, ``block_sparse_moe.gate.e_score_correction_bias`` ``[E]`` fp32, and whoever
    loads it chooses experts by the k largest of sigmoid(logits) + bias (K3 report, Eq. 11 and 13; in the released
    configuration the method ``noaux_tc`` on sigmoid scores). A model with ``score_domain = "logit"`` chooses by
    logits + bias. No bias on scores makes the same choices, since the sigmoid bends: exported as it is, the model would
    load without complaint and send tokens to other experts.

    Args:
        config: of the model to be exported.

    Raises:
        ValueError: ``score_domain`` is not ``"sigmoid"``.
    """
    if config.score_domain != "sigmoid":
        raise ValueError(
            f"score_domain: found {config.score_domain!r}, need 'sigmoid': the released K3 layout adds its "
            "e_score_correction_bias to sigmoid scores, so experts chosen by a bias on logits cannot be written in it"
        )
