"""A look inside: which depth sources each sublayer reads, and how alike the layers' inputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trine.model import Model
from trine.nn.depth import DepthMix
from trine.ops.attn_res import attn_res_weights


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
    hooks = depth_hooks(model, lambda site, weights_S: rows.append({"label": site, "weights": weights_S.tolist()}))
    for i, layer in enumerate(model.layers):
        hooks.append(layer.attention_norm.register_forward_pre_hook(_keep_state(states, str(i))))
    hooks.append(model.norm.register_forward_pre_hook(_keep_state(states, "head")))
    with looking(model, hooks):
        model(tokens_T, cu_seqlens_N1)
    labels = list(states)
    values = [[cka(states[a], states[b]) for b in labels] for a in labels]
    return {"mix": rows, "similarity": {"labels": labels, "values": values}}


def cka(x_TD: Tensor, y_TD: Tensor) -> float:
    """Linear centred kernel alignment of two representations of the same T tokens, 0 to 1."""
    x_TD, y_TD = (one.double() - one.double().mean(0) for one in (x_TD, y_TD))
    cross = (x_TD.T @ y_TD).square().sum()
    norms = (x_TD.T @ x_TD).norm() * (y_TD.T @ y_TD).norm()
    return float(cross / norms) if norms > 0 else 0.0


@contextmanager
def looking(model: nn.Module, hooks: Sequence[Any]) -> Iterator[None]:
    """Evaluation mode inside; afterwards the mode of before, and the hooks are off."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def depth_hooks(model: Model, keep: Callable[[str, Tensor], None]) -> list[Any]:
    """Hooks that tell ``keep`` of each depth mix a pass goes through: the site's name, and ``[S]`` weights of its
    sources, mean over tokens (the softmax of Attention Residuals, arXiv 2603.15031, section 3; K3 report, arXiv
    2607.24653, Eq. 8-10)."""

    def told(site: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(module, DepthMix)
            keep(site, attn_res_weights(arguments[0], module.query, module.gain, module.eps).mean(1))

        return hook

    mixes = ((name, one) for name, one in model.residual.named_modules() if isinstance(one, DepthMix))
    return [one.register_forward_pre_hook(told(_site(name))) for name, one in mixes]


def _site(name: str) -> str:
    """``feed_forward.3`` as "3 feed-forward", ``mixes.0`` as "chunk 1"."""
    parts = name.split(".")
    if parts[0] == "mixes":
        return f"chunk {int(parts[1]) + 1}"
    return "head" if parts[0] == "final" else f"{parts[1]} {parts[0].replace('_', '-')}"


def _keep_state(states: dict[str, Tensor], label: str) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        states[label] = arguments[0].detach()

    return hook
