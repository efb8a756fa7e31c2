"""Network addresses as text, and sockets for them: IPv4 and IPv6 alike.

In a URL, and before a port, an IPv6 address is written in brackets; functions that open sockets need it without.
"""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

from furlong.errors import EngineError


def host_and_port(host: str, port: int) -> str:
    """Join a host and a port.

    >>> host_and_port("10.0.0.7", 80), host_and_port("fd00::7", 80)
    ('10.0.0.7:80', '[fd00::7]:80')
    """
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """Return a host as it is written in a URL: an IPv6 address in brackets.

    >>> bracketed("::1"), bracketed("[::1]"), bracketed("node-3")
    ('[::1]', '[::1]', 'node-3')
    """
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def split_port(address: str) -> tuple[str, str]:
    """Split HOST:PORT; the host is without brackets. Without a port, the host is "".

    >>> split_port("[::1]:6379"), split_port("head:6379"), split_port("auto")
    (('::1', '6379'), ('head', '6379'), ('', 'auto'))
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


def socket_for(host: str, port: int = 0, kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, Any]:
    """Create a socket of the address family of `host`, and return it with the address to bind or connect to.

    A host name has the family of its first address. Raises OSError if it is unknown.
    """
    host = host.removeprefix("[").removesuffix("]")
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=kind)[0]
    return socket.socket(family, kind, protocol), address


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 chooses a free one. Raises EngineError if the address cannot be bound."""
    listener: socket.socket | None = None
    try:
        # asyncio sets TCP_NODELAY only if the protocol is explicit, as it is here; otherwise replies wait for an ACK.
        listener, address = socket_for(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise EngineError(
            f"cannot listen on {host_and_port(host, port)}: {error}; choose another port (--port, in a run "
            "--session-server-port), or 0 for a free one"
        ) from error
    return listener
