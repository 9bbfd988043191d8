"""What the curriculum study runs. Loads no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trine.config import need_finite
from trine.train.config import Stage, default_mixture

ARMS = ("staged-mixture", "staged", "longest")
LENGTHS = (128, 1_024, 4_096, 16_384)  # K3's 1 : 8 : 32 : 128
SHARES = (0.6, 0.2, 0.12, 0.08)  # of the tokens, before stages longer than the longest are cut off


@dataclass(frozen=True)
class StudyConfig:
    """Is it worth training short before long, and changing the data with the length? Three arms, several seeds.

    All arms see the same number of tokens in steps of the same size. Runs that are done are not run again: a study
    that was stopped goes on with the same command, and one whose runs were picked apart by ``arms`` and ``seed`` is put
    together by a command without them.

    Raises:
        ValueError: at construction, naming the field, the value found and the value needed.
    """

    folder: str = "runs/study-curriculum"  # one folder inside for each arm and seed, the results and the page
    preset: str = "smoke"  # whose model, rates and data every run has
    longest: int = 4_096  # longest row, and tokens a step of every arm: 1024, 4096 or 16384
    seeds: int = 3  # runs of each arm
    arms: tuple[str, ...] = ()  # run these now: staged-mixture, staged, longest; none runs all
    seed: tuple[int, ...] = ()  # run these seeds now, from 0; none runs all
    jobs: int = 0  # runs side by side, each a process of one thread; 0: one a core, on a card one after another
    tokens: int = 0  # of each run; 0 takes what fits into the budget
    budget: float = 55.0  # minutes for the whole study on this machine, measured before it starts
    source: str = ""  # data, as of trine train; empty takes the preset's
    more: tuple[str, ...] = ("tasks:800x500", "tasks:300x2500")  # further data of every arm, as of trine train
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes a card when torch sees one
    threads: int = 0  # CPU threads of a run; 0: one where runs go side by side, else torch's choice

    def __post_init__(self) -> None:
        need_finite(self)
        if self.longest not in LENGTHS[1:]:
            raise ValueError(f"longest: found {self.longest}, need one of {', '.join(map(str, LENGTHS[1:]))}")
        if self.seeds < 1:
            raise ValueError(f"seeds: found {self.seeds}, need at least 1")
        for arm in self.arms:
            arm_stages(arm, self.longest)
        if any(not 0 <= seed < self.seeds for seed in self.seed):
            raise ValueError(f"seed: found {self.seed}, need numbers from 0 to {self.seeds - 1}")
        if self.jobs < 0:
            raise ValueError(f"jobs: found {self.jobs}, need 0 (choose) or more")
        if self.tokens < 0:
            raise ValueError(f"tokens: found {self.tokens}, need 0 (what the budget allows) or more")
        if self.budget <= 0:
            raise ValueError(f"budget: found {self.budget}, need more than 0 minutes")


def arm_stages(arm: str, longest: int) -> tuple[Stage, ...]:
    """The stages of one arm: ``longest`` tokens a step throughout.

    Raises:
        ValueError: no such arm.
    """
    if arm not in ARMS:
        raise ValueError(f"arm: found {arm!r}, need one of {', '.join(ARMS)}")
    lengths = [length for length in LENGTHS if length <= longest]
    if arm == "longest":
        lengths = lengths[-1:]
    shares = SHARES[: len(lengths)] if len(lengths) > 1 else (1.0,)
    return tuple(
        Stage(
            length=length,
            share=share / sum(shares),
            step_tokens=longest,
            micro_tokens=max(length, min(2_048, longest)),
            mixture=default_mixture(index, length) if arm == "staged-mixture" else (),
        )
        for index, (length, share) in enumerate(zip(lengths, shares, strict=True))
    )


def chosen_runs(config: StudyConfig) -> list[tuple[str, int]]:
    """(arm, seed) of the runs asked for: all arms of a seed first, so that a study that is stopped can be read."""
    seeds = config.seed or range(config.seeds)
    return [(arm, seed) for seed in seeds for arm in config.arms or ARMS]
