"""Asynchronous control: what is adopted and when; what training does when the service is late, hangs, dies or lies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from service_runs import EXPERTS, K, drive, logits, until, window

from trine.balance import QuantileBalancing, max_violation
from trine.balance.service import AsyncBalancing
from trine.balance.service_link import Answer, Request, ThreadLink
from trine.balance.service_protocol import ServiceError
from trine.ops.router import RouterStats, route, solve_bias


class HeldLink:
    """A link in which each request waits until it is let go, or fails."""

    restarts = 0

    def __init__(self) -> None:
        self.inner = ThreadLink(QuantileBalancing(K))
        self.begun: list[int] = []
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def open(self) -> None:
        return

    def solve(self, request: Request) -> Answer:
        self.begun.append(request.version)
        self.go.acquire()
        if self.error is not None:
            raise self.error
        return self.inner.solve(request)

    def close(self) -> None:
        self.error = ServiceError("closed")
        for _ in range(10):
            self.go.release()


@pytest.fixture
def held(balancing: Callable[..., AsyncBalancing], monkeypatch: pytest.MonkeyPatch) -> tuple[AsyncBalancing, HeldLink]:
    link = HeldLink()
    monkeypatch.setattr(AsyncBalancing, "_link", lambda self, key, threads: link)
    return balancing(patience=3), link


def test_a_child_that_is_still_starting_is_no_alarm(
    balancing: Callable[..., AsyncBalancing], caplog: pytest.LogCaptureFixture
) -> None:
    """It imports torch, which takes longer than the first steps: with the newest answer as lag they were all missed,
    and a warning was the first thing that was heard of the service."""
    policy = balancing("process", patience=1)
    stats, _ = drive(policy, range(1, 2))
    until(lambda: policy.status().answered, seconds=5.0)  # it had started when the first step ended
    drive(policy, range(2, 3), stats)
    status = policy.status()
    assert (status.missed, status.version, status.failures, status.fallbacks) == (0, 1, 0, 0)
    assert not caplog.records


def test_starting_is_no_part_of_the_time_for_an_answer(
    balancing: Callable[..., AsyncBalancing], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a run with a lag is not reproducible where the child starts slowly."""

    class SlowToOpen(ThreadLink):
        def open(self) -> None:
            time.sleep(0.0 if self.opened else 0.6)
            self.opened = True

    link = SlowToOpen(QuantileBalancing(K))
    link.opened = False  # type: ignore[attr-defined]
    monkeypatch.setattr(AsyncBalancing, "_link", lambda self, key, threads: link)
    policy = balancing(lag=0, seconds=0.3)
    drive(policy, range(1, 3))
    assert policy.status().missed == 0 and policy.version == 2 and not caplog.records


@pytest.mark.parametrize(("estimator", "domain"), [("report", "sigmoid"), ("signed_log", "logit")])
def test_without_lag_it_is_the_policy_itself(
    balancing: Callable[..., AsyncBalancing], estimator: str, domain: str
) -> None:
    policy = balancing(lag=0)
    kind = {"estimator": estimator, "score_domain": domain}
    stats, found = drive(policy, range(5), RouterStats.allocate(2, EXPERTS, **kind))
    alone, expected = drive(QuantileBalancing(K), range(5), RouterStats.allocate(2, EXPERTS, **kind))
    assert all(torch.equal(one, stats.state_dict()[name]) for name, one in alone.state_dict().items())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not stats.counts.any()
    status = policy.status()
    assert (status.steps, status.version, status.lag, status.missed, status.fallbacks) == (5, 5, 0, 0, 0)
    assert status.answered == 5 and not status.down and status.heard_seconds is not None


@pytest.mark.parametrize("lag", [0, 1, 2, 3, 4])
def test_absolute_biases_balance_at_any_lag(balancing: Callable[..., AsyncBalancing], lag: int) -> None:
    """Loads settle near the sampling floor (sqrt(2 ln 16 / 64) = 0.29) and stay, whatever the lag."""
    policy, stats, path = balancing(lag=lag), RouterStats.allocate(2, EXPERTS, 1000), []
    for step in range(24):
        window(stats, step)
        path.append(float(max_violation(policy.step(stats).loads_LE).mean()))
    assert path[0] > 1.5 and max(path[12:]) < 0.6, path
    assert policy.status().lag == lag and policy.status().fallbacks == 0
    # it takes lag + 1 steps before a first answer is there, and until then nothing changes
    assert min(path[: lag + 1]) > 1.5


