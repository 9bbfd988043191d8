"""The command line: what each verb prints, its exit code, and the one line that a mistake gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trine import __version__, _options, cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command line in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = cli.main(args)
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


PRESETS = "smoke, laptop, 130m, 400m, 1b, k3"

# A command line that is wrong, what stderr says (all of it), and the exit code. None of them leaves a file behind.
MISTAKES = [
    ("trian", "trine: no verb 'trian'; did you mean train?", 2),
    ("xyz", "trine: no verb 'xyz'; need one of train, generate, eval, info, doctor", 2),
    ("train --tokns 5", "trine train: no option --tokns; did you mean --tokens? (see trine train --help)", 2),
    ("train --tokns=5", "trine train: no option --tokns; did you mean --tokens? (see trine train --help)", 2),
    (
        "train --optimiser.rates.muon 1",
        "trine train: no option --optimiser.rates.muon; did you mean --optimizer.rates.muon? (see trine train --help)",
        2,
    ),
    ("train extra", "trine train: found 'extra', which nothing asks for (see trine train --help)", 2),
    (
        "train --tokens abc",
        "trine train: --tokens: invalid literal for int() with base 10: 'abc' (see trine train --help)",
        2,
    ),
    (
        "train --stages.0.length 200",
        "trine train: stages.micro_tokens: found 4096, need a multiple of the row length 200",
        1,
    ),
    (
        "train --device gpu",
        "trine train: invalid choice 'gpu' for argument '--device'. Expected one of ('auto', 'cpu', 'cuda') "
        "(see trine train --help)",
        2,
    ),
    (
        "train --preset laptpo",
        f"trine train: preset: found 'laptpo', need one of {PRESETS}; did you mean 'laptop'?",
        1,
    ),
    (
        "train --preset k3",
        "trine train: preset: 'k3' is a model without a training plan (plans: smoke, laptop); write one in a TOML file",
        1,
    ),
    (
        "train --model wdth=3",
        "trine train: model.wdth: no such field of ModelConfig; did you mean 'width'?",
        1,
    ),
    ("train --config nope.toml", "trine train: nope.toml: cannot be read (No such file or directory)", 1),
    (
        "train --config a.toml --preset smoke",
        "trine train: --preset: the file given with --config names the preset (see trine train --help)",
        2,
    ),
    ("train --resume", "trine train: runs: holds no run of preset 'laptop' to resume", 1),
    ("train --run mine --resume", "trine train: runs/mine: holds no run", 1),
    ("info --preset k33", f"trine info: preset: found 'k33', need one of {PRESETS}; did you mean 'k3'?", 1),
    ("info --jsn", "trine info: no option --jsn; did you mean --json? (see trine info --help)", 2),
    ("eval", "trine eval: missing: RUN (see trine eval --help)", 2),
    ("eval nothing --json", "trine eval: run: found no run in nothing", 1),
    ("generate", "trine generate: missing: RUN, --prompt (see trine generate --help)", 2),
    (
        "generate nothing --prompt",
        "trine generate: Missing value for argument '--prompt'. Expected 1 values (see trine generate --help)",
        2,
    ),
    ("generate nothing --prompt x", "trine generate: run: found no run in nothing", 1),
]


@pytest.mark.parametrize(("line", "message", "code"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_mistake_gets_one_line_its_exit_code_and_leaves_nothing(trine: Run, line: str, message: str, code: int) -> None:
    assert trine(*line.split()) == (code, "", message + "\n")
    assert list(Path().iterdir()) == []


def test_toml_file_with_an_unknown_key_is_refused_with_the_nearest(trine: Run) -> None:
    Path("a.toml").write_text("[optimizer.rates]\nmoun = 0.1\n")
    code, out, err = trine("train", "--config", "a.toml")
    assert (code, out) == (1, "")
    assert err == "trine train: a.toml: optimizer.rates.moun: no such key; did you mean optimizer.rates.muon?\n"


def test_options_go_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('preset = "smoke"\nseed = 7\ntokens = 8192\n')
    plan = _options.parse_train(["--config", str(file), "--tokens", "4096", "--optimizer.rates.muon=0.5"])
    assert (plan.preset, plan.seed, plan.tokens, plan.optimizer.rates.muon) == ("smoke", 7, 4096, 0.5)
    assert plan.data.vocabulary == 512  # the smoke plan's own


def test_preset_option_brings_its_whole_plan() -> None:
    plan = _options.parse_train(["--preset", "smoke", "--model", "width=96", "top_k=3"])
    assert plan.stages[0].length == 128
    assert (plan.model_config().width, plan.model_config().top_k) == (96, 3)
    assert _options.parse_train([]).preset == "laptop"


def test_run_is_found_by_path_and_by_name_and_near_names_are_offered(trine: Run) -> None:
    for name in ("laptop", "laptop-2"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "run.json").write_text("{}")
    assert cli._run_folder("laptop") == Path("runs/laptop")
    assert cli._run_folder("runs/laptop-2") == Path("runs/laptop-2")
    assert trine("eval", "laptp")[2] == "trine eval: run: found no run in laptp; did you mean laptop?\n"
    assert trine("eval", "xyz")[2] == "trine eval: run: found no run in xyz; runs/ has laptop, laptop-2\n"


def test_help_of_everything(trine: Run) -> None:
    code, out, err = trine("--help")
    assert (code, err) == (0, "")
    for verb in cli.VERBS:
        assert f"\n  {verb} " in out
        code, text, err = trine(verb, "--help")
        assert (code, err) == (0, "")
        assert text.startswith(f"usage: trine {verb} ")
    assert trine() == (2, "", out)
    assert trine("--version") == (0, f"trine {__version__}\n", "")


def test_help_and_usage_errors_load_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from trine import cli\n"
        "for line in (['--help'], ['train', '--tokns', '5'], ['train', '--help'], ['generate', '--help']):\n"
        "    try: cli.main(line)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'triton', 'transformers', 'tokenizers'} & set(sys.modules)))\n"
        "cli.main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "\n[]\n" in done.stdout
    only_help = "import sys; from trine import cli; cli.main(['--help']); print('tyro' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", only_help], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.endswith("False\n")


def test_info_counts_the_parts_of_a_preset(trine: Run) -> None:
    code, out, err = trine("info", "--preset", "k3", "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert sum(facts["parts"].values()) == facts["total"]
    assert facts["total"] / 1e12 == pytest.approx(2.7795, abs=5e-5)
    assert facts["active"] / 1e9 == pytest.approx(104.19, abs=5e-3)
    code, out, _ = trine("info", "--preset", "smoke")
    assert code == 0
    assert "routed experts" in out and "of latents a token" in out


def test_doctor_prints_every_part(trine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from trine import doctor

    monkeypatch.setattr(doctor, "busy_fraction", lambda: 0.0)
    code, out, err = trine("doctor", "--json")
    assert (code, err) == (0, "")
    assert set(json.loads(out)["checks"]) >= {"python", "torch", "triton", "card", "memory", "disk", "threads"}
    code, out, _ = trine("doctor")
    assert code == 0
    assert "python" in out and "advice" in out


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def verb(args: list[str]) -> int:
        raise error

    return verb


def test_errors_that_users_can_mend_are_one_line(trine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from trine.ops import BackendUnavailable
    from trine.train.errors import Interrupted, NumericStop

    cases: list[tuple[BaseException, int, str]] = [
        (ValueError("cu_seqlens: found a\n decrease"), 1, "cu_seqlens: found a decrease"),
        (ValueError(), 1, "ValueError"),
        (OSError(28, "No space left on device", "runs/a/eval.json"), 1, "runs/a/eval.json: No space left on device"),
        (PermissionError(13, "Permission denied"), 1, "Permission denied"),
        (BackendUnavailable("kda: backend 'triton' cannot run here"), 1, "kda: backend 'triton' cannot run here"),
        (NumericStop("three steps in a row were not finite"), 3, "three steps in a row were not finite"),
        (Interrupted("saved at step 7"), 130, "saved at step 7"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ]
    for error, code, message in cases:
        monkeypatch.setitem(cli.VERBS, "info", raising(error))
        assert trine("info") == (code, "", f"trine info: {message}\n")


def test_debug_logging_adds_the_traceback(trine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.VERBS, "info", raising(ValueError("a mistake")))
    level = cli.logger.level
    cli.logger.setLevel("DEBUG")
    try:
        code, _, err = trine("info")
    finally:
        cli.logger.setLevel(level)
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert err.endswith("trine info: a mistake\n")


def test_a_fault_of_ours_keeps_its_traceback(trine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.VERBS, "info", raising(KeyError("part")))
    with pytest.raises(KeyError):
        trine("info")


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m trine.cli --help | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("box", "line"),
    [
        ("", "cannot be understood"),
        ("╭─ x ─╮\n│ something new │\n╰─────╯\n", "something new"),
        ("\x1b[31m╭─ x ─╮\x1b[0m\n│ \x1b[1mError parsing --a:\x1b[0m bad. │\n╰─────╯\n", "--a: bad"),
    ],
)
def test_messages_of_an_unknown_form_still_come_through(box: str, line: str) -> None:
    assert _options.read_box(box) == (line, False)


def test_completion_script_reaches_stdout(trine: Run) -> None:
    code, out, err = trine("info", "--tyro-print-completion", "bash")
    assert (code, err) == (0, "")
    assert "complete" in out and "trine info" in out


def test_width_of_the_terminal_is_put_back(trine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trine("info", "--oops")
    assert os.environ["COLUMNS"] == "100"
    monkeypatch.delenv("COLUMNS")
    trine("info", "--oops")
    assert "COLUMNS" not in os.environ
