"""A stand-in for the CUDA driver: what ``native.cpp`` launches runs in Triton's interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from trine.ops.kda.triton_launch import Kernel, Variant

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64}
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of cuda.h."""

    _fields_ = (
        ("function", ctypes.c_size_t),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Driver:
    """Stands in for the CUDA driver: a launch runs the kernel in Triton's interpreter on the addresses it is given.

    Graphs and their instances are numbers; setting a kernel's parameters copies them.
    """

    every: ClassVar[list[Driver]] = []  # programs that outlive their test still call it

    def __init__(self) -> None:
        self.every.append(self)
        self.handles: list[tuple[Kernel, Variant]] = []
        self.launches = 0
        self.code = 0
        self.context = 7
        self.mode = 0
        self.capturing = 0
        self.priority = 0
        self.failing: set[str] = set()
        self.graphs: dict[int, list[tuple[Any, ...] | None]] = {}  # also by their instances' numbers
        self.graph_launches = 0
        number, numbers, pointer = ctypes.c_size_t, [ctypes.c_uint] * 7, ctypes.c_void_p
        out, many, node = ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(Node)
        small = ctypes.POINTER(ctypes.c_int)
        functions: dict[str, tuple[Callable[..., int], list[Any]]] = {
            "cuLaunchKernel": (self._launch, [number, *numbers, pointer, many, pointer]),
            "cuDeviceGet": (self._device, [small, ctypes.c_int]),
            "cuDevicePrimaryCtxRetain": (self._primary, [out, ctypes.c_int]),
            "cuCtxGetCurrent": (self._context, [out]),
            "cuCtxSetCurrent": (self._set_context, [number]),
            "cuThreadExchangeStreamCaptureMode": (self._exchange, [small]),
            "cuStreamIsCapturing": (self._is_capturing, [pointer, small]),
            "cuStreamGetPriority": (self._priority, [pointer, small]),
            "cuGraphCreate": (self._make, [out, ctypes.c_uint]),
            "cuGraphAddKernelNode_v2": (self._add, [out, number, out, number, node]),
            "cuGraphInstantiateWithFlags": (self._instantiate, [out, number, number]),
            "cuGraphExecKernelNodeSetParams_v2": (self._set, [number, number, node]),
            "cuGraphLaunch": (self._launch_graph, [number, pointer]),
            "cuGraphDestroy": (self._destroy, [number]),
            "cuGraphExecDestroy": (self._destroy, [number]),
        }

        def answer(name: str, function: Callable[..., int], *arguments: Any) -> int:
            return 1 if name in self.failing else function(*arguments)

        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(partial(answer, name, one))
            for name, (one, types) in functions.items()
        }
        self.addresses = {name: ctypes.cast(one, ctypes.c_void_p).value for name, one in self._functions.items()}

    def _device(self, device: Any, index: int) -> int:
        device[0] = 40 + index
        return 0

    def _primary(self, context: Any, device: int) -> int:
        context[0] = {40: 7}[device]
        return 0

    def _exchange(self, mode: Any) -> int:
        self.mode, mode[0] = mode[0], self.mode
        return 0

    def _context(self, context: Any) -> int:
        context[0] = self.context
        return 0

    def _set_context(self, context: int) -> int:
        self.context = context
        return 0

    def _is_capturing(self, _: Any, status: Any) -> int:
        status[0] = self.capturing
        return 0

    def _priority(self, _: Any, priority: Any) -> int:
        priority[0] = self.priority
        return 0

    def _make(self, graph: Any, flags: int) -> int:
        assert self.mode == 2  # relaxed: it is no part of anybody's capture
        graph[0] = 1 + max(self.graphs, default=0)
        self.graphs[graph[0]] = []
        return flags

    def _add(self, node: Any, graph: int, before: Any, count: int, what: Any) -> int:
        kernels = self.graphs[graph]
        assert (count, before[0] if count else 0) == ((1, len(kernels)) if kernels else (0, 0))  # one after another
        kernels.append(None)
        node[0] = len(kernels)
        return 0 if what[0].function else 1

    def _instantiate(self, instance: Any, graph: int, flags: int) -> int:
        assert self.mode == 2
        instance[0] = 100 + graph
        self.graphs[100 + graph] = [None] * len(self.graphs[graph])
        return flags

    def _set(self, instance: int, node: int, what: Any) -> int:
        it = what[0]
        assert not (it.extra or it.kernel or it.context)
        count = len(self.handles[it.function - 1][1].types) + 2
        given = (ctypes.c_uint64.from_address(it.parameters[i]).value for i in range(count))
        values = (ctypes.c_uint64 * count)(*given)
        places = (ctypes.c_void_p * count)(*(ctypes.addressof(values) + 8 * i for i in range(count)))
        numbers = (it.function, *it.grid, *it.block, it.shared)
        # The values stand where a launch has what this driver ignores: somebody has to keep them alive.
        self.graphs[instance][node - 1] = (*numbers, None, places, values)
        return 0

    def _launch_graph(self, instance: int, _: Any) -> int:
        assert self.mode == 2
        self.graph_launches += 1
        codes = [self._launch(*arguments) for arguments in self.graphs[instance] if arguments is not None]
        assert len(codes) == len(self.graphs[instance])
        self.graphs[instance] = [None] * len(codes)
        return max(codes)

    def _destroy(self, graph: int) -> int:
        assert self.mode == 2
        del self.graphs[graph]
        return 0

    def handle(self, kernel: Kernel, variant: Variant, index: int | None) -> tuple[int, int, int]:
        if (kernel, variant) not in self.handles:
            self.handles.append((kernel, variant))
        return self.handles.index((kernel, variant)) + 1, 32 * variant.options.num_warps, 512

    def _launch(self, function: int, *given: Any) -> int:
        assert self.context
        if self.capturing == 2:  # a capture that failed
            return 901
        grid, *ones, shared, _, parameters, _ = given
        threads = ones.pop(2)
        assert ones == [1, 1, 1, 1]
        kernel, variant = self.handles[function - 1]
        assert (threads, shared) == (32 * variant.options.num_warps, 512)
        arguments = [self._argument(kind, parameters[i]) for i, kind in enumerate(variant.types)]
        for i in (0, 1):  # Triton's scratch buffers
            assert ctypes.cast(parameters[len(variant.types) + i], ctypes.POINTER(ctypes.c_uint64))[0] == 0
        self.launches += 1
        if not self.code:
            kernel.function[(grid,)](*arguments, *variant.constants)
        return self.code

    @staticmethod
    def _argument(kind: str, at: int) -> Any:
        if kind[0] != "*":
            return ctypes.cast(at, ctypes.POINTER(NUMBERS[kind]))[0]
        address = ctypes.cast(at, ctypes.POINTER(ctypes.c_uint64))[0]
        memory = (ctypes.c_char * 16).from_address(address) if address else None
        return None if memory is None else torch.frombuffer(memory, dtype=DTYPES[kind[1:]])
