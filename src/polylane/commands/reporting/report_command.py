"""``polylane report``: write the page of a run, or of two beside each other, or serve it while the run trains."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from polylane.commands.printing import print_line, write_text
from polylane.commands.reporting.report_page import build_page, write_report
from polylane.commands.reporting.serve_report import ReportServer
from polylane.commands.requests import ReportRequest
from polylane.errors import PolylaneError
from polylane.output import say_at_once


def run(request: ReportRequest) -> None:
    """Write or serve the page.

    Raises:
        PolylaneError: there is no run in a folder, the page cannot be written, or the port cannot be listened on.
    """
    if len(request.runs) > 2:
        raise PolylaneError(f"report takes one run, or two to compare, not {len(request.runs)}")
    if request.serve:
        serve(request)
    elif len(request.runs) == 1 and request.html is None:
        print_line(str(write_report(request.runs[0])))
    else:
        names = "-".join(path.resolve().name for path in request.runs)
        html = request.html or Path(f"report-{names}.html")
        write_text(html, build_page(request.runs))
        print_line(str(html))


def serve(request: ReportRequest) -> None:
    """Serve the page until the user interrupts it.

    Raises:
        PolylaneError: the port cannot be listened on, or there is no run in a folder.
    """
    try:
        server = ReportServer(request.runs, request.port)
    except OSError as error:
        raise PolylaneError(f"--port {request.port} cannot be listened on: {error.strerror or error}") from error
    say_at_once(f"the report is at {server.url} on this machine; Ctrl-C ends it")
    with server, suppress(KeyboardInterrupt):  # the end that everybody gives it
        server.serve_forever()
