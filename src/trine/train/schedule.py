"""How much is learned when: stages in steps, and one learning-rate curve over the whole plan. No framework."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trine.train.config import Stage


@dataclass(frozen=True)
class StageSpan:
    """A stage laid out in steps: it covers steps ``first_step`` to ``first_step + steps - 1``."""

    index: int  # number of the stage, from 0
    stage: Stage
    first_step: int
    steps: int
    first_token: int  # tokens seen before the stage begins


@dataclass(frozen=True)
class Plan:
    """Every step of a run, known before the first one; `at` is a pure function of the step."""

    spans: tuple[StageSpan, ...]

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return sum(span.steps for span in self.spans)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run: whole steps only, so it can differ from the wanted total by part of a step."""
        return self.tokens_before(self.steps)

    def at(self, step: int) -> StageSpan:
        """The stage that step ``step`` (from 0) belongs to.

        Raises:
            ValueError: a step outside the plan.
        """
        for span in self.spans:
            if span.first_step <= step < span.first_step + span.steps:
                return span
        raise ValueError(f"step: found {step}, need 0 to {self.steps - 1}")

    def tokens_before(self, step: int) -> int:
        """Tokens seen when ``step`` steps are done."""
        return sum(min(max(step - s.first_step, 0), s.steps) * s.stage.step_tokens for s in self.spans)

    def __iter__(self) -> Iterator[StageSpan]:
        return iter(self.spans)


def lay_out(stages: Sequence[Stage], tokens: int) -> Plan:
    """Turn shares of ``tokens`` into whole steps; every stage gets at least one.

    Raises:
        ValueError: no stage, or no tokens.
    """
    if not stages:
        raise ValueError("stages: found none, need at least one")
    if tokens <= 0:
        raise ValueError(f"tokens: found {tokens}, need more than 0")
    spans: list[StageSpan] = []
    step = seen = 0
    for index, stage in enumerate(stages):
        steps = max(1, round(tokens * stage.share / stage.step_tokens))
        spans.append(StageSpan(index, stage, step, steps, seen))
        step += steps
        seen += steps * stage.step_tokens
    return Plan(tuple(spans))


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine down to ``final``, over tokens (K3 report, arXiv 2607.24653, section 3.2).

    The total is the planned one and is stored in each checkpoint: a resumed run follows the same curve, and a new total
    is another run. Stages are marks on the curve; nothing restarts at a transition.
    """

    total: int  # planned tokens
    warmup: int  # tokens of linear warm-up
    final: float = 0.0  # fraction of the rate left at the end

    def __post_init__(self) -> None:
        if self.total <= 0:
            raise ValueError(f"total: found {self.total}, need more than 0 tokens")
        if not 0 <= self.warmup < self.total:
            raise ValueError(f"warmup: found {self.warmup}, need 0 to {self.total - 1} tokens")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final: found {self.final}, need 0 to 1")

    def factor(self, before: int, step_tokens: int) -> float:
        """What the base rates are multiplied by in the step that takes tokens ``before`` to ``before + step_tokens``.

        The warm-up counts the step's own tokens, so that the first step moves; the cosine counts those before it, so
        that the last step still does.
        """
        if before < self.warmup:
            return min(1.0, (before + step_tokens) / self.warmup)
        progress = min(1.0, (before - self.warmup) / (self.total - self.warmup))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
