"""Recipes for text that may not be shipped: packages of a Debian system, downloaded and unpacked, never installed.

A recipe names packages by pattern, since names carry versions, with the licence that their text is known to be under.
The system's own ``apt-get`` and ``dpkg-deb`` do the work; nothing of it reaches the system.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from trine._log import logger
from trine.data._errors import DataError
from trine.data.sources import LARGEST_FILE, list_folder
from trine.data.store import STORE, Kind, StoredSource, add


@dataclass(frozen=True)
class Package:
    """A package to fetch.

    Attributes:
        pattern: regular expression of its whole name; of several that fit, the one with the highest version is taken.
        licence: SPDX expression of its text.
        suffixes: endings of the files that are text; ``.html`` is turned into plain text.
        skip: folders, as they end, that hold the same text again or none.
    """

    pattern: str
    licence: str
    suffixes: tuple[str, ...]
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchRecipe:
    """Packages that together are one source, and how it is read."""

    packages: tuple[Package, ...]
    kind: Kind = "text"
    largest_file: int = LARGEST_FILE


_HTML = (".html", ".htm")
# Licences as the packages' own copyright files state them (Debian 12).
RECIPES: dict[str, FetchRecipe] = {
    "debian-docs": FetchRecipe(
        (
            Package(r"linux-doc-[0-9.]+", "GPL-2.0-only", (".rst", ".txt", ".rst.gz", ".txt.gz"), ("/html",)),
            Package(r"python3\.[0-9]+-doc", "PSF-2.0", _HTML, ("/_sources", "/_static", "/genindex")),
            Package(r"debian-reference-en", "GPL-2.0-or-later", _HTML),
            Package(r"debian-handbook", "CC-BY-SA-3.0 OR GPL-2.0-or-later", _HTML),
            Package(r"perl-doc", "GPL-1.0-or-later OR Artistic-1.0-Perl", (".pod",)),
            Package(r"sqlite3-doc", "blessing", _HTML),
            Package(r"postgresql-doc-[0-9]+", "PostgreSQL", _HTML),
            Package(r"anarchism", "GPL-2.0-or-later", _HTML, ("/markdown",)),
            Package(r"cppreference-doc-en-html", "CC-BY-SA-3.0 OR GFDL-1.3-or-later", _HTML),
            Package(r"python-sklearn-doc", "BSD-3-Clause", _HTML, ("/_sources", "/_static")),
        )
    ),
    "linux-source": FetchRecipe(
        (
            Package(
                r"linux-source-[0-9.]+",
                "GPL-2.0-only WITH Linux-syscall-note",
                (".c", ".h", ".S", ".rs", ".rst", ".txt", ".py", ".sh", ".dts", ".dtsi", "Makefile", "Kconfig"),
                ("/drivers/gpu/drm/amd/include",),  # hundreds of megabytes of generated register tables
            ),
        ),
        kind="bundle",
        largest_file=1 << 20,
    ),
}


@dataclass(frozen=True)
class Fetched:
    """A line of the licence table: a package as it was found.

    Attributes:
        package, version: as the system names them.
        licence: the recipe's.
        stated: the ``License:`` fields of the package's copyright file, as written there.
        copyright_sha256: hash of that file; empty when there is none.
        files, bytes: text files taken from it.
    """

    package: str
    version: str
    licence: str
    stated: tuple[str, ...]
    copyright_sha256: str
    files: int
    bytes: int


def fetch(recipe: str, *, store: str | Path = STORE, replace: bool = False) -> tuple[StoredSource, list[Fetched]]:
    """Download and unpack the packages of a recipe, and add their text to the store under the recipe's name.

    Args:
        recipe: a name in ``RECIPES``.
        store: folder of the store; the text goes to ``STORE/files/RECIPE``.
        replace: take the place of what was fetched before.

    Returns:
        The source, and the licence table.

    Raises:
        DataError: an unknown recipe, a missing tool, a command that fails (with its last line), none of the packages
            known to the system, or no text in them. What was there before is then untouched.
    """
    if recipe not in RECIPES:
        raise DataError(f"fetch: no recipe {recipe!r}, need one of {', '.join(RECIPES)}")
    root = Path(store)
    place = root / "files" / recipe
    if (root / f"{recipe}.json").exists() and not replace:
        raise DataError(f"source {recipe}: is in the store already; replace it to fetch it again")
    for tool in ("apt-cache", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DataError(f"fetch {recipe}: needs {tool}, which is not on this system (a Debian or Ubuntu is needed)")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{recipe}-", dir=place.parent))
    except OSError as error:
        raise DataError(f"store {root}: cannot be written ({error.strerror})") from error
    try:
        packages = [(package, _known(package, recipe)) for package in RECIPES[recipe].packages]
        table = [
            _fetch_package(package, name, RECIPES[recipe].largest_file, work) for package, name in packages if name
        ]
        if not table:
            wanted = ", ".join(package.pattern for package, _ in packages)
            raise DataError(
                f"fetch {recipe}: apt-cache knows none of {wanted}; run apt-get update, or add their section"
            )
        if not any(one.files for one in table):
            raise DataError(f"fetch {recipe}: found no text in {', '.join(one.package for one in table)}")
        if place.exists():
            place.replace(work / "old")
        (work / "text").replace(place)
    except OSError as error:
        raise DataError(f"fetch {recipe}: {error.filename or place}: {error.strerror}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    licence = " AND ".join(sorted({f"({one.licence})" if " " in one.licence else one.licence for one in table}))
    source = add(
        recipe,
        [place],
        licence=licence,
        kind=RECIPES[recipe].kind,
        suffixes=() if RECIPES[recipe].kind == "text" else ("",),
        replace=replace,
        store=store,
        details={"packages": [asdict(one) for one in table]},
    )
    return source, table


def _run(command: Sequence[str], where: Path | None = None) -> str:
    """Run a tool and give its output. Raises DataError with the last line of what it said."""
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise DataError(f"{command[0]}: cannot be run ({error.strerror})") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise DataError(f"{' '.join(command)}: exit code {done.returncode} ({said})")
    return done.stdout


def _known(package: Package, recipe: str) -> str | None:
    """The package's name on this system, or None with a warning."""
    listed = _run(["apt-cache", "search", "--names-only", f"^{package.pattern}$"])
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    names = [name for name in names if re.fullmatch(package.pattern, name)]
    if not names:
        logger.warning("fetch %s: no package %s here; left out", recipe, package.pattern)
        return None
    return max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def _fetch_package(package: Package, name: str, largest: int, work: Path) -> Fetched:
    """Download one package, unpack it and keep its text below ``WORK/text/NAME``."""
    down, tree = work / "down" / name, work / "tree" / name
    down.mkdir(parents=True)
    tree.mkdir(parents=True)
    _run(["apt-get", "download", name], down)
    archives = sorted(down.glob("*.deb"))
    if len(archives) != 1:
        raise DataError(f"apt-get download {name}: left {len(archives)} packages, need one")
    version = _run(["dpkg-deb", "-f", str(archives[0]), "Version"]).strip()
    _run(["dpkg-deb", "-x", str(archives[0]), str(tree)])
    count = size = 0
    for path, content in _texts(tree, package, largest):
        target = work / "text" / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        count += 1
        size += len(content)
    stated, digest = _copyright(tree, name)
    shutil.rmtree(tree)
    shutil.rmtree(down)
    return Fetched(name, version, package.licence, stated, digest, count, size)


