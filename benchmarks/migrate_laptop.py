"""Train the laptop preset with softplus gates for a few minutes, migrate it, let it recover; and some not safe.

python benchmarks/migrate_laptop.py [--text episodes] [--gates both] [--folder build/migrate]

Two texts. *episodes*: runs of 16 to 64 letters drawn from four, then a line break and four others, a token a byte:
what is remembered from before the break only harms, so a model of it needs gates that forget at once and gates that
do not. *library*: Python's standard library, as in the laptop run; a short training hardly uses a memory there.

Two teachers: gates as they start by default, and gates that start strong (A_log uniform between log 1 and log 16, as
the modelling code released with K3 draws it). Each is migrated to bounds that hold its gates and to some that do not.
Recovery is 2 % of the teacher's training tokens. Beside it, at -5, two controls with the same tokens and rates: the
teacher trained on as it is, and the teacher's old numbers in the new formula, without a fit. Losses are of held-out
text. Writes benchmarks/results/migrate_laptop-*.json.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _common
import torch

SHARE = 0.02  # of the training tokens, for recovery
HELD_OUT = 32_768  # tokens of held-out text: half to fit on, half that losses are measured on
LENGTH = {"episodes": 256, "library": 512}  # of the held-out sequences
BOUNDS = {"episodes": (-5.0, -2.0, -0.5), "library": (-5.0, -0.25)}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NOISE = 0.005  # nats: a gap below it is none, and no share of it can be recovered


@dataclass(frozen=True)
class MigrationRecord(_common.Record):
    """A migration: losses in nats a held-out token. ``error`` is that of the fitted model over the teacher."""

    verdict: str | None = None
    reasons: tuple[str, ...] = ()
    g_min: float | None = None
    training_tokens: int | None = None
    recovery_tokens: int | None = None
    loss_teacher: float | None = None
    loss_swapped: float | None = None
    loss_fitted: float | None = None
    loss_recovered: float | None = None
    loss_control_teacher: float | None = None
    loss_control_swapped: float | None = None
    recovered_share: float | None = None  # of the gap between the swapped model and the teacher
    recovered_share_of_fit: float | None = None  # of the gap that the fit left
    layers: tuple[dict[str, Any], ...] = ()


def write_episodes(folder: Path, files: int = 600, characters: int = 2048) -> Path:
    """Text whose letters change at every line break; the same files every time."""
    if not folder.exists():
        draw = random.Random(0)
        beside = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for number in range(files):
            lines: list[str] = []
            while sum(map(len, lines)) + len(lines) < characters:
                some = draw.sample(LETTERS, 4)
                lines.append("".join(draw.choice(some) for _ in range(draw.randint(16, 64))))
            (beside / f"{number:04d}.txt").write_text("\n".join(lines) + "\n")
        beside.rename(folder)
    return folder


def train_teacher(folder: Path, text: str, steps: int, strong: bool) -> Path:
    """A run with softplus gates; gone on with when it was interrupted, kept when it is done."""
    from trine.train.callbacks import Callback
    from trine.train.config import DataConfig, EvalConfig, train_preset
    from trine.train.loop import train

    name = f"{text}-{'strong' if strong else 'default'}"

    class StrongGates(Callback):
        name = "strong_gates"

        def on_start(self, trainer: Any) -> None:
            random = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter_name, parameter in trainer.model.named_parameters():
                    if trainer.step == 0 and parameter_name.endswith(".A_log"):
                        parameter.copy_(torch.rand(parameter.shape, generator=random) * math.log(16))

    base = train_preset("laptop")
    stage = replace(base.stages[0], share=1.0)  # one stage of short rows: a teacher is trained for a few minutes only
    base = replace(base, stages=(stage,))
    if text == "episodes":
        source = DataConfig(source=str(write_episodes(folder / "text")), vocabulary=257)
        base = replace(base, stages=(replace(stage, length=256),), data=source, allow_repeats=True)
    config = replace(
        base,
        model=("gate_kind=softplus",),
        run=name,
        runs=str(folder),
        resume=(folder / name / "run.json").exists(),
        tokens=steps * stage.step_tokens,
        eval=EvalConfig(run=False),
        threads=torch.get_num_threads(),
        checkpoint_every=25,
        keep=1,
    )
    return train(config, callbacks=[StrongGates()] if strong else []).folder


def controls(teacher: Path, g_min: float, length: int) -> tuple[float, float]:
    """Losses after the recovery's tokens of the teacher as it is and of its numbers in the new formula."""
    from trine.data import Shards
    from trine.decay.calibrate_gates import mean_loss
    from trine.decay.migrate import bounded_twin, split_held_out
    from trine.decay.migrate_recover import Recovery, recover
    from trine.train.schedule import lay_out
    from trine.train.stored import load_run

    run = load_run(teacher)
    shards = Shards.open(run.path / "data")
    fitted, judged = split_held_out(shards, HELD_OUT, length)
    seen = lay_out(run.config.stages, run.config.tokens).tokens_before(run.step)
    losses = []
    for model in (copy.deepcopy(run.model), bounded_twin(run.model, g_min)):
        recover(model, run.config, shards, seen, Recovery(SHARE), lambda model: mean_loss(model, fitted))
        losses.append(mean_loss(model, judged))
    return losses[0], losses[1]


