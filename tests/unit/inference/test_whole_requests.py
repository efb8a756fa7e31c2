"""Requests that arrive in one packet are read as h11 reads them, and everything else is left to h11."""

from __future__ import annotations

import asyncio

import h11
import orjson
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from furlong.inference.server.bodies import has_left, read_object
from furlong.inference.server.limits import Counts, LimitRequests, ServerLimits
from furlong.inference.server.listener import LoopServer, listening_socket
from furlong.inference.server.whole_requests import WholeRequest

PLAIN = (
    b"POST /v1/chat?a=%20b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nX-Odd:  y z \r\nConnection: Keep-Alive\r\n\r\n{}"
)
GET = b"GET /health HTTP/1.1\r\nhost:x\r\n\r\n"


@pytest.mark.parametrize("data", [PLAIN, GET])
def test_a_plain_request_is_read_as_h11_reads_it(data):
    whole = WholeRequest.parse(data)
    assert whole is not None
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    request = connection.next_event()
    assert (whole.method.encode(), whole.target, whole.headers) == (
        request.method, request.target, list(request.headers),
    )  # fmt: skip
    body = connection.next_event()
    assert whole.body == (bytes(body.data) if isinstance(body, h11.Data) else b"")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"POST", b"PUT"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"/v1/chat", b"http://x/v1"),
        (b"/v1/chat", b"/v1 chat"),
        (b"Host: x\r\n", b""),
        (b"Host: x", b"Host: x\r\nHost: y"),
        (b"Length: 2", b"Length: 3"),
        (b"Length: 2", b"Length: 1"),
        (b"Length: 2", b"Length: +2"),
        (b"Length: 2", b"Length: 2\r\nContent-Length: 2"),
        (b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        (b"X-Odd: ", b"Transfer-Encoding: chunked\r\nX-Odd: "),
        (b"X-Odd: ", b"Expect: 100-continue\r\nX-Odd: "),
        (b"X-Odd: ", b"Upgrade: websocket\r\nX-Odd: "),
        (b"Keep-Alive", b"close"),
        (b"X-Odd: ", b"X Odd: "),
        (b"X-Odd: ", b" X-Odd: "),
        (b"y z", b"y\x00z"),
        (b"y z", b"y\rz"),
        (b"y z", b"y\xffz"),
        (b"\r\n\r\n", b"\r\n"),
        (b"{}", b"{}" + GET),
    ],
)
def test_anything_else_is_left_to_h11(old, new):
    assert old in PLAIN
    assert WholeRequest.parse(PLAIN.replace(old, new, 1)) is None


async def _app(scope, receive, send):
    """Answer with the body, as events if it asks for a stream."""
    http = Request(scope, receive, send)
    body = await read_object(http)
    await asyncio.sleep(body.get("wait", 0))

    async def events():
        for part in (b"a", b"", b"bc"):
            yield part

    response = StreamingResponse(events()) if "stream" in body else JSONResponse({**body, "left": await has_left(http)})
    await response(scope, receive, send)


def post(**body) -> bytes:
    raw = orjson.dumps(body)
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the body of one reply."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200 ok\r\n")
    if b"transfer-encoding: chunked" not in head:
        return await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


def exchange(*packets: bytes, replies: int) -> list[bytes]:
    """Send packets, a moment apart, over one connection, and return the bodies of the replies."""

    async def main() -> list[bytes]:
        counts = Counts(ServerLimits())
        listener = listening_socket("127.0.0.1", 0)
        server = LoopServer(LimitRequests(_app, counts, None), listener, counts)
        await server.start()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        for packet in packets:
            writer.write(packet)
            await asyncio.sleep(0.02)
        bodies = [await asyncio.wait_for(_read(reader), 10) for _ in range(replies)]
        writer.close()
        await server.close()
        return bodies

    return asyncio.run(main())


@pytest.mark.slow
def test_requests_of_a_connection_are_answered_in_order_however_they_arrive():
    first, second, third, fourth = (post(n=n, wait=0.05) for n in range(4))
    bodies = exchange(first, second + third[:9], third[9:], fourth, replies=4)
    assert [orjson.loads(body) for body in bodies] == [{"n": n, "wait": 0.05, "left": False} for n in range(4)]


@pytest.mark.slow
def test_a_stream_is_sent_in_chunks_and_the_next_request_is_answered():
    assert exchange(post(stream=1), post(n=1), replies=2) == [b"abc", b'{"n":1,"left":false}']
