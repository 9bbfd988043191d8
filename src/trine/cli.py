"""`trine VERB`: the command line. Thin: it parses, calls the package once, and prints.

Exit codes: 0 done, 1 the user's error (one line on stderr), 2 usage, 3 numeric stop, 130 interrupted and saved.
Nothing heavy is loaded until a verb needs it. TRINE_LOG=debug adds tracebacks.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trine import __version__
from trine._log import logger

OK, USER_ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130

HELP = """\
usage: trine VERB [options]

Trains and runs models with the design of Kimi K3.

  train      train a model, evaluate it, let it write; all in runs/NAME
  plan       what a run would read, take and need on this machine, without training
  compare    what runs were set to differently, and their curves side by side
  study      curriculum: is it worth training short before long? three arms, several seeds
  generate   continue a text with a trained model
  eval       bits per byte, loss by position, tasks by depth and length: all that is measured of a run
  info       parameters of a preset, part by part, and the memory a sequence takes
  calibrate  which lower bound of the decay gates fits which tile and number format; where gates live
  migrate    softplus-to-bounded: a checkpoint with softplus gates in the bounded form, with a drift report
  audit      probe an implementation of KDA, ours or anyone's, for known faults
  balance    what saved expert loads say, forced imbalance, and the balancing service
  dash       a page in the browser: experts, depth, gates and training of runs, live
  data       sources by name, recipes that fetch text, a look at packed rows
  tune       measure the launch parameters of the kernels on this card, and refuse wrong ones
  doctor     what this machine offers, with advice

trine VERB --help tells the options of one. Environment: TRINE_LOG=debug|info|warning (default warning).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default `sys.argv`) and return its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    verb, rest = (args[0], args[1:]) if args else ("", [])
    if verb in VERBS:
        with _log_to_stderr():
            return _guarded(f"trine {verb}", lambda: VERBS[verb](rest))
    return _guarded("trine", lambda: _without_verb(verb))


