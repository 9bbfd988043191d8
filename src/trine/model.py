"""The decoder: embeddings, layers, depth mixing, head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trine.config import ModelConfig
from trine.nn import (
    AttnResidual,
    ChunkResidual,
    FeedForward,
    GatedMLA,
    KimiDeltaAttention,
    LatentMoE,
    PlainResidual,
    RMSNorm,
    ShallowToDeepResidual,
)
from trine.ops.cross_entropy import linear_cross_entropy
from trine.ops.router import RouterStats
from trine.ops.router.auxiliary import LoadPressure
from trine.ops.router.quantile import check_rounds
from trine.ops.router.stateless import Stateless

if TYPE_CHECKING:
    from trine.cache import HybridCache
    from trine.data import Batch

IGNORE_INDEX = -100  # target of a position without one, as `trine.data` has it
BIAS_KEY = "router_bias_LE"  # where `state_dict` keeps the routers' selection bias


class DecoderLayer(nn.Module):
    """One attention and one feed-forward, each behind its own norm. Residuals live in the model."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        c = config
        self.attention_norm = RMSNorm(c.width, c.norm_eps)
        self.attention: KimiDeltaAttention | GatedMLA
        if index in c.mla_layers:
            self.attention = GatedMLA(
                *(c.width, c.heads, c.head_dim),
                q_rank=c.q_rank,
                kv_rank=c.kv_rank,
                shared_key_dim=c.shared_key_dim,
                output_gate=c.output_gates,
                norm_eps=c.mla_norm_eps,
            )
        else:
            self.attention = KimiDeltaAttention(
                *(c.width, c.heads, c.head_dim),
                conv_kernel=c.conv_kernel,
                decay_rank=c.decay_rank,
                gate_kind=c.gate_kind,
                g_min=c.g_min,
                output_gate=c.output_gates,
                norm_eps=c.norm_eps,
            )
        self.feed_forward_norm = RMSNorm(c.width, c.norm_eps)
        self.feed_forward: FeedForward | LatentMoE
        if index < c.dense_layers:
            self.feed_forward = FeedForward(c.width, c.dense_width, beta=c.situ_beta, linear_beta=c.situ_linear_beta)
        else:
            self.feed_forward = LatentMoE(
                c.width,
                experts=c.experts,
                top_k=c.top_k,
                latent_width=c.latent_width,
                expert_width=c.expert_width,
                shared_experts=c.shared_experts,
                beta=c.situ_beta,
                linear_beta=c.situ_linear_beta,
                latent_norm=c.latent_norm,
                norm_eps=c.norm_eps,
            )

    def attend(self, h_TD: Tensor, cu_seqlens_N1: Tensor | None, past: Any, step: bool) -> tuple[Tensor, Any]:
        """The attention branch; `past` is this layer's entry of the cache."""
        return self.attention(self.attention_norm(h_TD), cu_seqlens_N1, past, step)

    def feed(self, h_TD: Tensor, mask_T: Tensor | None, replay_TK: Tensor | None = None) -> Tensor:
        """The feed-forward branch."""
        x_TD = self.feed_forward_norm(h_TD)
        if isinstance(self.feed_forward, LatentMoE):
            return self.feed_forward(x_TD, mask_T, replay_TK)
        return self.feed_forward(x_TD)


class LossTally:
    """Sum of a loss and of its weights over the micro-batches of a step, float64."""

    def __init__(self) -> None:
        self.sums_2 = torch.zeros(2, dtype=torch.float64, device="cpu")

    def see(self, loss_sum: Tensor, weight_sum: Tensor) -> None:
        """Add a micro-batch."""
        one_2 = torch.stack((loss_sum.detach(), weight_sum.detach())).double()
        self.sums_2 = self.sums_2.to(one_2.device) + one_2

    def zero_(self) -> None:
        """Begin a new step."""
        self.sums_2 = torch.zeros_like(self.sums_2)

    def merge_(self, other: LossTally) -> None:
        """Take in what a replica saw."""
        self.sums_2 = self.sums_2.to(other.sums_2.device) + other.sums_2


