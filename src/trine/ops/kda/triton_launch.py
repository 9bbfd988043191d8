"""Compiling and launching Triton kernels with an explicit signature, and repairs to Triton's interpreter for CPU tests.

Triton's own launch path inspects every argument at every call (tens of microseconds for twenty arguments). Here a
kernel says what its arguments are once; a launch is a dictionary look-up and one call of the compiled launcher. The
same description compiles without a GPU, which is how the committed table of registers and spills is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from trine.ops.kda.triton_replay import ACTIVE, register_kernel

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def type_name(dtype: torch.dtype) -> str:
    """Triton's name of a torch dtype, e.g. ``"bf16"``."""
    return _TYPE_NAMES[dtype]


@dataclass(frozen=True)
class Options:
    """How one kernel is compiled. All of it is fixed by a committed table, never searched for at run time."""

    num_warps: int = 4  # warps a program
    num_stages: int = 1  # software pipelining depth of loops
    maxnreg: int | None = None  # cap on registers a thread; None leaves it to the assembler

    def as_dict(self) -> dict[str, Any]:
        """The options under Triton's names."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options


@dataclass(frozen=True, eq=False)
class Variant:
    """One compiled form of a kernel: argument types in order, then compile-time constants in order, then options.

    Compared by identity, so that a look-up costs nothing: make each one once, behind a cache.

    ``types`` name run-time arguments (``"*bf16"``, ``"i32"``, ``"i64"``, ``"fp32"``); every pointer is promised to be
    16-byte aligned. ``constants`` give the values of the kernel's trailing ``constexpr`` parameters.
    """

    types: tuple[str, ...]
    constants: tuple[Any, ...]
    options: Options


class Kernel:
    """A Triton function whose run-time arguments come first and whose compile-time constants come last."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.interpreted = not isinstance(function, JITFunction)
        self.name: str = function.fn.__name__
        self._compiled: dict[tuple[Variant, int], tuple[Any, ...]] = {}

    def compile(self, variant: Variant, arch: int = 90) -> Any:
        """Compile for CUDA architecture ``arch`` (90 for Hopper). Needs no GPU.

        Raises:
            ValueError: the number of types and constants is not the kernel's number of parameters.
        """
        names = self.function.arg_names
        if len(variant.types) + len(variant.constants) != len(names):
            raise ValueError(
                f"{self.name}: found {len(variant.types)} types and {len(variant.constants)} constants, "
                f"need {len(names)} in all"
            )
        split = len(variant.types)
        signature = dict(zip(names, (*variant.types, *("constexpr" for _ in variant.constants)), strict=True))
        constants = {(split + i,): value for i, value in enumerate(variant.constants)}
        attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(variant.types) if kind[0] == "*"}
        kind = _gluon_source() if self.function.is_gluon() else ASTSource
        source = kind(self.function, signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options.as_dict())

    def launch(self, grid: int, args: tuple[Any, ...], variant: Variant, device: torch.device) -> None:
        """Run ``grid`` programs on the current stream of ``device``; nothing happens for an empty grid.

        ``args`` are tensors, ``None`` (a null pointer) or numbers, in the kernel's order.
        """
        if ACTIVE.recording is not None:
            ACTIVE.recording.launched(self, grid, args, variant)
        if grid <= 0:
            return
        if self.interpreted:
            self.function[(grid,)](*args, *variant.constants)
            return
        index = device.index
        launch, function, metadata, cooperative, pdl, padding = self.loaded(variant, index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        addresses = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
        # Grid, stream, function, two flags, two scratch buffers (these kernels have none), metadata, three hooks.
        launch(
            *(grid, 1, 1, stream, function, cooperative, pdl, None, None, metadata, None, None, None),
            *addresses,
            *padding,
        )

    def loaded(self, variant: Variant, index: int) -> tuple[Any, ...]:
        """The launcher, function, metadata, two flags and padding of ``variant`` on device ``index``."""
        entry = self._compiled.get((variant, index))
        if entry is None:
            entry = self._compiled[(variant, index)] = self._load(variant, index)
        return entry

    def handle(self, variant: Variant, index: int) -> tuple[int, int, int] | None:
        """The driver's handle of ``variant``, its threads a program and bytes of shared memory.

        None where a plain launch by the driver is not enough: clusters, cooperative and dependent launches, and in the
        interpreter.
        """
        if self.interpreted:
            return None
        _, function, (warps, programs, shared), cooperative, dependent, _ = self.loaded(variant, index)
        return None if cooperative or dependent or programs != 1 else (function, 32 * warps, shared)

    def _load(self, variant: Variant, index: int) -> tuple[Any, ...]:
        """Compile for device ``index``, load the binary there and take the compiled launcher out of its wrapper."""
        major, minor = torch.cuda.get_device_capability(index)
        with torch.cuda.device(index):
            compiled = self.compile(variant, major * 10 + minor)
            launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise RuntimeError(f"{self.name}: needs scratch memory from Triton, which this launch path does not give")
        padding = (None,) * len(variant.constants)
        return (
            *(launcher.launch, compiled.function, compiled.packed_metadata),
            *(launcher.launch_cooperative_grid, launcher.launch_pdl, padding),
        )


register_kernel(Kernel)


def _gluon_source() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


@dataclass
class _Repair:
    done: bool = field(default=False)


_REPAIR = _Repair()


def repair_interpreter() -> None:
    """Mend three faults of Triton 3.6's CPU interpreter, so that tests on a machine without a GPU mean something.

    It multiplies bfloat16 operands of ``tl.dot`` as 16-bit integers, truncates float32 to bfloat16 instead of rounding
    to nearest even, and with numpy >= 2.4 cannot run a loop whose bound is a run-time value.
    """
    if _REPAIR.done:
        return
    import numpy as np
    from triton.runtime import interpreter

    def to_float32(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(to_float32(a), to_float32(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            src = interpreter.TensorHandle(to_float32(src), tl.float32)
            return src if target == tl.float32 else plain_cast(self, src, dst_type)
        if target == tl.bfloat16 and source != tl.bfloat16:
            bits = src.data.astype(np.float32).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            quiet = ((bits >> 16) | 0x40).astype(np.uint16)
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return interpreter.TensorHandle(np.where(nan, quiet, rounded), target)
        return plain_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return cast_impl(self, src, dst_type)

    plain_patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    builder = interpreter.InterpreterBuilder
    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    interpreter._patch_lang_tensor = patch_lang_tensor
    _REPAIR.done = True


@cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of CUDA device ``index``."""
    return torch.cuda.get_device_properties(index).multi_processor_count
