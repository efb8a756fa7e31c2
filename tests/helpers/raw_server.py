"""A server on a raw socket that answers each request with given bytes, whether they are HTTP or not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

Answer = bytes | Callable[[], Iterable[bytes]]  # in one piece, or piece by piece until the client is gone


def http(body: bytes, *, status: str = "200 OK", head: str = "", length: int | None = None) -> bytes:
    """Return an HTTP/1.1 answer; `length` overrides that of the body."""
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{head}\r\n".encode() + body


def chunks(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return an answer in chunks."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + end


class RawServer:
    """Answers the n-th request with the n-th of `answers`, later ones with the last; closes after one if `closes`."""

    def __init__(self, *answers: Answer, closes: bool = True) -> None:
        self._answers, self._closes = list(answers), closes
        self.requests: list[bytes] = []
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection:
            while request := _read_request(connection):
                self.requests.append(request)
                answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
                for piece in [answer] if isinstance(answer, bytes) else answer():
                    connection.sendall(piece)
                if self._closes:
                    return

    def close(self) -> None:
        """Close all sockets."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread that waits in `accept` does not notice `close`
        self._accepting.join()
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _read_request(connection: socket.socket) -> bytes:
    """Return a request without its head; b"" for an end of the connection, and b"-" for an empty body."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (data := connection.recv(1 << 16)):
            return b""
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields.get(b"content-length", b"0")):
        if not (data := connection.recv(1 << 16)):
            return b""
        body += data
    return body or b"-"


def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Callable[[], Iterator[bytes]]:
    """Return an answer that never ends."""

    def pieces() -> Iterator[bytes]:
        yield head
        while True:
            time.sleep(pause_s)
            yield piece

    return pieces


@contextlib.contextmanager
def raw_server(*answers: Answer, closes: bool = True) -> Iterator[RawServer]:
    """Run a server with these answers."""
    server = RawServer(*answers, closes=closes)
    try:
        yield server
    finally:
        server.close()
