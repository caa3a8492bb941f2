"""Served report: the page of a run while it trains, on this machine alone, behind an address that nobody can guess.

The server listens on the loopback interface, answers addresses with its random token only, and no other host's name
(a page of somebody else's could have its own name point here: DNS rebinding). It reads files again where they changed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from polylane.commands.logs.file_names import (
    GOODPUT,
    METRICS,
    MODEL,
    PLAN,
    PREDICTED,
    TIMELINE,
    TIMELINES,
    WHY,
    find_folder,
)
from polylane.commands.reporting.report_page import build_page, collect_data, dump
from polylane.commands.reporting.run_files import is_claimed
from polylane.errors import PolylaneError

LOOPBACK = "127.0.0.1"
FILES = (METRICS, GOODPUT, PREDICTED, MODEL, WHY, TIMELINES, TIMELINE, PLAN)


class ReportServer(ThreadingHTTPServer):
    """Serves the page of some runs, and what is new of them.

    Args:
        folders: of one run, or of two.
        port: to listen on; 0: any that is free.

    Attributes:
        url: address of the page, with the token.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.page = build_page(folders, is_live=True).encode()
        self._folders, self._lock = folders, Lock()
        self._signature: object = None
        self._data = b""
        super().__init__((LOOPBACK, port), _ReportHandler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        self.url = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def read_data(self) -> bytes:
        """Return what the page shows now, as JSON; read again where a file has changed.

        Raises:
            PolylaneError: there is no run any more.
        """
        with self._lock:
            claims = tuple(map(is_claimed, self._folders))  # a run that was killed changes no file
            signature = claims, tuple(map(_sign, self._list_files()))
            if signature != self._signature:
                self._data = dump(collect_data(self._folders, is_live=True)).encode()
                self._signature = signature
            return self._data

    def _list_files(self) -> list[Path]:
        folders = [folder for run in self._folders for folder in (run, find_folder(run))]
        return [folder / name for folder in folders for name in FILES]


def _sign(file: Path) -> tuple[int, int]:
    """Return what changes with a file's content: (time of the last change, size); zeros where there is none."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


class _ReportHandler(BaseHTTPRequestHandler):
    """Answers one browser."""

    server: ReportServer
    server_version, sys_version = "polylane", ""

    def do_GET(self) -> None:
        """Answer the page, or its data; nothing else is there."""
        _, token, *words = self.path.split("?", 1)[0].split("/", 2)
        name = "/".join(words)
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not is_known or self.headers.get("Host") not in self.server.hosts:
            self._answer(HTTPStatus.NOT_FOUND, b"not found", "text/plain")
        elif name == "" and words:
            self._answer(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif name == "data":
            try:
                self._answer(HTTPStatus.OK, self.server.read_data(), "application/json")
            except PolylaneError as error:  # its files may come back: the browser asks again
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(), "text/plain; charset=utf-8")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found", "text/plain")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the token stays here
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the address has the token."""
