"""Asynchronous control: a service solves the bias while training goes on, and every rank adopts it between two steps.

The bias of step t + 1 + lag is solved from the counts of step t. What travels is the *absolute* bias, never an
increment: replacing the bias with one that is some steps old is stable, adding a correction that is some steps old is
not (docs/balance.md). The service may be late, hang, die or speak nonsense: training keeps the last bias, and when that
grows too old solves in the process, until the service answers again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from trine._log import logger
from trine.balance.quantile_balancing import QuantileBalancing
from trine.balance.service_link import (
    START_SECONDS,
    Answer,
    ChildLink,
    Courier,
    Link,
    Request,
    SocketLink,
    ThreadLink,
)
from trine.balance.service_protocol import connect, hang_up, parse_address, read_key
from trine.balance.window import Window, reduce_counts
from trine.ops.router import RouterStats

_PENDING = ("bias_LE", "reach_L", "solved_L")
_HEADER = 4  # words before the bias in what rank 0 tells the others: version, missed, fallbacks, late


@dataclass(frozen=True)
class ServiceStatus:
    """How asynchronous control is doing. Where not rank 0, only the first six fields are known.

    Attributes:
        mode: ``"thread"``, ``"process"`` or the service's address.
        steps: windows closed so far.
        version: the window that the present bias was solved from; 0 before the first.
        lag: windows between the newest one and that.
        missed: steps in a row to which no new bias came from the service.
        fallbacks: biases solved in this process because the service's grew too old.
        requests, answered, failures: of the service.
        dropped: requests that a newer one replaced before the service was free.
        late: answers that were too old to be adopted.
        restarts: child processes started after the first.
        down: the last request failed, and nothing was heard since.
        heard_seconds: since the last answer; None before the first.
        last_error: what went wrong last, also when it is over; empty if nothing did.
    """

    mode: str
    steps: int
    version: int
    lag: int
    missed: int
    fallbacks: int
    requests: int = 0
    answered: int = 0
    failures: int = 0
    dropped: int = 0
    late: int = 0
    restarts: int = 0
    down: bool = False
    heard_seconds: float | None = None
    last_error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Field names and values."""
        return asdict(self)


def check_service(where: str, seconds: float = 10.0) -> None:
    """Greet the service at an address and hang up, so that a run can be refused before its data are made.

    Args:
        where: what `BalanceConfig.service` says; only an address is looked at.
        seconds: time allowed for the greeting.

    Raises:
        ValueError: no address, or no key.
        ServiceError: no service there, another key, another version.
    """
    if where not in ("off", "thread", "process"):
        hang_up(connect(parse_address(where), read_key(), seconds))


