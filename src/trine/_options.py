"""The options of each verb, and reading them from a command line. Loads no framework, but costs a moment: see `cli`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional

from trine.config import SourceShare, need_one_of
from trine.train.config import TrainConfig, load_toml, parse_share, share_text, train_preset
from trine.train.study_config import StudyConfig

T = TypeVar("T")

Run = Annotated[Positional[str], tyro.conf.arg(metavar="RUN")]


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _share_rule(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[SourceShare] | None:
    """A part of a mixture is one word, as ``code=0.4..0.2@4096-``."""
    if info.type is not SourceShare:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="SOURCE=WEIGHT",
        instance_from_str=lambda words: parse_share(words[0]),
        is_instance=lambda value: isinstance(value, SourceShare),
        str_from_instance=lambda share: [share_text(share)],
    )


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
class Plan:
    """What a run would read, take and need on this machine: a table of its stages. Nothing is trained or kept.

    Takes every option of trine train.
    """

    plan: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: str = ""  # TOML file, as of trine train
    measure: bool = True  # time a few micro-batches of each stage; without it only the data is looked at
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Compare:
    """What runs were set to differently, what came of it, and their curves on one picture."""

    runs: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN RUN2")]  # folders, or names in runs/
    picture: str = "compare.png"  # where the curves are drawn
    json: bool = False  # print JSON instead of a table


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
    """Measure a run's newest checkpoint: held-out files beside the baselines, positions, tasks. Renews eval.json."""

    run: Run  # the run's folder, or its name in runs/
    lengths: tuple[int, ...] = ()  # tokens of the tasks, the longest also of the positions; none takes the stages'
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Info:
    """Parameters of a preset, part by part, and the memory a sequence takes. Nothing is allocated."""

    preset: str = "laptop"  # smoke, laptop, 130m, 400m, 1b, k3
    json: bool = False  # print JSON instead of a table


@dataclass(frozen=True)
class Calibrate:
    """Which lower bound g_min of the decay gates fits which tile, number format and anchor; where a model's gates live.

    A larger |g_min| costs numerical range and buys nothing but faster forgetting.
    """

    run: Run = ""  # a run, a checkpoint or a safetensors file whose gates are looked at; none only sweeps
    g_min: float = -5.0  # the bound whose verdicts are listed; of a file's gates when nothing in it says
    tile: tuple[int, ...] = (16, 32, 64)  # rows
    format: tuple[str, ...] = ("fp16", "bf16", "tf32")  # of matrix operands; fp32 is known too
    head_dim: tuple[int, ...] = (64, 128)  # key channels
    length: tuple[int, ...] = (256, 1024)  # tokens of the sequences that errors are measured on
    gate_kind: Literal["", "bounded", "softplus"] = ""  # of a file's gates when nothing in it says
    tokens: int = 8_192  # of held-out text for a run's gates
    out: str = ""  # folder for calibration.json and the pictures; made when absent
    json: bool = False  # print JSON instead of tables


@dataclass(frozen=True)
class Migrate:
    """A run or a safetensors file with softplus gates, refitted to the bounded form; the source stays as it is."""

    what: Annotated[Positional[Literal["softplus-to-bounded"]], tyro.conf.arg(metavar="softplus-to-bounded")]
    source: Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]  # run, checkpoint or safetensors file
    out: Annotated[Positional[str], tyro.conf.arg(metavar="OUT")]  # new run's folder, or new file; must not exist
    g_min: float = -5.0  # lower bound of the new gates
    tokens: int = 8_192  # of held-out text: half is fitted on, half judges
    length: int = 1_024  # longest sequence of these
    inputs: str = ""  # for a file: safetensors with what each gated layer is given
    recover: float = 0.0  # train on for this share of the run's training tokens
    gates_first: float = 0.5  # share of that for the gates alone
    rate: float = 0.03  # of the run's peak learning rates while it recovers
    json: bool = False  # print the report as JSON


@dataclass(frozen=True)
class Tune:
    """Measure the launch parameters of an operator's kernels on this card; wrong candidates are refused."""

    operator: Annotated[Positional[Literal["kda"]], tyro.conf.arg(metavar="kda")]
    write: bool = False  # replace the committed table in this installation instead of only printing


@dataclass(frozen=True)
class Doctor:
    """What this machine offers a run, with one line of advice for each part."""

    json: bool = False  # print JSON instead of a table
    runs: str = "runs"  # folder whose disk is looked at


def parse_plan(args: Sequence[str]) -> Plan:
    """The run that `trine plan` looks ahead at; options and errors as of `parse_train`."""
    return parse("plan", Plan, args, Plan(_base(args, "plan"), _peek(args, "--config") or ""))


