"""A short training after a migration: the gates alone, then everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from trine.balance import QuantileBalancing
from trine.data import Batch, PackingPlan, Shards
from trine.model import Model
from trine.train.config import Rates, TrainConfig
from trine.train.schedule import Plan, StageSpan, lay_out
from trine.train.trainer import Trainer

GATE_PARAMETERS = (".A_log", ".dt_bias", ".decay_down.weight", ".decay_up.weight")


@dataclasses.dataclass(frozen=True)
class Recovery:
    """How a migrated model is trained on.

    Raises:
        ValueError: a field out of range, by name.
    """

    tokens: float = 0.0  # share of the tokens the model was trained on; 0 leaves it as fitted
    gates_first: float = 0.5  # share of these for the gates alone, before everything is trained
    rate: float = 0.03  # of the run's peak learning rates, falling to 0 in each of the two parts
    seed: int = 1  # added to the run's own: the rows come in another order

    def __post_init__(self) -> None:
        for name in ("tokens", "gates_first"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"recovery {name}: found {getattr(self, name)}, need 0 to 1")
        if not self.rate > 0:
            raise ValueError(f"recovery rate: found {self.rate}, need more than 0")


def recover(
    model: Model,
    config: TrainConfig,
    shards: Shards,
    seen: int,
    how: Recovery,
    measure: Callable[[Model], float],
    say: Callable[[str], None] = lambda _: None,
    workers: int = 1,
) -> list[dict[str, Any]]:
    """Train ``model`` in place: the parameters of the gates, then all; a part that does not lower the loss is undone.

    Args:
        model: of the run's configuration.
        config: of the run; its last stage's micro-batches and its rates are used, a step a micro-batch.
        shards: the run's training data.
        seen: tokens it was trained on.
        how: how much and how fast.
        measure: the loss that decides; of other text than the one that is trained on or reported.
        say: told a line a part.
        workers: micro-batches at the same time.

    Returns:
        Of each part that was trained: ``part``, ``steps``, ``tokens``, ``losses`` of the steps, the deciding loss
        ``before`` and ``after`` it, and whether it was ``kept``.

    Raises:
        trine.train.errors.NumericStop: three steps in a row without a finite loss.
    """
    # The budget is short of steps, not of tokens a step: one micro-batch is enough for an update.
    last = config.stages[-1]
    stage = dataclasses.replace(last, step_tokens=last.micro_tokens, share=1.0)
    wanted = how.tokens * seen
    steps = int(wanted // stage.step_tokens)
    if how.tokens > 0 and steps < 1:
        raise ValueError(
            f"recovery tokens: found {how.tokens:g} of {seen} = {wanted:.0f}, need one step of {stage.step_tokens}"
        )
    first = round(steps * how.gates_first)
    rates = dataclasses.asdict(config.optimizer.rates)
    optimizer = dataclasses.replace(
        config.optimizer, rates=Rates(**{name: how.rate * rate for name, rate in rates.items()}), warmup=0.1, final=0.0
    )
    done: list[dict[str, Any]] = []
    best = measure(model)
    for part, (name, count) in enumerate((("gates", first), ("all", steps - first))):
        if not count:
            continue
        saved = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        plan = lay_out([stage], count * stage.step_tokens)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "all" or parameter_name.endswith(GATE_PARAMETERS))
        balancer = QuantileBalancing(model.config.top_k) if name == "all" else None
        trainer = Trainer(model, plan, _batches(config, plan, shards, how.seed + part), optimizer, balancer=balancer,
                          workers=workers)  # fmt: skip
        losses = [trainer.train_step().loss for _ in range(plan.steps)]
        after = measure(model)
        kept = after < best
        told = f"held-out loss {best:.4f} to {after:.4f}"
        say(f"recovery, {name}: {plan.steps} steps, {plan.tokens} tokens, {told}{'' if kept else ', so undone'}")
        part_done = {"part": name, "steps": plan.steps, "tokens": plan.tokens, "losses": losses}
        done.append({**part_done, "before": best, "after": after, "kept": kept})
        if kept:
            best = after
        else:
            model.load_state_dict(saved)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return done


def _batches(config: TrainConfig, plan: Plan, shards: Shards, seed: int) -> Callable[[StageSpan, int], Sequence[Batch]]:
    stage = plan.at(0).stage
    rows = PackingPlan(
        shards, row_length=stage.length, tokens_per_step=stage.step_tokens, micro_batch_tokens=stage.micro_tokens,
        seed=config.seed + seed,
    )  # fmt: skip
    return lambda span, step: rows.micro_batches(step)
