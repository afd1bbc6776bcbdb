"""The page as one file, and over HTTP on this machine alone."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybridpar.errors import config_error
from hybridpar.reading import read_limited, to_json
from hybridpar.watch.board import PICTURES, Board

_MAX_PICTURE = 16 << 20
_AT_A_TIME = 8 << 20
"""Bytes of metrics that one answer reads: a long run appears bit by bit."""
_NO_DATA = "/*DATA*/null"
_POLICY = ("default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
           "connect-src 'self'")


def page(board: Board | None = None) -> str:
    """The page: of a board, with all it shows inside it; None: one that asks its server for /data.json."""
    html = Path(__file__).with_name("page.html").read_text()
    if board is None:
        return html
    data = board.look()
    if data["picture"]:
        picture = base64.b64encode(read_limited(board.folder / data["picture"], _MAX_PICTURE)).decode()
        data["picture"] = f"data:image/svg+xml;base64,{picture}"
    return html.replace(_NO_DATA, to_json(data, separators=(",", ":")).replace("<", "\\u003c"))


def serve(board: Board, port: int = 0, ready: Callable[[str], None] = print) -> None:
    """Serves the page on 127.0.0.1 until it is interrupted; `ready` is told its address.

    port: 0: a free one. Raises: ConfigError where the port is taken.
    """
    with server(board, port) as listening:
        ready(f"http://127.0.0.1:{listening.server_port}/")
        listening.serve_forever()


def server(board: Board, port: int = 0) -> ThreadingHTTPServer:
    """A server that listens, and is yet to be run. Raises: ConfigError where the port is taken."""
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, board))
    except OSError as error:
        raise config_error("port", port, f"cannot be listened on ({error.strerror})", "0") from None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its data and its pictures; everything else is not there."""

    def __init__(self, board: Board, *args: Any):
        self._board = board
        super().__init__(*args)

    def do_GET(self) -> None:
        name = urlsplit(self.path).path.lstrip("/")
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)  # a name that leads here: another site's page in this browser
        elif name == "":
            self._send("text/html; charset=utf-8", page().encode())
        elif name == "data.json":
            self._send("application/json", to_json(self._board.look(_AT_A_TIME), separators=(",", ":")).encode())
        elif name in PICTURES and (self._board.folder / name).is_file():
            self._send("image/svg+xml", read_limited(self._board.folder / name, _MAX_PICTURE))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store",
                   "X-Content-Type-Options": "nosniff", "Content-Security-Policy": _POLICY}
        for header, value in headers.items():
            self.send_header(header, value)
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""
