"""Who may see the dashboard and what may be sent to it: cookies of two ports, addresses, callbacks that are none."""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from trine import _dash_verb
from trine.train.errors import RunError
from trine.views import dash_app, dash_guard
from trine.views.demo import DemoSize, write_demo

TOKENS = ("a-token-of-the-first-one", "a-token-of-the-second")
CALLBACK = "/_dash-update-component"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard") / "demo"
    write_demo(folder, DemoSize(layers=2, experts=8, top_k=1, steps=4, tokens=64, ranks=1), "demo", "none")
    return folder


@pytest.fixture
def client(run: Path) -> Any:
    return dash_app.build([run]).server.test_client()


def get(client: Any, path: str, port: int = 80, **more: Any) -> Any:
    return client.get(path, base_url="http://127.0.0.1", environ_overrides={"SERVER_PORT": str(port)}, **more)


def test_dashboards_of_two_ports_do_not_log_each_other_out(run: Path) -> None:
    first, second = (dash_app.build([run], token=token).server.test_client() for token in TOKENS)
    jar = first._cookies = second._cookies  # one browser: its cookies are those of the host, whatever the port
    assert get(first, f"/?token={TOKENS[0]}", 8050).status_code == 302
    assert get(second, f"/?token={TOKENS[1]}", 8051).status_code == 302
    assert len(jar) == 2
    assert get(first, "/depth", 8050).status_code == get(second, "/depth", 8051).status_code == 200
    assert get(first, "/depth", 8051).status_code == 403  # the other one's cookie is not this one's


def test_the_cookie_has_the_port_that_is_served(run: Path) -> None:
    server = dash_guard.bind(dash_app.build([run], token=TOKENS[0]).server, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.build_opener(Stay).open(f"http://127.0.0.1:{server.port}/?token={TOKENS[0]}", timeout=20)
        assert answer.value.code == 302
        assert answer.value.headers["Set-Cookie"].startswith(f"trine_token_{server.port}={TOKENS[0]};")
        answer.value.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_way_from_a_token_keeps_the_other_words_and_leads_nowhere_else(run: Path) -> None:
    client = dash_app.build([run], token=TOKENS[0]).server.test_client()
    for asked, to in (
        (f"/export/heat.png?runs=0&token={TOKENS[0]}&what=a%26b", "/export/heat.png?runs=0&what=a%26b"),
        (f"/depth?token={TOKENS[0]}", "/depth"),
    ):
        answer = get(client, asked)
        assert answer.status_code == 302 and answer.headers["Location"] == to
    for path in ("//evil.example/x", "///evil.example", "/\\evil.example"):
        answer = client.get(f"/?token={TOKENS[0]}", base_url="http://127.0.0.1", environ_overrides={"PATH_INFO": path})
        to = answer.headers["Location"]
        assert answer.status_code == 302 and to.startswith("/") and to[1] not in "/\\"


# -- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"{}", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        json.dumps({"output": "none.children", "inputs": [], "changedPropIds": []}).encode(),
        json.dumps({"output": 7, "outputs": [], "inputs": "x", "state": {}}).encode(),
        json.dumps({"output": "theme.data", "outputs": {"id": "theme", "property": "data"}, "inputs": []}).encode(),
    ],
)  # fmt: skip
def test_a_callback_that_is_none_is_400_and_no_trace(
    client: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], body: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        answer = client.post(CALLBACK, data=body, content_type="application/json", base_url="http://127.0.0.1")
    assert answer.status_code == 400 and "<p>" in answer.text and "Traceback" not in answer.text
    seen = capfd.readouterr()
    assert "Traceback" not in caplog.text + seen.err + seen.out
    assert len(caplog.records) <= 1


def test_what_is_sent_has_an_end(client: Any) -> None:
    body = b'{"output": "' + b"x" * dash_guard.MOST_BYTES + b'"}'
    answer = client.post(CALLBACK, data=body, content_type="application/json", base_url="http://127.0.0.1")
    assert answer.status_code == 413 and "1,048,576 bytes" in answer.text
    plain = client.post(CALLBACK, data=b"x", content_type="text/plain", base_url="http://127.0.0.1")
    assert plain.status_code == 415 and "Unsupported Media Type" in plain.text


