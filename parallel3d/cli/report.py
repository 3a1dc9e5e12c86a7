"""`p3d report`: the page of a training, as a file or live on this host's loopback address; `p3d trace`: its traces as one."""

from __future__ import annotations

import argparse
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from parallel3d.atomic_write import atomic_write
from parallel3d.errors import ConfigError
from parallel3d.monitor.traces import MERGED, merge_traces
from parallel3d.planner.report.run import read_run, run_page

_LOOPBACK = "127.0.0.1"
_REFRESH = 5  # seconds between two loads of the live page


def run(options: argparse.Namespace) -> int:
    """Write the page, or serve it until Ctrl-C."""
    directory: Path = options.run_directory
    page = run_page(read_run(directory, options.plan), directory.resolve().name)
    if options.serve is None:
        out: Path = options.out or directory / "report.html"
        try:
            atomic_write(out, page)
        except OSError as error:
            raise ConfigError(f"{out} can't be written ({error.strerror}); give --out another file") from error
        print(f"written: {out}")
        return 0
    try:
        server = ThreadingHTTPServer((_LOOPBACK, options.serve), partial(_Live, directory, options.plan))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"can't listen on port {options.serve} ({error}); give --serve another one") from error
    print(f"http://{_LOOPBACK}:{server.server_port} shows {directory} as it is; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
    return 0


class _Live(BaseHTTPRequestHandler):
    """HTTP handler that serves the page, made from the current files."""

    def __init__(self, directory: Path, plan: Path | None, *request: Any):
        self._directory, self._plan = directory, plan
        super().__init__(*request)

    def do_GET(self) -> None:
        """Send the page; nothing for another path, or to a site that has another name for this address."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if self.path != "/" or host not in (_LOOPBACK, "localhost"):
            self.send_error(404)
            return
        try:
            page = run_page(read_run(self._directory, self._plan), self._directory.resolve().name, _REFRESH)
        except ConfigError as error:
            self.send_error(503, explain=str(error))
            return
        body = page.encode()
        self.send_response(200)
        for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Print nothing for each request."""


def trace(options: argparse.Namespace) -> int:
    """Make one trace for Perfetto of what engine.profile has recorded on all ranks, and print where it is."""
    out: Path = options.out or options.run_directory / MERGED
    ranks = merge_traces(options.run_directory, out)
    print(f"{out}: {ranks} ranks; open it at https://ui.perfetto.dev")
    return 0
