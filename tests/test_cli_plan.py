"""`trine plan`, `trine compare`, `trine study` and mixtures on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trine import cli
from trine._options import Usage, parse_plan, parse_study, parse_train
from trine.config import SourceShare


def test_mixtures_are_given_as_words() -> None:
    words = ["--preset", "laptop", "--stages.0.mixture", "*=0.7@-100", "*=0.3..0.5@101-", "--mtp", "0.2"]
    config = parse_train(words)
    assert config.stages[0].mixture == (SourceShare("*", 0.7, longest=100), SourceShare("*", 0.3, 0.5, shortest=101))
    assert config.stages[1].mixture[0].longest == 1_023 and len(config.stages) == 4 and config.mtp == 0.2


def test_a_bad_part_is_refused_in_one_line() -> None:
    with pytest.raises((Usage, ValueError)) as error:
        parse_train(["--stages.0.mixture", "a=b"])
    assert "a=b" in str(error.value) and "\n" not in str(error.value)


def test_plan_takes_the_options_of_train() -> None:
    options = parse_plan(["--preset", "smoke", "--tokens", "8192", "--no-measure", "--json"])
    assert (options.plan.tokens, options.measure, options.json) == (8_192, False, True)
    with pytest.raises(Usage, match="no option --tokenz"):
        parse_plan(["--tokenz", "3"])


def test_a_study_is_named_first() -> None:
    assert parse_study(["curriculum", "--preset", "laptop", "--budget", "5"]).budget == 5.0
    for args in ([], ["lengths"]):
        with pytest.raises(Usage, match="need the name of a study: curriculum"):
            parse_study(args)


def test_plan_prints_json_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.py").write_text(f"value_{number} = {number}\n" * 40)
    words = ["plan", "--preset", "smoke", "--runs", str(tmp_path / "runs"), "--data.source", str(folder)]
    words += ["--data.vocabulary", "280", "--tokens", "8192", "--no-measure", "--allow-repeats"]
    assert cli.main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["steps"] == 2 and found["stages"][0]["length"] == 128 and found["seconds"] is None
    assert cli.main(words) == 0
    assert "2 steps, 8.19 K tokens" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_compare_needs_two_runs_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(tmp_path / "no"), str(tmp_path / "never")]) == 1
    assert "found no run in" in capsys.readouterr().err
