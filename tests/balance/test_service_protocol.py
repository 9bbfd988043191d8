"""Messages of the balancing service: what arrives intact is read back, and everything else is refused by name."""

from __future__ import annotations

import socket
import struct
import threading
import time
import zlib
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
import torch

from trine.balance import service_protocol as protocol
from trine.balance.service_protocol import Message, ProtocolError, ServiceError, decode, encode

MESSAGE = Message(
    "solve",
    {"version": 7, "stats": '{"estimator": "report"}', "ratio": 0.5, "note": "ü"},
    {
        "counts": torch.arange(12, dtype=torch.int32).view(3, 4),
        "bias": torch.tensor([0.1, -0.1]),
        "none": torch.empty(0),
    },
)


def test_round_trip() -> None:
    found = decode(encode(MESSAGE))
    assert found.kind == "solve" and dict(found.fields) == dict(MESSAGE.fields)
    assert set(found.tensors) == {"counts", "bias", "none"}
    for name, tensor in MESSAGE.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)
    assert found.integer("version") == 7 and found.text("note") == "ü"
    empty = decode(encode(Message("hello")))
    assert (empty.kind, dict(empty.fields), dict(empty.tensors)) == ("hello", {}, {})


def _body(data: bytes) -> bytes:
    return struct.pack("<4sHxxIQ", b"TRNB", 1, zlib.crc32(data), len(data)) + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "message: found 0 bytes that begin b'', need an envelope b'TRNB'"),
        (b"GET / HTTP/1.1\r\n\r\n", "message: found 18 bytes that begin b'GET ', need an envelope b'TRNB'"),
        (encode(MESSAGE, protocol=2), "message: found protocol version 2, need 1: update the older end"),
        (encode(MESSAGE)[:-1], "it was cut off or added to"),
        (encode(MESSAGE) + b"x", "it was cut off or added to"),
        (_body(b""), "message: cannot be read"),
        (_body(b"\xff" * 8 + b"{}"), "message: found a header of 18446744073709551615 bytes, need at most 1048576"),
        (_body(struct.pack("<Q", 2) + b"{}"), "message: cannot be read ('__metadata__')"),
        (_body(struct.pack("<Q", 2) + b"[["), "message: cannot be read"),
        (_body(struct.pack("<Q", 100_000) + b"[" * 100_000), "message: cannot be read"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError) as error:
        decode(data)
    assert message in str(error.value)


def test_every_flipped_byte_is_seen() -> None:
    data = encode(MESSAGE)
    for place in [*range(20), *range(20, len(data), 13), len(data) - 1]:
        if place in (6, 7):  # padding of the envelope
            continue
        with pytest.raises(ProtocolError):
            decode(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])


def test_fields_are_checked() -> None:
    for name, value in (("version", -1), ("version", True), ("version", 1.0), ("other", None)):
        with pytest.raises(ProtocolError, match=f"message 'x': {name if name == 'version' else 'version'}: found"):
            Message("x", {name: value}).integer("version")
    with pytest.raises(ProtocolError, match="need a text"):
        Message("x", {"a": 1}).text("a")
    with pytest.raises(ProtocolError, match=r"found arrays \['b'\], need 'a'"):
        Message("x", {}, {"b": torch.zeros(1)}).tensor("a")
    with pytest.raises(ServiceError, match="service: out of order"):
        protocol.expect(Message("error", {"error": "out of order"}), "solved")
    with pytest.raises(ProtocolError, match="found kind 'hello', need 'solved'"):
        protocol.expect(Message("hello"), "solved")


def test_too_large_is_not_read() -> None:
    here, there = Pipe()
    thread = threading.Thread(target=_quietly_send, args=(there, encode(MESSAGE)))
    thread.start()
    with pytest.raises(ProtocolError, match="message: found one of more than 64 bytes, need at most so many"):
        protocol.receive(here, max_bytes=64)
    there.close()
    thread.join()


