"""Calls of the KDA kernels recorded once and replayed: what a call costs the host, without what it decides.

Replays run in C++ where that side is built (``triton_native.py``), else here.

Everything of a call but addresses is a function of shapes, strides, types and flags: which kernels run, their grids,
numbers and compiled forms, the buffers between them. The first call of a kind runs the plain code, which is the only
description of the work; a ``Recording`` notes its allocations, its launches and when a buffer is let go. Later calls of
that kind allocate, add addresses and launch. Buffers that live between the same two launches become one allocation, all
of them where they are small.

A call that does anything else, such as copying an argument or summing gradients of grouped heads, leaves an address
that is neither an argument nor a buffer, and is then never replayed. Compiled kernels are promised pointers that are
multiples of 16 bytes; a replay is only for such arguments.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from trine.ops.kda.triton_native import LIMIT, NATIVE, driver

Inputs = Sequence["Tensor | None"]
_UNKNOWN: Any = object()
_ALIGN = 256
_SMALL = 64 << 20  # up to so many bytes of buffers a call are one allocation, whenever they are needed


class _Active(threading.local):
    recording: Recording | None = None
    latest: Replay | None = None  # what replays this thread's latest call, if it can be replayed


ACTIVE = _Active()


def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` that a recording knows of."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if ACTIVE.recording is not None:
        ACTIVE.recording.allocated(made)
    return made


class Recording:
    """Notes of one plain call, taken while it runs."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.events: list[tuple[str, Any]] = []
        self.buffers: list[tuple[weakref.ref[Tensor], int, tuple[int, ...], torch.dtype]] = []
        self.sound = True
        self._where = {x.data_ptr(): i for i, x in enumerate(inputs) if x is not None}
        self._gone: set[int] = set()

    def _note_gone(self) -> None:
        for i, (reference, *_) in enumerate(self.buffers):
            if i not in self._gone and reference() is None:
                self._gone.add(i)
                self.events.append(("free", i))

    def allocated(self, tensor: Tensor) -> None:
        """A buffer of the call's own was made."""
        self._note_gone()
        self.events.append(("new", len(self.buffers)))
        self.buffers.append((weakref.ref(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype))

    def launched(self, kernel: Any, grid: int, args: tuple[Any, ...], variant: Any) -> None:
        """A kernel is about to run."""
        self._note_gone()
        pointers = sum(kind[0] == "*" for kind in variant.types)
        places = [self._place(x) for x in args[:pointers]]
        if any(kind[0] != "*" for kind in variant.types[:pointers]) or None in places:
            self.sound = False
            return
        shapes = [None if x is None else (x.dtype, tuple(x.shape), x.stride()) for x in args[:pointers]]
        self.events.append(("launch", (kernel, grid, places, shapes, args[pointers:], variant)))

    def _place(self, x: Tensor | None) -> tuple[str, int, int] | None:
        """Which argument or buffer ``x`` is, and how many bytes into it; None: neither."""
        if x is None:
            return ("null", 0, 0)
        at = x.data_ptr()
        for i, given in enumerate(self.inputs):
            if given is x:
                return ("input", i, 0)
        for i, (reference, start, shape, dtype) in enumerate(self.buffers):
            size = torch.Size(shape).numel() * dtype.itemsize
            if i not in self._gone and reference() is not None and start <= at < start + max(size, 1):
                return ("buffer", i, at - start)
        if at in self._where:  # the same memory through another object: a detached parameter
            return ("input", self._where[at], 0)
        for i, given in enumerate(self.inputs):  # a part of kept factors
            if given is not None and given.is_contiguous():
                start = given.data_ptr()
                if start <= at < start + given.numel() * given.dtype.itemsize:
                    return ("input", i, at - start)
        return None

    def finish(self, results: Sequence[Tensor | None], device: torch.device) -> Replay | None:
        """What repeats the call, or None if it cannot be repeated."""
        if not self.sound or not any(kind == "launch" for kind, _ in self.events):
            return None
        index: dict[int, int] = {
            id(reference()): i for i, (reference, *_) in enumerate(self.buffers) if reference() is not None
        }
        if any(x is not None and id(x) not in index for x in results):
            return None
        return Replay(self, [None if x is None else index[id(x)] for x in results], device)


class Replay:
    """One kind of call: allocations and launches, with nothing left to decide."""

    def __init__(self, recording: Recording, results: list[int | None], device: torch.device) -> None:
        self.device, self.count = device, len(recording.inputs)
        kept = {i for i in results if i is not None}
        life = _lives(recording)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for *_, shape, dtype in recording.buffers]
        small = sum(size for i, size in enumerate(sizes) if i not in kept) <= _SMALL
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (born, died) in life.items():
            if i not in kept:
                groups.setdefault((0, 1 << 30) if small else (born, died), []).append(i)
        # Places in the list of addresses: the inputs, the null pointer, then a block for every result and every group.
        self.null = self.count
        place: dict[int, tuple[int, int]] = {}
        blocks: list[tuple[tuple[int, ...], torch.dtype, int, int]] = []
        for i in sorted(kept):
            place[i] = (self.null + 1 + len(blocks), 0)
            blocks.append((recording.buffers[i][2], recording.buffers[i][3], life[i][0], 1 << 30))
        for (born, died), members in groups.items():
            total = 0
            for i in members:
                place[i] = (self.null + 1 + len(blocks), total)
                total += -(-sizes[i] // _ALIGN) * _ALIGN
            blocks.append(((total // 2,), torch.bfloat16, born, died))  # a float type, so that fresh memory can be NaN
        self.results = [None if i is None else place[i][0] for i in results]
        launches = [what for kind, what in recording.events if kind == "launch"]
        self._noted, self._program = launches, _UNKNOWN
        self.rounds: list[tuple[list[int], list[tuple[int, tuple[int, ...], torch.dtype]], Any]] = []
        for number in range(len(launches) + 1):
            before = [(self.null + 1 + j, b[0], b[1]) for j, b in enumerate(blocks) if b[2] == number]
            gone = [self.null + 1 + j for j, b in enumerate(blocks) if b[3] == number]
            launch = self._launch(launches[number], place) if number < len(launches) else None
            self.rounds.append((gone, before, launch))
        self.size = self.null + 1 + len(blocks)

    def _launch(self, noted: tuple[Any, ...], place: dict[int, tuple[int, int]]) -> tuple[Any, ...] | None:
        kernel, grid, places, shapes, numbers, variant = noted
        if grid <= 0:
            return None
        at = [
            (self.null, 0)
            if kind == "null"
            else (i, offset)
            if kind == "input"
            else (place[i][0], place[i][1] + offset)
            for kind, i, offset in places
        ]
        if kernel.interpreted:
            return (kernel, grid, at, shapes, (*numbers, *variant.constants))
        run, function, metadata, cooperative, pdl, padding = kernel.loaded(variant, self.device.index)
        head = (function, cooperative, pdl, None, None, metadata, None, None, None)
        return (run, grid, at, head, (*numbers, *padding))

    def program(self) -> Any | None:
        """This call in C++; None where that side is not built or cannot express a launch."""
        native = NATIVE.ready(self.device)
        if native is None or self._program is not _UNKNOWN:
            return None if native is None else self._program
        rounds, self._program = [], None
        for (gone, before, launch), noted in zip(self.rounds, [*self._noted, None], strict=True):
            made = None
            if launch is not None:
                kernel, grid, places, _, numbers, variant = noted
                handle = kernel.handle(variant, self.device.index)
                if handle is None:
                    return None
                bits = [_bits(kind, x) for kind, x in zip(variant.types[len(places) :], numbers, strict=True)]
                made = native.Launch(handle[0], grid, *handle[1:], launch[2], bits)
            rounds.append(native.Round(gone, before, made))
        results = [-1 if i is None else i for i in self.results]
        self._program = native.Program(driver(), self.device.index or 0, self.count, self.size, rounds, results)
        return self._program

    def run(self, inputs: Inputs) -> list[Tensor | None]:
        """The call's results."""
        device = self.device
        held: list[Tensor | None] = [None] * self.size
        at = [0 if x is None else x.data_ptr() for x in inputs] + [0] * (self.size - self.count)
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.index is not None else 0
        for gone, before, launch in self.rounds:
            for i in gone:
                held[i] = None
            for i, shape, dtype in before:
                made = held[i] = torch.empty(shape, dtype=dtype, device=device)
                at[i] = made.data_ptr()
            if launch is None:
                continue
            run, grid, places, head, tail = launch
            if run.__class__ is not _KERNEL:
                run(grid, 1, 1, stream, *head, *[at[i] + offset or None for i, offset in places], *tail)
            else:
                held[: self.count] = inputs
                views = [_view(held[i], offset, s) for (i, offset), s in zip(places, head, strict=True)]
                run.function[(grid,)](*views, *tail)
        return [None if i is None else held[i] for i in self.results]


def _bits(kind: str, number: float) -> int:
    """A launch parameter of Triton's type ``kind`` as the low bytes of 64."""
    code = {"i32": "i", "i64": "q", "fp32": "f"}[kind]
    return int.from_bytes(struct.pack(f"<{code}", number), "little")


def _lives(recording: Recording) -> dict[int, tuple[int, int]]:
    """For every buffer: the launches done when it is made, and those done when it is let go."""
    launches, life = 0, {}
    for kind, what in recording.events:
        if kind == "launch":
            launches += 1
        elif kind == "new":
            life[what] = (launches, 1 << 30)
        else:
            life[what] = (life[what][0], launches)
    return life


def _view(base: Tensor | None, offset: int, form: Any) -> Tensor | None:
    """The tensor of ``form`` (dtype, shape, strides) at a byte of ``base``, for the interpreter."""
    if base is None or form is None:
        return None
    dtype, shape, strides = form
    start = (base.storage_offset() * base.dtype.itemsize + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), start, shape, strides)


class _Nobody:
    """Takes the kernel class's place until Triton is imported."""


_KERNEL: Any = _Nobody


def register_kernel(kind: type) -> None:
    """Tell replays which class launches through the interpreter."""
    global _KERNEL
    _KERNEL = kind


class Memory:
    """Replays of one operator by kind of call."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Replay | None] = {}

    def call(
        self, flags: Hashable, inputs: Inputs, plain: Callable[[], Any], flat: Callable[[Any], Sequence[Tensor | None]]
    ) -> tuple[Any, list[Tensor | None] | None]:
        """``(what plain returned, None)`` or ``(None, the replayed results)``.

        Args:
            flags: everything besides the inputs' forms that ``plain`` decides by.
            inputs: every tensor that ``plain`` reads.
            flat: the results' tensors, in the order in which a replay gives them.
        """
        ACTIVE.latest = None
        key = kind_of(flags, inputs)
        if key is None:
            return plain(), None
        kept = self._kept.get(key, _UNKNOWN)
        if kept is _UNKNOWN:
            found = self._record(key, inputs, plain, flat)
            ACTIVE.latest = self._kept.get(key)
            return found, None
        if kept is None:
            return plain(), None
        ACTIVE.latest = kept
        program = kept.program()
        return None, kept.run(inputs) if program is None else program.run(inputs)

    def _record(
        self,
        key: Hashable,
        inputs: Inputs,
        plain: Callable[[], Any],
        flat: Callable[[Any], Sequence[Tensor | None]],
    ) -> Any:
        real = [x.data_ptr() for x in inputs if x is not None]
        if 0 in real or len(set(real)) < len(real) or ACTIVE.recording is not None:
            return plain()  # without an address, or one tensor twice: nobody can say which of them a kernel was given
        recording = ACTIVE.recording = Recording(inputs)
        try:
            found = plain()
        finally:
            ACTIVE.recording = None
        if len(self._kept) >= LIMIT:
            self._kept.clear()
        assert inputs[0] is not None
        self._kept[key] = recording.finish(flat(found), inputs[0].device)
        return found


def kind_of(flags: Hashable, inputs: Inputs) -> Hashable | None:
    """What a replay of a call depends on.

    None for calls that are not to be replayed: on another device than the current one, with an address that is no
    multiple of 16, or where a dispatch mode watches torch's operators and may answer them (selective checkpointing).
    """
    first = inputs[0]
    assert first is not None
    device = first.device
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    if NATIVE.module is not None:
        forms = NATIVE.module.forms(inputs)
        return None if forms is None else (flags, forms)
    low = 0
    for x in inputs:
        low |= 0 if x is None else x.data_ptr()
    if low & 15:
        return None
    return (flags, *(None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in inputs))