def test_late_increments_do_not() -> None:
    """Why the bias travels and not its change: one step of lag at gain 1 is enough to swing without end."""
    bias_E, before_E, path = torch.zeros(EXPERTS), torch.zeros(EXPERTS), []
    for step in range(24):
        scores_TE = logits(step)[0].sigmoid()
        change_E = solve_bias(scores_TE, bias_E, K) - bias_E
        ids_TK = (scores_TE + bias_E).topk(K, dim=1).indices
        path.append(float(max_violation(torch.bincount(ids_TK.reshape(-1), minlength=EXPERTS))))
        bias_E, before_E = bias_E + before_E, change_E
    assert max(path[12:]) > 3, path


def test_newest_is_adopted_between_steps_and_older_requests_are_dropped(
    held: tuple[AsyncBalancing, HeldLink],
) -> None:
    policy, link = held
    stats, _ = drive(policy, range(1))
    until(lambda: link.begun)
    drive(policy, range(1, 3), stats)
    assert not stats.bias_LE.any() and policy.status().missed == 3 and policy.status().dropped == 1
    link.go.release()  # window 1 is solved; window 2 was replaced by window 3 while waiting
    until(lambda: link.begun == [1, 3])
    window(stats, 3)
    assert not stats.bias_LE.any(), "nothing changes inside a window"
    found = policy.step(stats)
    assert not found.bias_LE.any() and stats.bias_LE.any()
    expected = drive(QuantileBalancing(K), range(1))[0].bias_LE
    assert torch.equal(stats.bias_LE, expected)
    status = policy.status()
    assert (status.steps, status.version, status.lag, status.missed, status.dropped) == (4, 1, 3, 0, 1)


def test_a_hanging_thread_is_survived(held: tuple[AsyncBalancing, HeldLink], caplog: pytest.LogCaptureFixture) -> None:
    """Three steps without an answer keep the bias; from the fourth on each step solves here, as if alone."""
    policy, link = held
    stats, _ = drive(policy, range(1))
    until(lambda: link.begun == [1])  # before the next request takes its place
    _, path = drive(policy, range(1, 3), stats)
    assert not path[-1].any()
    drive(policy, range(3, 6), stats)
    reference = RouterStats.allocate(2, EXPERTS, 100)
    drive(QuantileBalancing(K), range(3, 6), reference)
    assert torch.equal(stats.bias_LE, reference.bias_LE)
    status = policy.status()
    assert (status.version, status.lag, status.missed, status.fallbacks) == (6, 0, 6, 3)
    assert "no bias from the service for 4 steps: solving in this process" in caplog.text
    link.go.release()  # it comes back, with an answer that is too old
    until(lambda: policy.status().answered == 1)
    drive(policy, range(6, 7), stats)
    assert (policy.status().late, policy.status().fallbacks) == (1, 4)
    link.go.release()
    until(lambda: policy.status().answered == 2)
    drive(policy, range(7, 8), stats)
    status = policy.status()
    assert status.missed == 0 and status.lag <= 3 and status.fallbacks == 4
    assert "the service's bias is used again" in caplog.text


