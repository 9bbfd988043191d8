"""Asynchronous control: what is adopted and when; what training does when the service is late, hangs, dies or lies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch

from trine.balance import QuantileBalancing, max_violation
from trine.balance.service import AsyncBalancing
from trine.balance.service_link import Answer, Request, ThreadLink
from trine.balance.service_protocol import Message, ServiceError, decode, encode, parse_address
from trine.balance.service_server import serve
from trine.ops.router import RouterStats, route, solve_bias

EXPERTS, K, TOKENS = 16, 2, 512
KEY = b"sixteen bytes key"
OFFSET_E = torch.linspace(-1.5, 1.5, EXPERTS)


def logits(step: int, layers: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(layers, TOKENS, EXPERTS, generator=generator) + OFFSET_E


def window(stats: RouterStats, step: int) -> None:
    for layer, logits_TE in enumerate(logits(step)):
        route(logits_TE, stats.bias_LE[layer], K, stats=stats.layer(layer), score_domain=stats.score_domain)


def drive(policy: Any, steps: range, stats: RouterStats | None = None) -> tuple[RouterStats, list[torch.Tensor]]:
    """The statistics, and the bias after each step."""
    stats = RouterStats.allocate(2, EXPERTS, 100) if stats is None else stats
    path = []
    for step in steps:
        window(stats, step)
        policy.step(stats)
        path.append(stats.bias_LE.clone())
    return stats, path


@pytest.fixture
def balancing() -> Iterator[Callable[..., AsyncBalancing]]:
    made: list[AsyncBalancing] = []

    def make(mode: str = "thread", **options: Any) -> AsyncBalancing:
        made.append(AsyncBalancing(QuantileBalancing(K), mode, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


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


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


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


# --- a service that somebody started ---


@contextmanager
def service(path: Path) -> Iterator[str]:
    """`serve` in a thread of this process; its connections end with the test's."""
    ready = threading.Event()
    where: list[str] = []
    thread = threading.Thread(
        target=serve,
        args=(str(path), KEY),
        daemon=True,
        kwargs={"on_ready": lambda at: (where.append(at), ready.set())},
    )
    thread.start()
    assert ready.wait(30)
    yield where[0]


def test_a_socket_that_an_ended_service_left_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with service(path) as address:
        assert address == f"unix:{path}"
        with pytest.raises(OSError, match="found a service that listens there, need another path"):
            serve(str(path), KEY, on_ready=lambda at: None)
    (tmp_path / "text").write_text("precious")
    with pytest.raises(OSError, match="found something that is no socket"):
        serve(str(tmp_path / "text"), KEY, on_ready=lambda at: None)
    assert (tmp_path / "text").read_text() == "precious"


