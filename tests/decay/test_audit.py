"""The audit's own parts: the definition, limits, targets by signature, processes of their own, reports, card logic."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trine import cli
from trine.decay.audit import PROBES, Case, Lab, Target, TargetError, Verdict, audit, examine, load, replay, select
from trine.decay.audit.adaptors import ADAPTORS, expand, names, own
from trine.decay.audit.inputs import Fault, Inputs, Loss, define, draw
from trine.decay.audit.lab import Poison, error
from trine.decay.audit.probes.card import diagonal_text, judge_cliff, only_in, profiled, with_slowest
from trine.decay.audit.report import as_dict, as_junit, as_markdown, as_renderable, seen
from trine.decay.audit.runner import Report
from trine.decay.audit.target import adapt
from trine.ops.kda import kda, kda_reference

BAD = """
import ctypes, os, sys, time
import torch
from trine.ops.kda import kda

def good(*tensors, **keywords):
    return kda(*tensors, backend="torch", **keywords)

def crashes(*tensors, **keywords):
    if "cu_seqlens" in keywords:
        ctypes.string_at(0)
    return good(*tensors, **keywords)

def hangs(*tensors, **keywords):
    if tensors[0].shape[1] == 17:
        time.sleep(1000)
    return good(*tensors, **keywords)

def leaves(*tensors, **keywords):
    os._exit(7)

def stranger(x, y):
    return x

def other_shape(q, k, v, g, beta, cu_seqlens=None):
    return v[:, :, :1] * 2

def not_a_number(q, k, v, g, beta):
    return v * float("nan")

def objects(q, k, v, g, beta):
    return "done"

def picky(q, k, v, g, beta, *, mask):
    return v

def aborts(*tensors, **keywords):
    if "cu_seqlens" in keywords:
        os.abort()
    return good(*tensors, **keywords)

GONE = []

def loses_the_card(*tensors, **keywords):
    if tensors[0].shape[1] == 17:
        GONE.append(True)
    if GONE:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return good(*tensors, **keywords)

def talks(*tensors, **keywords):
    print("{" * 10_000, flush=True)
    print("\\xff garbage " * 10_000, file=sys.stderr, flush=True)
    return good(*tensors, **keywords)

def half(q, k, v, g, beta):
    return v.bfloat16()

def integers(q, k, v, g, beta):
    return v.long()

def quits(*tensors, **keywords):
    sys.exit("no licence")

