"""A look inside: which depth sources each sublayer reads, and how alike the layers' inputs are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trine.model import Model
from trine.nn.depth import DepthMix
from trine.ops.attn_res.reference import attn_res_reference


@torch.no_grad()
def portrait(model: Model, tokens_T: Tensor, cu_seqlens_N1: Tensor | None = None) -> dict[str, Any]:
    """Depth-mix weights and representation similarity on one batch.

    The weights are the softmax of Block Attention Residuals (arXiv 2603.15031, §3), mean over tokens. Similarity is
    linear centred kernel alignment (Kornblith et al., arXiv 1905.00414) between what the layers' attentions read, and
    what the head reads: 1 where two differ by a rotation and a scale only.

    Args:
        model: put into evaluation mode for the time.
        tokens_T: int64 ids on the model's device.
        cu_seqlens_N1: sequence bounds.

    Returns:
        ``mix``: rows (``label``, ``weights`` over sources 0 … N), empty for a model without depth mixes;
        ``similarity``: ``labels`` and ``values``, a symmetric matrix.
    """
    rows: list[dict[str, Any]] = []
    states: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, DepthMix):
            hooks.append(module.register_forward_pre_hook(_keep_weights(rows, _label(name))))
    for i, layer in enumerate(model.layers):
        hooks.append(layer.attention_norm.register_forward_pre_hook(_keep_state(states, str(i))))
    hooks.append(model.norm.register_forward_pre_hook(_keep_state(states, "head")))
    was_training = model.training
    model.train(False)
    try:
        model(tokens_T, cu_seqlens_N1)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    labels = list(states)
    values = [[cka(states[a], states[b]) for b in labels] for a in labels]
    return {"mix": rows, "similarity": {"labels": labels, "values": values}}


def cka(x_TD: Tensor, y_TD: Tensor) -> float:
    """Linear centred kernel alignment of two representations of the same T tokens, 0 to 1."""
    x_TD, y_TD = (one.double() - one.double().mean(0) for one in (x_TD, y_TD))
    cross = (x_TD.T @ y_TD).square().sum()
    norms = (x_TD.T @ x_TD).norm() * (y_TD.T @ y_TD).norm()
    return float(cross / norms) if norms > 0 else 0.0


def _label(name: str) -> str:
    """``residual.feed_forward.3`` as "3 feed-forward"."""
    parts = name.split(".")
    if parts[-1].isdigit():
        kind = {"attention": "attention", "feed_forward": "feed-forward"}.get(parts[-2], parts[-2])
        return f"{parts[-1]} {kind}"
    return "head" if parts[-1] == "final" else parts[-1]


def _keep_weights(rows: list[dict[str, Any]], label: str) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, DepthMix)
        _, alpha_ST = attn_res_reference(arguments[0], module.query, module.gain, module.eps)
        rows.append({"label": label, "weights": alpha_ST.mean(1).tolist()})

    return hook


def _keep_state(states: dict[str, Tensor], label: str) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        states[label] = arguments[0].detach()

    return hook
