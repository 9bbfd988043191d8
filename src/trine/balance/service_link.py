"""Ways to reach whoever solves: a thread here, a child process, or a service that somebody started.

A link answers one request at a time, in the thread that asks, and raises `ServiceError` for whatever goes wrong.
`Courier` is that thread: it takes the newest request, and what it brings back is picked up between optimizer steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_bytes
from typing import Any, Protocol

import torch
from torch import Tensor

from trine._log import logger
from trine.balance.quantile_balancing import QuantileBalancing
from trine.balance.service_protocol import (
    Address,
    Message,
    ProtocolError,
    ServiceError,
    connect,
    deadline,
    expect,
    hang_up,
    parse_address,
    receive,
    send,
)
from trine.balance.service_server import solve_counts
from trine.ops.router import RouterStats

_BACKOFF_SECONDS = (0.2, 5.0)
START_SECONDS = 60.0
"""Time for a child process to begin; it imports torch."""
_CHILD = "import sys; from trine.balance.service_server import child_main; sys.exit(child_main(sys.argv[1:]))"


@dataclass(frozen=True)
class Request:
    """Counts of one window, reduced over ranks, to be solved.

    Attributes:
        epoch: changes when the trainer goes back to a checkpoint; answers of another epoch are dropped.
        version: number of the window, from 1 on.
        layers, experts, bins: sizes of the statistics.
        options: other arguments of `RouterStats.allocate`.
        tensors: copies of the statistics' buffers, on their device.
        ready: waits until those copies are made (the device may still be busy).
    """

    epoch: int
    version: int
    layers: int
    experts: int
    bins: int
    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    ready: Callable[[], None]

    @classmethod
    def of(cls, stats: RouterStats, epoch: int, version: int) -> Request:
        """Copy the statistics, without waiting for their device."""
        options = {"estimator": stats.estimator, "score_domain": stats.score_domain}
        tensors = stats.state_dict()
        ready: Callable[[], None] = lambda: None  # noqa: E731
        if stats.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            ready = event.synchronize
        return cls(epoch, version, stats.layers, stats.experts, stats.bins, options, tensors, ready)

    def on_cpu(self) -> dict[str, Tensor]:
        """The buffers on the CPU; waits for them."""
        self.ready()
        return {name: tensor.cpu() for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Answer:
    """The absolute bias of every layer, solved from one window.

    Attributes:
        epoch, version: those of the request.
        bias_LE: ``[L, E]`` fp32 on the CPU, finite.
        reach_L: ``[L]`` fp32, how far beyond the bias the next histogram goes, finite and above 0.
        solved_L: ``[L]`` bool; a layer without tokens has nothing to be solved from.
    """

    epoch: int
    version: int
    bias_LE: Tensor
    reach_L: Tensor
    solved_L: Tensor


class Link(Protocol):
    """One way to whoever solves."""

    restarts: int

    def open(self) -> None:
        """Connect, starting what has to be started; nothing to do when it stands.

        Raises:
            ServiceError: not to be had.
        """

    def solve(self, request: Request) -> Answer:
        """Solve one request; the link is open.

        Raises:
            ServiceError: no answer in time, or a bad one; the link is closed then.
        """

    def close(self) -> None:
        """Let go of everything, from any thread, also while `solve` waits."""


class ThreadLink:
    """Solves in the thread that asks."""

    def __init__(self, policy: QuantileBalancing) -> None:
        self._policy = policy
        self.restarts = 0

    def open(self) -> None:
        """Nothing to do."""

    def solve(self, request: Request) -> Answer:
        """Solve a copy of the counts."""
        try:
            stats = RouterStats.allocate(request.layers, request.experts, request.bins, "cpu", **request.options)
            stats.load_state_dict(request.on_cpu())
            return Answer(request.epoch, request.version, **solve_counts(self._policy, stats))
        except ValueError as error:
            raise ServiceError(f"service: {error}") from error

    def close(self) -> None:
        """Nothing to do."""


class SocketLink:
    """A service at an address, started by someone else."""

    def __init__(self, address: Address, key: bytes, settings: Mapping[str, Any], seconds: float) -> None:
        self.address, self._key, self._seconds = address, key, seconds
        self._settings = json.dumps(dict(settings))
        self._connection: Connection | None = None
        self.restarts = 0

    def open(self) -> None:
        """Connect, unless connected."""
        if self._connection is None:
            self._connection = connect(self.address, self._key, self._seconds)

    def solve(self, request: Request) -> Answer:
        """Send the request, wait for the answer, believe it only if it fits."""
        connection = self._connection
        if connection is None:
            raise ServiceError("service: not connected")
        sizes = {"layers": request.layers, "experts": request.experts, "bins": request.bins}
        fields = {"epoch": request.epoch, "version": request.version, **sizes}
        texts = {"stats": json.dumps(dict(request.options)), "policy": self._settings}
        tensors = request.on_cpu()
        try:
            with deadline(connection, self._seconds, "solving"):
                send(connection, Message("solve", {**fields, **texts}, tensors))
                message = expect(receive(connection), "solved")
            return self._believed(message, request)
        except (EOFError, OSError) as error:
            self.close()
            raise ServiceError("service: it is gone (the connection ended)") from error
        except ServiceError:
            self.close()
            raise

    @staticmethod
    def _believed(message: Message, request: Request) -> Answer:
        if (message.integer("epoch"), message.integer("version")) != (request.epoch, request.version):
            raise ProtocolError(f"message 'solved': found version {message.fields['version']}, need {request.version}")
        layers = (request.layers,)
        need = {
            "bias_LE": ((*layers, request.experts), torch.float32),
            "reach_L": (layers, torch.float32),
            "solved_L": (layers, torch.bool),
        }
        for name, (shape, dtype) in need.items():
            found = message.tensor(name)
            if found.shape != shape or found.dtype != dtype:
                there = f"found shape {tuple(found.shape)} of {found.dtype}"
                raise ProtocolError(f"message 'solved': {name}: {there}, need {shape} of {dtype}")
            if not bool(found.isfinite().all()):
                raise ProtocolError(f"message 'solved': {name}: found a non-finite value, need finite ones")
        if not bool((message.tensor("reach_L") > 0).all()):
            raise ProtocolError("message 'solved': reach_L: found a value of 0 or below, need values above 0")
        return Answer(request.epoch, request.version, **{name: message.tensor(name) for name in need})

    def close(self) -> None:
        """Hang up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            hang_up(connection)


