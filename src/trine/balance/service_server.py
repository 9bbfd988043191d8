"""The balancing service itself: reads reduced counts, solves the bias, answers. One connection a trainer.

`child_main` is the child process that `AsyncBalancing` starts; ``trine balance serve`` runs the same loop by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import torch
from torch import Tensor

from trine._log import logger
from trine.balance.quantile_balancing import QuantileBalancing
from trine.balance.service_protocol import (
    MAX_BYTES,
    Address,
    Message,
    ProtocolError,
    ServiceError,
    address_text,
    deadline,
    greet,
    parse_address,
    receive,
    send,
)
from trine.ops.router import COUNTERS, RouterStats

_GREETING_SECONDS = 10.0
_PARENT_SECONDS = 2.0


def solve_message(request: Message) -> Message:
    """Answer one ``solve`` request: bias and reach of every layer, and which layers had tokens to solve them from.

    Raises:
        ProtocolError: a field or an array is missing or does not fit the others.
        ValueError: counts or settings that cannot be solved.
    """
    layers, experts, bins = (request.integer(name) for name in ("layers", "experts", "bins"))
    histograms = request.tensor("histograms_LEB")
    if histograms.shape != (layers, experts, bins):
        raise ProtocolError(
            f"message 'solve': histograms_LEB: found shape {tuple(histograms.shape)}, need {(layers, experts, bins)}"
        )
    options = json.loads(request.text("stats"))
    settings = json.loads(request.text("policy"))
    began = time.perf_counter()
    try:
        stats = RouterStats.allocate(layers, experts, bins, "cpu", **options)
        policy = QuantileBalancing(**settings)
    except TypeError as error:
        raise ProtocolError(f"message 'solve': settings {options} and {settings} do not fit: {error}") from error
    stats.load_state_dict(dict(request.tensors))
    solved = solve_counts(policy, stats)
    fields = {name: request.integer(name) for name in ("epoch", "version")}
    seconds = time.perf_counter() - began
    return Message("solved", {**fields, "seconds": seconds}, solved)


@torch.no_grad()
def solve_counts(policy: QuantileBalancing, stats: RouterStats) -> dict[str, Tensor]:
    """What ``policy`` solves from counts that are reduced already; ``stats`` is used up.

    Returns:
        ``bias_LE`` ``[L, E]`` fp32; ``reach_L`` ``[L]`` fp32, of the next histogram; ``solved_L`` ``[L]`` bool, layers
        that had tokens.

    Raises:
        ValueError: the solved bias is not finite, or ``k`` does not fit.
    """
    solved_L = stats.counters_LF[:, COUNTERS.index("counted")] > 0
    policy.solve_(stats)
    if not bool(stats.bias_LE.isfinite().all() and stats.reach_L.isfinite().all()):
        raise ValueError("bias: found a non-finite one after solving, need finite counts and biases")
    return {"bias_LE": stats.bias_LE, "reach_L": stats.reach_L, "solved_L": solved_L}


def serve(
    address: Address,
    key: bytes,
    *,
    on_ready: Callable[[str], None] = lambda _: None,
    owned: bool = False,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Listen and answer until the process ends; with ``owned`` until the first trainer hangs up.

    Args:
        address: a path, at which no other service listens (a socket that an ended one left is removed), or
            ("127.0.0.1", port), 0 taking any port.
        key: what both sides must know.
        on_ready: told the address once connections are taken.
        owned: serve one trainer, then return.
        max_bytes: largest request.

    Raises:
        OSError: the address is in use or cannot be bound.
    """
    before = os.umask(0o177)  # only the owner may connect, whatever the umask; the key would refuse others anyway
    try:
        if isinstance(address, str):
            _remove_left(address)
        listener = Listener(address)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(f"{address_text(address)}: cannot listen there ({error.strerror})") from error
    finally:
        os.umask(before)
    with listener:
        at = listener.address
        on_ready(address_text(at if isinstance(at, str) else (str(at[0]), int(at[1]))))
        while True:
            connection: Connection = listener.accept()
            if not owned:
                threading.Thread(target=_converse, args=(connection, key, max_bytes), daemon=True).start()
            elif _converse(connection, key, max_bytes):
                return


def _remove_left(path: str) -> None:
    """Remove a socket at which nobody listens any more.

    Raises:
        OSError: somebody does, or the path is something else.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"{path}: found something that is no socket, need a free path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(f"{path}: found a service that listens there, need another path")


def _converse(connection: Connection, key: bytes, max_bytes: int) -> bool:
    """Serve one connection to its end; whether it knew the key."""
    with connection:
        try:
            with deadline(connection, _GREETING_SECONDS, "greeting"):
                greet(connection, key)
        except (AuthenticationError, AssertionError, ServiceError, EOFError, OSError) as error:
            logger.warning("balance service: refused a connection: %s", error)
            return False
        with contextlib.suppress(EOFError, OSError):
            while _answer(connection, max_bytes):
                continue
    return True


def _answer(connection: Connection, max_bytes: int) -> bool:
    """Answer one request; whether the connection can go on. What is wrong is told to the trainer, not only logged."""
    try:
        answer = solve_message(receive(connection, max_bytes))
    except (ProtocolError, ValueError) as error:
        logger.warning("balance service: refused a request: %s", error)
        answer = Message("error", {"error": str(error)})
    send(connection, answer)
    return connection.readable  # not after a message that was too large


def child_main(arguments: list[str]) -> int:
    """The child process of a trainer: ``ADDRESS THREADS PARENT``; the key comes by stdin, in a line of hexadecimals.

    Prints the address in one line once it listens. Ends when the trainer hangs up, or dies in whatever way: the kernel
    closes both the connection and stdin, and the second is seen even while a request is being solved. Where another
    process of the trainer's holds copies of them, the parent's number tells.
    """
    address, threads, parent = parse_address(arguments[0]), int(arguments[1]), int(arguments[2])
    torch.set_num_threads(threads)
    key = bytes.fromhex(sys.stdin.buffer.readline().decode().strip())

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], _PARENT_SECONDS)
            if readable and not os.read(0, 1):
                break
        _forget(address)
        os._exit(0)

    threading.Thread(target=leave_with_parent, daemon=True).start()

    def tell(where: str) -> None:
        print(where, flush=True)

    serve(address, key, on_ready=tell, owned=True)
    _forget(address)
    return 0


def _forget(address: Address) -> None:
    """Remove a socket's file and the folder made for it."""
    if isinstance(address, str):
        with contextlib.suppress(OSError):
            Path(address).unlink(missing_ok=True)
            Path(address).parent.rmdir()
