"""Repository bundles: a whole subtree of a code tree as one document, so that a long context has something to find.

Files stand in the order in which a reader could understand them: a Python module after those it imports (a cycle is
cut where the walk comes back), all others by path. Each has a header with its path. At the end may stand questions
whose answers lie far apart: where something is defined, which file uses it, which value a constant has.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import PurePosixPath

from trine.data._errors import DataError

HEADER = "==> {path} <==\n"
LARGEST = 4 << 20
"""Bytes of a bundle unless told otherwise: about a million tokens of code."""

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+\(?([\w, \t]*)|import[ \t]+([\w., \t]+))", re.M)
_DEFINED = re.compile(r"^(?:async )?(?:def|class)[ \t]+(\w{4,})", re.M)
_CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]{3,})[ \t]*=[ \t]*([0-9][\w.]*|\"[^\"\n]{1,40}\"|'[^'\n]{1,40}')[ \t]*$", re.M)


def bundle(
    texts: Iterable[tuple[str, bytes]], *, largest: int = LARGEST, questions: int = 0, seed: int = 0
) -> list[tuple[str, bytes]]:
    """Join the files of a tree into documents, one a subtree.

    A folder whose files together have at most ``largest`` bytes becomes one document; a larger one is taken apart into
    its folders and, as documents of their own, the files that lie in it directly, in runs of at most ``largest`` bytes.
    A single file larger than that is a document by itself.

    Args:
        texts: (path, content) pairs with POSIX paths; content that is no UTF-8 text is left to ``make_corpus`` to name.
        largest: bytes of a document, headers not counted.
        questions: questions with answers at a document's end, at most.
        seed: decides which ones, with the document's name.

    Returns:
        (name, content) pairs; the name is the subtree's path.

    Raises:
        DataError: a size below 1, or fewer than 0 questions.
    """
    if largest < 1 or questions < 0:
        raise DataError(f"bundle: found largest {largest}, questions {questions}, need 1 or more, and 0 or more")
    made: list[tuple[str, bytes]] = []
    readable: dict[str, str] = {}
    for path, content in texts:
        try:
            readable[path] = content.decode()
        except UnicodeDecodeError:
            made.append((path, content))
            continue
        if not content or b"\0" in content:
            made.append((path, content))
            del readable[path]
    sizes = {path: len(text.encode()) for path, text in readable.items()}
    for name, paths in _subtrees("", sorted(readable), sizes, largest):
        ordered = in_order({path: readable[path] for path in paths})
        parts = [HEADER.format(path=path) + _ended(readable[path]) for path in ordered]
        draw = random.Random(int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:8], "big"))
        asked = ask({path: readable[path] for path in ordered}, questions, draw) if questions else ""
        made.append((name, ("\n".join(parts) + asked).encode()))
    return made


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _subtrees(
    folder: str, paths: Sequence[str], sizes: Mapping[str, int], largest: int
) -> list[tuple[str, Sequence[str]]]:
    """(name, paths) of each document below ``folder``."""
    if not paths:
        return []
    if sum(sizes[path] for path in paths) <= largest:
        return [(folder or ".", paths)]
    below: defaultdict[str, list[str]] = defaultdict(list)
    direct: list[str] = []
    prefix = f"{folder}/" if folder else ""
    for path in paths:
        head, slash, _ = path[len(prefix) :].partition("/")
        if slash:
            below[prefix + head].append(path)
        else:
            direct.append(path)
    found: list[tuple[str, Sequence[str]]] = []
    run: list[str] = []
    have = 0
    for path in direct:
        if run and have + sizes[path] > largest:
            found.append((run[0] if len(run) == 1 else f"{prefix}files from {PurePosixPath(run[0]).name}", run))
            run, have = [], 0
        run.append(path)
        have += sizes[path]
    if run:
        found.append((run[0] if len(run) == 1 else f"{prefix}files from {PurePosixPath(run[0]).name}", run))
    for name, inside in sorted(below.items()):
        found += _subtrees(name, inside, sizes, largest)
    return found


def in_order(texts: Mapping[str, str]) -> list[str]:
    """The paths, each Python module after the modules of this mapping that it imports, else by path.

    Imports are followed depth first; one that leads back to a module on the way is left out.
    """
    module_of: dict[str, str] = {}
    for path in texts:
        if path.endswith(".py"):
            dotted = path[:-3].replace("/", ".").removesuffix(".__init__")
            # A tree may be read from above its packages or from inside one: any ending of the dotted name may be meant.
            parts = dotted.split(".")
            for i in range(len(parts)):
                module_of.setdefault(".".join(parts[i:]), path)
    done: dict[str, None] = {}
    entered: set[str] = set()
    for root in sorted(texts):
        way = [(root, False)]
        while way:
            path, left = way.pop()
            if left:
                done[path] = None
            elif path not in entered:
                entered.add(path)
                way.append((path, True))
                way += [(other, False) for other in sorted(_imports(path, texts[path], module_of), reverse=True)]
    return list(done)


def _imports(path: str, text: str, module_of: Mapping[str, str]) -> set[str]:
    """Paths of the modules that a Python file imports, as far as they are in the mapping."""
    if not path.endswith(".py"):
        return set()
    package = path[:-3].replace("/", ".").split(".")[:-1]
    found = set()
    for match in _IMPORT.finditer(text):
        base, names, plain = match.groups()
        if plain is not None:
            wanted = [name.split(" as ")[0].strip() for name in plain.split(",")]
        else:
            dots = len(base) - len(base.lstrip("."))
            above = package[: len(package) - dots + 1] if dots else []
            start = ".".join([*above, *[part for part in base.lstrip(".").split(".") if part]])
            inner = [name.split(" as ")[0].strip() for name in names.split(",")]
            wanted = [f"{start}.{name}" if start else name for name in inner if name]
            wanted = [name if name in module_of else start for name in wanted] or [start]
        found |= {module_of[name] for name in wanted if name in module_of}
    return found - {path}


def ask(texts: Mapping[str, str], count: int, draw: random.Random) -> str:
    """Up to ``count`` questions about files, with answers that only one place in them gives."""
    defined: defaultdict[str, list[str]] = defaultdict(list)
    constants: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, text in texts.items():
        if path.endswith(".py"):
            for name in _DEFINED.findall(text):
                defined[name].append(path)
            for name, value in _CONSTANT.findall(text):
                constants[name].append((path, value))
    asked = [
        (f"In which file is `{name}` defined?", paths[0]) for name, paths in sorted(defined.items()) if len(paths) == 1
    ]
    asked += [
        (f"Which value has `{name}` in {places[0][0]}?", places[0][1])
        for name, places in sorted(constants.items())
        if len(places) == 1
    ]
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items() if path.endswith(".py")}
    for name, paths in sorted(defined.items()):
        users = [path for path, used in words.items() if name in used and path != paths[0]]
        if len(paths) == 1 and len(users) == 1:
            asked.append((f"Which other file uses `{name}`?", users[0]))
    chosen = draw.sample(asked, min(count, len(asked)))
    return "".join(f"\nQuestion: {question}\nAnswer: {answer}\n" for question, answer in chosen)
