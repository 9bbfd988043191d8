"""Messages of the balancing service: bytes on a local connection, checked before they are believed, never unpickled.

A message is an envelope (magic, protocol version, CRC-32, length) and a safetensors body: a JSON header and raw
little-endian arrays. Connections are those of ``multiprocessing.connection``, of which only ``send_bytes`` and
``recv_bytes`` are used (``send`` and ``recv`` pickle), after its mutual challenge with a shared key.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

PROTOCOL = 1
"""Version of the messages. Another one is refused: both ends come from the same installation."""
MAX_BYTES = 1 << 31
"""Largest message read; K3's 92 layers of 896 experts at 1000 bins are 330 MB."""
KEY_VARIABLE = "TRINE_BALANCE_KEY"
_MAGIC = b"TRNB"
_ENVELOPE = struct.Struct("<4sHxxIQ")
_MAX_HEADER = 1 << 20
_MIN_KEY = 16
_FROM_FILE = f'{KEY_VARIABLE}="$(cat FILE)"'
_MAX_PATH = 100  # the kernel takes 107 bytes for a socket's path
_LOOPBACK = ("127.0.0.1", "localhost")

Value = int | float | str | bool | None
Address = str | tuple[str, int]


class ServiceError(RuntimeError):
    """The balancing service did not do its part: not there, refused the key, silent, gone, or wrong in what it said."""

    exit_code = 1


class ProtocolError(ServiceError):
    """A message that is damaged, too large, of another version, or not what was expected."""


@dataclass(frozen=True)
class Message:
    """One message: what it is, small values, and arrays (CPU tensors)."""

    kind: str
    fields: Mapping[str, Value] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def integer(self, name: str) -> int:
        """A whole number of at least 0.

        Raises:
            ProtocolError: missing, or something else.
        """
        value = self.fields.get(name)
        if type(value) is not int or value < 0:
            raise ProtocolError(f"message {self.kind!r}: {name}: found {value!r}, need a whole number of at least 0")
        return value

    def text(self, name: str) -> str:
        """A text.

        Raises:
            ProtocolError: missing, or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise ProtocolError(f"message {self.kind!r}: {name}: found {value!r}, need a text")
        return value

    def tensor(self, name: str) -> Tensor:
        """An array.

        Raises:
            ProtocolError: missing.
        """
        if name not in self.tensors:
            raise ProtocolError(f"message {self.kind!r}: found arrays {sorted(self.tensors)}, need {name!r}")
        return self.tensors[name]


def encode(message: Message, protocol: int = PROTOCOL) -> bytes:
    """The bytes of a message; ``protocol`` is for tests."""
    metadata = {"kind": message.kind, "fields": json.dumps(dict(message.fields), allow_nan=False)}
    body = safetensors.torch.save({name: one.contiguous() for name, one in message.tensors.items()}, metadata)
    return _ENVELOPE.pack(_MAGIC, protocol, zlib.crc32(body), len(body)) + body


def decode(data: bytes) -> Message:
    """Read what `encode` wrote. Nothing is believed before version, length and checksum are right.

    Raises:
        ProtocolError: what is wrong with it.
    """
    if len(data) < _ENVELOPE.size or data[:4] != _MAGIC:
        raise ProtocolError(f"message: found {len(data)} bytes that begin {data[:4]!r}, need an envelope {_MAGIC!r}")
    _, protocol, checksum, length = _ENVELOPE.unpack_from(data)
    if protocol != PROTOCOL:
        raise ProtocolError(f"message: found protocol version {protocol}, need {PROTOCOL}: update the older end")
    body = data[_ENVELOPE.size :]
    if len(body) != length:
        raise ProtocolError(f"message: found {len(body)} bytes, need {length}: it was cut off or added to")
    if zlib.crc32(body) != checksum:
        raise ProtocolError("message: found another checksum than it was sent with: it is damaged")
    try:
        size = int.from_bytes(body[:8], "little")
        if size > _MAX_HEADER:
            raise ProtocolError(f"message: found a header of {size} bytes, need at most {_MAX_HEADER}")
        metadata = json.loads(body[8 : 8 + size])["__metadata__"]
        fields = json.loads(metadata["fields"])
        if not isinstance(fields, dict):
            raise ProtocolError(f"message: found fields of type {type(fields).__name__}, need a table")
        return Message(metadata["kind"], fields, safetensors.torch.load(body))
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"message: cannot be read ({error})") from error


def send(connection: Connection, message: Message) -> None:
    """Send one message.

    Raises:
        OSError: the other end is gone.
    """
    connection.send_bytes(encode(message))


def receive(connection: Connection, max_bytes: int = MAX_BYTES) -> Message:
    """Wait for one message.

    Raises:
        ProtocolError: it is bad, or larger than ``max_bytes`` (nothing can be read any more then).
        EOFError, OSError: the other end is gone.
    """
    try:
        data = connection.recv_bytes(max_bytes)
    except OSError as error:
        if not connection.readable:  # only a bad length ends it
            raise ProtocolError(f"message: found one of more than {max_bytes} bytes, need at most so many") from error
        raise
    return decode(data)


def parse_address(text: str) -> Address:
    """``unix:PATH`` or a path with a slash: a socket in the file system; ``127.0.0.1:PORT``: a port of this machine.

    Raises:
        ValueError: neither, a path that is too long for a socket, or an address of another machine.
    """
    path = text.removeprefix("unix:")
    if path != text or "/" in text:
        if not path or len(os.fsencode(path)) > _MAX_PATH:
            raise ValueError(f"address: found a path of {len(os.fsencode(path))} bytes, need 1 to {_MAX_PATH}")
        return path
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address: found {text!r}, need unix:PATH or 127.0.0.1:PORT")
    if host not in _LOOPBACK:
        raise ValueError(f"address: found host {host!r}, need 127.0.0.1: the service is for this machine only")
    return "127.0.0.1", int(port)


def address_text(address: Address) -> str:
    """What `parse_address` reads back."""
    return f"unix:{address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def read_key(file: str | Path | None = None) -> bytes:
    """The shared key: the bytes of a file that nobody else can read, or the text of `KEY_VARIABLE`.

    White space around it is no part of it. Messages never quote what the variable holds.

    Raises:
        ValueError: no key, one shorter than 16 bytes, a file that others may read, or a file's name in the variable.
    """
    if file is None or not str(file):
        text, where = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
        if not text:
            raise ValueError(f"key: found none, need a file of at least {_MIN_KEY} bytes or {KEY_VARIABLE}")
        if _is_file(text):
            raise ValueError(f"key: {where}: found the name of a file, need the key in it: {_FROM_FILE}")
        key, hint = os.fsencode(text), f" (the key itself, not the name of its file: {_FROM_FILE})"
    else:
        where, hint = str(file), ""
        try:
            mode = Path(file).stat().st_mode
            key = Path(file).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"key: {where}: cannot be read ({error.strerror})") from error
        if stat.S_IMODE(mode) & 0o077:
            raise ValueError(f"key: {where}: found mode {stat.S_IMODE(mode):o}, need 600: others can read it")
    if len(key) < _MIN_KEY:
        raise ValueError(f"key: {where}: found {len(key)} bytes, need at least {_MIN_KEY}{hint}")
    return key


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # too long for a name, or a home that is not known
        return False


@contextmanager
def deadline(connection: Connection, seconds: float, what: str) -> Iterator[None]:
    """Shut the connection down after so many seconds, which ends every read and write on it, also blocked ones.

    Raises:
        ServiceError: the time was up.
    """
    expired = threading.Event()
    # a descriptor of its own: the connection may be closed, and its number given to another file, before the time is up
    twin = socket.socket(fileno=os.dup(connection.fileno()))

    def expire() -> None:
        expired.set()
        try:
            twin.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (EOFError, OSError, ProtocolError, AuthenticationError) as error:
        if expired.is_set():
            raise ServiceError(f"service: {what}: no answer within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
        timer.join()
        twin.close()


def hang_up(connection: Connection) -> None:
    """Close, and wake whoever reads or writes on the connection in another thread."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