def test_a_running_service(balancing: Callable[..., AsyncBalancing], tmp_path: Path) -> None:
    with service(tmp_path / "s") as address:
        assert address == f"unix:{tmp_path / 's'}" and (tmp_path / "s").stat().st_mode & 0o077 == 0
        policies = [balancing(address, key=KEY, lag=0) for _ in range(2)]  # two trainers at once
        found = [drive(policy, range(3))[0].bias_LE for policy in policies]
        expected = drive(QuantileBalancing(K), range(3))[0].bias_LE
        assert all(torch.equal(one, expected) for one in found)
        with pytest.raises(ServiceError, match="the key is not the service's"):
            balancing(address, key=b"another bytes key")
        # a message of another version, a damaged one and an impossible one are answered, and the service goes on
        connection: Connection = Client(parse_address(address))
        answer_challenge(connection, KEY), deliver_challenge(connection, KEY)
        connection.send_bytes(encode(Message("hello"), protocol=2))
        assert "found protocol version 2, need 1" in decode(connection.recv_bytes()).text("error")
        connection = Client(parse_address(address))
        answer_challenge(connection, KEY), deliver_challenge(connection, KEY)
        connection.send_bytes(encode(Message("hello")))
        assert decode(connection.recv_bytes()).kind == "hello"
        good = Request.of(RouterStats.allocate(1, 4, 10), 0, 1)
        sizes = {"epoch": 0, "version": 1, "layers": 1, "experts": 4, "bins": 10}
        texts = {"stats": "{}", "policy": '{"k": 2}'}
        tensors = good.tensors
        for fields, sent, message in [
            (None, None, "it is damaged"),
            ({**sizes, **texts, "experts": 1 << 40}, tensors, "histograms_LEB: found shape (1, 4, 10)"),
            ({**sizes, **texts, "policy": '{"k": 9}'}, tensors, "k: found 9, need 1 <= k <= 4"),
            ({**sizes, **texts, "policy": '{"gain": 9}'}, tensors, "do not fit"),
            ({**sizes, **texts, "policy": "{"}, tensors, "Expecting"),
            ({**sizes, "stats": "{}"}, tensors, "policy: found None, need a text"),
            ({**sizes, **texts}, {**tensors, "bias_LE": torch.full((1, 4), torch.nan)}, "bias_LE: found a non-finite"),
            ({**sizes, **texts}, {"histograms_LEB": tensors["histograms_LEB"]}, "state: found ['histograms_LEB']"),
        ]:
            if fields is None:
                connection.send_bytes(encode(Message("solve"))[:-1] + b"!")
            else:
                connection.send_bytes(encode(Message("solve", fields, sent or {})))
            answer = decode(connection.recv_bytes())
            assert answer.kind == "error" and message in answer.text("error"), answer
        connection.send_bytes(encode(Message("solve", {**sizes, **texts}, tensors)))
        assert decode(connection.recv_bytes()).tensor("solved_L").tolist() == [False]
        connection.close()


def _wrong(answer: Message) -> list[tuple[bytes, str]]:
    bias_LE = answer.tensor("bias_LE")

    def changed(fields: dict[str, Any], **tensors: torch.Tensor) -> bytes:
        return encode(Message("solved", {**answer.fields, **fields}, {**answer.tensors, **tensors}))

    return [
        (encode(answer)[:-3], "it was cut off"),
        (encode(answer, protocol=2), "found protocol version 2, need 1"),
        (encode(Message("error", {"error": "full"})), "service: full"),
        (encode(Message("hello")), "found kind 'hello', need 'solved'"),
        (changed({"version": 99}), "found version 99, need 1"),
        (changed({}, bias_LE=bias_LE[:, :3].contiguous()), "bias_LE: found shape (2, 3)"),
        (changed({}, bias_LE=bias_LE.double()), "need (2, 16) of torch.float32"),
        (changed({}, reach_L=torch.tensor([1.0, 0.0])), "reach_L: found a value of 0 or below"),
        (changed({}, reach_L=torch.tensor([1.0, torch.nan])), "reach_L: found a non-finite value"),
        (changed({}, bias_LE=bias_LE * torch.inf), "bias_LE: found a non-finite value"),
        (changed({}, solved_L=torch.ones(3, dtype=torch.bool)), "solved_L: found shape (3,) of torch.bool, need (2,)"),
    ]


def test_what_a_bad_service_says_is_not_believed(balancing: Callable[..., AsyncBalancing], tmp_path: Path) -> None:
    """Each wrong answer ends the connection; the trainer keeps its bias, says what was wrong, and asks again."""
    from trine.balance.service_server import solve_message

    answers: list[bytes] = []

    def lie(listener: Listener) -> None:
        while True:
            try:
                connection: Connection = listener.accept()
                deliver_challenge(connection, KEY), answer_challenge(connection, KEY)
                connection.recv_bytes()
                connection.send_bytes(encode(Message("hello")))
                request = connection.recv_bytes()
                connection.send_bytes(answers[-1] if answers else encode(solve_message(decode(request))))
                connection.recv_bytes()
            except (EOFError, OSError):
                if not answers:
                    return

    listener = Listener(str(tmp_path / "s"))
    thread = threading.Thread(target=lie, args=(listener,), daemon=True)
    thread.start()
    stats = RouterStats.allocate(2, EXPERTS, 100)
    window(stats, 0)
    request = Request.of(stats, 0, 1)
    fields = {"epoch": 0, "version": 1, "layers": 2, "experts": EXPERTS, "bins": 100, "stats": "{}"}
    true = solve_message(Message("solve", {**fields, "policy": '{"k": 2}'}, request.tensors))
    for data, message in _wrong(true):
        answers.append(data)
        policy = balancing(f"unix:{tmp_path / 's'}", key=KEY, patience=1)
        stats, path = drive(policy, range(1))
        until(lambda: policy.status().failures)  # noqa: B023
        assert message in policy.status().last_error
        drive(policy, range(1, 2), stats)
        assert not path[0].any() and stats.bias_LE.any() and policy.status().fallbacks == 1
        policy.close()
    listener.close()


