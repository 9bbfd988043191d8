"""Which parameter is learned how: three groups, float32 masters, one norm, one flat state.

Matrices go to per-head Muon; the embedding and the output head to AdamW at a high rate, since most of their rows see
few gradients; everything else (norms, gains, depth queries, convolutions, A_log, dt_bias) to AdamW at a low rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trine.train.config import OptimizerConfig
from trine.train.errors import RunError
from trine.train.muon import Muon, check_blocks, check_dtype

GroupName = Literal["muon", "embeddings", "other"]

_EMBEDDINGS = ("embed.weight", "head.weight")
# Two-dimensional, but no matrices: a filter a channel, a bias a head and channel.
_NO_MATRIX = ("conv.weight", "dt_bias")
# A convolution's taps are weights like any other. What sets a level or a time scale must not be pulled towards 0.
_DECAYS_THOUGH_NO_MATRIX = ("conv.weight",)


@dataclass(frozen=True)
class Placement:
    """How one parameter is learned."""

    name: str
    group: GroupName
    blocks: int  # that Muon orthogonalises separately; 1 in the other groups
    weight_decay: bool
    numel: int
    dtype: torch.dtype


def head_blocks(model: nn.Module) -> dict[str, int]:
    """Full parameter name to number of row blocks, as the modules declare it in ``head_blocks``.

    Raises:
        ValueError: a module names something that is no parameter.
    """
    names = {name for name, _ in model.named_parameters()}
    found: dict[str, int] = {}
    for prefix, module in model.named_modules():
        for local, count in getattr(module, "head_blocks", {}).items():
            name = f"{prefix}.{local}" if prefix else local
            if name not in names:
                raise ValueError(f"head_blocks: {name} is no parameter of the model")
            found[name] = count
    return found


def place(model: nn.Module) -> list[Placement]:
    """Decide the group of every trainable parameter, in the model's order.

    By shape and name: ``embed.weight`` and ``head.weight`` are embeddings; other 2-D and 3-D parameters are matrices,
    except convolutions and dt_bias. Weight decay applies to matrices, embeddings and convolutions; never to 1-D
    parameters, norms, gains, biases, depth queries, A_log and dt_bias (K3 report, arXiv 2607.24653, section 2.5; Kimi
    Linear, arXiv 2510.26692). The embedding and the head decay too: the report says "throughout", and their rows would
    otherwise only grow.

    Raises:
        ValueError: a parameter of more than three dimensions, or blocks that do not cut it evenly.
    """
    declared = head_blocks(model)
    placements = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group: GroupName = "muon"
        blocks = 1
        if name in _EMBEDDINGS or name.endswith(tuple("." + one for one in _EMBEDDINGS)):
            group = "embeddings"
        elif parameter.ndim <= 1 or name.endswith(_NO_MATRIX):
            group = "other"
        else:
            blocks = declared.get(name, 1)
            if parameter.ndim == 3 and name not in declared:
                blocks = parameter.shape[0]
            check_blocks(name, parameter, blocks)
        decays = group != "other" or name.endswith(_DECAYS_THOUGH_NO_MATRIX)
        placements.append(Placement(name, group, blocks, decays, parameter.numel(), parameter.dtype))
    return placements


def describe_groups(model: nn.Module, config: OptimizerConfig | None = None) -> str:
    """A table of `place`, one line a parameter: group, rate, decay, blocks, shape, dtype, name."""
    config = config or OptimizerConfig()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    lines = [f"{'group':<11}{'rate':>9}{'decay':>7}{'blocks':>8}  {'shape':<18}{'dtype':<10}name"]
    for one in place(model):
        decay = config.weight_decay if one.weight_decay else 0.0
        shape, dtype = "x".join(map(str, shapes[one.name])), str(one.dtype).removeprefix("torch.")
        rate = getattr(config.rates, one.group)
        lines.append(f"{one.group:<11}{rate:>9.2g}{decay:>7.2g}{one.blocks:>8}  {shape:<18}{dtype:<10}{one.name}")
    return "\n".join(lines)


class Optimizers:
    """Muon and AdamW over a model, with float32 masters for parameters of 16 bits.

    Masters and all optimizer state are float32 whatever the model's dtype (float64 for a float64 model). Gradients of
    16-bit parameters are added up in float32, micro-batch by micro-batch, as soon as backward has them.

    Args:
        model: its trainable parameters are taken as they are; build it in its final dtype and device first.
        config: rates, decay and constants.
        muon_dtype: of Muon's matrix products. None takes bfloat16 on a card and the masters' dtype on a CPU. Two runs
            on a card that shall differ by no more than fp32 rounding need float32: where rounding turns the last bit
            of a bfloat16 operand, they part by 2^-9 of it.

    Raises:
        ValueError: ``muon_dtype`` is none of bfloat16, float32 and float64.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, muon_dtype: torch.dtype | None = None) -> None:
        check_dtype("muon_dtype", muon_dtype)
        self.placements = place(model)
        parameters = dict(model.named_parameters())
        self._weights = {one.name: parameters[one.name] for one in self.placements}
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        self._copies = [(name, w) for name, w in self._weights.items() if self._masters[name] is not w]
        self._hooks = [
            weight.register_post_accumulate_grad_hook(_Collect(self._masters[name])) for name, weight in self._copies
        ]
        rates = config.rates
        matrices = [one for one in self.placements if one.group == "muon"]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            masters = [self._masters[one.name] for one in matrices]
            if muon_dtype is None and masters[0].device.type == "cuda":
                muon_dtype = torch.bfloat16
            blocks = [one.blocks for one in matrices]
            muon = Muon(masters, blocks, rates.muon, config.momentum, config.weight_decay, compute_dtype=muon_dtype)
            self._optimizers.append(muon)
        groups: list[dict[str, Any]] = []
        for name, rate in (("embeddings", rates.embeddings), ("other", rates.other)):
            for decays in (True, False):
                members = [p for p in self.placements if p.group == name and p.weight_decay == decays]
                if members:
                    decay = config.weight_decay if decays else 0.0
                    masters = [self._masters[one.name] for one in members]
                    groups.append({"params": masters, "lr": rate, "weight_decay": decay})
        if groups:
            betas = (config.beta1, config.beta2)
            self._optimizers.append(torch.optim.AdamW(groups, betas=betas, eps=config.eps, fused=True))
        self._groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for one in self._groups:
            one["base_lr"] = one["lr"]
        self._names = {master: name for name, master in self._masters.items()}

    @property
    def has_masters(self) -> bool:
        """Whether some parameters are of 16 bits, so that gradients are added up elsewhere than in ``.grad``."""
        return bool(self._copies)

    def set_factor(self, factor: float) -> None:
        """Set every rate to its peak times ``factor``."""
        for group in self._groups:
            group["lr"] = group["base_lr"] * factor

    @property
    def lr(self) -> float:
        """The present rate of the first group (Muon's, when there are matrices)."""
        return float(self._groups[0]["lr"])

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for name, weight in self._weights.items():
            weight.grad = None
            self._masters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Parameter name to accumulated gradient, of the master's dtype; parameters without one are left out."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def grad_norm(self) -> Tensor:
        """Global Euclidean norm of all gradients, float64 scalar; not finite if any gradient is not."""
        gradients = list(self.gradients().values())
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        norms = torch._foreach_norm(gradients)
        return torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))

    def clip(self, norm: float, limit: float) -> None:
        """Scale all gradients so that their norm, ``norm`` now, is at most ``limit``."""
        if norm > limit:
            torch._foreach_mul_(list(self.gradients().values()), limit / norm)

    @torch.no_grad()
    def step(self) -> None:
        """Update masters, then write them to 16-bit parameters."""
        for optimizer in self._optimizers:
            optimizer.step()
        for name, weight in self._copies:
            weight.copy_(self._masters[name])

    @torch.no_grad()
    def scale_rows(self, name: str, factor_R: Tensor) -> None:
        """Multiply the rows of a matrix, and of its master, by `factor_R`; momenta stay."""
        master, weight = self._masters[name], self._weights[name]
        master.mul_(factor_R.to(master)[:, None])
        if weight is not master:
            weight.copy_(master)

    def state_tensors(self) -> dict[str, Tensor]:
        """All state as flat tensors: ``<parameter>/<quantity>``, masters under ``master``. Not copies."""
        state = {f"{name}/master": self._masters[name] for name, _ in self._copies}
        for optimizer in self._optimizers:
            for master, values in optimizer.state.items():
                for key, value in values.items():
                    state[f"{self._names[master]}/{key}"] = value
        return state

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` gave. Parameters that had no step yet have none afterwards.

        Raises:
            RunError: a name, shape or dtype that does not fit this model, named.
        """
        owner = {self._names[m]: o for o in self._optimizers for group in o.param_groups for m in group["params"]}
        copies = {name for name, _ in self._copies}
        restored: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, quantity = key.rpartition("/")
            if name not in owner:
                raise RunError(f"optimizer state: {key} belongs to no parameter of this model")
            shape = () if quantity == "step" else tuple(self._masters[name].shape)
            dtype = torch.float32 if quantity == "step" else self._masters[name].dtype
            if tuple(value.shape) != shape or value.dtype != dtype:
                found = f"{value.dtype} of shape {tuple(value.shape)}"
                raise RunError(f"optimizer state: {key}: found {found}, need {dtype} of shape {shape}")
            restored.setdefault(name, {})[quantity] = value
        for name, one in owner.items():
            have: set[str] = set(restored.get(name, {}))
            always: set[str] = {"master"} if name in copies else set()
            quantities = {"momentum"} if isinstance(one, Muon) else {"step", "exp_avg", "exp_avg_sq"}
            if have not in (always, always | quantities):
                raise RunError(f"optimizer state: {name}: found {sorted(have)}, need {sorted(always | quantities)}")
        for name, values in restored.items():
            master = self._masters[name]
            if name in copies:
                master.copy_(values.pop("master"))
            owner[name].state[master] = {key: value.to(master.device, copy=True) for key, value in values.items()}


def _master(weight: nn.Parameter) -> Tensor:
    if weight.dtype in (torch.bfloat16, torch.float16):
        return weight.detach().float()
    return weight


class _Collect:
    """Adds a 16-bit parameter's gradient to its master's as soon as it is complete, and frees it."""

    def __init__(self, master: Tensor) -> None:
        self.master = master

    def __call__(self, weight: Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        if self.master.grad is None:
            self.master.grad = gradient.to(self.master.dtype)
        else:
            self.master.grad.add_(gradient)
        weight.grad = None


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor that holds an infinity or not-a-number, or None."""
    for name, tensor in tensors.items():
        if not math.isfinite(float(tensor.detach().sum())) and not bool(torch.isfinite(tensor).all()):
            return name
    return None