def connect(address: Address, key: bytes, seconds: float) -> Connection:
    """Connect, prove the key to each other, and agree on the version.

    Raises:
        ServiceError: nobody listens there, the key is another one, or no answer in time.
        ProtocolError: the service speaks another version.
    """
    where = address_text(address)
    try:
        connection: Connection = Client(address)
    except OSError as error:
        raise ServiceError(f"service: {where}: nobody listens ({error.strerror or error})") from error
    try:
        with deadline(connection, seconds, f"{where}: greeting"):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            send(connection, Message("hello"))
            expect(receive(connection, _MAX_HEADER), "hello")
    except (AuthenticationError, AssertionError) as error:  # Python 3.11 asserts what the peer's challenge looks like
        connection.close()
        raise ServiceError(f"service: {where}: the key is not the service's") from error
    except (EOFError, OSError) as error:
        connection.close()
        raise ServiceError(f"service: {where}: it hung up while greeting") from error
    except ServiceError:
        connection.close()
        raise
    return connection


def expect(message: Message, kind: str) -> Message:
    """The message, if it is of this kind.

    Raises:
        ServiceError: the service reports an error.
        ProtocolError: another kind.
    """
    if message.kind == "error":
        raise ServiceError(f"service: {message.text('error')}")
    if message.kind != kind:
        raise ProtocolError(f"message: found kind {message.kind!r}, need {kind!r}")
    return message


def greet(connection: Connection, key: bytes) -> None:
    """The service's side of `connect`.

    Raises:
        AuthenticationError, ProtocolError, EOFError, OSError: whoever connected is refused.
    """
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    try:
        expect(receive(connection, _MAX_HEADER), "hello")
    except ProtocolError as error:
        send(connection, Message("error", {"error": str(error)}))
        raise
    send(connection, Message("hello"))
