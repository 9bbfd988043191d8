"""`trine dash RUN [RUN2 ...]`: the dashboard, on this machine's own address unless told otherwise."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import tyro
from tyro.conf import Positional

from trine._options import parse

_SHORTEST_TOKEN = 16
_NICENESS = 5
DEMO_FOLDER = Path("runs") / "demo"


@dataclass(frozen=True)
class Dash:
    """A page in the browser: experts, depth, gates and training of runs, live while they train. It only reads.

    RUN is a run's folder, its name in runs/, or a folder of runs; without one it is runs/. Any address but this
    machine's own asks visitors for a token, which is printed with the address.
    """

    runs: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RUN RUN2]")] = ()  # what may be looked at
    host: str = "127.0.0.1"  # address to bind to
    port: int = 8050  # 0 takes any
    token: str = ""  # asked of visitors; made up where the address needs one and none is given
    every: float = 0.25  # seconds after which the page looks for something new
    demo: bool = False  # synthesise runs to look at, 92 layers of 896 experts, in runs/demo (about 300 MB)
    demo_small: bool = False  # the same with 6 layers of 64 experts, in seconds


def main(args: list[str], start: Callable[[Any], None] | None = None) -> int:
    """Run one `trine dash` command line; ``start`` is handed the bound server (default: serves until interrupted)."""
    options = parse("dash", Dash, args)
    if options.token and len(options.token) < _SHORTEST_TOKEN:
        raise ValueError(f"token: found {len(options.token)} characters, need at least {_SHORTEST_TOKEN}")
    if not 0.25 <= options.every <= 3600:
        raise ValueError(f"every: found {options.every}, need 0.25 to 3600 seconds")
    demo = options.demo or options.demo_small
    folders = [_folder(name) for name in options.runs]
    if demo:
        where = DEMO_FOLDER.with_name("demo-small") if options.demo_small else DEMO_FOLDER
        where.mkdir(parents=True, exist_ok=True)
        folders = [where / "demo-quantile", where / "demo-sign", *folders]
    folders = folders or [_folder("runs")]
    from trine.views import dash_app, dash_guard

    if not options.host.strip():
        raise ValueError(f"host: found {options.host!r}, need an address; 0.0.0.0 stands for all of this machine's")
    token = options.token
    if not token and not dash_guard.is_local(options.host):
        token = secrets.token_urlsafe(24)
    app = dash_app.build(folders, token=token, host=options.host, every=options.every)
    server = dash_app.serve(app, options.host, options.port)
    address = dash_guard.shown_address(server, options.host)
    print(f"dashboard at {address}{'?' + urlencode({'token': token}) if token else ''}", flush=True)
    writer = _write_demo(where, options.demo_small) if demo else None
    try:
        (start or _serve)(server)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        if writer is not None and writer.poll() is None:
            writer.terminate()
            writer.wait()
    return 0


def _serve(server: Any) -> None:
    """Until interrupted; training beside it goes first."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    server.serve_forever()


def _folder(name: str) -> Path:
    """A folder by path, or by its name in runs/.

    Raises:
        ValueError: an empty name, which would be the current folder.
        RunError: there is neither.
    """
    if not name.strip():
        raise ValueError(f"run: found {name!r}, need a run's folder or name; . is the current folder")
    for folder in (Path(name), Path("runs") / name):
        if folder.is_dir():
            return folder
    from trine.train.errors import no_run

    raise no_run(name, Path("runs"))


def _write_demo(folder: Path, small: bool) -> subprocess.Popen[bytes]:
    """Synthesise what is not there yet in a process of its own; the page follows it as it would follow training."""
    print(f"{folder}: runs are synthesised where they are not there yet; the page shows them grow", flush=True)
    return subprocess.Popen([sys.executable, "-m", "trine.views.demo", str(folder), *(["--small"] if small else [])])