class MtpLayer(nn.Module):
    """Predicts the token after the next: h' = Layer(W [norm(h_t) ; norm(embedding of token t+1)]), then norm and the
    model's own head (multi-token prediction of DeepSeek-V3, arXiv 2412.19437, Eq. 21-23, at depth 1). The layer has the
    structure of the backbone's last; K3 trains one such layer (K3 report, arXiv 2607.24653, section 4.1.4).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.width, config.norm_eps)
        self.embedding_norm = RMSNorm(config.width, config.norm_eps)
        self.projection = nn.Linear(2 * config.width, config.width, bias=False)
        self.layer = DecoderLayer(config, config.layers - 1)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.weight = 0.0  # of this layer's loss in training; whoever trains sets it
        self.seen = LossTally()


class Model(nn.Module):
    """A decoder with the structure of Kimi K3 at any size (K3 report, §2).

    Sequences are packed in one row of T tokens: `cu_seqlens_N1` holds the N+1 bounds, documents never see each other.
    `router_stats` holds the routers' bias and this step's loads and histograms for all MoE layers; whoever trains reads
    and resets it (`trine.balance`). Set `recompute` to keep only the inputs of each sublayer for the backward pass.

    Args:
        config: the shape.
        device: where to build it. On "meta" nothing is allocated; call `to_empty` and `init_weights` to bring it alive.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.pressure: LoadPressure | None = None
        self._estimator, self._batch_rounds = "report", 1
        self.layers: Any  # a ModuleList, which types its items as plain modules
        with torch.device(device) if device is not None else nullcontext():
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
            self.residual = _residual(config)
            self.norm = RMSNorm(config.width, config.norm_eps)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)
            self.mtp = MtpLayer(config) if config.mtp else None
        self._bind_router_stats(self.embed.weight.device)
        self.register_state_dict_post_hook(_save_router_bias)
        self.register_load_state_dict_pre_hook(_load_router_bias)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all parameters anew: matrices normal with `init_std` (default fan_in^-1/2), embeddings with `embed_std`,
        head with 0.02, and each module's own rule for the rest. Router biases and counters become 0."""
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2 and not name.endswith(("conv.weight", "dt_bias")):
                std = self.config.init_std if self.config.init_std is not None else parameter.shape[-1] ** -0.5
                nn.init.normal_(parameter, std=std)
        nn.init.normal_(self.embed.weight, std=self.config.embed_std)
        nn.init.normal_(self.head.weight, std=0.02)
        self._bind_router_stats(self.embed.weight.device)

    def forward(
        self,
        tokens_T: Tensor,
        cu_seqlens_N1: Tensor | None = None,
        cache: HybridCache | None = None,
        mask_T: Tensor | None = None,
        replay_LTK: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, `[T, width]`; `logits` turns them into scores.

        Args:
            tokens_T: int64 ids.
            cu_seqlens_N1: int32 or int64 sequence bounds. None means one sequence or, with a `cache` of N > 1
                sequences, one new token for each of them (T = N).
            cache: what the sequences carry; read, and replaced by what they carry after these tokens.
            mask_T: False for padding tokens, which the routers then do not count.
            replay_LTK: `[L, T, k]` int64 experts that the L MoE layers use instead of their own choice, in the order of
                the layers (what `recorded_routing` gave; the MTP layer, which is not among them, always chooses).

        Raises:
            ValueError: ids outside the vocabulary, lengths that do not fit the cache, or another number of layers.
        """
        _check_tokens(tokens_T, self.config.vocab_size)
        replay = _by_layer(replay_LTK, self.config.moe_layers)
        step = cache is not None and cache.is_step(tokens_T.shape[0], cu_seqlens_N1)
        stream = self.residual.start(self.embed(tokens_T))
        for i, layer in enumerate(self.layers):
            past = None if cache is None else cache.layers[i]
            a_TD, past = self._run(layer.attend, layer, stream.attention_input(i), cu_seqlens_N1, past, step)
            stream.add_attention(i, a_TD)
            h_TD = stream.feed_forward_input(i)
            stream.add_feed_forward(i, self._run(layer.feed, layer, h_TD, mask_T, replay.get(i)))
            if cache is not None:
                cache.layers[i] = past
        if cache is not None:
            cache.advance(tokens_T.shape[0], cu_seqlens_N1)
        return self.norm(stream.output())

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Scores of the next token, `[T, vocab]`, float32 (float64 for a float64 model)."""
        return self.head(hidden_TD).to(torch.promote_types(hidden_TD.dtype, torch.float32))

    def loss(self, batch: Batch, replay_LTK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum over the batch of weight · (-ln p(target)) in nats, and the sum of the weights.

        In training the gradient also holds that of the MTP layer's loss times its weight, and that of the auxiliary
        losses of the routers times theirs; the value does not. `replay_LTK`: see `forward`.
        """
        for moe in self._moes() if self.pressure is not None else ():
            moe.auxiliary_T = None  # of a pass that was no loss's
        hidden_TD = self(batch.tokens_T, batch.cu_seqlens_N1, mask_T=batch.mask_T, replay_LTK=replay_LTK)
        loss, weight = linear_cross_entropy(hidden_TD, self.head.weight, batch.targets_T, batch.weights_T)
        if self.mtp is not None and self.mtp.weight and self.training and torch.is_grad_enabled():
            ahead, ahead_weight = self.mtp_loss(hidden_TD, batch)
            self.mtp.seen.see(ahead, ahead_weight)
            loss = loss + self.mtp.weight * (ahead - ahead.detach())
        if self.pressure is not None:
            auxiliary = self._take_auxiliary(batch)
            if auxiliary is not None:
                loss = loss + self.pressure.weight * (auxiliary - auxiliary.detach())
        return loss, weight

    def _take_auxiliary(self, batch: Batch) -> Tensor | None:
        """Sum over the batch of weight · auxiliary loss, over all MoE layers of the pass just done: a token counts as
        much as its own loss does, so micro-batches of a step add up to the step."""
        weights_T = batch.weights_T.masked_fill(batch.targets_T == IGNORE_INDEX, 0.0)
        found = []
        for moe in self._moes():
            if moe.auxiliary_T is not None:
                found.append((moe.auxiliary_T * weights_T).sum())
                moe.auxiliary_T = None
        return torch.stack(found).sum() if found else None

    def mtp_loss(self, hidden_TD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss of the token after the next, summed as in `loss`; the last position of each sequence has none.

        Args:
            hidden_TD: what `forward` gave for this batch.
            batch: the batch.

        Raises:
            ValueError: the model has no MTP layer (`ModelConfig.mtp`).
        """
        if self.mtp is None:
            raise ValueError("mtp: found False in the model's configuration, need True")
        targets_T, weights_T = _after_next(batch)
        known_T = batch.targets_T.clamp(min=0)
        both_TE = torch.cat((self.mtp.hidden_norm(hidden_TD), self.mtp.embedding_norm(self.embed(known_T))), -1)
        layer = self.mtp.layer
        x_TD = self.mtp.projection(both_TE)
        x_TD = x_TD + self._run(layer.attend, layer, x_TD, batch.cu_seqlens_N1, None, False)[0]
        x_TD = x_TD + self._run(layer.feed, layer, x_TD, batch.mask_T)
        return linear_cross_entropy(self.mtp.norm(x_TD), self.head.weight, targets_T, weights_T)

    def observers(self) -> list[Any]:
        """What takes notes of a training step beside the routers: peaks of heads under QK-clip, the MTP loss.

        Each has `zero_` and `merge_`.
        """
        found: list[Any] = [m.peaks for m in self.modules() if isinstance(m, GatedMLA) and m.peaks is not None]
        return found if self.mtp is None else [*found, self.mtp.seen]

    def replica(self) -> Model:
        """The same model for another thread: parameters and router bias are shared, what routers count is its own."""
        stats = self.router_stats.replica()
        shared: dict[int, Any] = {id(p): p for p in self.parameters()}
        shared[id(self.router_stats)] = stats
        shared[id(self.pressure)] = self.pressure
        for index, moe in enumerate(self._moes()):
            shared[id(moe.stats)] = stats.layer(index)
        return copy.deepcopy(self, shared)

    def set_balance(
        self,
        *,
        estimator: str = "report",
        batch_rounds: int = 1,
        stateless: Stateless | None = None,
        pressure: LoadPressure | None = None,
    ) -> None:
        """What balancing does in the forward pass, in training only; `trine.balance.install_policy` calls this.

        Call it before replicas are made.

        Args:
            estimator: the histogram of `router_stats`; another one than now begins new statistics with the old bias.
            batch_rounds: updates of the bias within a batch, `RouterStats.batch_rounds`.
            stateless: thresholds of the batch choose experts.
            pressure: an auxiliary loss acts on the scores.
        """
        check_rounds("batch_rounds", batch_rounds)
        self._estimator, self._batch_rounds = estimator, batch_rounds
        before = self.router_stats
        before.batch_rounds = batch_rounds
        if estimator != before.estimator:
            self._bind_router_stats(before.device)
            self.router_stats.set_bias_(before.bias_LE)
        self.pressure = pressure
        for moe in self._moes():
            moe.stateless, moe.pressure = stateless, pressure

    @contextmanager
    def recorded_routing(self) -> Iterator[list[Tensor]]:
        """Inside, each forward pass (or step of decoding) appends its choices, `[L, T, k]`, to the list this gives:
        what `forward` takes back as `replay_LTK`. Those of the MTP layer are not among them."""
        passes: list[Tensor] = []
        heard: list[Tensor] = []
        moes = [self.layers[i].feed_forward for i in self.config.moe_layers]

        def collect(*_: Any) -> None:
            passes.append(torch.stack(heard))
            heard.clear()

        hook = self.register_forward_hook(collect)
        for moe in moes:
            moe.heard = heard
        try:
            yield passes
        finally:
            hook.remove()
            for moe in moes:
                moe.heard = None

    def _moes(self) -> list[LatentMoE]:
        return [module for module in self.modules() if isinstance(module, LatentMoE)]

    def _run(self, branch: Callable[..., Any], layer: nn.Module, *args: Any) -> Any:
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return branch(*args)
        moe = getattr(layer, "feed_forward", None)
        again = moe.recomputing if isinstance(moe, LatentMoE) else nullcontext
        return checkpoint(
            branch, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), again())
        )

    def _bind_router_stats(self, device: torch.device) -> None:
        moes = self._moes()
        self.router_stats = RouterStats.allocate(
            *(len(moes), self.config.experts),
            device=device,
            estimator=self._estimator,
            score_domain=self.config.score_domain,
            batch_rounds=self._batch_rounds,
        )
        for index, moe in enumerate(moes):
            moe.stats = self.router_stats.layer(index)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.router_stats
        super()._apply(fn, recurse)
        device = self.embed.weight.device
        if device != before.bias_LE.device:
            self._bind_router_stats(device)
            if "meta" not in (device.type, before.bias_LE.device.type):
                self.router_stats.load_state_dict(before.state_dict())
        return self