def _quietly_send(connection: Connection, data: bytes) -> None:
    try:
        connection.send_bytes(data)
    except OSError:
        return


@pytest.mark.parametrize("direction", ["read", "write"])
def test_deadline_ends_a_blocked_call(direction: str) -> None:
    here, there = Pipe()
    began = time.monotonic()
    silent = pytest.raises(ServiceError, match=r"service: solving: no answer within 0\.1 s")
    with silent, protocol.deadline(here, 0.1, "solving"):
        here.recv_bytes() if direction == "read" else here.send_bytes(bytes(1 << 24))
    assert time.monotonic() - began >= 0.1
    here.close(), there.close()
    with pytest.raises(ValueError), protocol.deadline(Pipe()[0], 5, "x"):
        raise ValueError("other errors pass")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/tmp/a", "/tmp/a"),
        ("./a", "./a"),
        ("unix:a", "a"),
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("localhost:0", ("127.0.0.1", 0)),
    ],
)
def test_addresses(text: str, address: object) -> None:
    assert protocol.parse_address(text) == address
    assert protocol.parse_address(protocol.address_text(protocol.parse_address(text))) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.0.0.0:80", "host '0.0.0.0', need 127.0.0.1: the service is for this machine only"),
        ("example.org:80", "need 127.0.0.1"),
        ("127.0.0.1:70000", "need unix:PATH or 127.0.0.1:PORT"),
        ("thread", "address: found 'thread', need unix:PATH or 127.0.0.1:PORT"),
        ("unix:", "address: found a path of 0 bytes, need 1 to 100"),
        ("/" + "x" * 100, "address: found a path of 101 bytes, need 1 to 100"),
    ],
)
def test_bad_addresses(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        protocol.parse_address(text)
    assert message in str(error.value)


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINE_BALANCE_KEY", raising=False)
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    assert protocol.read_key(file) == b"0123456789abcdef"
    file.chmod(0o640)
    with pytest.raises(ValueError, match="found mode 640, need 600: others can read it"):
        protocol.read_key(file)
    with pytest.raises(ValueError, match="key: found none, need a file of at least 16 bytes or TRINE_BALANCE_KEY"):
        protocol.read_key()
    with pytest.raises(ValueError, match="cannot be read"):
        protocol.read_key(tmp_path / "absent")
    monkeypatch.setenv("TRINE_BALANCE_KEY", "short")
    with pytest.raises(ValueError) as error:
        protocol.read_key()
    assert str(error.value) == (
        "key: TRINE_BALANCE_KEY: found 5 bytes, need at least 16 (the key itself, not the name of its file: "
        'TRINE_BALANCE_KEY="$(cat FILE)")'
    )
    monkeypatch.setenv("TRINE_BALANCE_KEY", "x" * 16)
    assert protocol.read_key() == b"x" * 16


def test_connecting_to_what_is_no_service(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with pytest.raises(ServiceError, match="nobody listens"):
        protocol.connect(path, b"k" * 16, 1.0)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(path)
        deaf.listen()
        with pytest.raises(ServiceError, match=r"greeting: no answer within 0\.1 s"):
            protocol.connect(path, b"k" * 16, 0.1)


def test_a_name_of_a_file_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of 16 bytes and more, which would work as a key that everybody can guess."""
    file = tmp_path / ".balance-key"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (str(file), "~/.balance-key", ".balance-key", f"{tmp_path}/./.balance-key\n"):
        monkeypatch.setenv("TRINE_BALANCE_KEY", name)
        with pytest.raises(ValueError) as error:
            protocol.read_key()
        found = "key: TRINE_BALANCE_KEY: found the name of a file, need the key in it: "
        assert str(error.value) == found + 'TRINE_BALANCE_KEY="$(cat FILE)"'
    for key in ("/" + "a" * 5000, "~nobody-of-this-name/0123456", str(tmp_path), "0123456789abcdef\n"):
        monkeypatch.setenv("TRINE_BALANCE_KEY", key)
        assert protocol.read_key() == key.strip().encode()
