"""Ports for what tests start."""

import socket


def free_port() -> int:
    """Of the loopback interface. Nobody holds it: another process could take it first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
