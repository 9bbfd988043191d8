"""The C++ side of replayed calls (``native.cpp``), as soon as it is there.

It is optional in every way. The first call of the kernels on a card starts its build, half a minute beside whatever
else goes on, once for a version of Python and torch. Until then, without a C++ compiler, or with ``TRINE_NATIVE=0`` in
the environment, replays run in Python, with the same launches and the same bits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trine._log import logger
from trine.ops._errors import check_at_once, error_words

LIMIT = 512
"""Kinds of calls kept, here and of each operator's replays; all are forgotten when there are more."""


FUNCTIONS = (
    "cuLaunchKernel", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuStreamGetPriority", "cuGraphCreate",
    "cuGraphDestroy", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags", "cuGraphExecDestroy",
    "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch",
)  # fmt: skip
"""The CUDA driver's functions that ``native.cpp`` calls."""


@cache
def driver() -> dict[str, int]:
    """The addresses of `FUNCTIONS`; a driver before CUDA 12.0 has not all that graphs need."""
    library = ctypes.CDLL("libcuda.so.1")
    found = {name: getattr(library, name, None) for name in FUNCTIONS}
    return {name: ctypes.cast(one, ctypes.c_void_p).value or 0 for name, one in found.items() if one is not None}


# native_build.py is imported where it is used: it also runs as a module, which must not have been imported before.
class Native:
    """The module, its build, and the calls of known kinds (`trine.ops.kda.kda` makes kinds)."""

    def __init__(self) -> None:
        self.module: Any = None
        self.calls: dict[tuple[object, ...] | None, Any] = {}
        self.wanted = os.environ.get("TRINE_NATIVE", "1").lower() not in ("0", "false", "no", "off")
        self._building: subprocess.Popen[str] | None = None

    def know(self, kind: tuple[object, ...] | None, replay: Any | None, backward: Callable[..., Any] | None) -> None:
        """From now on calls of this ``kind`` run in C++, if that is there for ``replay``; None is no kind or no replay.

        ``backward`` gives gradients by the Python function, None where none are wanted.
        """
        program = None if kind is None or replay is None else replay.program()
        # A kind of before the module was there, without bytes in front, says nothing of strides and alignment.
        if program is not None and kind is not None and isinstance(kind[0], bytes):
            if len(self.calls) >= LIMIT:
                self.calls.clear()
            self.calls[kind] = self.module.call(program, backward)

    def again(self, call: Any, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """Output and final state of a known kind of call; ``tensors`` are `kda`'s nine, in its order."""
        first, bounds = tensors[0], tensors[8]
        assert first is not None
        if bounds is None:
            out, final = self.module.apply(call, (*tensors, None))
        else:
            out, final = self.module.apply(call, (*tensors, error_words(first.device)))
            check_at_once(first.device)
        return out, final

    def ready(self, device: torch.device) -> Any | None:
        """The module for calls on ``device``; None while it is being built and where it cannot be.

        The first call for a card starts the build. A CPU, where only tests run the kernels, starts none.
        """
        if self.module is not None or not self.wanted or device.type != "cuda":
            return self.module
        try:
            return self._load() if self._built() else None
        except (ImportError, OSError, RuntimeError) as error:
            self.wanted = False
            logger.warning("kda: calls are replayed in Python, 0.2 ms slower a forward and backward pass: %s", error)
            return None

    def _built(self) -> bool:
        """Whether the module is there; starts or watches its build.

        Raises:
            RuntimeError: why it cannot be built.
        """
        from trine.ops.kda import native_build

        if native_build.path().exists():
            return True
        if os.environ.get("LOCAL_RANK", "") not in ("", "0"):
            return False  # one process of a machine builds for all
        if self._building is None:
            if not sys.executable:
                raise RuntimeError("native.cpp: needs a Python to run native_build.py, found none (sys.executable)")
            self._building = subprocess.Popen(
                [sys.executable, "-P", str(Path(native_build.__file__))], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        if self._building.poll():  # 0 says little: it is also what a forked process hears of its parent's child
            raise RuntimeError(self._building.communicate()[1].strip()[-2000:])
        return False

    def load(self) -> Any:
        """The module, built here and now if need be.

        Raises:
            RuntimeError, OSError: it cannot be built.
            ImportError: it cannot be loaded.
        """
        if self.module is None:
            from trine.ops.kda import native_build

            native_build.build()
            self._load()
        return self.module

    def _load(self) -> Any:
        from trine.ops.kda import native_build

        spec = importlib.util.spec_from_file_location(native_build.NAME, native_build.path())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.module = module
        return module


NATIVE = Native()