def _without_verb(word: str) -> int:
    """The command line began with `word`, which is no verb."""
    if word in ("-h", "--help", "help"):
        print(HELP, end="")
        return OK
    if word == "--version":
        print(f"trine {__version__}")
        return OK
    if not word:
        print(HELP, end="", file=sys.stderr)
        return USAGE
    near = difflib.get_close_matches(word, VERBS, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; need one of {', '.join(VERBS)}"
    return _fail("trine", f"no verb {word!r}{hint}", USAGE)


def _guarded(prog: str, work: Callable[[], int]) -> int:
    """Turn the errors that users can mend into one line and an exit code; anything else is a fault of ours."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is wrong, and nothing more can be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USER_ERROR
    except Exception as error:
        given = getattr(error, "exit_code", None)
        if given is None and not isinstance(error, (ValueError, OSError)) and type(error).__name__ not in _MENDABLE:
            raise
        logger.debug("%s", error, exc_info=True)
        return _fail(prog, _one_line(error), USER_ERROR if given is None else given)


# By name, so that the classes need not be loaded: they live beside torch.
_MENDABLE = frozenset({"BackendUnavailable", "OutOfMemoryError"})


def _fail(prog: str, message: str, code: int) -> int:
    print(f"{prog}: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("trine: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _train(args: list[str]) -> int:
    from trine._options import parse_train

    plan = parse_train(args)
    from rich.console import Console

    from trine.train.loop import train
    from trine.views.report import next_commands, write_report
    from trine.views.report_eval import evaluation_tables

    console = Console()
    summary = train(plan, console)
    report = write_report(summary.folder)
    for table in evaluation_tables(summary.evaluation or {}):
        console.print(table)
    if summary.sample is not None:
        console.rule("what it writes", align="left")
        console.print(summary.sample, markup=False, highlight=False, soft_wrap=not console.is_terminal)
        console.rule()
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    console.print("Next:")
    for command, why in next_commands(summary.folder):
        console.print(f"  {command}\n      {why}", markup=False, highlight=False, soft_wrap=True)
    return OK


def _plan(args: list[str]) -> int:
    from trine._options import parse_plan

    options = parse_plan(args)
    from trine.train.machine import prepare_machine

    prepare_machine(options.plan.threads)
    from trine.train.rehearse import forecast

    found = forecast(options.plan, measure=options.measure)
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        from trine.views.compare import forecast_table

        _show(forecast_table(found.to_json()))
    return OK


def _compare(args: list[str]) -> int:
    from trine._options import Compare, parse

    options = parse("compare", Compare, args)
    folders = [_run_folder(name) for name in options.runs]
    from trine.views import figures
    from trine.views.compare import compare, comparison_table

    found = compare(folders)
    picture = figures.save(figures.compare(found.names, found.metrics), Path(options.picture))
    if options.json:
        print(json.dumps({**found.to_json(), "picture": str(picture)}))
    else:
        _show(comparison_table(found))
        print(f"curves: {picture}")
    return OK


def _study(args: list[str]) -> int:
    from trine._options import parse_study

    options = parse_study(args)
    from trine.train.machine import prepare_machine

    prepare_machine(options.threads)
    from rich.console import Console

    from trine.train.study import run_study
    from trine.views.study import study_table, write_study

    console = Console()
    found = run_study(options, console)
    console.print(study_table(found))
    console.print(f"page: {write_study(found, Path(options.folder))}", markup=False, highlight=False)
    return OK


def _generate(args: list[str]) -> int:
    from trine._options import Generate, parse

    options = parse("generate", Generate, args)
    folder = _run_folder(options.run)
    from trine.train.machine import prepare_machine

    prepare_machine()
    from trine.engine import Sampling, generate
    from trine.train.stored import load_run

    sampling = Sampling(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=options.stop,
        seed=options.seed,
    )
    run = load_run(folder)
    end = run.tokenizer.eod_id
    print(options.prompt, end="", flush=True)
    (done,) = generate(
        run.model,
        # Every document of the training data came after this token, so a prompt does too.
        [[end, *run.tokenizer.encode(options.prompt)]],
        sampling,
        tokenizer=run.tokenizer,
        end_token=end,
        on_text=_print_piece if options.stream else None,
    )
    print("" if options.stream else done.text)
    return OK


def _print_piece(_: int, text: str) -> None:
    print(text, end="", flush=True)


def _eval(args: list[str]) -> int:
    from trine._options import Eval, parse

    options = parse("eval", Eval, args)
    folder = _run_folder(options.run)
    from trine.train.machine import prepare_machine

    settings = prepare_machine()
    from rich.console import Console

    from trine.train.finish import evaluate_run
    from trine.views.report import write_report
    from trine.views.report_eval import evaluation_tables

    console = Console(stderr=options.json)
    result = evaluate_run(folder, lengths=options.lengths, threads=settings["threads"], console=console)
    report = write_report(folder)
    if options.json:
        print(json.dumps(result))
    else:
        for table in evaluation_tables(result):
            console.print(table)
        console.print(f"report: {report}", markup=False, highlight=False)
    return OK


def _info(args: list[str]) -> int:
    from trine._options import Info, parse

    options = parse("info", Info, args)
    from trine.config import preset
    from trine.train.config import TRAIN_PRESETS

    config = preset(options.preset)
    plan = TRAIN_PRESETS[options.preset].model_config() if options.preset in TRAIN_PRESETS else config
    from trine.model import info

    facts = {"vocabulary": config.vocab_size, **info(config)}
    if options.json:
        print(json.dumps({"preset": options.preset, **facts}))
    else:
        from trine.views.tables import model_table

        planned = (plan.vocab_size, info(plan)["total"]) if plan != config else None
        _show(model_table(options.preset, facts, planned))
    return OK


def _calibrate(args: list[str]) -> int:
    from trine._options import Calibrate, parse

    options = parse("calibrate", Calibrate, args)
    from trine.train.machine import prepare_machine

    prepare_machine()
    from trine.decay import calibrate, calibrate_report

    bounds = tuple(sorted({*calibrate.Grid().g_min, options.g_min}, reverse=True))
    grid = calibrate.Grid(
        g_min=bounds, tile=options.tile, format=options.format, head_dim=options.head_dim, length=options.length
    )
    result = calibrate.calibrate(
        grid,
        _run_or_file(options.run) if options.run else None,
        kind=options.gate_kind or None,
        g_min=options.g_min,
        tokens=options.tokens,
    )
    if options.json:
        print(json.dumps(result))
    else:
        for table in calibrate_report.tables(result, options.g_min):
            _show(table)
        print("\n".join((*result["recommendation"], result["note"], calibrate_report.check_line(result))))
    if options.out:
        from trine.views import figures, figures_decay

        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        calibrate.save_json(result, folder / "calibration.json")
        figures.save(figures_decay.decay_limits(result, options.g_min), folder / "limits.png")
        if result["gates"] is not None:
            figures.save(figures_decay.gate_memory(result["gates"]), folder / "gates.png")
    return USER_ERROR if result["brute_force"]["disagreements"] else OK


def _migrate(args: list[str]) -> int:
    from trine._options import Migrate, parse

    options = parse("migrate", Migrate, args)
    from trine.train.machine import prepare_machine

    settings = prepare_machine()
    from rich.console import Console

    from trine.decay import migrate, migrate_report

    console = Console(stderr=True)
    report = migrate.softplus_to_bounded(
        _run_or_file(options.source),
        options.out,
        g_min=options.g_min,
        tokens=options.tokens,
        length=options.length,
        inputs=options.inputs or None,
        recovery=migrate.Recovery(options.recover, options.gates_first, options.rate),
        workers=settings["threads"],
        say=lambda line: console.print(line, markup=False, highlight=False),
    )
    if options.json:
        print(json.dumps(report))
    else:
        _show(migrate_report.drift_table(report))
        print("\n".join((*migrate_report.lines(report), f"wrote {report['out']}")))
    return OK


def _balance(args: list[str]) -> int:
    from trine._balance_verbs import main as balance

    return balance(args)


def _dash(args: list[str]) -> int:
    from trine._dash_verb import main as dash

    return dash(args)


def _data(args: list[str]) -> int:
    from trine._data_verbs import main as data

    return data(args)


def _doctor(args: list[str]) -> int:
    from trine._options import Doctor, parse

    options = parse("doctor", Doctor, args)
    from trine import doctor

    checks = doctor.examine(Path(options.runs))
    if options.json:
        print(json.dumps(doctor.as_json(checks)))
    else:
        _show(doctor.as_table(checks))
    return OK


def _audit(args: list[str]) -> int:
    from trine._options import Audit, parse

    options = parse("audit", Audit, args)
    from trine.decay.audit.command import run

    return run(options)


def _tune(args: list[str]) -> int:
    from trine._options import Tune, parse

    options = parse("tune", Tune, args)
    from trine.ops.kda._choice import tune_kda

    tune_kda(print, write=options.write)
    return OK


def _run_folder(name: str) -> Path:
    """A run given by path, or by its name in runs/.

    Raises:
        RunError: there is no such run; names the nearest.
    """
    for folder in (Path(name), Path("runs") / name):
        if (folder / "run.json").is_file():
            return folder
    from trine.train.errors import no_run

    raise no_run(name, Path("runs"))


def _run_or_file(name: str) -> Path:
    """A safetensors file or a checkpoint by path, else a run as `_run_folder` finds it."""
    path = Path(name)
    given = path.is_file() or path.suffix == ".safetensors" or path.parent.name == "checkpoints"
    return path if given else _run_folder(name)


def _show(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "compare": _compare,
    "study": _study,
    "generate": _generate,
    "eval": _eval,
    "info": _info,
    "calibrate": _calibrate,
    "migrate": _migrate,
    "audit": _audit,
    "balance": _balance,
    "dash": _dash,
    "data": _data,
    "tune": _tune,
    "doctor": _doctor,
}


if __name__ == "__main__":
    sys.exit(main())