def test_the_page_sends_nothing_but_addresses(client: Any) -> None:
    """All callbacks run in the page, so what arrives at the address of callbacks was not sent by it."""
    found = get(client, "/_dash-dependencies").get_json()
    assert found and all(one["clientside_function"] for one in found)


@pytest.mark.parametrize(
    "path",
    [
        "/nosuch", "/balance/heat", "/balance.html", "/index.html", "/export/../x", "/_dash-component-suites/os/x.py",
        "/_dash-component-suites/dash/nosuch.js", "/_dash-component-suites/dash/../../x.py",
        "/_dash-component-suites/none/x.js", "/_dash-component-suites/dash/dash.py", "/export/heat.pdf/x",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_404_with_a_way_back(
    client: Any, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    answer = get(client, path)
    assert answer.status_code == 404 and '<a href="/">' in answer.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ["/", "/balance", "/depth", "/depth/", "/gates", "/training"])
def test_pages_are_found(client: Any, path: str) -> None:
    answer = get(client, path)
    assert answer.status_code == 200 and "_dash-renderer" in answer.text


def test_without_the_token_no_address_tells_whether_it_is_one(run: Path) -> None:
    client = dash_app.build([run], token=TOKENS[0]).server.test_client()
    assert {get(client, one).status_code for one in ("/", "/nosuch", "/run.json")} == {403}
    assert get(client, "/nosuch", headers={"Authorization": f"Bearer {TOKENS[0]}"}).status_code == 404


def test_an_error_of_the_program_is_a_sentence_and_one_line(
    run: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    app = dash_app.build([run])

    def fails() -> None:
        raise RuntimeError("secret words")

    app.server.add_url_rule("/fails", view_func=fails)
    with caplog.at_level(logging.INFO):
        answer = get(app.server.test_client(), "/fails")
    assert answer.status_code == 500 and "secret" not in answer.text and "<p>" in answer.text
    assert [one.getMessage() for one in caplog.records] == ["dashboard: /fails: RuntimeError: secret words"]
    assert "Traceback" not in capfd.readouterr().err


# -- binding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_one_sentence(taken: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"port: {taken} of 127.0.0.1 is taken; choose another --port"):
        dash_guard.bind(None, "127.0.0.1", taken)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("host", ["192.0.2.7", "", "  ", "x" * 300, "a\0b", "1::zz"])
def test_a_bad_host_is_told_as_one(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^host: ") as error:
        dash_guard.bind(None, host, 0)
    assert "--port" not in str(error.value) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "127.0.0.1", "localhost", "::", "::1"])
def test_the_address_that_is_printed_can_be_opened(
    run: Path, host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "workstation")
    ports: list[int] = []
    try:
        assert _dash_verb.main([str(run), "--port", "0", "--host", host], lambda one: ports.append(one.port)) == 0
    except ValueError as error:  # a machine without IPv6 says so
        assert ":" in host and str(error).startswith("host: ")
        return
    name = {"0.0.0.0": "workstation", "0": "workstation", "::": "workstation", "::1": "[::1]"}.get(host, host)
    out = capsys.readouterr().out
    assert out.startswith(f"dashboard at http://{name}:{ports[0]}/")
    assert ("?token=" in out) == (name == "workstation")


def test_empty_names_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)  # where "" would be a run
    for args, words in (
        ([str(run), "--host", ""], "host: found '', need an address"),
        ([""], "run: found '', need a run's folder"),
        ([str(run), " "], "run: found ' ', need a run's folder"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            _dash_verb.main([*args, "--port", "0"], lambda _: None)
        assert not isinstance(error.value, RunError)
    assert _dash_verb.main([".", "--port", "0"], lambda _: None) == 0
    assert capsys.readouterr().out.startswith("dashboard at http://127.0.0.1:")


def test_a_question_that_never_ends_does_not_hold_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dash_guard, "_PATIENCE", 0.2)
    server = dash_guard.bind(Flask("trine"), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as half:
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127")
            assert half.recv(100) == b""  # shut by the server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