def migrate(teacher: Path, out: Path, text: str, g_min: float) -> MigrationRecord:
    """One migration as a record."""
    from trine.decay.migrate import softplus_to_bounded
    from trine.decay.migrate_recover import Recovery
    from trine.train.stored import stored_config

    shutil.rmtree(out, ignore_errors=True)
    report = softplus_to_bounded(
        teacher, out, g_min=g_min, tokens=HELD_OUT, length=LENGTH[text], recovery=Recovery(SHARE), say=print
    )
    loss = report["loss"]
    kept, swapped = controls(teacher, g_min, LENGTH[text]) if g_min == -5.0 else (None, None)
    after = loss["recovered"]
    config = stored_config(teacher)
    gaps = [loss[name] - loss["before"] for name in ("swapped", "fitted")]
    return MigrationRecord(
        benchmark="migrate_laptop",
        case=f"{teacher.name} to g_min {g_min:g}",
        gates="strong" if "strong" in teacher.name else "default",
        impl="trine",
        error=gaps[1],
        note=f"{config.preset} preset, {text}",
        verdict=report["verdict"],
        reasons=tuple(report["reasons"]),
        g_min=g_min,
        training_tokens=config.tokens,
        recovery_tokens=sum(part["tokens"] for part in report["recovery"]["parts"]),
        loss_teacher=loss["before"],
        loss_swapped=loss["swapped"],
        loss_fitted=loss["fitted"],
        loss_recovered=loss["recovered"],
        loss_control_teacher=kept,
        loss_control_swapped=swapped,
        recovered_share=(loss["swapped"] - after) / gaps[0] if gaps[0] > NOISE else None,
        recovered_share_of_fit=(loss["fitted"] - after) / gaps[1] if gaps[1] > NOISE else None,
        layers=tuple(report["layers"]),
    )


def main() -> None:
    """Train, migrate, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default="episodes", choices=tuple(BOUNDS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=Path("build/migrate"))
    parser.add_argument("--gates", default="both", choices=("default", "strong", "both"))
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    _common.threads(options.threads)
    for strong in {"default": (False,), "strong": (True,), "both": (False, True)}[options.gates]:
        teacher = train_teacher(options.folder, options.text, options.steps, strong)
        for g_min in BOUNDS[options.text]:
            record = migrate(teacher, options.folder / f"{teacher.name}-{-g_min:g}", options.text, g_min)
            print(_common.write_records("migrate_laptop", [record]))


if __name__ == "__main__":
    main()
