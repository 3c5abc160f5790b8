"""What a host's `rl worker` and who uses it say to each other: lines of JSON over TCP.

The worker begins with a nonce. Who connects sends a request, and a signature of both where RL_WORKER_KEY is
set. Nothing that arrives is unpickled.
"""

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from rl.errors import ConfigError, RunError
from rl.host_tls import VARIABLES, client_context

OWN_HOST = "RL_HOST"
"""In the environment of processes that a worker started: its address, host:port."""
KEY = "RL_WORKER_KEY"
LONGEST_LINE = 2**24


class HostUnreachable(RunError):
    """A host's worker does not answer, or refuses. The text names the host and the remedy."""


class HostRefuses(HostUnreachable):
    """It answers, and cannot be used."""


class HostDiffers(HostRefuses):
    """It is not the host that was planned with."""


class Refusal(Exception):
    """Of a worker: why a request is not granted, what comes after "host a:port"."""


MARK = ".hosts"
"""A file in the directory of a run on several hosts, while it runs: who reads there what the controller wrote
shares the directory."""


def own_host() -> str:
    """What this host is called: its worker's address where a worker started this process, else its name."""
    return os.environ.get(OWN_HOST) or socket.gethostname()


def parse_address(text: str) -> tuple[str, int]:
    """host:port. Raises ConfigError."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 <= int(port) < 2**16:
        raise ConfigError(f"{text!r} is no address; write host:port, as 10.0.0.1:7000")
    return host, int(port)


def written(host: str, port: int) -> str:
    """host:port, as `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, port: int = 0, backlog: int = 128) -> socket.socket:
    """On this address alone. port: 0 is a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def address_of(host: str) -> str:
    """The IP address of a name, for others to connect to. Raises ConfigError."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:  # a label that is empty, or too long
        raise ConfigError(f"{host} is not known ({error}); give its IP address") from None
    is_literal = host.replace(".", "").isdecimal() or ":" in host
    if ipaddress.ip_address(address).is_loopback and not is_literal and host != "localhost":
        raise ConfigError(f"{host} is {address}, which is each host's own; give its IP address")
    return str(address)


def own_address(address: str) -> str:
    """Of this machine, on the way to that worker."""
    host, port = parse_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, port))
        return str(way.getsockname()[0])


def greeting() -> tuple[str, bytes]:
    """A nonce, and the line with it that a worker begins with."""
    nonce = secrets.token_hex(16)
    return nonce, line({"nonce": nonce})


def line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def signed(request: Mapping[str, Any], greeting: bytes) -> bytes:
    """The line of a request, after a worker's greeting. Raises ConnectionError where none came."""
    if not greeting:
        raise ConnectionError(f"it sent no greeting: is {next(iter(VARIABLES))} set there, and not here?")
    return line({"request": request, "mac": _mac(json.loads(greeting)["nonce"], request)})


def request_of(text: bytes, nonce: str) -> dict[str, Any]:
    """What was asked. Raises ValueError where it is not a request, PermissionError without the key."""
    message = json.loads(text)
    if not isinstance(message, dict) or not isinstance(message.get("request"), dict):
        raise ValueError("no request")
    if not hmac.compare_digest(str(message.get("mac")), _mac(nonce, message["request"])):
        raise PermissionError
    return message["request"]


def _mac(nonce: str, request: Mapping[str, Any]) -> str:
    text = nonce + json.dumps(request, sort_keys=True)
    return hmac.new(os.environ.get(KEY, "").encode(), text.encode(), hashlib.sha256).hexdigest()


def ask(
    address: str,
    request: Mapping[str, Any],
    seconds: float,
    connected: Callable[[socket.socket], None] = lambda _: None,
) -> tuple[dict[str, Any], socket.socket]:
    """One request, and its answer's first line; the caller closes the socket. Raises HostUnreachable.

    connected: called with the socket before anything is asked; an OSError of its ends the request.
    """
    connection = None
    try:
        host, port = parse_address(address)
        connection = socket.create_connection((host, port), timeout=seconds)
        connected(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls := client_context():
            connection = tls.wrap_socket(connection, server_hostname=host)
            connected(connection)  # the one before is none any more
        connection.sendall(signed(request, read_line(connection)))
        answer = checked(address, read_line(connection))
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, OSError | ValueError | KeyError):
            raise HostUnreachable(unreachable(address, error)) from error
        raise
    return answer, connection


def read_line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows a line is not a line. Empty where the connection is closed."""
    text = bytearray()
    while not text.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        text += byte
    return bytes(text)


def checked(address: str, text: bytes) -> dict[str, Any]:
    """A worker's answer. Raises HostRefuses, and ConnectionError where none came."""
    if not text:
        raise ConnectionError("it closed the connection")
    answer: dict[str, Any] = json.loads(text)
    if error := answer.get("error"):
        raise HostRefuses(f"host {address} {error}")
    return answer


def unreachable(address: str, error: BaseException) -> str:
    cause = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLError):
        names = ", ".join(VARIABLES)
        return f"host {address} has no TLS with this one ({cause}); set {names} on both, for its address"
    return f"host {address} does not answer ({cause}); start there: rl worker --listen {address}"
