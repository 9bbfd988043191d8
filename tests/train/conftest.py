"""A model of a few hundred parameters that has one of everything a trainer must treat differently."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trine.balance import QuantileBalancing
from trine.data import IGNORE_INDEX, Batch
from trine.ops.router import RouterStats, route
from trine.train.config import OptimizerConfig, Rates, Stage
from trine.train.schedule import Plan, StageSpan, lay_out

VOCAB, WIDTH, EXPERTS, TOP_K = 29, 8, 4, 2


class Gate(nn.Module):
    """Float32 whatever the model becomes, as the decay gates are."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(2))
        self.dt_bias = nn.Parameter(torch.randn(2, 4))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.gate = Gate()
        self.head_blocks = {"q_proj.weight": 2}

    def forward(self, x_TD: Tensor) -> Tensor:
        decay = torch.sigmoid(self.gate.A_log.exp()[:, None] * self.gate.dt_bias).flatten().to(x_TD.dtype)
        return self.o_proj(torch.tanh(self.q_proj(x_TD)) * decay)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.expert_up = nn.Parameter(torch.randn(EXPERTS, 6, WIDTH) * 0.3)
        self.expert_down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 6) * 0.3)
        self.stats: Any = None

    def forward(self, x_TD: Tensor) -> Tensor:
        counted = self.stats if self.training else None
        routing = route(F.linear(x_TD, self.router.weight).float(), self.stats.bias_E, TOP_K, stats=counted)
        weights_TE = torch.zeros(len(x_TD), EXPERTS).scatter(1, routing.ids_TK, routing.weights_TK).to(x_TD.dtype)
        every_TED = torch.einsum("edf,tef->ted", self.expert_down, torch.einsum("efd,td->tef", self.expert_up, x_TD))
        return torch.einsum("te,ted->td", weights_TE, torch.tanh(every_TED))


class TinyModel(nn.Module):
    """Embedding, one attention-like layer, one MoE layer, a depth query, a convolution's weight, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = Attention()
        self.moe = Experts()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Parameter(torch.zeros(WIDTH))
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(torch.randn(WIDTH, 4) * 0.3)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.router_stats = RouterStats.allocate(1, EXPERTS, bins=50)
        self.moe.stats = self.router_stats.layer(0)
        self.recompute = False

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x_TD = self.embed(batch.tokens_T)
        x_TD = x_TD + self.attention(x_TD) * (1 + self.query) * self.conv.weight.sum(1).to(x_TD.dtype)
        x_TD = self.norm(x_TD + self.moe(x_TD))
        chosen_T = batch.targets_T != IGNORE_INDEX
        weights_T = torch.where(chosen_T, batch.weights_T, 0.0)
        nll_T = F.cross_entropy(self.head(x_TD).float(), batch.targets_T.clamp(min=0), reduction="none")
        return (nll_T * weights_T).sum(), weights_T.sum()


def make_batch(seed: int, tokens: int = 24, supervised: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (tokens,), generator=generator)
    targets = (ids * 3 + 1) % VOCAB
    weights = torch.ones(tokens)
    if supervised is not None:
        targets[supervised:], weights[supervised:] = IGNORE_INDEX, 0.0
    bounds = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    count = int((targets != IGNORE_INDEX).sum())
    return Batch(ids, targets, weights, bounds, torch.zeros(2, dtype=torch.int64), supervised_bytes=3 * count)


def two_micro_batches(span: StageSpan, step: int) -> Sequence[Batch]:
    """48 tokens a step in two micro-batches, a pure function of stage and step."""
    return [make_batch(1000 * span.index + 2 * step + half) for half in (0, 1)]


def plan_of(steps: int) -> Plan:
    return lay_out([Stage(length=24, step_tokens=48, micro_tokens=24)], 48 * steps)


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The stand-ins, by name (test files cannot import one another here)."""

    def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> TinyModel:
        torch.manual_seed(seed)
        return TinyModel().to(dtype)

    def constants(**more: Any) -> OptimizerConfig:
        return OptimizerConfig(rates=Rates(muon=0.02, embeddings=0.02, other=0.01), warmup=0.2, **more)

    return SimpleNamespace(
        model=model,
        batch=make_batch,
        batches=two_micro_batches,
        plan=plan_of,
        optimizer=constants,
        balancer=lambda: QuantileBalancing(TOP_K),
    )
