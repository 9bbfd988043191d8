"""The command line: what each verb prints, its exit code, and the one line that a mistake gets."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trine import __version__, _options, cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Verbs that compute have denormals flushed, for the whole process; other tests are not to notice."""
    yield
    torch.set_flush_denormal(False)


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
    ("xyz", f"trine: no verb 'xyz'; need one of {', '.join(cli.VERBS)}", 2),
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
        "trine train: --tokens: found 'abc', need a whole number (see trine train --help)",
        2,
    ),
    (
        "train --optimizer.rates.muon fast",
        "trine train: --optimizer.rates.muon: found 'fast', need a number (see trine train --help)",
        2,
    ),
    ("train --optimizer.rates.muon inf", "trine train: optimizer.rates.muon: found inf, need a finite number", 1),
    ("train --mtp nan", "trine train: mtp: found nan, need a finite number", 1),
    (
        "train --seed 99999999999999999999999",
        "trine train: seed: found 99999999999999999999999, need 0 to 2**63 - 1",
        1,
    ),
    (
        "train --model init_std=-1",
        "trine train: model.init_std: found -1.0, need None or a positive number",
        1,
    ),
    (
        "train --model tile=1 g_min=-50",
        "trine train: model.g_min: found -50.0, need tile * |g_min| < 88 (the range of float32), found 16 * 50 = 800",
        1,
    ),
    (
        "train --model residual=plian",
        "trine train: model.residual: found 'plian', need one of attn_res, plain, chunk, shallow_to_deep; "
        "did you mean 'plain'?",
        1,
    ),
    ("train --run a\0b", "trine train: run: found 'a\\x00b', need a plain folder name", 1),
    (
        "train --stages.0.length 200 --stages.0.micro-tokens 4096",
        "trine train: stages.micro_tokens: found 4096, need a multiple of the row length 200",
        1,
    ),
    (
        "train --device cdua",
        "trine train: --device: found 'cdua', need one of auto, cpu, cuda; did you mean 'cuda'? (see trine train "
        "--help)",
        2,
    ),
    (
        "train --preset laptpo",
        f"trine train: preset: found 'laptpo', need one of {PRESETS}; did you mean 'laptop'?",
        1,
    ),
    (
        "train --preset k3",
        "trine train: preset: 'k3' is a model without a training plan "
        "(plans: smoke, laptop, recall); write one in a TOML file",
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
    ("train --resume", "trine train: run: found no run of preset 'laptop' in runs", 1),
    ("train --run mine --resume", "trine train: run: found no run in runs/mine", 1),
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
    # the same words wherever a run is asked for
    for line, where in (
        ("train --run lptop --resume", "in runs/lptop; did you mean laptop?"),
        ("train --run xyz --resume", "in runs/xyz; runs/ has laptop, laptop-2"),
        ("train --preset smoke --resume", "of preset 'smoke' in runs; runs/ has laptop, laptop-2"),
        ("compare laptop xyz", "in xyz; runs/ has laptop, laptop-2"),
    ):
        assert trine(*line.split())[2] == f"trine {line.split()[0]}: run: found no run {where}\n"


def test_info_says_the_vocabulary_and_what_the_plan_makes_of_it(trine: Run) -> None:
    words = " ".join(trine("info", "--preset", "smoke")[1].split())
    assert "The vocabulary has 256 ids." in words
    assert "The training plan smoke learns 512 ids, which makes 500,966 parameters." in words
    words = " ".join(trine("info", "--preset", "laptop")[1].split())
    assert "The vocabulary has 4,096 ids." in words and "training plan" not in words
    assert json.loads(trine("info", "--preset", "smoke", "--json")[1])["vocabulary"] == 256


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


# ------------------------------------------------------------------------------- one small run, and what can befall it


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of two steps, made by the command line."""
    home = tmp_path_factory.mktemp("home")
    words, draw = ("alpha", "beta", "gamma", "return", "yield", "class"), random.Random(0)
    (home / "texts").mkdir()
    for i in range(30):
        text = " ".join(draw.choice(words) + str(draw.randrange(100)) for _ in range(200))
        (home / "texts" / f"{i}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("trine.train.machine.busy_warning", lambda: None)
        line = (
            "train --preset smoke --data.source texts --data.held-out-one-in 4 --data.vocabulary 320 --tokens 8192 "
            "--eval.context 128 --eval.sample-tokens 8"
        )
        assert cli.main(line.split()) == 0
    torch.set_flush_denormal(False)
    return home


@pytest.fixture
def home(small_run: Path, trine: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder to damage, as the working folder."""
    monkeypatch.setattr("trine.train.machine.busy_warning", lambda: None)
    copy = tmp_path / "home"
    shutil.copytree(small_run, copy)
    monkeypatch.chdir(copy)
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, but for the lock, which only says who holds it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_training_leaves_everything_in_the_folder_of_the_run(small_run: Path) -> None:
    run = small_run / "runs" / "smoke"
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert found >= {
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "tokenizer.json",
        "eval.json",
        "sample.txt",
        "report.md",
        "plots/overview.png",
        "checkpoints/step-000002/model.safetensors",
    }
    assert "## Held-out text" in (run / "report.md").read_text()


def test_training_shows_evaluation_sample_and_what_to_try_next(
    small_run: Path, trine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trine.train.machine.busy_warning", lambda: None)
    monkeypatch.chdir(small_run)
    code, out, err = trine("train", "--run", "smoke", "--resume")
    assert (code, err) == (0, "")
    assert "this model" in out and "xz -9" in out
    assert "report: runs/smoke/report.md" in out
    assert "generate runs/smoke --prompt" in out
    assert "resumed at step 2 of 2: nothing left to train" in out


def test_evaluating_a_run_gives_the_numbers_it_ended_with(home: Path, trine: Run) -> None:
    before = contents(home)
    code, out, err = trine("eval", "smoke", "--json")
    assert (code, err) == (0, "")
    found, kept = json.loads(out), json.loads((home / "runs/smoke/eval.json").read_text())
    assert found["bits_per_byte"] == pytest.approx(kept["bits_per_byte"], abs=1e-9)
    assert {"gzip", "xz", "ngram3", "ngram_best"} <= found["baselines"].keys()
    after = contents(home)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"runs/smoke/eval.json", "runs/smoke/report.md"}  # renewed, with its own time
    code, out, _ = trine("eval", "runs/smoke")
    assert code == 0
    assert f"{kept['bits_per_byte']:.3f}" in out


def test_generating_streams_the_same_text_it_gives_at_once(home: Path, trine: Run) -> None:
    code, whole, err = trine("generate", "smoke", "--prompt", "alpha", "--max-tokens", "12")
    assert (code, err) == (0, "")
    assert whole.startswith("alpha") and whole.endswith("\n")
    assert trine("generate", "smoke", "--prompt", "alpha", "--max-tokens", "12", "--stream") == (0, whole, "")
    hot = ["generate", "smoke", "--prompt", "alpha", "--max-tokens", "12", "--temperature", "1", "--seed"]
    assert trine(*hot, "1")[1] == trine(*hot, "1")[1] != trine(*hot, "2")[1]
    assert trine("generate", "smoke", "--prompt", "", "--max-tokens", "3")[0] == 0
    code, _, err = trine("generate", "smoke", "--prompt", "a", "--top-p", "2")
    assert (code, err) == (1, "trine generate: top_p: found 2.0, need more than 0 and at most 1\n")


def test_two_runs_in_one_folder_are_refused_and_nothing_changes(home: Path, trine: Run) -> None:
    before = contents(home)
    code, _, err = trine("train", "--preset", "smoke", "--run", "smoke")
    message = "runs/smoke: holds a run already; add --resume to go on with it, or choose another --run"
    assert (code, err) == (1, f"trine train: {message}\n")
    assert contents(home) == before


def test_resuming_with_another_plan_is_refused(home: Path, trine: Run) -> None:
    before = contents(home)
    code, _, err = trine("train", "--run", "smoke", "--resume", "--seed", "4")
    message = "runs/smoke: cannot resume with another plan: seed: found 4, the stored run has 0; start a new run for it"
    assert (code, err) == (1, f"trine train: {message}\n")
    assert contents(home) == before


def test_resuming_with_a_file_of_another_plan_is_refused(home: Path, trine: Run) -> None:
    stored = json.loads((home / "runs/smoke/run.json").read_text())["config"]
    plan = f'preset = "smoke"\ntokens = {stored["tokens"] + 4096}\n'
    (home / "other.toml").write_text(plan)
    before = contents(home)
    code, _, err = trine("train", "--run", "smoke", "--resume", "--config", "other.toml")
    assert code == 1 and err.startswith("trine train: runs/smoke: cannot resume with another plan: ")
    assert contents(home) == before


def test_corrupt_checkpoint_is_named(home: Path, trine: Run) -> None:
    file = home / "runs/smoke/checkpoints/step-000002/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    where = "checkpoint runs/smoke/checkpoints/step-000002"
    for line in ("eval smoke", "generate smoke --prompt a"):
        code, out, err = trine(*line.split())
        assert (code, out) == (1, "")
        assert err == f"trine {line.split()[0]}: {where}: model.safetensors is damaged (its checksum does not fit)\n"
    file.write_bytes(data[:100])
    code, _, err = trine("eval", "smoke")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"trine eval: {where}: model.safetensors is damaged (100 bytes, need ")
    file.unlink()
    assert trine("eval", "smoke")[2] == f"trine eval: {where}: half-written, model.safetensors is missing\n"


def test_run_without_checkpoint_record_or_data_is_named(home: Path, trine: Run) -> None:
    run = home / "runs" / "smoke"
    (run / "data" / "manifest.json").unlink()
    code, _, err = trine("eval", "smoke")
    assert (code, err.count("\n")) == (1, 1)
    assert "runs/smoke/data" in err
    shutil.rmtree(run / "checkpoints")
    assert trine("eval", "smoke")[::2] == (1, "trine eval: runs/smoke: has no checkpoint yet\n")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "format_version": 99}))
    newer = "runs/smoke/run.json: format_version 99 is newer than 1, the newest this version reads"
    assert trine("eval", "smoke")[::2] == (1, f"trine eval: {newer}\n")
    (run / "run.json").write_text('{"format_ver')
    code, _, err = trine("eval", "smoke")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("trine eval: runs/smoke/run.json: damaged (")


def test_no_data_is_named_and_no_run_is_begun(trine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trine.train.machine.busy_warning", lambda: None)
    Path("empty").mkdir()
    for source in ("empty", "missing"):
        code, _, err = trine("train", "--preset", "smoke", "--data.source", source)
        assert (code, err.count("\n")) == (1, 1)
        assert err.startswith("trine train: ") and source in err
        assert not Path("runs").exists()
