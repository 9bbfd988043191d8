"""Carries figures and alerts out of a run: Prometheus and a webhook. Neither holds training up.

The only file that imports ``prometheus_client`` (extra ``dashboard``).
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from trine._log import logger
from trine.balance.alerts import DEFAULT_RULES
from trine.balance.record_format import Frame

QUANTILES = {"0.01": "p1", "0.05": "p5", "0.5": "p50", "0.95": "p95", "0.99": "p99"}
_GAUGES = {
    "max_vio": "Largest load over mean load, minus 1.",
    "cv": "Standard deviation of the loads over their mean.",
    "dead": "Experts that should have got more than 10 tokens since their last.",
    "effective": "Effective number of experts: exp of the entropy of their shares.",
    "rank_overload": "Largest load of an expert-parallel rank over the mean.",
    "bias_min": "Smallest bias.",
    "bias_max": "Largest bias.",
    "bias_step": "Mean size of the last change of the bias.",
    "saturated": "Share of scores that fp32 cannot tell from 0 or 1.",
    "overflow": "Share of required biases outside the histogram.",
    "dropped": "Tokens left out because a score was not finite.",
    "tokens": "Tokens routed.",
}


class Prometheus:
    """A registry of gauges for one run, and optionally a page that serves it.

    Its number of series is bounded whatever the number of experts: of a layer the quantiles of `QUANTILES`, the figures
    of `SUMMARY` that matter, and its ``top`` busiest experts by place (the expert's number is a value, not a label).

    Args:
        port: serve ``/metrics`` there; None serves nothing, 0 takes a free one.
        address: to bind to; the default cannot be reached from other machines.
        top: busiest experts of each layer that are shown.

    Attributes:
        layers: the model's numbers of its MoE layers, which the label ``layer`` tells. Of those it does not name it is
            ``MoE 0``, ``MoE 1`` …, which no one takes for a layer of the model.

    Raises:
        ValueError: prometheus_client is not installed, or the port is taken.
    """

    layers: Sequence[int] = ()

    def __init__(self, port: int | None = None, address: str = "127.0.0.1", top: int = 4) -> None:
        if top < 0:
            raise ValueError(f"top: found {top}, need 0 or more")
        client = _client()
        self.registry: Any = client.CollectorRegistry()
        self.top = top

        def gauge(name: str, text: str, *labels: str) -> Any:
            return client.Gauge(f"trine_{name}", text, labels, registry=self.registry)

        self._step = gauge("balance_step", "Newest step that these figures are of.")
        self._quantile = gauge("load_ratio", "Load over mean load.", "layer", "quantile")
        self._figures = {name: gauge(f"experts_{name}", text, "layer") for name, text in _GAUGES.items()}
        self._busiest = gauge("busiest_load_ratio", "Load over mean load of the busiest experts.", "layer", "place")
        self._which = gauge("busiest_expert", "Number of the busiest experts.", "layer", "place")
        self._alerts = gauge("balance_alert_layers", "Layers in which an alert is on.", "rule")
        self._records = gauge("recorder_steps", "Steps handed to the recorder, by what became of them.", "fate")
        for rule in DEFAULT_RULES:
            self._alerts.labels(rule.name).set(0)
        self.port: int | None = None
        self._server: Any = None
        if port is not None:
            try:
                self._server, self._thread = client.start_http_server(port, address, registry=self.registry)
            except (OSError, OverflowError) as error:
                raise ValueError(f"prometheus: cannot serve on {address}:{port} ({error})") from error
            self.port = int(self._server.server_address[1])

    def update(
        self, frame: Frame, active: Mapping[str, Sequence[int]] | None = None, fates: Mapping[str, float] | None = None
    ) -> None:
        """Show a step's figures, the alerts that are on, and what became of the recorder's steps."""
        self._step.set(frame.last)
        mean_L = np.maximum(frame.loads_LE.mean(-1), 1e-300)
        top = min(self.top, frame.loads_LE.shape[1])
        order_LP = np.argsort(-frame.loads_LE, axis=1, kind="stable")[:, :top]
        values = {name: frame.summary(name) for name in (*_GAUGES, *QUANTILES.values())}
        for layer in range(len(mean_L)):
            label = str(self.layers[layer]) if layer < len(self.layers) else f"MoE {layer}"
            for level, name in QUANTILES.items():
                self._quantile.labels(label, level).set(float(values[name][layer]))
            for name, gauge in self._figures.items():
                gauge.labels(label).set(float(values[name][layer]))
            for place, expert in enumerate(order_LP[layer].tolist(), 1):
                self._busiest.labels(label, place).set(float(frame.loads_LE[layer, expert] / mean_L[layer]))
                self._which.labels(label, place).set(expert)
        if active is not None:
            for rule in DEFAULT_RULES:
                self._alerts.labels(rule.name).set(len(active.get(rule.name, ())))
        for fate, count in (fates or {}).items():
            self._records.labels(fate).set(count)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class Family(NamedTuple):
    """Values of one name for `exposition`, each with the values of the labels."""

    name: str  # without "trine_"
    text: str
    labels: tuple[str, ...]
    values: Sequence[tuple[tuple[str, ...], float]]


def exposition(runs: Mapping[str, tuple[Prometheus | None, Sequence[Family]]]) -> str:
    """Several runs as one page for Prometheus: every series has the label ``run``.

    Args:
        runs: by name: the gauges of the run's experts, if there are any, and other values.

    Returns:
        The page, in Prometheus' text format 0.0.4.

    Raises:
        ValueError: prometheus_client is not installed.
    """
    client = _client()
    found: dict[str, Any] = {}

    def add(name: str, text: str, run: str, labels: Mapping[str, str], value: float) -> None:
        if name not in found:
            found[name] = client.Metric(name, text, "gauge")
        found[name].add_sample(name, {"run": run, **labels}, value)

    for run, (experts, families) in runs.items():
        for metric in experts.registry.collect() if experts is not None else ():
            for sample in metric.samples:
                add(metric.name, metric.documentation, run, sample.labels, sample.value)
        for family in families:
            for values, value in family.values:
                labels = dict(zip(family.labels, values, strict=True))
                add(f"trine_{family.name}", family.text, run, labels, value)
    registry = client.CollectorRegistry()
    registry.register(_Collected(list(found.values())))
    return str(client.generate_latest(registry).decode())


class _Collected:
    """Metrics as they are, for a registry."""

    def __init__(self, metrics: Sequence[Any]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Any]:
        """What the registry asks for."""
        return self._metrics


def _client() -> Any:
    try:
        return import_module("prometheus_client")
    except ImportError as error:
        raise ValueError(
            "prometheus: prometheus_client is not installed; in the clone: "
            ".venv/bin/pip install -e '.[dashboard]', or do without"
        ) from error


def check_port(port: int, address: str = "127.0.0.1") -> None:
    """Ask whether `Prometheus` could serve there now, so that a run can be refused before its data are made.

    Raises:
        ValueError: prometheus_client is not installed, or the port is taken.
    """
    _client()
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind((address, port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"prometheus: cannot serve on {address}:{port} ({error})") from error


def check_webhook(url: str) -> str:
    """The host of an address that `Webhook` may post to.

    Raises:
        ValueError: the address is no http or https one.
    """
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"webhook: found an address that begins with {parts.scheme!r}, need http:// or https://")
    return parts.hostname


class Webhook:
    """Posts JSON to an address from a thread of its own. What cannot be delivered is counted, not tried again.

    The address is never logged: such addresses often are secrets.

    Args:
        url: http or https.
        timeout: seconds for one message.
        depth: messages that may wait; beyond it the oldest is thrown away.

    Raises:
        ValueError: the address is no http or https one.
    """

    def __init__(self, url: str, timeout: float = 2.0, depth: int = 64) -> None:
        self._url, self._host, self.timeout = url, check_webhook(url), timeout
        self._queue: deque[bytes] = deque()
        self._depth = depth
        self._wake = threading.Condition()
        self._closing = False
        self.sent = self.failed = self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="trine-webhook", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand a message over; returns at once."""
        body = json.dumps(message).encode()
        with self._wake:
            if len(self._queue) >= self._depth:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(body)
            self._wake.notify()

    def close(self, timeout: float = 3.0) -> None:
        """Let what is waiting go, for at most ``timeout`` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                body = self._queue.popleft()
            try:
                self._post(body)
                self.sent += 1
            except Exception as error:
                # A dead or malicious receiver is no reason to end a run.
                self.failed += 1
                if self.failed == 1:
                    logger.warning("webhook to %s failed (%s); further failures are counted", self._host, _why(error))

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "trine"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            answer.read(1)


def _why(error: Exception) -> str:
    """What went wrong, without the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    reason = getattr(error, "reason", error)
    return type(reason).__name__