def test_a_service_of_another_version_is_refused_at_the_start(
    balancing: Callable[..., AsyncBalancing], tmp_path: Path
) -> None:
    listener = Listener(str(tmp_path / "s"))

    def answer() -> None:
        connection: Connection = listener.accept()
        deliver_challenge(connection, KEY), answer_challenge(connection, KEY)
        connection.recv_bytes()
        connection.send_bytes(encode(Message("hello"), protocol=2))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(ServiceError, match="found protocol version 2, need 1: update the older end"):
        balancing(f"unix:{tmp_path / 's'}", key=KEY)
    thread.join()
    listener.close()
    with pytest.raises(ServiceError, match="nobody listens"):
        balancing(f"unix:{tmp_path / 'absent'}", key=KEY)


# --- a child process ---


def test_a_child_that_is_killed_and_one_that_hangs(balancing: Callable[..., AsyncBalancing]) -> None:
    """Both are replaced; meanwhile the last bias is kept, then each step solves here."""
    policy = balancing("process", lag=0, patience=2, seconds=60.0)
    stats, path = drive(policy, range(3))
    expected = drive(QuantileBalancing(K), range(3))[1]
    assert all(torch.equal(one, other) for one, other in zip(path, expected, strict=True))
    link = policy._courier.link  # type: ignore[union-attr]
    first = link.process.pid  # type: ignore[attr-defined]
    os.kill(first, signal.SIGKILL)
    _, path = drive(policy, range(3, 7), stats)
    assert torch.equal(path[0], expected[2]) and torch.equal(path[1], path[0]), "kept"
    assert not torch.equal(path[2], path[1]) and policy.status().fallbacks >= 1, "then solved here"
    assert "service: it is gone" in policy.status().last_error
    until(lambda: not policy.status().down)
    fallbacks = policy.status().fallbacks
    drive(policy, range(7, 8), stats)
    assert policy.status().lag == 0 and policy.status().fallbacks == fallbacks and policy.status().restarts == 1

    second = link.process.pid  # type: ignore[attr-defined]
    link._socket._seconds = policy._seconds = 0.5  # type: ignore[attr-defined]
    os.kill(second, signal.SIGSTOP)
    drive(policy, range(8, 11), stats)
    until(lambda: policy.status().failures >= 2)
    assert "service: solving: no answer within 0.5 s" in policy.status().last_error
    assert not alive(second) and policy.status().fallbacks > fallbacks
    policy.close()
    assert link.process is None and policy.status().restarts <= 2  # type: ignore[attr-defined]


def alive(pid: int) -> bool:
    """Whether a process runs (one that is dead and not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


TRAINER = """
import sys, time
import torch
from trine.balance import QuantileBalancing
from trine.balance.service import AsyncBalancing
from trine.ops.router import RouterStats, route
policy, stats = AsyncBalancing(QuantileBalancing(2), "process", lag=0, seconds=60.0), RouterStats.allocate(1, 8, 50)
route(torch.randn(64, 8), stats.bias_LE[0], 2, stats=stats.layer(0))
policy.step(stats)
assert policy.status().answered == 1
link = policy._courier.link
print(link.process.pid, link._folder, flush=True)
if sys.argv[1] == "kill":
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "leave"])
def test_no_child_outlives_its_trainer(end: str) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, end], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid, folder = trainer.stdout.readline().split()
    assert folder and (end == "leave" or alive(int(pid)))
    if end == "kill":
        trainer.kill()
    assert trainer.wait(timeout=60) == (-signal.SIGKILL if end == "kill" else 0)
    until(lambda: not alive(int(pid)))
    until(lambda: not Path(folder).exists())


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
