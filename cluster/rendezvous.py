"""Where the processes of a job find each other: a key-value store over HTTP, for this job alone.

Horovod's own server listens on all interfaces and accepts what anyone puts there (CVE-2024-10190).
This one listens only on the interfaces towards the hosts, and answers only those who know the job's
secret, which is part of the path. Gloo requests "http://" + address + ":" + port + "/" + key: ranks
are given "host:port/secret/" as the address, and what Gloo appends only lengthens the path.

Each of p ranks puts p - 1 addresses here, one for each other rank, and then asks for what every
other one has put, each time over a new connection: p^2 requests with p^3 addresses. Our Horovod
(cluster/patches.py) asks whether this server picks addresses ("picks"), and then for those that it
needs ("to_3_of_8"): p requests with p^2 addresses. One thread answers all, in 0.1 ms each
(http.server's threads: 0.5 ms), and a request for what is not there yet waits here (else Gloo would
ask 100 times a second).

What remains unsafe: anyone who can read the network between the hosts can read the secret, and the
connections that Gloo and NCCL then make between ranks have no authentication. Use a network of your
own.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import sys
import threading
from http import HTTPStatus

MOST_BYTES = 1 << 20  # of a value: addresses of ranks
MOST_KEYS = 1 << 20
MOST_HEAD = 1 << 14  # bytes of a request, without the value
WAIT_SECONDS = 1.0  # that a request waits for a value; then Gloo asks again, or gives up
QUIET_SECONDS = 30.0  # in which a connection must have sent its request
PICKED = re.compile(r"(.*/)to_(\d+)_of_(\d+)")
LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)


class Rendezvous:
    """The store, which answers from now until `close`.

    Args:
        addresses: of this host, on which to listen; one port, the same for all.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.port = 0
        self.store: dict[str, bytes] = {}
        self.seen: set[str] = set()  # all keys that were put
        self.waiting: dict[str, set[_Connection]] = {}  # by key
        self.connected: set[asyncio.Transport] = set()
        self.refused: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        for address in addresses:
            server = self.loop.create_server(
                lambda: _Connection(self), address, self.port, backlog=1024
            )  # a long backlog, as all ranks come at once
            self._servers.append(self.loop.run_until_complete(server))
            self.port = self._servers[0].sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def environment(self, address: str) -> dict[str, str]:
        """The variables that tell ranks where the store is; they reach this host by `address`."""
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{self.port}/{self.secret}/",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
        }

    def addresses(self, scope: str, rank: int, size: int) -> list[bytes]:
        """Where all others, in order, expect a rank: each has put an address for each other."""
        picked = []
        for other in range(size):
            if other != rank:
                theirs = self.store[f"{scope}{other}"]
                length = len(theirs) // (size - 1)
                place = rank if rank < other else rank - 1
                picked.append(theirs[place * length : (place + 1) * length])
        return picked

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        for server in self._servers:
            server.close()
        self.loop.run_until_complete(asyncio.sleep(0.01))  # connections that were being accepted
        for transport in self.connected:
            transport.abort()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


class _Connection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._received = b""
        self._key = self._awaited = ""
        self._found = 0  # ranks, in their order, whose addresses are there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._rendezvous.connected.add(transport)
        self._limit = self._rendezvous.loop.call_later(QUIET_SECONDS, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._rendezvous.connected.discard(self._transport)
        self._rendezvous.waiting.get(self._awaited, set()).discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, ended, value = self._received.partition(b"\r\n\r\n")
        if not ended:
            if len(head) > MOST_HEAD:
                self.answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        method, _, rest = head.partition(b" ")
        secret, _, key = rest.partition(b" ")[0].removeprefix(b"/").partition(b"/")
        if not hmac.compare_digest(secret, self._rendezvous.secret.encode()):
            self._refuse()
            return
        self._key = key.partition(b"/")[2].decode("latin-1")  # after ":port"
        if method == b"GET":
            self._get()
        elif method == b"PUT":
            length = LENGTH.search(head)
            self._put(value, int(length[1]) if length else MOST_BYTES + 1)
        else:
            # DELETE, which a rank sends once it is connected to all others, as they are: without it
            # hvd.init() after hvd.shutdown() would find addresses of before.
            self._rendezvous.store.pop(self._key, None)
            self.answer(HTTPStatus.OK)

    def _get(self) -> None:
        """Called again when what it waited for has come."""
        rendezvous = self._rendezvous
        if self._key.endswith("/picks"):
            self.answer(HTTPStatus.OK, b"yes")
        elif (picked := PICKED.fullmatch(self._key)) and int(picked[2]) < int(picked[3]):
            scope, rank, size = picked[1], int(picked[2]), int(picked[3])
            while self._found < size and f"{scope}{self._found}" in rendezvous.store:
                self._found += 1
            if self._found < size:
                self._wait(f"{scope}{self._found}")
            else:
                self.answer(HTTPStatus.OK, b"".join(rendezvous.addresses(scope, rank, size)))
        elif (value := rendezvous.store.get(self._key)) is not None:
            self.answer(HTTPStatus.OK, value)
        else:
            self._wait(self._key)

    def _wait(self, key: str) -> None:
        if not self._awaited:
            self._limit.cancel()
            not_there = HTTPStatus.NOT_FOUND
            self._limit = self._rendezvous.loop.call_later(WAIT_SECONDS, self.answer, not_there)
        self._awaited = key
        self._rendezvous.waiting.setdefault(key, set()).add(self)

    def _put(self, value: bytes, length: int) -> None:
        """Called with all that has come so far, until the value is complete."""
        rendezvous = self._rendezvous
        if length > MOST_BYTES or len(rendezvous.store) > MOST_KEYS:
            self.answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif len(value) >= length:
            rendezvous.store[self._key] = value[:length]
            rendezvous.seen.add(self._key)
            self.answer(HTTPStatus.OK)
            for connection in rendezvous.waiting.pop(self._key, ()):
                connection._get()

    def _refuse(self) -> None:
        asker = self._transport.get_extra_info("peername")[0]
        if asker not in self._rendezvous.refused:
            self._rendezvous.refused.add(asker)
            message = f"refused a request from {asker}, which is not part of this job\n"
            # Not in this thread, for which all ranks wait: the terminal may be stopped.
            threading.Thread(target=sys.stderr.write, args=[message], daemon=True).start()
        self.answer(HTTPStatus.FORBIDDEN)

    def answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        if not self._transport.is_closing():
            head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Length: {len(value)}\r\n"
            self._transport.write(head.encode() + b"\r\n" + value)
            self._transport.close()
