"""`trine balance`: what each verb prints, its exit code, and the one line that a mistake gets."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

from trine import cli
from trine.balance import AsyncBalancing, QuantileBalancing
from trine.balance.analyze import analyze
from trine.balance.saved_loads import Loads
from trine.balance.stress import Recovery
from trine.ops.router import RouterStats, route
from trine.views.balance import analysis_table, recovery_table

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def balance(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `trine balance ...` in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TRINE_BALANCE_KEY", raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["balance", *args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_help_lists_the_verbs_and_each_has_its_own(balance: Run) -> None:
    code, out, _ = balance("--help")
    assert code == 0 and all(f"  {verb}" in out for verb in ("analyze", "stress", "serve"))
    for verb in ("analyze", "stress", "serve"):
        code, out, _ = balance(verb, "--help")
        assert code == 0 and "usage: trine balance " + verb in out
    code, _, err = balance("analyse")
    assert code == 2 and "no verb of trine balance; did you mean analyze?" in err
    code, _, err = balance()
    assert code == 2 and err.startswith("trine balance: found no verb of trine balance; need one of analyze, stress")


def shown(table: Table, width: int) -> str:
    """A table as a terminal of this width has it."""
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def whole(table: Table, width: int) -> None:
    """Every number and word of the table stands in it whole at this width."""
    text = shown(table, width).split()
    wanted = [word for column in table.columns for cell in column.cells for word in str(cell).split()]
    assert wanted and all(word in text for word in wanted) and "…" not in "".join(text), shown(table, width)


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (896, 1), (8, 4), (896, 4)])
def test_nothing_of_an_analysis_is_cut_at_80_columns(experts: int, ranks: int) -> None:
    share_E = np.r_[np.full(experts - 3, 1.0), [40.0, 30.0, 20.0]]
    loads = np.random.default_rng(0).multinomial(200 * experts, share_E / share_E.sum(), size=(24, 2))
    found = analyze(Loads("runs/a-run-with-a-long-name", np.arange(1, 25), loads), ranks)
    whole(analysis_table(found), 80)


def test_nothing_of_a_recovery_is_cut_at_80_columns() -> None:
    """The last column was lost, and it is the result."""
    paths = [("load_quantile", None), ("qb", 12)]
    found = [Recovery(name, 14.875, (14.88,) * 41, 0.12, steps) for name, steps in paths]
    table = recovery_table(found, "8192 tokens, 64 experts, 4 a token")
    whole(table, 80)
    assert "not in 40" in shown(table, 80) and "steps to" in shown(table, 80)


def test_analyze(balance: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = np.random.default_rng(0).multinomial(8000, np.r_[0.3, np.full(7, 0.1)], size=(30, 2))
    np.save(tmp_path / "loads.npy", loads)
    code, out, _ = balance("analyze", "loads.npy", "--ranks", "4")
    assert code == 0
    for part in (
        "loads.npy: steps 1 to 30, 8 experts",
        "lasting",
        "1.40 (0.0",
        "0:2.40",
        "Experts are uneven in layers 0, 1: MaxVio 1.4",
        "Ranks are uneven in layers 0, 1: the fullest of 4 ranks has 1.6",
        "Alert max_vio would have begun at step 20",
    ):
        assert part in out, out
    monkeypatch.setenv("COLUMNS", "40")
    assert balance("analyze", "loads.npy", "--ranks", "4")[1] == out, "a pipe has no width"
    (tmp_path / "runs" / "named").mkdir(parents=True)
    assert "runs/named: found no balance.sqlite" in balance("analyze", "named")[2]  # a run by its name
    code, out, _ = balance("analyze", "loads.npy", "--json", "--last", "5")
    found = json.loads(out)
    assert code == 0 and found["first"] == 26 and found["layers"][1]["uneven"] and found["verdict"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("analyze", "absent.npy"), "trine balance: absent.npy: no such run or file"),
        (("analyze", "absent"), "trine balance: absent: no such run or file"),
        (
            ("analyze", "."),
            "trine balance: .: found no balance.sqlite in it, it is no run's folder; need a recorded run",
        ),
        (("stress", "--k", "90"), "k: found 90, need 1 <= k <= 64"),
        (("stress", "--max-vio", "100"), "max_violation: found 100.0, need 0 to 15"),
        (("stress", "--max-vio"), "max-vio: found no value, need at least one"),
        (("stress", "--policies"), "policies: found no value, need at least one"),
        (("stress", "--k", "64"), "k: found 64, need less than 64, the number of experts: all loads are equal"),
        (("serve", "--threads", "0"), "threads: found 0, need at least 1"),
        (("serve",), "key: found none, need a file of at least 16 bytes or TRINE_BALANCE_KEY"),
        (("serve", "--address", "0.0.0.0:1"), "the service is for this machine only"),
    ],
)
def test_mistakes_get_one_line(balance: Run, args: tuple[str, ...], message: str) -> None:
    code, out, err = balance(*args)
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1, err


def test_stress(balance: Run) -> None:
    sizes = ("--tokens", "1024", "--experts", "16", "--k", "2", "--steps", "6")
    code, out, _ = balance("stress", *sizes, "--max-vio", "2.0", "--policies", "qb", "freeze")
    assert code == 0 and out.count("after") == 4 and "not in 6" in out
    code, out, _ = balance("stress", *sizes, "--max-vio", "2.0", "--policies", "qb", "--json")
    (found,) = json.loads(out)
    assert (found["policy"], found["steps"] in (1, 2)) == ("qb", True) and len(found["path"]) == 7
    code, out, _ = balance("stress", "--what", "experts", *sizes, "--max-vio", "1.0", "--repeats", "1")
    assert code == 0 and "times even" in out and "1.000" in out
    assert balance("stress", "--policies", "aux")[0] == 2
    small = ("--steps", "5", "--tokens", "2048", "--experts", "16", "--policies", "qb", "--json")
    code, out, err = balance("stress", *small)  # 4.0 of the usual sweep cannot be
    assert (code, [one["max_violation"] for one in json.loads(out)]) == (0, [0.2, 1.0]), err


def test_serve_names_the_address_it_cannot_have(balance: Run, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    (tmp_path / "key").chmod(0o600)
    code, out, err = balance("serve", "--key", "key", "--address", f"unix:{tmp_path}/absent/s")
    assert (code, out) == (1, "")
    assert err == f"trine balance: unix:{tmp_path}/absent/s: cannot listen there (No such file or directory)\n"


def test_serve_prints_its_address_and_answers_until_interrupted(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    command = [sys.executable, "-m", "trine.cli", "balance", "serve", "--key", str(key)]
    # A shell's background jobs are started with interrupts ignored, and hand that on.
    service = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert service.stdout is not None
    line = service.stdout.readline()
    assert line.startswith("balance service at 127.0.0.1:"), line
    policy = AsyncBalancing(QuantileBalancing(2), line.split()[-1], key=str(key), lag=0, seconds=60.0)
    stats = RouterStats.allocate(1, 8, 50)
    route(torch.randn(64, 8), stats.bias_LE[0], 2, stats=stats.layer(0))
    policy.step(stats)
    assert policy.status().answered == 1 and stats.bias_LE.any()
    policy.close()
    service.send_signal(signal.SIGINT)
    _, err = service.communicate(timeout=60)
    assert service.returncode == 130 and err == "trine balance: interrupted\n"
