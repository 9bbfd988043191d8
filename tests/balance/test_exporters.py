from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trine.balance.alerts import DEFAULT_RULES, Alerts
from trine.balance.exporters import Prometheus, Webhook
from trine.balance.record_format import Frame, HostWindow
from trine.balance.summary import Summaries


def frame_of(layers: int = 2, experts: int = 6, step: int = 3) -> Frame:
    loads_LE = np.arange(layers * experts, dtype=np.int64).reshape(layers, experts) * 10
    zero_L = np.zeros(layers, dtype=np.int64)
    bias_LE = np.linspace(-1, 1, layers * experts, dtype=np.float32).reshape(layers, experts)
    window = HostWindow(loads_LE, bias_LE, loads_LE.sum(1), zero_L, zero_L, zero_L, np.zeros((layers, 5)))
    return Summaries(layers, experts, 1).step(step, window)


class Gauge:
    """Stands in for prometheus_client's, which an extra installs: values by their labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], registry: dict[str, Gauge]) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.names = labels
        assert text and name not in registry
        registry[name] = self

    def labels(self, *values: object) -> SimpleNamespace:
        assert len(values) == len(self.names)
        return SimpleNamespace(set=lambda value: self.values.__setitem__(tuple(map(str, values)), value))

    def set(self, value: float) -> None:
        self.values[()] = value


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    server = SimpleNamespace(server_address=("127.0.0.1", 4242), closed=0)

    def close() -> None:
        server.closed += 1

    server.shutdown = server.server_close = close
    asked: list[tuple[int, str]] = []

    def serve(port: int, address: str, registry: object) -> tuple[Any, None]:
        asked.append((port, address))
        if port == 80:
            raise OSError("in use")
        return server, None

    fake = SimpleNamespace(CollectorRegistry=dict, Gauge=Gauge, start_http_server=serve, asked=asked, server=server)
    monkeypatch.setitem(sys.modules, "prometheus_client", fake)
    return fake


def test_prometheus_shows_figures_of_each_layer(client: SimpleNamespace) -> None:
    page = Prometheus(top=2)
    page.layers = (3, 4)  # the model's numbers
    frame = frame_of()
    page.update(frame, {"dead": [0, 1]}, {"written": 3, "dropped": 1})
    found = {name: gauge.values for name, gauge in page.registry.items()}
    assert found["trine_balance_step"] == {(): 3}
    assert found["trine_load_ratio"]["4", "0.5"] == pytest.approx(1.0)
    assert found["trine_load_ratio"]["3", "0.99"] == pytest.approx(float(frame.summary("p99")[0]))
    assert found["trine_busiest_expert"] == {("3", "1"): 5, ("3", "2"): 4, ("4", "1"): 5, ("4", "2"): 4}
    assert found["trine_busiest_load_ratio"]["3", "1"] == pytest.approx(2.0)
    assert found["trine_experts_bias_max"]["4",] == pytest.approx(1.0)
    assert found["trine_balance_alert_layers"]["dead",] == 2
    assert len(found["trine_balance_alert_layers"]) == len(DEFAULT_RULES)
    assert found["trine_recorder_steps"] == {("written",): 3, ("dropped",): 1}
    page.update(frame, {}, None)
    assert page.registry["trine_balance_alert_layers"].values["dead",] == 0 and client.asked == []


def test_one_rank_is_plain_1_everywhere(client: SimpleNamespace) -> None:
    page, alerts = Prometheus(), Alerts(2, 6, 1)
    for step in range(1, 31):
        frame = frame_of(step=step)
        assert not [one for one in alerts.step(frame) if one.rule == "rank_overload"]
        page.update(frame, alerts.active)
    assert page.registry["trine_experts_rank_overload"].values == {("MoE 0",): 1.0, ("MoE 1",): 1.0}
    assert page.registry["trine_balance_alert_layers"].values[("rank_overload",)] == 0


def test_prometheus_series_are_bounded_by_layers_not_experts(client: SimpleNamespace) -> None:
    counts = []
    for experts in (8, 896):
        page = Prometheus()
        page.update(frame_of(3, experts), {}, {"written": 1})
        counts.append(sum(len(gauge.values) for gauge in page.registry.values()))
    assert counts[0] == counts[1] == 3 * (5 + 12 + 4 + 4) + len(DEFAULT_RULES) + 2
    few = Prometheus()
    few.update(frame_of(1, 2))
    assert len(few.registry["trine_busiest_expert"].values) == 2


def test_prometheus_serves_this_machine_only(client: SimpleNamespace) -> None:
    page = Prometheus(0)
    assert client.asked == [(0, "127.0.0.1")] and page.port == 4242
    page.close()
    page.close()
    assert client.server.closed == 2
    with pytest.raises(ValueError, match=r"prometheus: cannot serve on 127.0.0.1:80 \(in use\)"):
        Prometheus(80)
    with pytest.raises(ValueError, match="top: found -1"):
        Prometheus(top=-1)


def test_prometheus_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match=r"prometheus_client is not installed; .* '.\[dashboard\]'"):
        Prometheus()


class Receiver:
    """A small server that notes what is posted to it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.arrived = threading.Semaphore(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(outer.status)
                self.end_headers()
                outer.arrived.release()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/secret-path"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.thread.join()
    found.server.server_close()


def test_a_webhook_posts_json(receiver: Receiver) -> None:
    hook = Webhook(receiver.url)
    for number in range(3):
        hook.send({"step": number})
    hook.close()
    assert receiver.bodies == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert (hook.sent, hook.failed, hook.dropped) == (3, 0, 0) and not hook._thread.is_alive()


def test_failures_are_counted_and_the_address_is_not_logged(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 500
    hook = Webhook(receiver.url)
    with caplog.at_level(logging.WARNING, "trine"):
        hook.send({})
        hook.send({})
        hook.close()
    assert (hook.sent, hook.failed) == (0, 2) and caplog.text.count("failed (status 500)") == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        hook = Webhook(f"http://127.0.0.1:{taken.getsockname()[1]}/secret-path")
        with caplog.at_level(logging.WARNING, "trine"):
            hook.send({})
            hook.close()
    assert hook.failed == 1 and "ConnectionRefusedError" in caplog.text and "secret" not in caplog.text


def test_a_receiver_that_hangs_holds_nobody_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hook = Webhook(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.2, depth=3)
        for number in range(10):
            hook.send({"step": number})
        assert hook.dropped >= 6  # what waited longest went first
        hook.close(timeout=5)
        assert hook.failed + hook.dropped == 10 and hook.sent == 0


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://x/", "http://", "hello"])
def test_only_web_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=r"webhook: found an address that begins with .* need http:// or https://"):
        Webhook(url)
