"""Where the processes of a job find each other: a key-value store over HTTP, for this job alone.

Horovod's own server listens on all interfaces and takes what anyone puts there (CVE-2024-10190).
This one listens on the interface towards the hosts and answers only those who know the job's
secret, which is part of the path. Gloo asks for "http://" + address + ":" + port + "/" + key: so
the address that ranks are given is "host:port/secret/", and what follows only lengthens the path.

What remains: who can read the network between the hosts can read the secret, and the connections
that Gloo and NCCL then make between ranks have no authentication. Use a network of your own.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_BYTES = 1 << 20  # of a value: addresses of ranks
MOST_KEYS = 1 << 20


class Rendezvous:
    """The store, from here until `close`.

    Args:
        addresses: of this host, on which to listen; one port, the same for all.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.store: dict[str, bytes] = {}
        self.refused: set[str] = set()
        self._servers: list[_Server] = []
        try:
            for address in addresses:
                port = self._servers[0].server_port if self._servers else 0
                server = _Server((address, port), self)
                self._servers.append(server)
                threading.Thread(target=server.serve_forever, args=[0.1], daemon=True).start()
        except OSError:
            self.close()
            raise

    @property
    def port(self) -> int:
        return self._servers[0].server_port

    def environment(self, address: str) -> dict[str, str]:
        """What tells ranks that reach this host by `address` where the store is."""
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{self.port}/{self.secret}/",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
        }

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, place: tuple[str, int], rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        super().__init__(place, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A rank that went away in the middle is told of by who started it."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 30

    def do_GET(self) -> None:
        if (key := self._key()) is not None:
            value = self.server.rendezvous.store.get(key)
            self._answer(200 if value is not None else 404, value or b"")

    def do_PUT(self) -> None:
        if (key := self._key()) is not None:
            size = self.headers.get("Content-Length", "")
            store = self.server.rendezvous.store
            if not size.isdecimal() or int(size) > MOST_BYTES or len(store) > MOST_KEYS:
                self.close_connection = True
                self._answer(413)
                return
            store[key] = self.rfile.read(int(size))
            self._answer(200)

    def do_DELETE(self) -> None:
        # Horovod's ranks say so when they end; others may still be reading.
        if self._key() is not None:
            self._answer(200)

    def _key(self) -> str | None:
        """What is asked for; None, and the asker refused, without the secret."""
        rendezvous = self.server.rendezvous
        secret, _, key = self.path.removeprefix("/").partition("/")
        if hmac.compare_digest(secret.encode(), rendezvous.secret.encode()):
            return key.partition("/")[2]  # after ":port"
        asker = self.client_address[0]
        if asker not in rendezvous.refused:
            rendezvous.refused.add(asker)
            print(f"refused a request of {asker}: not of this job", file=sys.stderr, flush=True)
        self.close_connection = True
        self._answer(403)
        return None

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not a line a request."""


def own_address(towards: str) -> str:
    """The address of this host by which packets to `towards` leave."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # UDP: looks up the route, sends nothing
        return str(probe.getsockname()[0])
