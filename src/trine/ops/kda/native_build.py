"""Builds ``native.cpp``, the C++ side of replayed calls, for one version of Python and torch.

    python -m trine.ops.kda.native_build       builds it now: for container images and clusters

The first call of the kernels on a card runs this file in the background, so it imports nothing but torch. Of CUDA it
needs the cuda.h that comes with Triton.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

NAME = "trine_kda_native"
SOURCE = Path(__file__).with_name("native.cpp")


def compiler() -> list[str] | None:
    """The C++ compiler's command: ``$CXX`` if that is set, else what is called c++ or g++ here."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"]]:
        tool = shutil.which(command[0])
        if tool is not None:
            return [tool, *command[1:]]
    return None


def lacking() -> str | None:
    """What a build needs and does not find here; None when it can be tried."""
    if compiler() is None:
        named = os.environ.get("CXX", "").strip()
        return f"the compiler that CXX names, {named!r}" if named else "a C++ compiler (c++ or g++, or CXX by name)"
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        return f"Python's headers (python3-dev or the like) in {include}"
    return None if cuda_types() is not None else "the cuda.h that comes with Triton (pip install triton)"


def cuda_types() -> Path | None:
    """The folder of the cuda.h that Triton itself compiles with; Triton is not imported."""
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        folder = Path(root) / "backends/nvidia/include"
        if (folder / "cuda.h").exists():
            return folder
    return None


def standard_library() -> list[str]:
    """The file of the C++ standard library that torch has brought into this process; none where that cannot be told.

    A compiler that finds no shared one puts a copy into the module, and two in a process do not get on: one has
    formatted a number by the other's locale, which ended the process.
    """
    try:
        lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")
        files = [Path(line.split(maxsplit=5)[-1]) for line in lines if "/libstdc++.so" in line]
        return [str(file) for file in files if file.exists()][:1]
    except OSError:
        return []


@cache
def path() -> Path:
    """Where the module of these sources, Python and torch belongs: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    versions = f"{sysconfig.get_config_var('EXT_SUFFIX')} {torch.__version__} {torch.version.git_version}"
    sources = SOURCE.read_bytes() + Path(__file__).read_bytes()
    mark = hashlib.sha256(sources + versions.encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trine" / f"{NAME}-{mark}.so"


def build() -> Path:
    """Compile the module if it is not there yet, half a minute; nothing half-written is ever in its place.

    Raises:
        RuntimeError: what is lacking, or what the compiler said when it failed.
        OSError: the folder cannot be written.
    """
    made = path()
    if made.exists():
        return made
    tool, types, lack = compiler(), cuda_types(), lacking()
    if tool is None or types is None or lack is not None:
        raise RuntimeError(f"native.cpp: needs {lack}, found none")
    root = Path(torch.__file__).parent
    include = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"], types)
    half = made.with_name(f"{made.stem}-{os.getpid()}.half")
    command = [*tool, "-O1", "-shared", "-fPIC", "-std=c++20", *(f"-I{place}" for place in include), str(SOURCE)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-L{root / 'lib'}"]
    command += ["-o", str(half), "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    shared = [word for file in standard_library() for word in ("-Xlinker", file)]
    made.parent.mkdir(parents=True, exist_ok=True)
    for left in made.parent.glob(f"{NAME}-*.half"):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > 3600:  # of a build that was killed
                left.unlink()
    try:
        done = _run([*command, *shared])
        if done.returncode and shared:  # a linker may refuse that file
            done = _run(command)
        if done.returncode:
            said = done.stderr[-2000:].strip() or "without a word"
            raise RuntimeError(f"native.cpp: {tool[0]} failed with code {done.returncode}: {said}")
        half.replace(made)  # whoever builds at the same time makes the same file
    finally:
        half.unlink(missing_ok=True)
    return made


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace")


if __name__ == "__main__":
    if sys.stderr.isatty() and not path().exists():
        print(f"building {path()}: half a minute, more on a busy machine", file=sys.stderr)
    try:
        print(build())
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))
