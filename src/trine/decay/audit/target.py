"""What is audited: an implementation of Kimi Delta Attention behind one small calling convention.

An adaptor is a :class:`Target`. Its ``run`` takes ``q, k, v, gate, beta`` and those of the keywords below that it can
honour; what its signature leaves out is reported as "not applicable", never as a fault.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

# What a target may be handed besides q, k, v, gate and beta.
KEYWORDS = ("A_log", "dt_bias", "lower_bound", "scale", "initial_state", "cu_seqlens")
FORMS = ("raw", "activated")
PRECISIONS = ("fp32", "tf32", "bf16")


class TargetError(ValueError):
    """A target that cannot be found, imported or understood; the message is one line."""


@dataclass(frozen=True)
class Target:
    """One implementation and what it can do.

    Attributes:
        name: what reports call it.
        run: ``run(q, k, v, gate, beta, *, ...) -> (output, final_state or None)`` with q, k ``[B, T, H, K]``, v
            ``[B, T, HV, V]``, gate ``[B, T, HV, K]``, beta ``[B, T, HV]`` and states ``[N, HV, K, V]`` float32. The
            ``KEYWORDS`` that it names decide what is asked of it. It returns the final state whenever it can.
        form: ``"raw"``: q and k are not normalised, the gate is the input of the bounded gate (K3 report, arXiv
            2607.24653, Eq. 5), beta is a logit. ``"activated"``: q and k are unit vectors, the gate is the log-decay
            g <= 0, beta lies in (0, 1].
        step: the decode step, ``step(q_NHK, k_NHK, v_NHV, gate, beta, state, *, ...) -> (output, state)``; without one,
            decoding is done by calls of ``run`` with one token.
        dtypes: of q, k, v, the main one first.
        precision: of the operands of its matrix products by dtype name; what is not named is "fp32" for float32 and
            "bf16" for 16 bits.
        head_dims: pairs (K, V) it supports; None means any.
        grouped: HV may be a multiple of H.
        gradients: autograd goes through it.
        multiple: T must be a multiple of this.
        lower_bounds: bounds of the gate it is made for, the usual one first.
        unbounded: the same call for gates without a bound, for the profile of a card.
        conv: ``conv(x_BTC, weight_CW, window or None) -> (y_BTC, window)``, its short causal convolution with SiLU.
        version: of the library, for the report.
    """

    name: str
    run: Callable[..., Any]
    form: str = "activated"
    step: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    precision: tuple[tuple[str, str], ...] = ()
    head_dims: tuple[tuple[int, int], ...] | None = None
    grouped: bool = True
    gradients: bool = True
    multiple: int = 1
    lower_bounds: tuple[float, ...] = (-5.0,)
    unbounded: Callable[..., Any] | None = None
    conv: Callable[..., Any] | None = None
    version: str = ""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise TargetError(f"form: found {self.form!r}, need one of {list(FORMS)}")

    @cached_property
    def keywords(self) -> frozenset[str]:
        """Those of ``KEYWORDS`` that ``run`` names."""
        return _names(self.run) & frozenset(KEYWORDS)

    def operands(self, dtype: str) -> str:
        """Precision of the matrix products' operands for inputs of ``dtype``."""
        return dict(self.precision).get(dtype, "fp32" if dtype in ("float32", "float64") else "bf16")


def _names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def load(spec: str) -> Target:
    """The target that a command line names: a known name, ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``.

    The function may be a :class:`Target`, return one when called without arguments, or be an implementation itself:
    with the signature of ``trine.ops.kda.kda``, of fla's ``chunk_kda``, or ``(q, k, v, g, beta, ...)`` in activated
    form. Which it is, is read from its parameters' names.

    Raises:
        TargetError: in one line.
    """
    from trine.decay.audit.adaptors import ADAPTORS

    if spec in ADAPTORS:
        return ADAPTORS[spec]()
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise TargetError(f"target: found {spec!r}, need MODULE:FUNCTION or one of {', '.join(ADAPTORS)}")
    module = _import(module_name)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise TargetError(f"target: module {module_name} has no {name!r}")
        value = getattr(value, part)
    if isinstance(value, Target):
        return value
    if not callable(value):
        raise TargetError(f"target: {spec} is a {type(value).__name__}, need a function")
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError) as error:
        raise TargetError(f"target: the signature of {spec} cannot be read: {error}") from error
    if not any(p.default is p.empty for p in parameters.values()):
        try:
            made = value()
        except Exception as error:
            raise TargetError(f"target: {spec}() raised {type(error).__name__}: {one_line(error)}") from error
        if not isinstance(made, Target):
            raise TargetError(f"target: {spec}() returned a {type(made).__name__}, need a Target")
        return made
    return adapt(spec, value)


def _import(name: str) -> Any:
    try:
        if name.endswith(".py"):
            path = Path(name).resolve()
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise TargetError(f"target: no file {name}")
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)
            spec.loader.exec_module(module)
            return module
        return importlib.import_module(name)
    except TargetError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TargetError(f"target: cannot import {name}: {type(error).__name__}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The message of an exception without line breaks, shortened."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def adapt(name: str, function: Callable[..., Any], **fields: Any) -> Target:
    """A target around an implementation whose parameters' names say how it is called.

    Args:
        name: for reports.
        function: with five leading parameters q, k, v, gate, beta and any of the keywords of ``trine.ops.kda.kda`` or
            of fla's ``chunk_kda``. ``**kwargs`` alone counts as trine's.
        fields: override those of the target.

    Raises:
        TargetError: fewer than five parameters.
    """
    parameters = inspect.signature(function).parameters
    kinds = {p.kind for p in parameters.values()}
    open_ended = inspect.Parameter.VAR_KEYWORD in kinds
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 5 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise TargetError(f"target: {name} takes ({', '.join(parameters)}), need q, k, v, gate and beta first")
    fla = "use_gate_in_kernel" in parameters
    fourth = positional[3] if len(positional) > 3 else "gate"
    raw = fla or "gate_kind" in parameters or (open_ended and fourth == "gate") or fourth == "gate"
    known = set(KEYWORDS) if open_ended and raw else set(KEYWORDS) & set(parameters)
    if fla:
        known |= {"A_log", "dt_bias"}
    if not raw:
        known -= {"A_log", "dt_bias", "lower_bound"}
    fixed: dict[str, Any] = {}
    if "output_final_state" in parameters or (open_ended and raw):
        fixed["output_final_state"] = True
    if fla:
        flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
        fixed |= {flag: True for flag in flags if flag in parameters}

    def run(*tensors: Tensor, **keywords: Any) -> Any:
        return function(*tensors, **fixed, **keywords)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY) for word in KEYWORDS if word in known]
    )
    return Target(name, run, form="raw" if raw else "activated", **fields)