def parse_study(args: Sequence[str]) -> StudyConfig:
    """The study that a command line asks for, whose first word names it.

    Raises:
        Usage: there is no such study, or the options are wrong.
    """
    if not {"-h", "--help"} & set(args) and (not args or args[0] != "curriculum"):
        raise Usage(
            f"found {args[0] if args else 'nothing'!r}, need the name of a study: curriculum (see trine study --help)"
        )
    return parse("study curriculum", StudyConfig, list(args[1:]) if args and args[0] == "curriculum" else args)


@dataclass(frozen=True)
class Audit:
    """Audit implementations of Kimi Delta Attention: a verdict a probe, and the smallest input that shows a finding.

    Each target runs in a process of its own. Exit code 1 when anything was found. See docs/audit.md.
    """

    operator: Annotated[Positional[Literal["kda"]], tyro.conf.arg(metavar="kda")]  # what is audited
    # MODULE:FUNCTION, FILE.py:FUNCTION, a known name (see --list) or a library: trine, fla, transformers; "installed"
    # takes every known one that runs here; none audits Trine's own paths
    target: tuple[str, ...] = ()
    device: str = "cpu"  # cpu, cuda or cuda:NUMBER
    quick: bool = False  # fewer and smaller inputs
    probes: tuple[str, ...] = ()  # these only, by name
    timeout: float = 0.0  # seconds that one input may take before it counts as a hang; 0: 60 on a CPU, 120 on a card
    budget: float = 0.0  # seconds for all probes of a target; 0: 600 on a CPU, 240 on a card
    jobs: int = 0  # targets at a time; 0: two on a CPU, one on a card
    json: str = ""  # write the report here as JSON
    markdown: str = ""  # write it here as Markdown
    junit: str = ""  # write it here as JUnit XML
    list: bool = False  # print the known targets and the probes instead


def parse_train(args: Sequence[str]) -> TrainConfig:
    """The training run that a command line asks for: preset, file or stored run first, then the options over it.

    Raises:
        Usage: the command line is wrong.
        ValueError: the preset is unknown, or the file has a bad key or value.
        trine.train.errors.RunError: there is nothing to resume.
    """
    return parse("train", Train, args, Train(_base(args, "train"), _peek(args, "--config") or "")).plan


def _base(args: Sequence[str], verb: str) -> TrainConfig:
    """Where the values of options that are not given come from."""
    file, name = _peek(args, "--config"), _peek(args, "--preset")
    if file is not None and name is not None:
        raise Usage(f"--preset: the file given with --config names the preset (see trine {verb} --help)")
    base = load_toml(file) if file is not None else train_preset(name if name is not None else "laptop")
    if "--resume" in args and not {"-h", "--help"} & set(args):
        stored = _stored(base, run=_peek(args, "--run") or base.run, runs=_peek(args, "--runs") or base.runs)
        # A file that is given is meant: the run then refuses the first field in which it differs from its own plan.
        base = stored if file is None else dataclasses.replace(base, run=stored.run, runs=stored.runs, resume=True)
    return base


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
    keywords: Any = {"args": args, "prog": f"trine {verb}", "registry": _REGISTRY}
    keywords |= {} if default is None else {"default": default}
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
    return _in_our_words(wrong[0].removeprefix("Error parsing ").rstrip(".")), False


def _in_our_words(message: str) -> str:
    """What the parser says of a value, as we say it of others: what was found, what is needed, what is near."""
    for pattern, needed in (
        (r"(--\S+): invalid literal for int\(\) with base 10: (.*)", "a whole number"),
        (r"(--\S+): could not convert string to float: (.*)", "a number"),
    ):
        if match := re.fullmatch(pattern, message):
            return f"{match[1]}: found {match[2]}, need {needed}"
    match = re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", message)
    if match is None:
        return message
    try:
        need_one_of(match[2], match[1], [word.strip().strip("'") for word in match[3].split(",") if word.strip()])
    except ValueError as error:
        return str(error)
    return message


def dispatch(name: str, verbs: Mapping[str, Callable[[list[str]], int]], text: str, args: list[str]) -> int:
    """Run the verb that ``args`` begins with, of ``trine NAME VERB``; ``text`` is what --help prints.

    Raises:
        Usage: no such verb.
    """
    verb, rest = (args[0], args[1:]) if args else ("", [])
    if verb in ("-h", "--help", "help"):
        print(text, end="")
        return 0
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; need one of {', '.join(verbs)}"
        found = f"{verb!r}, which is no" if verb else "no"
        raise Usage(f"found {found} verb of trine {name}{hint}")
    return verbs[verb](rest)
