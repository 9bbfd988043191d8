"""The compiler's cache filled on all cores before the first test, and error words read after each."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trine

sys.path.insert(0, str(Path(__file__).parent))

from kda_cases import CASES


def _variants() -> list[tuple[Any, Any]]:
    """Every compiled form that CASES need: their launches, recorded instead of run."""
    from trine.ops.kda.triton_backward_autograd import Settings, backward_from, forward_keeping
    from trine.ops.kda.triton_launch import Kernel

    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    plain = Kernel.launch

    def record(self: Any, grid: int, args: Any, variant: Any, device: Any) -> None:
        found[id(self), id(variant)] = self, variant

    Kernel.launch = record  # type: ignore[method-assign]
    try:
        for case in CASES:
            B, T, H = case.shape
            HV, K, V, N = H * case.groups, case.key, case.value, len(case.lengths) or B
            shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV, K), (B, T, HV))
            tensors = [torch.empty(shape, dtype=case.dtype) for shape in shapes]
            tensors += [torch.empty(HV), torch.empty(HV, K), torch.empty(N, HV, K, V)]
            cu = torch.zeros(N + 1, dtype=torch.int32) if case.lengths else None
            o = dict(case.options)
            settings = Settings(
                o.get("lower_bound", -5.0), o.get("qk_norm", True), o.get("beta_is_logit", True), 1.0, None,
                o.get("plan", "auto"), "save" in o, True,
            )  # fmt: skip
            out, final, kept = forward_keeping(*tensors, cu, settings)
            backward_from(*tensors, cu, out, out, final, kept, settings)
    finally:
        Kernel.launch = plain  # type: ignore[method-assign]
    return list(found.values())


_JOBS: list[tuple[Any, Any]] = []


def _compile(index: int) -> None:
    kernel, variant = _JOBS[index]
    kernel.compile(variant, 90)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Fill the compiler's cache on all cores first: one after another, compiling takes longer than all the tests."""
    assert torch.cuda.is_available(), "these tests need a CUDA card"
    _JOBS[:] = _variants()
    with multiprocessing.get_context("fork").Pool(min(16, len(os.sched_getaffinity(0)))) as pool:
        pool.map(_compile, range(len(_JOBS)), chunksize=1)


@pytest.fixture(autouse=True)
def _no_errors_left() -> Iterator[None]:
    yield
    trine.check_errors()
    torch.cuda.empty_cache()
