"""Who may see the dashboard, and what a browser may do with it: the web server's side. Imports Flask, not Dash."""

from __future__ import annotations

import hmac
import html
import ipaddress
import logging
from typing import Any

_COOKIE = "trine_token"
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


def sentence(text: str, status: int) -> Any:
    """A page of one sentence."""
    from flask import Response

    head = '<!DOCTYPE html><html lang="en"><head><title>Trine</title></head>'
    body = f"{head}<body><p>{html.escape(text)}</p></body></html>"
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

    @server.before_request
    def check() -> Any:
        if request.method not in ("GET", "HEAD", "OPTIONS") and request.path != "/_dash-update-component":
            return sentence("This page only reads.", 405)
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if local and not is_local(name):
            return sentence("This page is only shown under this machine's own address.", 403)
        if not token:
            return None
        given = request.args.get("token", "")
        if given and hmac.compare_digest(given.encode(), token.encode()):
            answer: Any = redirect(request.path)  # so that it does not stay in the address
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="Strict")
            return answer
        kept = request.cookies.get(_COOKIE, "")
        header = request.headers.get("Authorization", "").removeprefix("Bearer ")
        for one in (kept, header):
            if one and hmac.compare_digest(one.encode(), token.encode()):
                return None
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

    @server.errorhandler(404)
    def absent(_error: Any) -> Any:
        return sentence("There is no such page.", 404)

    @server.errorhandler(500)
    def failed(_error: Any) -> Any:
        return sentence("This could not be shown; the log of trine dash says why.", 500)


def bind(server: Any, host: str, port: int) -> Any:
    """A threaded server, bound; its ``port`` is the one taken.

    Raises:
        ValueError: the address cannot be had.
    """
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    if not 0 <= port <= 65535:
        raise ValueError(f"port: found {port}, need 0 to 65535")
    try:
        return make_server(host, port, server, threaded=True)
    except (OSError, SystemExit) as error:
        raise ValueError(f"{host}:{port}: cannot be had ({error}); choose another --port") from error
