"""One target under examination: how it is called, how its results are compared, and what is known of it so far."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trine.decay.audit.inputs import Case, Fault, Inputs, Loss, Result, define, draw
from trine.decay.audit.target import Target

# Largest relative error (Frobenius, a head) by the precision of the operands: float32 must be near float32; 16-bit
# operands may err as their rounding does. Public tests allow 0.005 to 0.02 there.
LIMITS = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2}
# What writing a result in 16 bits may add.
RESULTS = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
# Half a unit in the last place: what rounding an operand can do to it.
ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-9}
# An error may be this many times what rounding the operands alone does: several products follow one another.
FLOORS = 8.0


class Declined(Exception):
    """The target raised an ordinary error: it refuses the input and says so."""


class Misshapen(Exception):
    """The target's result is not of the promised kind."""


class Lost(Exception):
    """A kernel has made the device useless for this process: whatever is called next fails, whoever is to blame."""


# What the CUDA runtime says of errors that no later call of the process survives.
STICKY = re.compile(
    r"illegal memory access|illegal instruction|illegal address|misaligned address|unspecified launch failure"
    r"|device-side assert|launch timed out|uncorrectable|hardware stack error|invalid (program counter|address space)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Measure:
    """What a check found.

    Attributes:
        ok: within the limit.
        value, limit: the figure and what it may be; None where a check has no figure.
        text: one sentence on what was seen.
        facts: more figures, for the JSON report.
    """

    ok: bool
    value: float | None = None
    limit: float | None = None
    text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """How near the limit: larger is worse."""
        if self.value is None or self.limit is None:
            return 0.0 if self.ok else math.inf
        return self.value / self.limit if self.limit else (0.0 if self.value == 0 else math.inf)


PASS = Measure(True)


@dataclass
class Lab:
    """A target on a device, with the faults already found, which later checks take into account.

    Attributes:
        target, device: what runs where.
        quick: fewer and smaller cases.
        fault: the misreading of the definition that explains this target.
        state_in, state_out: "KV", or "VK" where states turned out to be read or returned transposed ("shape": of shape
            [V, K]; "memory": of shape [K, V] but laid out as [V, K]).
        beat: called with each case before it runs.
        has_gradients, has_state: False when a call showed that there are none.
        lost: the device cannot be used by this process any more.
        patience: seconds after which a probe takes no further input (0: any time).
    """

    target: Target
    device: str = "cpu"
    quick: bool = False
    fault: Fault = field(default_factory=Fault)
    state_in: str = "KV"
    state_out: str = "KV"
    beat: Callable[[Case], None] = lambda case: None
    has_gradients: bool = True
    has_state: bool = True
    shared: dict[Any, Any] = field(default_factory=dict)
    lost: bool = False
    patience: float = 0.0

    def __post_init__(self) -> None:
        self.has_gradients = self.target.gradients

    # What it can do ---------------------------------------------------------------------------------------------

    @property
    def raw(self) -> bool:
        """It takes the gate's input and beta's logit."""
        return self.target.form == "raw"

    def takes(self, keyword: str) -> bool:
        """It can be handed this keyword."""
        return keyword in self.target.keywords

    @property
    def carries(self) -> bool:
        """States go in and come out."""
        return self.takes("initial_state") and self.has_state

    def dtype(self, case: Case) -> torch.dtype:
        """Of q, k and v in a case."""
        return getattr(torch, case.dtype or self.target.dtypes[0])

    def operands(self, case: Case) -> str:
        """Precision that errors are judged by."""
        return self.target.operands(case.dtype or self.target.dtypes[0])

    def fit(self, case: Case) -> Case:
        """The nearest case that this target supports: head dimensions, lengths, states, groups."""
        target = self.target
        if target.head_dims is not None and (case.key_dim, case.value_dim) not in target.head_dims:
            key, value = min(target.head_dims, key=lambda d: (d[0] != d[1]) == (case.key_dim != case.value_dim))
            case = replace(case, key_dim=key, value_dim=value)
        if target.multiple > 1:
            case = replace(case, lengths=tuple(-(-n // target.multiple) * target.multiple for n in case.lengths))
        if not self.takes("initial_state"):
            case = replace(case, state=False)
        if not target.grouped:
            case = replace(case, groups=1)
        return case

    def settle(self) -> None:
        """Wait for the card, so that an error of a kernel shows at the input that caused it."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    # Calls ------------------------------------------------------------------------------------------------------

    def draw(self, case: Case) -> Inputs:
        """The tensors of a case in the target's form."""
        return draw(case, self.target.form, self.dtype(case), self.device)

    def call(self, x: Inputs, run: Callable[..., Any] | None = None) -> tuple[Tensor, Tensor | None]:
        """The target on these very tensors: output and final states, checked for kind and shape.

        Raises:
            Declined: it raised an error.
            Misshapen: its result is not of the promised shape.
        """
        keywords: dict[str, Any] = {}
        for name in ("A_log", "dt_bias", "initial_state"):
            if name in x.tensors and self.takes(name):
                keywords[name] = x[name]
        if "initial_state" in keywords and self.state_in != "KV":
            keywords["initial_state"] = _transposed(x["initial_state"], self.state_in)
        if self.takes("lower_bound"):
            keywords["lower_bound"] = x.lower_bound
        if x.scale is not None:
            keywords["scale"] = x.scale
        if x.cu_seqlens is not None:
            keywords["cu_seqlens"] = torch.tensor(x.cu_seqlens, device=self.device)
        tensors = [x[name] for name in ("q", "k", "v", "gate", "beta")]
        found = _guarded(lambda: (run or self.target.run)(*tensors, **keywords))
        return self._checked(found, x)

    def _checked(self, found: Any, x: Inputs) -> tuple[Tensor, Tensor | None]:
        out, state = (*found, None)[:2] if isinstance(found, (tuple, list)) and found else (found, None)
        v = x["v"]
        if not isinstance(out, Tensor):
            raise Misshapen(f"returned a {type(out).__name__}, need a tensor or (output, final_state)")
        if out.shape != v.shape:
            raise Misshapen(f"the output has shape {tuple(out.shape)}, need that of v, {tuple(v.shape)}")
        if not out.is_floating_point():
            raise Misshapen(f"the output has dtype {out.dtype}, need a floating one")
        if state is None:
            return out, None
        if not isinstance(state, Tensor) or state.ndim != 4:
            raise Misshapen(f"the final state is {_kind(state)}, need a tensor [N, HV, K, V]")
        if self.state_out != "KV":
            state = _transposed(state, self.state_out, back=True)
        return out, state

    def run(self, x: Inputs, loss: Loss | None = None, weigh_state: bool = True) -> Result:
        """A call on copies, with the gradients of ``loss`` with respect to every tensor; nothing in the result shares
        memory with the target's."""
        leaves = {n: t.detach().clone(memory_format=torch.preserve_format) for n, t in x.tensors.items()}
        if loss is None:
            with torch.no_grad():
                out, state = self.call(x.with_(**leaves))
            return Result(out.clone(), None if state is None else state.clone())
        for t in leaves.values():
            t.requires_grad_(True)
        with torch.enable_grad():
            out, state = self.call(x.with_(**leaves))
            grads = self.gradients(loss(out, state if weigh_state else None, x.cu_seqlens), leaves)
        return Result(out.detach().clone(), None if state is None else state.detach().clone(), grads)

    def gradients(self, total: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients by name; zeros where there is none."""
        if not total.requires_grad:
            raise Declined("its results carry no gradient")
        found = _guarded(lambda: torch.autograd.grad(total, list(leaves.values()), allow_unused=True))
        return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)}

    def step(self, x: Inputs, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Token ``t`` of every row through the decode step: output ``[B, HV, V]`` and states."""
        row = {n: x[n][:, t] for n in ("q", "k", "v", "gate", "beta")}
        if self.target.step is None:
            out, new = self.call(x.rows(t, t + 1, state))
            if new is None:
                raise Misshapen("no final state was returned")
            return out[:, 0], new
        names = {"A_log": x.tensors.get("A_log"), "dt_bias": x.tensors.get("dt_bias"), "lower_bound": x.lower_bound}
        keywords = {n: value for n, value in names.items() if value is not None and self.takes(n)}
        found = _guarded(lambda: self.target.step(*row.values(), state, **keywords))  # type: ignore[misc]
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise Misshapen(f"the step returned {_kind(found)}, need (output, state)")
        out, new = found
        if out.shape != row["v"].shape or new.shape != state.shape:
            raise Misshapen(f"the step returned shapes {tuple(out.shape)} and {tuple(new.shape)}")
        return out, new

    # Judgement --------------------------------------------------------------------------------------------------

    def expect(self, x: Inputs, loss: Loss | None = None, fault: Fault | None = None) -> Result:
        """What the definition, with the fault already known, makes of these tensors."""
        return define(x, loss, self.fault if fault is None else fault)

    def limit(self, x: Inputs, loss: Loss | None, name: str, precision: str) -> float:
        """Largest error allowed for one result: a fixed one, or a multiple of what rounding the operands does."""
        exact = define(x, loss, self.fault)
        shaken = define(x, loss, self.fault, noise=ROUNDING[precision], noise_seed=1)
        floor = error(_pick(shaken, name), _pick(exact, name), name, exact.sizes.get(name))
        return max(LIMITS[precision], FLOORS * floor)

    def against_definition(
        self,
        x: Inputs,
        case: Case,
        loss: Loss | None = None,
        only: Sequence[str] | None = None,
        found: Result | None = None,
    ) -> Measure:
        """The worst of output, final state and gradients beside the definition."""
        found = self.run(x, loss) if found is None else found
        expected = self.expect(x, loss)
        return self.compare(x, found, expected, self.operands(case), loss, only)

    def compare(
        self,
        x: Inputs,
        found: Result,
        expected: Result,
        precision: str,
        loss: Loss | None = None,
        only: Sequence[str] | None = None,
    ) -> Measure:
        """The worst result of ``found`` beside ``expected``; ``only`` names those that are looked at."""
        names = ["output"] + (["final state"] if found.state is not None else []) + list(found.grads)
        worst = PASS
        for name in names if only is None else [n for n in names if n in only]:
            have, want = _pick(found, name), _pick(expected, name)
            if have.shape != want.shape:
                what = f"{_said(name)} has shape {tuple(have.shape)}, need {tuple(want.shape)}"
                return Measure(False, math.inf, LIMITS[precision], what)
            value = error(have, want, name, expected.sizes.get(name))
            # A result of 16 bits was rounded when it was written, however it was computed.
            limit = max(LIMITS[precision], RESULTS.get(have.dtype, 0.0))
            # The floor costs a second run of the definition: only where the plain limit is not enough.
            if value > limit:
                limit = max(limit, self.limit(x, loss, name, precision))
            text = f"{_said(name)} {_off(have, value)}"
            here = Measure(value <= limit, value, limit, text)
            if here.ratio >= worst.ratio:
                worst = here
        return worst


def _transposed(state: Tensor, how: str, back: bool = False) -> Tensor:
    """A state in the layout that a target was found to use, or ``back`` from it."""
    n, h, a, b = state.shape
    if how == "shape":
        return state.mT.contiguous()
    return state.reshape(n, h, b, a).mT.contiguous() if back else state.mT.reshape(n, h, a, b)


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _guarded(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (KeyboardInterrupt, Declined, Lost):
        raise
    except BaseException as failure:
        text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        if STICKY.search(text):
            raise Lost(text) from failure
        raise Declined(text) from failure


def _pick(result: Result, name: str) -> Tensor:
    if name == "output":
        return result.out
    if name == "final state":
        assert result.state is not None
        return result.state
    return result.grads[name]


def _said(name: str) -> str:
    return {"output": "the output", "final state": "the final state"}.get(name, f"the gradient of {name}")


def _off(have: Tensor, value: float) -> str:
    return f"is off by {value:.1e}" if bool(torch.isfinite(have).all()) else "is not finite"


# Axis of the heads in each tensor.
_HEADS = {"final state": 1, "initial_state": 1, "A_log": 0, "dt_bias": 0}


def error(have: Tensor, want: Tensor, name: str, least: Tensor | None = None) -> float:
    """Relative error, Frobenius, of the worst head; infinite when not finite.

    A head whose expected values are a thousandth of the others' is judged by that thousandth, a tensor of exact zeros
    by 1e-30, and none by less than ``least`` ``[HV]``: rounding has to be allowed somewhere.
    """
    a, b = have.detach().cpu().double(), want.detach().cpu().double()
    if not b.numel():
        return 0.0
    if not bool(torch.isfinite(a).all()):
        return math.inf
    heads = _HEADS.get(name, 2)
    b, a = (t.transpose(0, heads).reshape(t.shape[heads], -1) for t in (b, a))
    size = b.norm(dim=1)
    size = torch.maximum(size, 1e-3 * size.max()).clamp(min=1e-30)
    if least is not None and least.shape == size.shape:
        size = torch.maximum(size, least)
    return float(((a - b).norm(dim=1) / size).max())


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Both absent, or equal in shape and in every bit (NaN equals NaN)."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(nan=12345.678), b.nan_to_num(nan=12345.678)))


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value."""
    if not a.numel():
        return 0.0
    gap = (a.double() - b.double()).abs().nan_to_num(nan=math.inf).max()
    return float(gap / b.double().abs().nan_to_num(nan=0.0).max().clamp(min=1e-30))


class Poison(TorchDispatchMode):
    """While it is on, memory that torch hands out unwritten is full of ``value`` (integers: of their largest value)."""

    _EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then fill what it left unwritten."""
        out = func(*args, **(kwargs or {}))
        if func._schema.name in self._EMPTY and isinstance(out, Tensor) and out.numel():
            if out.is_floating_point():
                largest = torch.finfo(out.dtype).max  # of float16 it is 65504
                out.fill_(self.value if self.value != self.value else min(self.value, largest))
            elif out.dtype != torch.bool and not out.is_complex():
                out.fill_(torch.iinfo(out.dtype).max)
        return out


@contextmanager
def poisoned(value: float | None) -> Iterator[None]:
    """``Poison`` with a value, or nothing for None."""
    if value is None:
        yield
        return
    with Poison(value):
        yield