class ChildLink:
    """A child process of our own, started again when it dies or hangs. It ends with this process, however that ends."""

    def __init__(
        self, settings: Mapping[str, Any], seconds: float, *, start_seconds: float = START_SECONDS, threads: int = 1
    ) -> None:
        self._settings, self._seconds, self._start_seconds, self._threads = settings, seconds, start_seconds, threads
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: SocketLink | None = None
        self._folder: str | None = None
        self._closed = False
        self._lock = threading.Lock()  # of starting and ending the child
        self.restarts = -1  # the first start is none

    def open(self) -> None:
        """Start the child and connect, unless that stands."""
        if self._socket is not None and self.process is not None and self.process.poll() is None:
            self._socket.open()
            return
        self._end()
        key = token_bytes(32)
        with self._lock:
            if self._closed:
                raise ServiceError("service: closed")
            self._folder = tempfile.mkdtemp(prefix="trine-")
            address = parse_address(f"unix:{self._folder}/balance")
            command = [sys.executable, "-c", _CHILD, f"unix:{self._folder}/balance", str(self._threads)]
            self.process = process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_child_environment(),
                start_new_session=True,  # an interrupt at the keyboard is the trainer's to handle
            )
            self.restarts += 1
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(key.hex().encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise ServiceError("service: its process ended while starting") from error
        self._wait_until_ready(process)
        self._socket = SocketLink(address, key, self._settings, self._seconds)
        self._socket.open()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._start_seconds)
        if not ready:
            self._end()
            raise ServiceError(f"service: its process was not ready within {self._start_seconds:g} s")
        if not process.stdout.readline():
            code = process.wait()
            self._end()
            raise ServiceError(f"service: its process ended while starting, with exit code {code}")

    def solve(self, request: Request) -> Answer:
        """Let the child solve; a child that did not is ended, and the next `open` starts another."""
        if self._socket is None:
            raise ServiceError("service: not connected")
        try:
            return self._socket.solve(request)
        except ServiceError:
            self._end()
            raise

    def close(self) -> None:
        """End the child for good."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, self.process = self.process, None
            link, self._socket = self._socket, None
            folder, self._folder = self._folder, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Delivery:
    """What the courier knows; read and written under its lock."""

    answers: dict[int, Answer] = field(default_factory=dict)
    newest: int = 0
    requests: int = 0
    dropped: int = 0
    answered: int = 0
    failures: int = 0
    last_error: str = ""
    heard_at: float | None = None
    down: bool = False


class Courier:
    """A thread that carries requests to a link and answers back.

    The newest request wins: where ``waiting`` of them wait already, the oldest is dropped (`Delivery.dropped`). After a
    failure the link is opened again, after longer and longer pauses.

    Args:
        link: opened at once, in the thread.
        waiting: requests that may wait, at least 1.
        kept: answers that are kept, the newest.
    """

    def __init__(self, link: Link, waiting: int, kept: int) -> None:
        self.link = link
        self.known = Delivery()
        self.epoch = 0
        self._kept = kept
        self._requests: deque[Request] = deque(maxlen=waiting)
        self._stopped = False
        self._opened = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._carry, name="trine-balance", daemon=True)
        self._thread.start()

    def started(self, seconds: float) -> None:
        """Wait until the link was opened once, or could not be; at most so long, and only the first time."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened or self._stopped or self.known.down, seconds)
            self._opened = True

    def submit(self, request: Request) -> None:
        """Hand over a request; never waits."""
        with self._changed:
            self.known.requests += 1
            self.known.dropped += len(self._requests) == self._requests.maxlen
            self._requests.append(request)
            self._changed.notify_all()

    def wait(self, version: int, seconds: float) -> Answer | None:
        """The answer of this version, waited for as long as there is hope: not after a failure without an answer."""
        limit = time.monotonic() + seconds
        with self._changed:
            while True:
                if version in self.known.answers:
                    return self.known.answers[version]
                left = limit - time.monotonic()
                if left <= 0 and not self.known.down:
                    self.known.down, self.known.last_error = True, f"service: no answer within {seconds:g} s"
                    logger.warning("balance: %s; the last bias is kept", self.known.last_error)
                if self.known.down or self._stopped or self.known.newest > version:
                    return None
                self._changed.wait(left)

    def newest(self) -> Answer | None:
        """The newest answer, if there is any."""
        with self._changed:
            return self.known.answers.get(self.known.newest)

    def put(self, answer: Answer) -> None:
        """Take in an answer, also one from a checkpoint; one from before the last `restart` is dropped."""
        with self._changed:
            known = self.known
            if answer.epoch != self.epoch:
                return
            known.answers[answer.version] = answer
            for version in sorted(known.answers)[: -self._kept]:
                del known.answers[version]
            known.newest = max(known.answers)
            self._changed.notify_all()

    def restart(self) -> None:
        """Begin another epoch: drop what waits, what is on its way, and all answers."""
        with self._changed:
            self.epoch += 1
            self._requests.clear()
            self.known.answers.clear()
            self.known.newest = 0

    def stop(self) -> None:
        """End the thread and close the link; a thread that hangs in a solve is left to end by itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.link.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
            self.link.close()  # the thread may just have been opening it

    def _carry(self) -> None:
        pause, longest = _BACKOFF_SECONDS
        while not self._stopped:
            try:
                self.link.open()  # before a request is taken: opening may take long, and newer ones come meanwhile
                with self._changed:
                    self._opened = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped or bool(self._requests))
                    if self._stopped:
                        return
                    request = self._requests.popleft()
                answer = self.link.solve(request)
            except Exception as error:  # the trainer goes on without the service, whatever is wrong with it
                self._failed(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause)
                pause = min(2 * pause, longest)
                continue
            pause = _BACKOFF_SECONDS[0]
            self._answered(answer)

    def _failed(self, error: Exception) -> None:
        with self._changed:
            if self._stopped:
                return
            known = self.known
            first = not known.down or known.last_error != str(error)
            known.failures += 1
            known.down, known.last_error = True, str(error)
            self._changed.notify_all()
        if first:
            logger.warning("balance: %s; the last bias is kept", error)

    def _answered(self, answer: Answer) -> None:
        with self._changed:
            known = self.known
            back = known.down and known.last_error
            known.answered += 1
            known.down, known.heard_at = False, time.monotonic()
        if back:
            logger.warning("balance: the service answers again")
        self.put(answer)


def _child_environment() -> dict[str, str]:
    """The child imports the package that this process has."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
