"""The options of each verb, and reading them from a command line. Loads no framework, but costs a moment: see `cli`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Positional

from trine.train.config import TrainConfig, load_toml, train_preset

T = TypeVar("T")

Run = Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]


class Usage(Exception):
    """The command line itself is wrong; the message is one line."""

    exit_code = 2


@dataclass(frozen=True)
class Train:
    """Train a model, evaluate it, let it write; everything ends up in runs/NAME.

    The preset, or a TOML file, sets all that is not given here.
    """

    plan: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: str = ""  # TOML file with the same keys as the options; options given beside it win


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model. Takes the likeliest token unless a temperature is given."""

    run: Run  # the run's folder, or its name in runs/
    prompt: str  # text to continue
    max_tokens: int = 256  # new tokens at most
    temperature: float = 0.0  # 0 takes the likeliest token; 0.8 varies
    top_p: float = 1.0  # keep the likeliest tokens whose probabilities add up to this
    seed: int = 0  # of the noise
    stop: tuple[str, ...] = ()  # end before the first of these texts
    stream: bool = False  # show text while it grows


@dataclass(frozen=True)
class Eval:
    """Bits per byte of a run's newest checkpoint on its held-out files, beside the baselines."""

    run: Run  # the run's folder, or its name in runs/
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Info:
    """Parameters of a preset, part by part, and the memory a sequence takes. Nothing is allocated."""

    preset: str = "laptop"  # smoke, laptop, 130m, 400m, 1b, k3
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Doctor:
    """What this machine offers a run, with one line of advice for each part."""

    json: bool = False  # print JSON instead of a table
    runs: str = "runs"  # folder whose disk is looked at


def parse_train(args: Sequence[str]) -> TrainConfig:
    """The training run that a command line asks for: preset, file or stored run first, then the options over it.

    Raises:
        Usage: the command line is wrong.
        ValueError: the preset is unknown, or the file has a bad key or value.
        trine.train.errors.RunError: there is nothing to resume.
    """
    file, name = _peek(args, "--config"), _peek(args, "--preset")
    if file is not None and name is not None:
        raise Usage("--preset: the file given with --config names the preset (see trine train --help)")
    base = load_toml(file) if file is not None else train_preset(name if name is not None else "laptop")
    if "--resume" in args and not {"-h", "--help"} & set(args):
        base = _stored(base, run=_peek(args, "--run") or base.run, runs=_peek(args, "--runs") or base.runs)
    return parse("train", Train, args, Train(base, file or "")).plan


def _stored(base: TrainConfig, run: str, runs: str) -> TrainConfig:
    """The plan that a run to be resumed was started with, so that nobody has to repeat its options."""
    from trine.train.stored import run_path, stored_config

    folder = run_path(dataclasses.replace(base, run=run, runs=runs, resume=True))
    return dataclasses.replace(stored_config(folder), run=folder.name, runs=str(folder.parent), resume=True)


def parse(verb: str, options: type[T], args: Sequence[str], default: T | None = None) -> T:
    """Parse the arguments of one verb into its dataclass.

    Args:
        verb: for messages.
        options: the dataclass.
        args: what follows the verb.
        default: values of the options that are not given.

    Raises:
        Usage: in one line, with the nearest name where an option is unknown.
        ValueError: a value that the configuration refuses; it names the field.
        SystemExit: help was asked for and printed.
    """
    keywords: Any = {"args": args, "prog": f"trine {verb}"} | ({} if default is None else {"default": default})
    if {"-h", "--help"} & set(args):
        return tyro.cli(options, **keywords)
    # How a message is drawn depends on what stdout is: a terminal gets colours, a plain encoding another frame.
    page = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    try:
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(page), _unlimited_width():
            return tyro.cli(options, **keywords)
    except SystemExit as stop:
        page.seek(0)
        text = page.read()
        if not stop.code:
            sys.stdout.write(text)
            raise
        message, refused = read_box(text)
        if refused:
            raise ValueError(message) from None
        raise Usage(f"{message} (see trine {verb} --help)") from None


def _peek(args: Sequence[str], option: str) -> str | None:
    """The value of an option that decides the defaults of the others, before those are parsed."""
    for i, word in enumerate(args):
        if word == option and i + 1 < len(args):
            return args[i + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


@contextlib.contextmanager
def _unlimited_width() -> Iterator[None]:
    """Keep messages unwrapped: whoever formats them asks the environment how wide a line may be."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def read_box(box: str) -> tuple[str, bool]:
    """The message inside a box drawn for a terminal, in one line, with the nearest option where one is offered.

    Returns:
        The message, and whether it is that of a value which the configuration itself refused.
    """
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip("│ \t")
        if line.startswith(("╭", "╰")) or not text:
            continue
        if not text.strip("─"):
            sections.append([])
        else:
            sections[-1].append(text)
    wrong = sections[0] or ["cannot be understood"]
    similar = [line for section in sections[1:2] for line in section if line.startswith("--")]
    kind, _, rest = wrong[0].partition(": ")
    if kind == "Unrecognized options":
        unknown = rest.split(", ")
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            return f"found {' '.join(unknown)!r}, which nothing asks for", False
        hint = f"; did you mean {similar[0].split()[0].strip(',')}?" if similar else ""
        return f"no option {option.partition('=')[0]}{hint}", False
    if kind.startswith("Missing from"):
        names = [line.split()[0] for line in wrong[1:] if line.startswith("--") or line.isupper()]
        return f"missing: {', '.join(names)}", False
    if kind.startswith("Error parsing") and ": found " in rest:
        return rest, True  # it names its field
    return wrong[0].removeprefix("Error parsing ").rstrip("."), False