class AsyncBalancing:
    """A `BalancePolicy` that lets a service solve what another policy would solve in the step.

    Every rank sums its counts with the others'; rank 0 hands them to the service without waiting, takes the newest
    complete answer, and one broadcast gives all ranks the same bits. A layer that had no tokens in the window that was
    solved keeps its bias.

    Args:
        policy: what is solved; also solves in the process when the service does not.
        mode: ``"thread"`` (of this process), ``"process"`` (a child process, which never outlives this one), or the
            address of a service that runs already (``trine balance serve``): ``unix:PATH`` or ``127.0.0.1:PORT``.
        key: the service's key; None reads ``TRINE_BALANCE_KEY``. A path names a file that only its owner can read.
            Needed for an address only.
        lag: None adopts the newest answer there is at each step, so that timing decides how old it is. A number adopts
            exactly the bias solved so many windows ago, waiting for it where needed: a run is then reproducible, also
            across a resume. 0 waits for this window's: the same as no service.
        patience: steps without a new bias from the service after which each step solves its own here, until the
            service answers again; an answer to a window older than that is not adopted. Biases 0 to 4 steps old were
            measured to balance as well.
        seconds: time allowed for an answer, and in ``lag`` mode for waiting at a step; the start of a child process is
            no part of it.
        threads: of the child process.

    Build it after ``init_process_group``. `close` ends the thread and the child process; so does the end of the
    process.

    Raises:
        ValueError: a bad argument, a policy whose bias cannot be solved elsewhere, no key.
        ServiceError: no service at the address, another key, another version.
    """

    def __init__(
        self,
        policy: QuantileBalancing,
        mode: str = "thread",
        *,
        key: bytes | str | Path | None = None,
        lag: int | None = None,
        patience: int = 4,
        seconds: float = 10.0,
        threads: int = 1,
    ) -> None:
        if not isinstance(policy, QuantileBalancing):
            raise ValueError(
                f"policy: found {type(policy).__name__}, need QuantileBalancing: its bias is solved from the counts of "
                "a window, while an increment that comes late lets the load swing up"
            )
        if patience < 1 or (lag is not None and not 0 <= lag <= patience):
            raise ValueError(f"patience, lag: found {patience}, {lag}, need patience >= 1 and 0 <= lag <= patience")
        if not seconds > 0 or threads < 1:
            raise ValueError(f"seconds, threads: found {seconds}, {threads}, need more than 0 and at least 1")
        self.policy, self.mode, self.lag, self.patience = policy, mode, lag, patience
        self._seconds = seconds
        self.steps = self.version = self.missed = self.fallbacks = self.late = 0
        self._served = 0  # the newest window whose bias came from the service
        self._told: Tensor | None = None
        self._courier: Courier | None = None
        link = self._link(key, threads)
        if self._is_leader():
            if isinstance(link, SocketLink):
                link.open()
            waiting = 1 if lag is None else lag + 1
            self._courier = Courier(link, waiting, kept=patience + 1)
            weakref.finalize(self, self._courier.stop)

    def _link(self, key: bytes | str | Path | None, threads: int) -> Link:
        if self.mode == "thread":
            return ThreadLink(self.policy)
        if self.mode == "process":
            return ChildLink(self.policy.settings(), self._seconds, threads=threads)
        address = parse_address(self.mode)
        secret = key if isinstance(key, bytes) else read_key(key)
        return SocketLink(address, secret, self.policy.settings(), self._seconds)

    def _is_distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.policy.group) > 1

    def _is_leader(self) -> bool:
        return not self._is_distributed() or dist.get_rank(self.policy.group) == 0

    @torch.no_grad()
    def step(self, stats: RouterStats) -> Window:
        """Reduce, hand over, adopt, zero. Waits for the service in ``lag`` mode only; the first step also waits until a
        child process has started, for a minute at most: what it imports takes longer than a step.

        Raises:
            ValueError: k exceeds the number of experts.
        """
        reduce_counts(stats, self.policy.group)
        window = Window.of(stats)
        self.steps += 1
        if self._courier is not None:
            self._courier.started(START_SECONDS)
            self._courier.submit(Request.of(stats, self._courier.epoch, self.steps))
            self._choose(self._courier, stats)
        if self._is_distributed():
            self._agree(stats)
        self.policy.warn(stats, window)
        stats.zero_()
        return window

    def _choose(self, courier: Courier, stats: RouterStats) -> None:
        """Put the next bias into ``stats`` on rank 0: the service's, or one solved here, or the old one."""
        answer = self._answer(courier)
        if answer is not None:
            if self.missed > self.patience:
                logger.warning(
                    "balance: the service's bias is used again, after %d solved here", self.missed - self.patience
                )
            solved_L = answer.solved_L.to(stats.device)
            stats.bias_LE.copy_(torch.where(solved_L[:, None], answer.bias_LE.to(stats.device), stats.bias_LE))
            stats.reach_L.copy_(torch.where(solved_L, answer.reach_L.to(stats.device), stats.reach_L))
            self.version = self._served = answer.version
            self.missed = 0
            return
        self.missed += 1
        if self.missed > self.patience:
            if self.missed == self.patience + 1:
                logger.warning("balance: no bias from the service for %d steps: solving in this process", self.missed)
            self.policy.solve_(stats)
            self.version = self.steps
            self.fallbacks += 1

    def _answer(self, courier: Courier) -> Answer | None:
        """The answer to adopt at this step, if there is one."""
        if self.lag is not None:
            wanted = self.steps - self.lag
            return courier.wait(wanted, self._seconds) if wanted > self._served else None
        answer = courier.newest()
        if answer is None or answer.version <= self._served:
            return None
        if self.steps - answer.version > self.patience:
            self._served = answer.version  # seen, and too old
            self.late += 1
            return None
        return answer

    def _agree(self, stats: RouterStats) -> None:
        """One broadcast from rank 0: version, bias and reach, as words, so that no bit is lost."""
        head_4 = torch.tensor([self.version, self.missed, self.fallbacks, self.late], dtype=torch.int32)
        own = (stats.bias_LE, stats.reach_L)
        words_N = torch.cat([head_4.to(stats.device), *(one.reshape(-1).view(torch.int32) for one in own)])
        group = self.policy.group
        dist.broadcast(words_N, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
        parts = words_N[_HEADER:].view(torch.float32).split([one.numel() for one in own])
        for one, part in zip(own, parts, strict=True):
            one.copy_(part.view_as(one))
        self._told = words_N[:_HEADER]

    def _listen(self) -> None:
        """Take in what rank 0 told last; waits for the device, so it is left until somebody asks."""
        if self._courier is None and self._told is not None:
            self.version, self.missed, self.fallbacks, self.late = self._told.tolist()

    def status(self) -> ServiceStatus:
        """How it is doing, as of the last step."""
        self._listen()
        common = (self.mode, self.steps, self.version, self.steps - self.version, self.missed, self.fallbacks)
        if self._courier is None:
            return ServiceStatus(*common)
        known = self._courier.known
        return ServiceStatus(
            *common,
            requests=known.requests,
            answered=known.answered,
            failures=known.failures,
            dropped=known.dropped,
            late=self.late,
            restarts=max(0, self._courier.link.restarts),
            down=known.down,
            heard_seconds=None if known.heard_at is None else time.monotonic() - known.heard_at,
            last_error=known.last_error,
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters, and answers that are not adopted yet; in ``lag`` mode those on their way are waited for."""
        self._listen()
        state: dict[str, Any] = {
            name: getattr(self, name) for name in ("steps", "version", "missed", "fallbacks", "late")
        }
        state["served"] = self._served
        pending = [] if self._courier is None else self._pending(self._courier)
        state["pending"] = [answer.version for answer in pending]
        if pending:
            for name in _PENDING:
                state[f"pending_{name}"] = torch.stack([getattr(answer, name) for answer in pending])
        state.update({f"policy.{name}": value for name, value in self.policy.state_dict().items()})
        return state

    def _pending(self, courier: Courier) -> list[Answer]:
        if self.lag is None:
            newest = courier.newest()
            return [newest] if newest is not None and newest.version > self._served else []
        versions = range(max(self.steps - self.lag, self._served) + 1, self.steps + 1)
        answers = [courier.wait(version, self._seconds) for version in versions]
        return [answer for answer in answers if answer is not None]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; whatever the service still works on is dropped.

        Raises:
            ValueError: the state is another policy's.
        """
        counters = ("steps", "version", "missed", "fallbacks", "late", "served")
        own = {name: value for name, value in state.items() if not name.startswith("policy.")}
        needed = {*counters, "pending"}
        if not needed <= set(own) <= needed | {f"pending_{name}" for name in _PENDING}:
            raise ValueError(f"state: found {sorted(own)}, need {sorted(needed)}: it is not one of AsyncBalancing")
        versions = own["pending"]
        parts = {name: own.get(f"pending_{name}", ()) for name in _PENDING}
        if any(len(one) != len(versions) for one in parts.values()):
            raise ValueError(f"state: found {len(versions)} pending versions, need bias, reach and mark of each")
        self.policy.load_state_dict(
            {name.removeprefix("policy."): value for name, value in state.items() if name.startswith("policy.")}
        )
        self.steps, self.version, self.missed, self.fallbacks, self.late, self._served = (own[n] for n in counters)
        self._told = None
        if self._courier is None:
            return
        self._courier.restart()
        for index, version in enumerate(versions):
            answer = {name: one[index].cpu() for name, one in parts.items()}
            self._courier.put(Answer(self._courier.epoch, version, **answer))

    def close(self) -> None:
        """End the thread and the child process. A policy that was closed solves in the process once it must."""
        if self._courier is not None:
            self._courier.stop()
