"""Who may see the dashboard, and what a browser may do with it: the web server's side. Imports Flask, not Dash."""

from __future__ import annotations

import errno
import hmac
import html
import ipaddress
import logging
import socket
from typing import Any
from urllib.parse import quote, urlencode

from trine._log import logger
from trine.views.dash_state import PAGES

_COOKIE = "trine_token"
MOST_BYTES = 1 << 20
"""Of what a visitor sends. The page itself asks with addresses only."""
_PATIENCE = 20.0
"""Seconds that a visitor may keep a thread waiting for the rest of a question, or for the next one."""
_CALLBACK = "/_dash-update-component"
_PARTS = "/_dash-component-suites/"
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'; connect-src 'self'; font-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""What the page may load: only what this server sends. Dash writes small scripts and styles into the page itself."""


def is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def sentence(text: str, status: int, link: bool = False) -> Any:
    """A page of one sentence, and with ``link`` of a way to the dashboard."""
    from flask import Response

    head = '<!DOCTYPE html><html lang="en"><head><title>Trine</title></head>'
    way = ' <a href="/">To the dashboard</a>' if link else ""
    body = f"{head}<body><p>{html.escape(text)}{way}</p></body></html>"
    return Response(body, status=status, content_type="text/html; charset=utf-8")


def protect(server: Any, token: str, host: str) -> None:
    """Ask for the token, answer to this machine's names only, read only, and say so to the browser.

    Args:
        server: a Flask application.
        token: empty asks for none.
        host: that it is bound to. On an address of this machine's own, a page elsewhere whose name was made to lead
            here (DNS rebinding) would come under its own name, and is refused.
    """
    from flask import redirect, request

    local = is_local(host)
    server.config["MAX_CONTENT_LENGTH"] = MOST_BYTES

    @server.before_request
    def check() -> Any:
        if request.method not in ("GET", "HEAD", "OPTIONS") and request.path != _CALLBACK:
            return sentence("This page only reads.", 405)
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if local and not is_local(name):
            return sentence("This page is only shown under this machine's own address.", 403)
        if not token:
            return _no_page(request)
        cookie = f"{_COOKIE}_{request.environ.get('SERVER_PORT', '')}"  # a browser's cookies are those of all ports
        given = request.args.get("token", "")
        if given and hmac.compare_digest(given.encode(), token.encode()):
            rest = [(name, value) for name, value in request.args.items(multi=True) if name != "token"]
            # So that it does not stay in the address. Two slashes at its beginning would lead to another host.
            to = f"/{quote(request.path.lstrip('/'))}"
            answer: Any = redirect(f"{to}?{urlencode(rest)}" if rest else to)
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict")
            return answer
        kept = request.cookies.get(cookie, "")
        header = request.headers.get("Authorization", "").removeprefix("Bearer ")
        for one in (kept, header):
            if one and hmac.compare_digest(one.encode(), token.encode()):
                return _no_page(request)
        return sentence("This page needs its token: open the address that trine dash printed.", 403)

    @server.after_request
    def label(answer: Any) -> Any:
        answer.headers["Content-Security-Policy"] = _POLICY
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "same-origin"
        answer.headers["X-Frame-Options"] = "DENY"
        if not request.path.startswith(("/_dash-component-suites/", "/_favicon")):
            answer.headers["Cache-Control"] = "no-store"
        return answer

    server.register_error_handler(Exception, _failed)


def _no_page(request: Any) -> Any:
    """A page of a sentence where the web server would show its first page under any address; else None."""
    rule = request.url_rule
    if rule is None or rule.rule != "/<path:path>" or request.path.strip("/") in PAGES:
        return None
    return sentence("There is no such page.", 404, link=True)


def _failed(error: Exception) -> Any:
    """A sentence for whatever went wrong; the terminal gets a line, and only of what is this program's own fault."""
    from flask import request
    from werkzeug.exceptions import HTTPException

    if isinstance(error, HTTPException):
        status = error.code or 500
        if status < 400:
            return error  # a redirect
        if status == 404:
            return sentence("There is no such page.", 404, link=True)
        if status == 413:
            return sentence(f"That is too long: at most {MOST_BYTES:,} bytes are read.", 413)
        return sentence(f"This cannot be answered ({error.name}).", status)
    if request.path.startswith(_PARTS):  # Dash raises for a file it does not know
        return sentence("There is no such page.", 404, link=True)
    if request.path == _CALLBACK:  # all of them run in the page: what comes here was not sent by it
        logger.debug("dashboard: a callback that is none", exc_info=error)
        return sentence("This is no callback of this page.", 400)
    logger.warning("dashboard: %s: %s: %s", request.path, type(error).__name__, error)
    logger.debug("dashboard", exc_info=error)
    return sentence("This could not be shown; the log of trine dash says why.", 500)


def bind(server: Any, host: str, port: int) -> Any:
    """A threaded server, bound; its ``port`` is the one taken.

    Raises:
        ValueError: the address cannot be had; says which of host and port to change.
    """
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        timeout = _PATIENCE

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    if not host.strip():
        raise ValueError(f"host: found {host!r}, need an address of this machine; 0.0.0.0 stands for all of them")
    if not 0 <= port <= 65535:
        raise ValueError(f"port: found {port}, need 0 to 65535")
    # Bound here: werkzeug would print its own words and leave the process where it cannot.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen(128)
        except OSError as error:
            raise ValueError(_why_not(error, host, port)) from error
        except (TypeError, ValueError) as error:  # no name at all
            raise ValueError(f"host: {host!r} is no address ({error})") from error
        return make_server(host, port, server, threaded=True, request_handler=Handler, fd=bound.fileno())


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port: {port} of {host} is taken; choose another --port (0 takes any that is free)"
    if error.errno == errno.EACCES:
        return f"port: {port} may not be taken by this user; choose a --port from 1024 on"
    return f"host: found {host!r}, need an address of this machine ({error.strerror or error})"


def shown_address(server: Any, host: str) -> str:
    """The address of a bound server to open it with, ``http://name:port/``.

    Bound to all addresses it is the machine's name, for 0.0.0.0 is none that another machine could open.
    """
    bound = server.socket.getsockname()[0]
    try:
        everywhere = ipaddress.ip_address(bound.split("%")[0]).is_unspecified
    except ValueError:
        everywhere = False
    name = socket.gethostname() if everywhere else host.strip("[]")
    return f"http://{f'[{name}]' if ':' in name else name}:{server.port}/"
