"""Services elsewhere, by socket or as a child process: what one that lies, is killed or hangs does to training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch
from service_runs import EXPERTS, K, drive, until, window

from trine.balance import QuantileBalancing
from trine.balance.service import AsyncBalancing
from trine.balance.service_link import Request
from trine.balance.service_protocol import Message, ServiceError, decode, encode, parse_address
from trine.balance.service_server import serve
from trine.ops.router import RouterStats

KEY = b"sixteen bytes key"


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