def _copyright(tree: Path, name: str) -> tuple[tuple[str, ...], str]:
    """The licences a package's copyright file states, and the file's hash."""
    path = tree / "usr/share/doc" / name / "copyright"
    if not path.is_file() or path.is_symlink():
        return (), ""
    content = path.read_bytes()
    fields = re.findall(r"^License:[ \t]*(\S.*)$", content.decode("utf-8", "replace"), re.M)
    return tuple(dict.fromkeys(one.strip() for one in fields)), hashlib.sha256(content).hexdigest()


def _texts(tree: Path, package: Package, largest: int) -> Iterator[tuple[str, bytes]]:
    """The texts of an unpacked package and of the source archives in it, HTML as plain text."""

    def wanted(name: str) -> bool:
        folder = f"/{name}".rpartition("/")[0]
        skipped = any(folder.endswith(skip) or f"{skip}/" in folder for skip in package.skip)
        return name.endswith(package.suffixes) and not skipped

    for name, path in list_folder(tree)[0]:
        if re.search(r"\.tar\.(xz|gz|bz2)$", name) and name.startswith("usr/src/"):
            yield from _archive(path, wanted, largest)
        elif wanted(name) and path.stat().st_size <= largest:
            yield _plain(name, path.read_bytes())


def _archive(path: Path, wanted: Callable[[str], bool], largest: int) -> Iterator[tuple[str, bytes]]:
    """The regular files of an archive that are wanted; a name that leads out of it is refused."""
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or member.size > largest or not wanted(member.name):
                    continue
                if name.is_absolute() or ".." in name.parts:
                    raise DataError(f"archive {path.name}: holds a file outside itself ({member.name})")
                content = archive.extractfile(member)
                if content is not None:
                    yield name.as_posix(), content.read()
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"archive {path.name}: damaged ({error})") from error


def _plain(name: str, content: bytes) -> tuple[str, bytes]:
    """A file as plain text, under the name it then has."""
    if name.endswith(".gz"):
        try:
            return name[:-3], gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise DataError(f"file {name}: damaged ({error})") from error
    if name.endswith(_HTML):
        return f"{name}.txt", html_text(content.decode("utf-8", "replace")).encode()
    return name, content


_BLOCKS = "p div br li ul ol dl dt dd h1 h2 h3 h4 h5 h6 tr table pre section article blockquote hr"


class _Text(HTMLParser):
    """Collects what a reader of a page sees."""

    HIDDEN = frozenset({"script", "style", "head", "nav", "svg", "footer", "form"})
    BLOCKS = frozenset(_BLOCKS.split())

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden: list[str] = []
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.HIDDEN:
            self.hidden.append(tag)
        if tag == "pre":
            self.pre += 1
        if tag in self.BLOCKS:
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append("\t")

    def handle_endtag(self, tag: str) -> None:
        # A page may close what it never opened, or open what it never closes.
        if tag in self.hidden:
            while self.hidden.pop() != tag:
                pass
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """The text of a page: without scripts, styles and navigation, a line a block, at most one empty line in a row."""
    reader = _Text()
    reader.feed(page)
    reader.close()
    lines = [line.rstrip() for line in "".join(reader.parts).replace("\xa0", " ").split("\n")]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line if line.strip() else "" for line in lines))
    return re.sub(r"(?m)^ (?=\S)", "", text).strip("\n") + "\n"