def _residual(config: ModelConfig) -> AttnResidual | ChunkResidual | ShallowToDeepResidual | PlainResidual:
    c = config
    if c.residual == "attn_res":
        return AttnResidual(c.width, c.layers, c.block_layers, c.norm_eps)
    if c.residual == "chunk":
        return ChunkResidual(c.width, c.layers, c.block_layers, c.norm_eps)
    if c.residual == "shallow_to_deep":
        return ShallowToDeepResidual(c.width, c.shallow_layers, c.deep_layers)
    return PlainResidual()


def _by_layer(replay_LTK: Tensor | None, moe_layers: tuple[int, ...]) -> dict[int, Tensor]:
    if replay_LTK is None:
        return {}
    if replay_LTK.ndim != 3 or replay_LTK.shape[0] != len(moe_layers):
        raise ValueError(
            f"replay_LTK: found shape {tuple(replay_LTK.shape)}, need [{len(moe_layers)}, T, k], one row a MoE layer"
        )
    return dict(zip(moe_layers, replay_LTK, strict=True))


def _check_tokens(tokens_T: Tensor, vocab_size: int) -> None:
    if tokens_T.ndim != 1 or tokens_T.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens_T: found {tokens_T.dtype} of shape {tuple(tokens_T.shape)}, need int64 of shape [T]")
    # Reading values back from a card would stall it; there the embedding's own bounds check has to do.
    if tokens_T.device.type == "cpu" and tokens_T.numel():
        low, high = int(tokens_T.min()), int(tokens_T.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            where = int((tokens_T == bad).nonzero()[0])
            raise ValueError(f"tokens_T: found id {bad} at position {where}, need 0 to {vocab_size - 1}")


def _after_next(batch: Batch) -> tuple[Tensor, Tensor]:
    """Targets and weights one position later in the same sequence; none at its end, nor where the next is unknown."""
    targets_T, weights_T = batch.targets_T.roll(-1), batch.weights_T.roll(-1)
    ends_U = batch.targets_T.new_zeros(batch.tokens + 1, dtype=torch.bool).index_fill_(
        0, batch.cu_seqlens_N1[1:].long(), True
    )
    gone_T = ends_U[1:] | (batch.targets_T == IGNORE_INDEX)
    return targets_T.masked_fill(gone_T, IGNORE_INDEX), weights_T.masked_fill(gone_T, 0.0)


# The bias is no parameter (no gradient moves it) and no ordinary buffer (a 16-bit cast must not reach it), but a model
# without it routes differently: so it travels in every state dict, and its absence there is an error.
def _save_router_bias(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, Model)
    state[prefix + BIAS_KEY] = module.router_stats.bias_LE.detach()


def _load_router_bias(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
) -> None:
    assert isinstance(module, Model)
    bias_LE = state.pop(prefix + BIAS_KEY, None)
    if bias_LE is None:
        missing.append(prefix + BIAS_KEY)
        return
    target_LE = module.router_stats.bias_LE
    if bias_LE.shape != target_LE.shape:
        raise ValueError(f"{BIAS_KEY}: found shape {tuple(bias_LE.shape)}, need {tuple(target_LE.shape)}")
    if target_LE.device.type != "meta":
        target_LE.copy_(bias_LE)


def info(config: ModelConfig) -> dict[str, Any]:
    """Count parameters and memory without allocating anything.

    Returns:
        `total`: all parameters; `active`: those one token uses, with the head and k of E experts, without the embedding
        look-up (the report's way of counting); `parts`: parameters a part; `kda_state_bytes`: float32 recurrent state
        and convolution window of one sequence, all layers; `latent_bytes_per_token`: 16-bit MLA cache, all layers.
    """
    model = Model(config, device="meta")
    parts = dict.fromkeys(
        (
            *("embedding", "head", "kda", "mla", "dense", "experts", "shared", "latent", "router", "depth_queries"),
            *("norms", "mtp"),
        ),
        0,
    )
    for name, parameter in model.named_parameters():
        parts[_part_of(name, config)] += parameter.numel()
    total = sum(parts.values())
    idle = parts["experts"] * (config.experts - config.top_k) // config.experts
    inner = config.heads * config.head_dim
    state_values = config.heads * config.head_dim**2 + (config.conv_kernel - 1) * 3 * inner
    return {
        "total": total,
        "active": total - parts["embedding"] - parts["mtp"] - idle,
        "parts": parts,
        "kda_state_bytes": 4 * state_values * len(config.kda_layers),
        "latent_bytes_per_token": 2 * (config.kv_rank + config.shared_key_dim) * len(config.mla_layers),
    }


def _part_of(name: str, config: ModelConfig) -> str:
    fields = name.split(".")
    top = {"embed": "embedding", "head": "head", "norm": "norms", "residual": "depth_queries", "mtp": "mtp"}
    if fields[0] in top:
        return top[fields[0]]
    layer, part = int(fields[1]), fields[2]
    if part.endswith("_norm"):
        return "norms"
    if part == "attention":
        return "mla" if layer in config.mla_layers else "kda"
    if layer < config.dense_layers:
        return "dense"
    inner = fields[3]
    if inner.startswith("expert_"):
        return "experts"
    return inner if inner in ("shared", "router") else "latent"
