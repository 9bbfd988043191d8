"""Replayed calls in C++: the plain code's bits, in autograd's graph too. The driver's launch is stood in for."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

os.environ["TRITON_INTERPRET"] = "1"

from driver_stand_in import Driver

from trine.ops.kda import _CHECKED, _choice, kda, kda_reference, triton_backward, triton_forward, triton_replay
from trine.ops.kda.triton_launch import Kernel, repair_interpreter
from trine.ops.kda.triton_native import NATIVE
from trine.ops.kda.triton_replay import Memory

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The built module, no call known to it yet, before a driver of our own."""
    made = Driver()
    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "MEMORY", Memory())
    monkeypatch.setattr(_choice, "why_no_card", lambda q: None)
    monkeypatch.setattr(NATIVE, "module", NATIVE.load())
    monkeypatch.setattr(NATIVE, "calls", {})
    _CHECKED.clear()
    monkeypatch.setattr(triton_replay, "driver", lambda: made.addresses)
    monkeypatch.setattr(Kernel, "handle", lambda kernel, variant, index: made.handle(kernel, variant, index))
    yield made
    _CHECKED.clear()


# 16 channels make the scale 0.25: the interpreter keeps a Python number in 64 bits, a launch gives it in 32.
def draw(tokens: int = 20, heads: int = 1, width: int = 16, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    data = {name: torch.randn(1, tokens, heads, width) for name in ("q", "k", "v", "gate")}
    data |= {"beta": torch.randn(1, tokens, heads), "A_log": torch.randn(heads), "dt_bias": torch.randn(heads, width)}
    return {name: x.requires_grad_() for name, x in data.items()}


def both(data: dict[str, Tensor], weight: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Output, final state and every gradient of one call."""
    out, final = kda(**data, **options)
    torch.manual_seed(9)
    upstream = torch.randn_like(out) if weight is None else weight
    loss = (out * upstream).sum() + (0 if final is None else (final * final).sum())
    return (out, *(() if final is None else (final,)), *torch.autograd.grad(loss, list(data.values())))


def python(data: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    """The same without the module."""
    module, NATIVE.module = NATIVE.module, None
    try:
        return both(data, **options)
    finally:
        NATIVE.module = module


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "factors": {"save": "factors"},
    "final state": {"output_final_state": True},
    "packed": {"cu_seqlens": torch.tensor([0, 5, 5, 20], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_later_call_has_the_first_ones_bits(driver: Driver, name: str) -> None:
    options = OPTIONS[name]
    wanted = {seed: python(draw(seed=seed), **options) for seed in (1, 2)}
    assert driver.launches == 0
    same(both(draw(seed=1), **options), wanted[1])  # recorded
    same(both(draw(seed=2), **options), wanted[2])  # forward in C++, backward recorded or asked for
    before = driver.launches
    assert before > 0
    for seed in (1, 2):
        data = draw(seed=seed)
        if name == "final state":  # a gradient of the state is asked of Python
            same(both(data, **options), wanted[seed])
            continue
        out, _ = kda(**data, **options)
        assert "KDA" in out.grad_fn.name()
        forward = driver.launches
        torch.manual_seed(9)
        gradients = torch.autograd.grad(out, list(data.values()), torch.randn_like(out))
        assert driver.launches > forward
        same((out, *gradients), wanted[seed])


def test_a_call_without_gradients_runs_in_cpp(driver: Driver) -> None:
    data = {name: x.detach() for name, x in draw().items()}
    wanted, _ = kda(**data)
    assert driver.launches == 0
    found, final = kda(**data)
    assert driver.launches == 2 and final is None
    assert torch.equal(found, wanted)


def test_gradients_of_other_forms_are_asked_of_python(driver: Driver) -> None:
    data = draw(tokens=7)
    wanted = python(data, weight=torch.full((1, 7, 1, 16), 0.5))
    for _ in range(2):
        same(both(data, weight=torch.full((1, 7, 1, 16), 0.5)), wanted)
    out, _ = kda(**data)
    before = driver.launches
    same((out, *torch.autograd.grad(0.5 * out.sum(), list(data.values()))), wanted)  # an expanded gradient
    assert driver.launches == before
    data["q"].grad = None
    out, _ = kda(**data)
    out.backward(torch.full_like(out, 0.5))
    assert driver.launches > before + 2
    assert data["q"].grad is not None
    assert torch.equal(data["q"].grad, wanted[1])


def test_only_first_gradients(driver: Driver) -> None:
    data = draw(tokens=5)
    for _ in range(3):
        both(data)
    out, _ = kda(**data)
    (first,) = torch.autograd.grad(out.sum(), data["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="TritonKDA: found a gradient of a gradient"):
        first.sum().backward()


def test_forward_mode_is_refused(driver: Driver) -> None:
    """With and without gradients, known kind or not: the tangent would be lost."""
    data = draw(tokens=5)
    for _ in range(3):
        both(data)
    with torch.no_grad():
        kda(**data)
        kda(**data)
    with forward_ad.dual_level():
        for grad in (True, False):
            dual = {name: forward_ad.make_dual(x.detach(), torch.ones_like(x)) for name, x in data.items()}
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(NotImplementedError, match="kda: found a tensor with a for"),
            ):
                kda(**(data | {"v": dual["v"]}))


def test_misuse_is_refused_as_everywhere_in_torch(driver: Driver) -> None:
    data = draw(tokens=5)
    for _ in range(3):
        both(data)
    out, _ = kda(**data)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    for change in ("k", "out"):
        doubled = {name: 2 * x for name, x in data.items()}
        out, _ = kda(**doubled)
        (out if change == "out" else doubled[change]).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_fresh_memory_is_torchs_own(driver: Driver) -> None:
    """Shape and dtype as asked; full of NaN where the user asks torch for deterministic algorithms."""
    fresh = NATIVE.module.Round([], [(2, [3, 5], torch.float16)], None)
    program = NATIVE.module.Program(driver.addresses, 0, 1, 3, [fresh], [2, -1])
    torch.use_deterministic_algorithms(True)
    try:
        filled, nothing = program.run([torch.ones(4)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert nothing is None
    assert torch.equal(filled.isnan(), torch.ones(3, 5, dtype=torch.bool))
    plain, _ = program.run([torch.ones(4)])
    for x in (filled, plain):
        assert (x.shape, x.stride(), x.dtype, x.device.type) == ((3, 5), (5, 1), torch.float16, "cpu")
        assert x.untyped_storage().nbytes() == 30 and not x.requires_grad
    plain.copy_(torch.arange(15).reshape(3, 5))
    assert (plain + filled.nan_to_num(0)).sum() == 105
    with pytest.raises(RuntimeError, match="found a tensor on meta, need one on a CUDA card"):
        program.run([torch.ones(4, device="meta")])


def test_an_error_of_the_python_function_keeps_its_type(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw(tokens=5)
    for _ in range(2):
        both(data)
    out, _ = kda(**data)

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("nothing of the kind")

    monkeypatch.setattr(triton_backward.MEMORY, "call", broken)
    with pytest.raises(KeyError, match="nothing of the kind"):
        torch.autograd.grad(out.sum(), data["q"])


def test_a_launch_that_fails_raises(driver: Driver) -> None:
    data = {name: x.detach() for name, x in draw(tokens=5).items()}
    kda(**data)
    driver.code = 701
    with pytest.raises(RuntimeError, match="CUDA driver error 701"):
        kda(**data)
    driver.code = 0
    leaves = draw(tokens=5)
    for _ in range(3):
        both(leaves)
    out, _ = kda(**leaves)
    upstream, failures = torch.ones_like(out), []
    driver.code = 901

    def work() -> None:
        for call in (lambda: kda(**leaves), lambda: torch.autograd.grad(out, leaves["q"], upstream)):
            try:
                call()
            except RuntimeError as error:
                failures.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == ["launching a KDA kernel failed with CUDA driver error 901"] * 2


def test_what_is_saved_passes_the_hooks(driver: Driver) -> None:
    """As for activation checkpointing: all that is kept for the backward pass can be given away and brought back."""
    data = draw()
    wanted = python(data, save="factors")
    for _ in range(2):
        both(data, save="factors")
    shapes: list[torch.Size] = []

    def pack(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, _ = kda(**data, save="factors")
    assert len(shapes) == 7 + 1 + 5  # arguments, output, factors
    torch.manual_seed(9)
    same((out, *torch.autograd.grad(out, list(data.values()), torch.randn_like(out))), wanted)


def test_what_hooks_bring_back_in_another_form_is_not_replayed(driver: Driver) -> None:
    """Neither then nor later: what is recorded with such tensors is for such tensors."""
    data = draw(tokens=5, heads=2)
    fused = torch.stack([data[name].detach() for name in "qkv"], 2)
    for i, name in enumerate("qkv"):
        data[name] = fused[:, :, i].detach().requires_grad_()
    wanted = python(data)

    def usual() -> tuple[Tensor, ...]:
        out, _ = kda(**data)
        torch.manual_seed(9)
        return out, *torch.autograd.grad(out, list(data.values()), torch.randn_like(out))

    def other(unpack: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
            return usual()

    for _ in range(2):
        same(other(lambda x: x.contiguous()), wanted)
    for _ in range(3):
        same(usual(), wanted)
    before = driver.launches
    same(other(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x), wanted)
    same(other(lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)), wanted)  # misaligned
    assert driver.launches == before + 4  # the forward passes


def test_checkpointing_keeps_nothing(driver: Driver) -> None:
    """It ends the second forward pass by raising from the hook that packs what KDA saves, inside the node's making."""
    data = draw(tokens=5)
    wanted = python(data)
    for _ in range(3):
        both(data)

    def step() -> weakref.ref[Tensor]:
        fresh = {name: x.detach().clone().requires_grad_() for name, x in data.items()}
        out = checkpoint(lambda **x: kda(**x)[0], use_reentrant=False, **fresh)
        torch.manual_seed(9)
        gradients = torch.autograd.grad(out, list(fresh.values()), torch.randn_like(out))
        same((out, *gradients), wanted)
        return weakref.ref(fresh["q"].untyped_storage())

    for _ in range(2):
        step()
    gc.collect()
    counted = sum(isinstance(x, Tensor) for x in gc.get_objects())
    assert all(step()() is None for _ in range(2))
    gc.collect()
    assert sum(isinstance(x, Tensor) for x in gc.get_objects()) == counted


def test_nothing_is_replayed_where_torch_is_watched(driver: Driver) -> None:
    """A mode may answer ``empty`` with memory of another size, as selective checkpointing does."""
    data = draw(tokens=5)
    wanted = python(data)
    for _ in range(3):
        both(data)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
            return function(*args, **(keywords or {}))

    out, _ = kda(**data)
    before = driver.launches
    with Counting():
        torch.manual_seed(9)
        first = torch.autograd.grad(out, list(data.values()), torch.randn_like(out))
        same((out, *first), wanted)
        same(both(data), wanted)
        module, NATIVE.module = NATIVE.module, None
        assert triton_replay.kind_of((), (data["q"],)) is None
        NATIVE.module = module
    assert driver.launches == before
    same(both(data), wanted)
    assert driver.launches > before


def test_compiled_autograd(driver: Driver) -> None:
    data = draw(tokens=5)
    wanted = python(data)
    for _ in range(3):
        both(data)
    out, _ = kda(**data)
    torch.manual_seed(9)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(torch.randn_like(out))
    same((out, *(x.grad for x in data.values())), wanted)  # type: ignore[misc]


def test_gradients_without_memory_or_with_a_tangent_are_asked_of_python(driver: Driver) -> None:
    data = draw(tokens=5)
    for _ in range(3):
        both(data)
    out, _ = kda(**data)
    nothing = torch._efficientzerotensor(out.shape)
    found = torch.autograd.grad(out, list(data.values()), nothing)
    assert all(not x.any() for x in found)
    out, _ = kda(**data)
    found = torch.autograd.grad(out, list(data.values()), torch._neg_view(torch.ones_like(out)))
    out, _ = kda(**data)
    ones = torch.autograd.grad(out, list(data.values()), torch.ones_like(out))
    same(found, tuple(-x for x in ones))
    negated = {name: torch._neg_view(-x.detach()) for name, x in data.items()}
    same((kda(**negated)[0],), (out,))
    nothing = kda(**(negated | {"beta": torch._efficientzerotensor(data["beta"].shape)}))[0]
    same((nothing,), (kda(**(negated | {"beta": torch.zeros_like(data["beta"])}))[0],))
    out, _ = kda(**data)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="gradient of kda: found a tensor with a forw"),
    ):
        torch.autograd.grad(out, data["q"], forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_the_module_tells_forms_apart(driver: Driver) -> None:
    """Types, shapes, strides, absences, whether gradients are wanted; None for what has no plain memory of its own."""
    forms = NATIVE.module.forms
    x = torch.zeros(4, 8)
    different = [
        (x,), (x, None), (None, x), (x, x), (x.double(),), (x.view(8, 4),), (x.view(4, 2, 4),), (x[:, :4],),
        (x.t(),), (x[:2],), (torch.zeros(()),), (None,), (),
    ]  # fmt: skip
    different += [tuple(y.clone().requires_grad_() for y in different[0])]
    found = [forms(one) for one in different]
    assert all(isinstance(one, bytes) for one in found)
    assert len(set(found)) == len(found)
    assert forms((torch.ones(4, 8), None)) == found[1]
    assert forms((torch.nn.Parameter(x),)) == found[-1]
    with torch.no_grad():
        assert forms((torch.nn.Parameter(x),)) == found[0]
    special = [x[:, 1:], x.to_sparse(), torch.zeros(2, dtype=torch.complex64).conj().imag, 3.0, "q"]
    with FakeTensorMode() as mode:
        special.append(mode.from_tensor(x))
    assert [forms((one,)) for one in special] == [None] * len(special)
    assert torch.func.vmap(lambda row: row * (forms((row,)) is None))(torch.ones(2, 4)).sum() == 8


def test_kernels_are_launched_as_one_graph(driver: Driver) -> None:
    """Made once for a stream, its parameters set anew by every call."""
    first, other = ({name: x.detach() for name, x in draw(tokens=5, seed=seed).items()} for seed in (1, 2))
    wanted = kda(**first)[0], kda_reference(**other, scale=0.25)[0]
    for i in range(3):
        assert torch.equal(kda(**first)[0], wanted[0])
        assert (driver.graph_launches, driver.launches, len(driver.graphs)) == (i + 1, 2 * (i + 1), 2)
    torch.testing.assert_close(kda(**other)[0], wanted[1], rtol=2e-5, atol=2e-5)
    assert driver.graph_launches == 4
    NATIVE.calls.clear()
    triton_forward.MEMORY._kept.clear()
    triton_replay.ACTIVE.latest = None
    gc.collect()
    assert driver.graphs == {}


def test_a_thread_without_a_context_is_given_the_cards(driver: Driver) -> None:
    data = {name: x.detach() for name, x in draw(tokens=5).items()}
    wanted, _ = kda(**data)
    kda(**data)
    driver.context = 0
    assert torch.equal(kda(**data)[0], wanted)
    assert (driver.launches, driver.context) == (4, 7)
    triton_forward.MEMORY._kept.clear()
    NATIVE.calls.clear()
    triton_forward.forward(**data)
    driver.context = 0  # known to none but the operator's replays, and replayed for the first time
    assert torch.equal(triton_forward.forward(**data)[0], wanted)
    assert (driver.launches, driver.context) == (6, 7)


def test_a_capture_that_failed_takes_no_launch(driver: Driver) -> None:
    data = draw(tokens=5)
    for _ in range(3):
        both(data)
    out, _ = kda(**data)
    wanted, before, driver.capturing = out.detach().clone(), driver.launches, 2
    for call in (lambda: kda(**data), lambda: torch.autograd.grad(out, data["q"], torch.ones_like(out))):
        with pytest.raises(RuntimeError, match="CUDA driver error 901"):
            call()
    assert driver.launches == before
    driver.capturing = 0
    assert torch.equal(kda(**data)[0], wanted)


WITHOUT_GRAPHS: dict[str, Callable[[Driver], object]] = {
    "another graph is being captured": lambda driver: setattr(driver, "capturing", 1),
    "the state of a capture is unknown": lambda driver: driver.failing.add("cuStreamIsCapturing"),
    "a stream of a priority": lambda driver: setattr(driver, "priority", -1),
    "a context of its own": lambda driver: setattr(driver, "context", 8),
    "an old driver": lambda driver: driver.addresses.pop("cuGraphAddKernelNode_v2"),
    "no graph can be made": lambda driver: driver.failing.add("cuGraphCreate"),
    "a kernel that does not fit": lambda driver: driver.failing.add("cuGraphAddKernelNode_v2"),
    "no instance can be made": lambda driver: driver.failing.add("cuGraphInstantiateWithFlags"),
    "parameters cannot be set": lambda driver: driver.failing.add("cuGraphExecKernelNodeSetParams_v2"),
    "a graph cannot be launched": lambda driver: driver.failing.add("cuGraphLaunch"),
}


@pytest.mark.parametrize("name", WITHOUT_GRAPHS)
def test_where_there_is_no_graph_kernels_are_launched_one_by_one(driver: Driver, name: str) -> None:
    WITHOUT_GRAPHS[name](driver)
    data = draw(tokens=5)
    wanted = python(data)
    for _ in range(3):
        out, _ = kda(**data)
        torch.manual_seed(9)
        gradients = torch.autograd.grad(out, list(data.values()), torch.randn_like(out))
    same((out, *gradients), wanted)
    assert driver.launches > 4 and driver.graph_launches == 0


def test_kernels_between_which_memory_goes_back_are_launched_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be given that memory, and its work must come after the launches that read it."""
    monkeypatch.setattr(triton_replay, "_SMALL", 0)
    data = draw()
    wanted = python(data)
    for _ in range(3):
        out, _ = kda(**data)
        before = driver.graph_launches
        torch.manual_seed(9)
        same((out, *torch.autograd.grad(out, list(data.values()), torch.randn_like(out))), wanted)
        assert driver.graph_launches == before
    for backward in triton_backward.MEMORY._kept.values():
        assert backward is not None and any(gone for gone, _, _ in backward.rounds)
    assert driver.launches > 4
