"""The page as one file, or over HTTP on this machine only."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybridpar.errors import config_error
from hybridpar.reading import to_json
from hybridpar.watch.board import SERVED, Board

_AT_A_TIME = 4 << 20
"""Bytes of metrics that one answer reads: a long run appears bit by bit."""
_NO_DATA = "/*DATA*/null"
_POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; "
    "connect-src 'self'"
)
_PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""Policy that keeps scripts in a run folder's picture from running."""


def page(board: Board | None = None) -> str:
    """Return the page: with all of a board's data inside; or, for None, one that asks its server
    for /data.json."""
    html = Path(__file__).with_name("page.html").read_text()
    if board is None:
        return html
    data = board.look()
    for key in ("picture", "loads"):
        if not data[key]:
            continue
        try:
            picture = base64.b64encode(board.picture(data[key])).decode()
            data[key] = f"data:image/svg+xml;base64,{picture}"
        except (OSError, ValueError):  # it was replaced in the meantime
            data[key] = ""
    return html.replace(_NO_DATA, to_json(data, separators=(",", ":")).replace("<", "\\u003c"))


def serve(board: Board, port: int = 0, ready: Callable[[str], None] = print) -> None:
    """Serve the page on 127.0.0.1 until interrupted; `ready` is called with its address.

    Args:
        port: Port to listen on; 0 for a free one.

    Raises:
        ConfigError: The port is taken.
    """
    with server(board, port) as listening:
        ready(f"http://127.0.0.1:{listening.server_port}/")
        listening.serve_forever()


def server(board: Board, port: int = 0) -> ThreadingHTTPServer:
    """Return a server that listens but does not run yet.

    Raises:
        ConfigError: The port is taken.
    """
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, board))
    except OSError as error:
        raise config_error("port", port, f"not available ({error.strerror})", "0") from None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its data and its pictures; everything else is not found."""

    def __init__(self, board: Board, *args: Any):
        self._board = board
        super().__init__(*args)

    def do_GET(self) -> None:
        try:
            self._answer(self.path.partition("?")[0].lstrip("/"))
        except ConnectionError:  # the page was closed in the meantime
            self.close_connection = True
        except Exception as error:  # the browser gets an answer whatever the folder contains
            print(f"hybridpar watch: {type(error).__name__}: {error}", file=sys.stderr)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _answer(self, name: str) -> None:
        """Answer a path without its query. Errors of reading the folder pass through."""
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(
                HTTPStatus.FORBIDDEN
            )  # another host name: a page of another site in this browser (DNS rebinding)
        elif name == "":
            self._send("text/html; charset=utf-8", page().encode())
        elif name == "data.json":
            self._send(
                "application/json",
                to_json(self._board.look(_AT_A_TIME), separators=(",", ":")).encode(),
            )
        elif name in SERVED:
            try:
                picture = self._board.picture(name)
            except (OSError, ValueError):
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send("image/svg+xml", picture, _PICTURE_POLICY)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes, policy: str = _POLICY) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": policy,
        }
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""