def test_waiting_for_a_lag_ends_and_is_not_repeated(
    balancing: Callable[..., AsyncBalancing], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = HeldLink()
    monkeypatch.setattr(AsyncBalancing, "_link", lambda self, key, threads: link)
    policy = balancing(lag=0, patience=2, seconds=0.2)
    condition = policy._courier._changed  # type: ignore[union-attr]
    waits, wait = [], condition.wait
    main = threading.get_ident()

    def counted(seconds: float | None = None) -> bool:
        waits.extend([policy.steps] * (threading.get_ident() == main))
        return wait(seconds)

    monkeypatch.setattr(condition, "wait", counted)
    _, path = drive(policy, range(6))
    assert set(waits) == {1}, "only the first step waits"
    assert not path[1].any() and path[2].any()
    assert policy.status().fallbacks == 4 and policy.status().down
    assert policy.status().last_error == "service: no answer within 0.2 s"


def test_a_failing_service_is_visible_and_survived(
    held: tuple[AsyncBalancing, HeldLink], caplog: pytest.LogCaptureFixture
) -> None:
    policy, link = held
    link.error = ServiceError("service: out of order")
    link.go.release()
    stats, _ = drive(policy, range(1))
    until(lambda: policy.status().failures >= 1)
    status = policy.status()
    assert status.down and status.last_error == "service: out of order" and status.heard_seconds is None
    assert caplog.text.count("out of order; the last bias is kept") == 1
    link.error = None
    link.go.release()
    drive(policy, range(1, 2), stats)
    until(lambda: policy.status().answered == 1)
    assert not policy.status().down and policy.status().last_error == "service: out of order"
    assert set(status.to_json()) >= {"lag", "fallbacks", "last_error", "heard_seconds"}


def test_layers_without_tokens_keep_their_bias(balancing: Callable[..., AsyncBalancing]) -> None:
    policy, stats = balancing(lag=1), RouterStats.allocate(2, EXPERTS, 100)
    drive(policy, range(2), stats)
    kept = stats.bias_LE.clone()
    policy.step(stats)  # adopts window 2; this one is empty
    second = stats.bias_LE.clone()
    route(logits(9)[0], stats.bias_LE[0], K, stats=stats.layer(0))
    policy.step(stats)  # of the empty window nothing is adopted
    assert torch.equal(stats.bias_LE, second) and not torch.equal(second, kept)
    policy.step(stats)
    assert torch.equal(stats.bias_LE[1], second[1]) and not torch.equal(stats.bias_LE[0], second[0])


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_goes_on_to_the_bit(balancing: Callable[..., AsyncBalancing], lag: int) -> None:
    straight, path = drive(balancing(lag=lag), range(9))
    stats, _ = drive(first := balancing(lag=lag), range(5))
    saved = first.state_dict()
    assert saved["pending"] == list(range(6 - lag, 6))
    again = balancing(lag=lag)
    drive(again, range(20, 23))  # work for another past, to be dropped
    again.load_state_dict(saved)
    fresh = RouterStats.allocate(2, EXPERTS, 100).load_state_dict(stats.state_dict())
    _, rest = drive(again, range(5, 9), fresh)
    assert all(torch.equal(one, other) for one, other in zip(rest, path[5:], strict=True))
    assert torch.equal(fresh.bias_LE, straight.bias_LE) and again.status().steps == 9


def test_bad_state_is_refused(balancing: Callable[..., AsyncBalancing]) -> None:
    policy = balancing(lag=1)
    with pytest.raises(ValueError, match="it is not one of AsyncBalancing"):
        policy.load_state_dict({"momentum": 1})
    with pytest.raises(ValueError, match="found 1 pending versions, need bias, reach and mark of each"):
        policy.load_state_dict({**policy.state_dict(), "pending": [1]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "need patience >= 1 and 0 <= lag <= patience"),
        ({"lag": 5}, "patience, lag: found 4, 5, need"),
        ({"lag": -1}, "patience, lag: found 4, -1, need"),
        ({"seconds": 0.0}, "seconds, threads: found 0.0, 1, need more than 0 and at least 1"),
        ({"mode": "nowhere"}, "address: found 'nowhere', need unix:PATH or 127.0.0.1:PORT"),
        ({"mode": "10.0.0.1:5"}, "the service is for this machine only"),
    ],
)
def test_bad_arguments(balancing: Callable[..., AsyncBalancing], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        balancing(**options)
    assert message in str(error.value)


def test_increments_are_refused() -> None:
    with pytest.raises(ValueError, match="policy: found object, need QuantileBalancing"):
        AsyncBalancing(object())  # type: ignore[arg-type]


RANK = """
import sys
import torch
from torch import distributed as dist
from trine.balance import QuantileBalancing
from trine.balance.service import AsyncBalancing
from trine.ops.router import RouterStats, route

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
calls = []
for name in ("all_reduce", "broadcast"):
    def wrapped(tensor, *args, _name=name, _original=getattr(dist, name), **kw):
        calls.append((_name, tensor.dtype))
        return _original(tensor, *args, **kw)
    setattr(dist, name, wrapped)
logits = torch.load(f"{folder}/logits.pt", weights_only=True)
stats = RouterStats.allocate(2, 16)
policy = AsyncBalancing(QuantileBalancing(2), "thread", lag=1, seconds=60.0)
assert (policy._courier is not None) == (rank == 0)
path = []
for step in range(6):
    if step == 3:  # every rank takes back the one state that was saved
        saved = [policy.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(saved, src=0)
        calls.clear()
        policy.load_state_dict(saved[0])
    cut = 150 if step != 2 else 512  # uneven shares; once rank 1 has no token at all
    part = logits[step][:, :cut] if rank == 0 else logits[step][:, cut:]
    for i in range(2):
        route(part[i], stats.bias_LE[i], 2, stats=stats.layer(i))
    policy.step(stats)
    path.append(stats.bias_LE.clone())
status = policy.status()
torch.save({"path": torch.stack(path), "lag": status.lag, "version": status.version}, f"{folder}/{rank}.pt")
assert calls == [("all_reduce", torch.int32), ("broadcast", torch.int32)] * 3, calls
dist.destroy_process_group()
"""


def test_two_ranks_agree_to_the_bit_and_equal_one(balancing: Callable[..., AsyncBalancing], tmp_path: Path) -> None:
    """One all-reduce and one broadcast a step; the bias is that of one process with all tokens."""
    torch.save([logits(step) for step in range(6)], tmp_path / "logits.pt")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(r), str(tmp_path)], env=environment, stderr=subprocess.PIPE)
        for r in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    zero, one = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    _, path = drive(balancing(lag=1), range(6), RouterStats.allocate(2, EXPERTS))
    for found in (zero, one):
        assert torch.equal(found["path"], torch.stack(path)) and (found["lag"], found["version"]) == (1, 5)