VALUE = 3
"""


@pytest.fixture
def bad(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "bad_kda.py"
    file.write_text(BAD)
    return lambda name: f"{file}:{name}"


# The definition -----------------------------------------------------------------------------------------------------


def test_B002_the_definition_at_values_worked_by_hand() -> None:
    # MLX's reported case: one token, decays 1/2 and 1/4, beta 1/2.
    t = {"q": [0.6, 0.8], "k": [1.0, 0.0], "v": [10.0, 20.0], "gate": [math.log(0.5), math.log(0.25)]}
    tensors = {n: torch.tensor(x, dtype=torch.float64).view(1, 1, 1, 2) for n, x in t.items()}
    tensors |= {"beta": torch.full((1, 1, 1), 0.5, dtype=torch.float64)}
    tensors |= {"initial_state": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).view(1, 1, 2, 2)}
    found = define(Inputs("activated", tensors))
    torch.testing.assert_close(found.out.flatten(), torch.tensor([2.651650, 5.020458]).double(), atol=1e-6, rtol=0)
    assert found.state is not None
    torch.testing.assert_close(found.state[0, 0], torch.tensor([[5.25, 10.5], [0.75, 1.0]]).double())
    early = define(Inputs("activated", tensors), fault=Fault(early=True)).state
    assert early is not None
    torch.testing.assert_close(early[0, 0], torch.tensor([[5.0, 10.0], [0.75, 1.0]]).double())


@pytest.mark.parametrize(
    "case", [Case(groups=2, gates="slow"), Case(lengths=(5, 0, 1, 9), packed=True), Case((0, 0), True)]
)
def test_the_definition_agrees_with_the_operator_written_apart_from_it(case: Case) -> None:
    x = draw(case, "raw", torch.float64)
    leaves = {n: t.double().requires_grad_() for n, t in x.tensors.items()}
    cu = None if x.cu_seqlens is None else torch.tensor(x.cu_seqlens)
    out, state = kda_reference(**leaves, cu_seqlens=cu, output_final_state=True)
    assert state is not None
    loss = Loss()
    loss(out, state, x.cu_seqlens).backward()
    expected = define(x, loss)
    assert error(out, expected.out, "output") < 1e-13
    assert error(state, expected.state, "final state") < 1e-13  # type: ignore[arg-type]
    for name, leaf in leaves.items():
        have = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert error(have, expected.grads[name], name, expected.sizes.get(name)) < 1e-12, name


def test_recipes_reach_the_values_they_are_named_for() -> None:
    def decays(gates: str) -> torch.Tensor:
        return draw(Case(gates=gates, lengths=(20,)), "activated", torch.float32)["gate"]

    assert bool((decays("bound") == -5.0).all())
    assert not decays("zero").any()
    assert bool((decays("saturated") < -4.99).all())
    still = decays("still-channel")
    assert not still[..., 0].any()
    assert bool((still[..., 1:] == -5.0).all())
    assert [bool(row.any()) for row in decays("alternate")[0, :4]] == [False, True, False, True]
    with pytest.raises(ValueError, match="recipe"):
        decays("nonsense")


def test_weights_of_a_longer_row_begin_with_those_of_a_shorter_one() -> None:
    total = Loss(before=5)
    short, long = torch.randn(2, 5, 2, 3), torch.randn(2, 900, 2, 3)
    long[:, :5] = short
    assert torch.equal(total(short, None, None), total(long, None, None))


def test_error_is_of_the_worst_head_and_infinite_for_nan() -> None:
    want = torch.ones(1, 4, 2, 3)
    have = want.clone()
    have[:, :, 1] *= 1.01
    assert error(have, want, "output") == pytest.approx(0.01, rel=1e-4)
    have[0, 0, 0, 0] = float("nan")
    assert error(have, want, "output") == math.inf
    assert error(torch.zeros(0, 2), torch.zeros(0, 2), "output") == 0.0


def test_poison_fills_what_is_handed_out_unwritten() -> None:
    with Poison(float("nan")):
        a, b = torch.empty(3), torch.empty_like(torch.ones(2, 2))
        c, d = torch.zeros(2).new_empty(4), torch.empty(2, dtype=torch.int32)
        e = torch.ones(3) + 1
    assert all(bool(t.isnan().all()) for t in (a, b, c))
    assert bool((d == torch.iinfo(torch.int32).max).all())
    assert bool((e == 2).all())


# Targets ------------------------------------------------------------------------------------------------------------


def test_a_signature_says_how_a_function_is_called() -> None:
    def activated(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None) -> Any: ...

    def fla(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        lower_bound: Any = None, cu_seqlens: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return kwargs, use_gate_in_kernel, output_final_state

    assert adapt("x", activated).form == "activated"
    assert adapt("x", activated).keywords == {"scale", "initial_state"}
    assert adapt("x", kda).form == "raw"
    assert adapt("x", kda).keywords == {"A_log", "dt_bias", "lower_bound", "scale", "initial_state", "cu_seqlens"}
    target = adapt("x", fla)
    assert target.form == "raw"
    assert target.keywords == {"A_log", "dt_bias", "lower_bound", "scale", "initial_state", "cu_seqlens"}
    assert target.run(*[None] * 5, A_log=1) == ({"A_log": 1}, True, True)
    with pytest.raises(TargetError, match="need q, k, v, gate and beta first"):
        adapt("x", lambda a, b: None)
    with pytest.raises(TargetError, match="form: found 'sideways'"):
        Target("x", kda, form="sideways")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "need MODULE:FUNCTION or one of trine:reference"),
        ("no_such_module_anywhere:f", "cannot import no_such_module_anywhere: ModuleNotFoundError"),
        ("nothere.py:f", "no file nothere.py"),
        ("math:nothing", "module math has no 'nothing'"),
        ("math:pi", "math:pi is a float, need a function"),
        ("math:sqrt", "takes (x), need q, k, v, gate and beta first"),
    ],
)
def test_a_target_that_is_none_is_told_in_one_line(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=re.escape(message)) as raised:
        load(name)
    assert "\n" not in str(raised.value)


def test_a_function_that_returns_a_target_is_an_adaptor(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from trine.decay.audit import Target\nfrom trine.ops.kda import kda\n\n\ndef adaptor():\n"
        "    def run(q, k, v, g, beta, *, initial_state=None):\n"
        "        return kda(q, k, v, g, beta, gate_kind='log_decay', qk_norm=False, beta_is_logit=False,\n"
        "                   initial_state=initial_state, output_final_state=True)\n\n"
        "    return Target('mine', run)\n"
    )
    target = load(f"{file}:adaptor")
    assert (target.name, target.form, target.keywords) == ("mine", "activated", {"initial_state"})
    verdicts = {
        v.probe: v.verdict for v in examine(Lab(target, quick=True), select(["contract", "split", "documents"]))
    }
    assert verdicts == {"contract": "pass", "documents": "not applicable", "split": "pass"}


def test_known_targets_by_device() -> None:
    assert own("cpu") == ["trine:reference", "trine:torch"]
    assert own("cuda") == ["trine:triton"]
    assert {"trine:reference", "trine:torch"} <= set(names("cpu")) <= set(ADAPTORS)
    assert not {"trine:triton", "cudnn"} & set(names("cpu"))
    assert expand("trine", "cpu") == ["trine:reference", "trine:torch"]
    assert expand("trine", "cuda") == ["trine:triton"]
    assert expand("mylib:f", "cuda") == ["mylib:f"]
    assert expand("installed", "cpu") == names("cpu")


def test_a_library_that_is_absent_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="target: found 'fla', which is not installed or has nothing that runs on cpu"):
        expand("fla", "cpu")


# Processes of their own ---------------------------------------------------------------------------------------------


def verdicts_of(report: Report) -> dict[str, str]:
    return {v.probe: v.verdict for v in report.verdicts}


def test_crashes_hangs_and_strange_results_are_verdicts(bad: Callable[[str], str]) -> None:
    some = ("contract", "determinism", "lengths", "neighbours", "views")
    crash, hang = audit([bad("crashes"), bad("hangs")], quick=True, probes=some, timeout=8.0)
    assert verdicts_of(crash) == {
        "contract": "pass", "determinism": "pass", "lengths": "pass", "neighbours": "finding", "views": "pass",
    }  # fmt: skip
    (found,) = crash.findings
    assert found.text == "crashed its process (SIGSEGV)"
    assert "packed=True" in found.case
    assert found.case in found.script
    assert verdicts_of(hang)["lengths"] == "finding"
    assert hang.findings[0].text == "gave no answer within 8 s"
    assert "lengths=(17, 17)" in hang.findings[0].case
    assert verdicts_of(hang)["views"] == "pass"


def test_an_abort_and_a_lost_card_fail_their_own_probe_alone(bad: Callable[[str], str]) -> None:
    some = ("contract", "determinism", "lengths", "neighbours", "views")
    abort, lost = audit([bad("aborts"), bad("loses_the_card")], quick=True, probes=some, timeout=20.0)
    assert {p for p, v in verdicts_of(abort).items() if v != "pass"} == {"neighbours"}
    assert abort.findings[0].text == "crashed its process (SIGABRT)"
    # A card that a kernel has brought down answers every later call with the same error: that is no fault of theirs.
    assert {p for p, v in verdicts_of(lost).items() if v != "pass"} == {"lengths"}
    text = "took the device down: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert lost.findings[0].text == text
    assert "lengths=(17, 17)" in lost.findings[0].case
    assert lost.findings[0].case in lost.findings[0].script


def test_talk_is_no_fault_and_a_card_lost_on_plain_inputs_is_the_only_finding(
    bad: Callable[[str], str], tmp_path: Path
) -> None:
    file = tmp_path / "dead.py"
    file.write_text("def f(q, k, v, g, beta):\n    raise RuntimeError('CUDA error: device-side assert triggered')\n")
    some = ("contract", "determinism", "views")
    talker, dead = audit([bad("talks"), f"{file}:f"], quick=True, probes=some)
    assert set(verdicts_of(talker).values()) == {"pass"}
    assert [v.verdict for v in dead.verdicts] == ["finding", "not judged", "not judged"]


def test_what_was_not_asked_in_time_is_no_finding_and_no_pass(bad: Callable[[str], str]) -> None:
    (report,) = audit([bad("hangs")], quick=True, probes=("contract", "lengths", "views"), timeout=100.0, budget=5.0)
    assert not report.findings
    assert [v.verdict for v in report.verdicts[1:]] == ["not judged", "not judged"]
    assert all("the time for all probes (5 s) was over" in v.text for v in report.verdicts[1:])


def test_a_probe_that_ran_out_of_time_says_how_far_it_came() -> None:
    lab = Lab(load("trine:torch"), quick=True, patience=1e-9)
    (verdict,) = examine(lab, select(["lengths"]))
    assert verdict.verdict == "pass"
    assert verdict.cases == 1
    assert seen(verdict).startswith("1 of ")


def test_a_target_that_ends_its_process_on_plain_inputs_has_one_finding(bad: Callable[[str], str]) -> None:
    (report,) = audit([bad("leaves")], quick=True, probes=("contract", "determinism", "causality"))
    assert [v.verdict for v in report.verdicts] == ["finding", "not judged", "not judged"]
    assert report.findings[0].text == "ended its process (exit code 7)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other_shape", "the output has shape (1, 1, 1, 1), need that of v"),
        ("not_a_number", "values of the output are not finite on plain inputs"),
        ("objects", "returned a str, need a tensor"),
        ("picky", "raised TypeError"),
        ("half", "the output is torch.bfloat16, need v's torch.float32"),
        ("integers", "the output has dtype torch.int64, need a floating one"),
        ("quits", "raised SystemExit: no licence"),
    ],
)
def test_a_wrong_kind_of_result_is_a_finding_of_the_contract(bad: Callable[[str], str], name: str, text: str) -> None:
    verdicts = list(examine(Lab(load(bad(name)), quick=True), select(["contract", "causality"]), shrink_seconds=0.0))
    assert [v.verdict for v in verdicts] == ["finding", "not judged"]
    assert text.replace("(1, 1, 1, 1)", "(1, 64, 1, 8)") in verdicts[0].text


def test_a_failing_input_is_made_small_and_its_script_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "from trine.ops.kda import kda\n\n\ndef f(q, k, v, gate, beta, A_log=None, dt_bias=None):\n"
        "    out, _ = kda(q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, backend='torch')\n"
        "    return out * (1 + 1e-5 * gate[:, 5:].float().mean()) if q.shape[1] > 6 else out\n"
    )
    spec = f"{file}:f"
    (verdict,) = examine(Lab(load(spec), quick=True), select(["causality"]), spec=spec)
    assert verdict.verdict == "finding"
    assert "Case(lengths=(7,), heads=1, key_dim=2, value_dim=2, state=False" in verdict.case
    namespace: dict[str, Any] = {}
    with pytest.raises(SystemExit) as stop:
        exec(verdict.script, namespace)
    assert stop.value.code == 1
    assert capsys.readouterr().out.startswith("causality: finding: editing")
    with pytest.raises(SystemExit) as stop:
        replay("trine:torch", "causality", Case(lengths=(7,), at=6, what="gate"))
    assert stop.value.code == 0


# Reports ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reports() -> list[Report]:
    verdicts = [
        Verdict("contract", "?", "pass", cases=1, seconds=0.1),
        Verdict("range", "?", "finding", "the output | is not finite", math.inf, 1e-4, "Case()", "print('x')\n", 3),
        Verdict("documents", "?", "not applicable", "the target takes no packed rows"),
        Verdict("slow-channel", "?", "not judged", "see range \x1b"),
        Verdict("definition", "?", "pass", "the output is off", 2e-7, 1e-4, cases=2),
    ]
    return [Report("a:b", "mine", "1.2", versions={"torch": "2"}, verdicts=verdicts, seconds=1.5, date="2026-11-29")]


def test_reports_in_all_forms(reports: list[Report]) -> None:
    text = json.dumps(as_dict(reports), allow_nan=False)
    again = json.loads(text)
    assert (again["format_version"], again["findings"]) == (1, 1)
    assert again["targets"][0]["verdicts"][1]["value"] == "inf"
    page = as_markdown(reports)
    assert "| range | **finding** | the output \\| is not finite |" in page
    assert "| definition | pass | 2 inputs, worst 2.0e-07 (limit 1e-04) |" in page
    assert "2026-11-29; torch 2; 1 finding, 2 passed, 1 not judged, 1 not applicable; 1.5 s." in page
    suite = ET.fromstring(as_junit(reports).encode()).find("testsuite")
    assert suite is not None
    counts = {n: suite.get(n) for n in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "5", "failures": "1", "skipped": "2", "errors": "0"}
    failure = suite.find("testcase[@name='range']/failure")
    assert failure is not None
    assert failure.text == "print('x')\n"
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(as_renderable(reports[0]))
    shown = console.export_text()
    assert "range" in shown
    assert "1 finding, 2 passed" in shown


def run_cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["audit", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: Callable[[str], str]) -> None:
    files = {n: tmp_path / f"report.{n}" for n in ("json", "markdown", "junit")}
    options = [o for n, f in files.items() for o in (f"--{n}", str(f))]
    some = ("--quick", "--probes", "contract", "state-layout")
    code, out, _ = run_cli(capsys, "kda", *some, "--target", bad("VALUE"), *options)
    assert code == 1
    assert "is a int, need a function" in " ".join(out.split())
    assert "1 finding, 0 passed, 1 not judged" in out
    (stored,) = json.loads(files["json"].read_text())["targets"]
    assert [v["verdict"] for v in stored["verdicts"]] == ["finding", "not judged"]
    assert files["markdown"].read_text().startswith("# Audit")
    assert ET.fromstring(files["junit"].read_bytes()).tag == "testsuites"
    code, out, _ = run_cli(capsys, "kda", *some, "--target", "trine:torch")
    assert code == 0
    assert "0 findings, 2 passed" in out
    code, out, _ = run_cli(capsys, "kda", "--list")
    assert code == 0
    assert all(name in out for name in (*ADAPTORS, *(p.name for p in PROBES)))


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (("kda", "--probes", "nothing"), "probes: found 'nothing', need names among contract", 1),
        (("kda", "--device", "abacus"), "device: found 'abacus', need cpu, cuda or cuda:NUMBER", 1),
        (("kda", "--json", "nowhere/at/all.json"), "json: found no folder nowhere/at, need an existing one", 1),
        (("kda", "--device", "cuda:first"), "device: found 'cuda:first', need cpu, cuda or cuda:NUMBER", 1),
        (("kda", "--device", "cuda"), "device: found no card for 'cuda', need cpu here", 1),
        (("kda", "--junit", "."), "junit: found the folder ., need the name of a file", 1),
        (("kda", "--timeout", "-1"), "timeout: found -1, need a positive number of seconds", 1),
        (("kda", "--budget", "nan"), "budget: found nan, need a positive number of seconds", 1),
        (("kda", "--jobs", "-2"), "jobs: found -2, need 0 (choose) or more", 1),
        (("kda", "--target", "flash_kda", "trine", "--device", "abacus"), "device: found 'abacus'", 1),
        (("gdn",), "gdn", 2),
    ],
)
def test_mistakes_get_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str, code: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, _, err = run_cli(capsys, *args)
    assert found == code
    assert message in err
    assert len(err.strip().splitlines()) == 1


# What a card is asked -----------------------------------------------------------------------------------------------


def test_launches_that_exist_for_the_diagonal_alone() -> None:
    bounded = {"prepare": 100.0, "scan": 300.0}
    unbounded = {"prepare": 110.0, "scan": 290.0, "token pairs": 150.0, "substitute": 50.0}
    assert only_in(unbounded, bounded) == [("token pairs", 0.25), ("substitute", pytest.approx(50 / 600))]
    text, facts = diagonal_text(unbounded, bounded)
    assert text.startswith(
        "bounded 0.400 ms, unbounded 0.600 ms; 33% of it in launches that only gates without a bound need: token pairs"
    )
    assert facts["only_unbounded"]["token pairs"] == 0.25
    assert diagonal_text(bounded, bounded)[0].endswith("the same launches")
    other = diagonal_text(unbounded, {**bounded, "sub-tiles": 100.0, "x" * 90: 50.0, "fill": 0.1})[0]
    assert "substitute (8%); bounded gates launch instead: sub-tiles (18%), " in other
    assert other.endswith(", " + "x" * 57 + "... (9%), 1 smaller")
    assert diagonal_text({}, bounded)[0] == "the profiler saw no launches"


def test_a_cliff_is_where_the_time_jumps() -> None:
    # Times of this kind are public for a kernel that replays its prefix when a channel decays slowly.
    found = judge_cliff([(-2.0, 0.205), (-0.3, 0.224), (-0.18, 0.29), (-0.15, 1.62), (-0.1, 1.619)])
    assert not found.ok
    assert found.value == pytest.approx(1.62 / 0.205)
    assert "0.290 ms at g = -0.18, 1.620 ms at g = -0.15 (5.6 times)" in found.text
    assert judge_cliff([(-2.0, 1.0), (-0.1, 1.2)]).ok


def test_the_slowest_channel_is_where_it_is_asked_to_be() -> None:
    x = draw(Case(lengths=(4,), gates="fast"), "raw", torch.float32)
    y = with_slowest(x, -0.15)
    g = -5 * torch.sigmoid(y["gate"] + y["dt_bias"])
    torch.testing.assert_close(g[..., 0], torch.full_like(g[..., 0], -0.15), rtol=1e-5, atol=0)
    assert torch.equal(y["gate"][..., 1:], x["gate"][..., 1:])
    a = with_slowest(draw(Case(lengths=(4,)), "activated", torch.float32), -0.4)
    assert bool((a["gate"][..., 0] == -0.4).all())


def test_a_profile_names_what_ran() -> None:
    a = torch.randn(64, 64)
    found = profiled(lambda: a @ a, runs=2)
    assert any("mm" in name for name in found)
    assert all(time > 0 for time in found.values())


def test_a_verdict_is_plain_values() -> None:
    assert Verdict("a", "b", "finding", value=math.inf).as_dict()["value"] == "inf"
    assert {f.name for f in dataclasses.fields(Verdict)} >= {
        "probe",
        "verdict",
        "text",
        "value",
        "limit",
        "case",
        "script",
    }
