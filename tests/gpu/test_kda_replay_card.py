"""Replayed calls of the KDA kernels on a CUDA card: a graph of the driver's a call, whose parameters are set anew."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from kda_cases import Case, Data, draw
from torch import Tensor

from trine.ops.kda import kda
from trine.ops.kda.triton_native import NATIVE

pytestmark = pytest.mark.gpu
CASE = Case((1, 200, 4), "slow")
Known = list[tuple[Data, Tensor, tuple[Tensor, ...]]]


def step(data: Data, upstream: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients, in the way that is replayed."""
    out, _ = kda(**data, backend="triton")
    return (out, *torch.autograd.grad(out, list(data.values()), upstream))


def leaves(seed: int) -> tuple[Data, Tensor]:
    data, upstream, _ = draw(CASE, seed=seed)
    data.pop("initial_state")
    return {name: x.requires_grad_() for name, x in data.items()}, upstream


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def known() -> Known:
    """Five inputs with their results by plain launches, of a kind of call that the C++ side knows by then."""
    inputs = [leaves(seed) for seed in range(5)]
    module, wanted = NATIVE.load(), NATIVE.wanted
    NATIVE.module, NATIVE.wanted = None, False
    results = [step(*one) for one in inputs]
    NATIVE.module, NATIVE.wanted = module, wanted
    for _ in range(3):
        out = step(*inputs[0])[0]
    assert "CppNode" in out.grad_fn.name()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    return [(*one, result) for one, result in zip(inputs, results, strict=True)]


@pytest.fixture
def cases() -> Known:
    return known()


def test_calls_that_wait_for_the_card_keep_their_own_arguments(cases: Known) -> None:
    """Parameters are set for the next call while earlier calls still wait to run."""
    torch.cuda._sleep(400_000_000)
    found = [step(*cases[i % 5][:2]) for i in range(60)]
    assert not torch.cuda.current_stream().query()  # the host was not kept waiting
    torch.cuda.synchronize()
    for i, one in enumerate(found):
        same(one, cases[i % 5][2])


def test_streams_beside_each_other(cases: Known) -> None:
    """More of them than graphs are kept for, and one with a priority."""
    streams = [torch.cuda.Stream() for _ in range(6)] + [torch.cuda.Stream(priority=-1)]
    found = []
    for _ in range(3):
        for i, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append((i % 5, step(*cases[i % 5][:2])))
    torch.cuda.synchronize()
    for i, one in found:
        same(one, cases[i][2])


def test_threads_beside_each_other(cases: Known) -> None:
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(40):
            found = step(*cases[i][:2])
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(found, cases[i][2], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_step_is_captured_in_a_graph_of_the_users(cases: Known) -> None:
    """There every kernel is launched by itself, whatever was launched as a graph before."""
    static, weight = leaves(9)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, weight)
    for new, d_out, wanted in cases:
        with torch.no_grad():
            for name, x in new.items():
                static[name].copy_(x)
            weight.copy_(d_out)
        graph.replay()
        torch.cuda.synchronize()
        same(captured, wanted)


def _beside_a_capture() -> None:
    cases = known()
    static, weight = leaves(9)
    stream, found = torch.cuda.Stream(), []

    def work() -> None:
        with torch.cuda.stream(stream):
            found.extend(step(*cases[1][:2]) for _ in range(2))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        first = kda(**static, backend="triton")[0]
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        captured = step(static, weight)
    with torch.no_grad():
        for name, x in cases[2][0].items():
            static[name].copy_(x)
        weight.copy_(cases[2][1])
    graph.replay()
    torch.cuda.synchronize()
    same(captured, cases[2][2])
    assert torch.equal(first, cases[2][2][0]) and len(found) == 2
    for one in found:
        same(one, cases[1][2])


def _after_an_invalidated_capture() -> None:
    static, weight = leaves(9)
    known()
    torch.cuda.synchronize()

    def allocate() -> None:  # what a capture in the default mode forbids all threads
        with contextlib.suppress(RuntimeError):
            torch.empty(1 << 30, device="cuda")

    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="CUDA driver error 901"):
            step(static, weight)
        raise RuntimeError  # as the end of such a capture does


def _without_a_context() -> None:
    data, _, (wanted, *_) = known()[0]
    data = {name: x.detach() for name, x in data.items()}
    found: list[Tensor] = []
    for _ in range(2):
        kda(**data, backend="triton")
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(kda(**data, backend="triton")[0]))
        thread.start()
        thread.join()
    assert len(found) == 2 and all(torch.equal(x, wanted) for x in found)


ALONE = {work.__name__[1:]: work for work in (_beside_a_capture, _after_an_invalidated_capture, _without_a_context)}


@pytest.mark.parametrize("name", ALONE)
def test_in_a_process_of_its_own(name: str) -> None:
    """Another thread makes its graph while this one captures, or spoils the capture; a thread begins with a replay.

    What goes wrong here ends the process.
    """
    subprocess.run([sys.executable, __file__, name], timeout=120, check=True)


if __name__ == "__main__":
    ALONE[sys.argv[1]]()
