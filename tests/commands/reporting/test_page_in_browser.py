"""Pages in a real browser: no message, no request, keyboard and zoom, phones and wide screens, hostile names, live."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from polylane.commands.reporting.report_page import build_page, write_report
from polylane.commands.reporting.run_files import read_run
from polylane.commands.reporting.serve_report import ReportServer
from polylane.commands.running.run_folder import RunFolder
from polylane.observe.swimlane.render import gallery, html
from tests.support.browser import Opened, opened
from tests.support.runs import make_theory, write_run

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
READY = "() => document.documentElement.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


def check_quiet(seen: Opened, requests: int = 1) -> None:
    assert seen.messages == [] and len(seen.requests) == requests, (seen.messages, seen.requests)


def pixels(page: Any, selector: str = "canvas.lanes >> nth=-1") -> str:
    """Return what a canvas shows, to be compared."""
    return str(page.locator(selector).evaluate("canvas => canvas.toDataURL()"))


def fits(page: Any) -> bool:
    """Return whether the page is no wider than its window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark"), (1920, "light")])
def test_a_page_opens_without_a_message_and_fits(run: Path, width: int, scheme: str) -> None:
    with opened(write_report(run).as_uri(), width, scheme=scheme) as seen:
        seen.page.wait_for_function(READY)
        titles = seen.page.locator("h2").all_text_contents()
        assert titles == [
            *("A step", "Where the time went", "Loss and metrics", "Speed", "Noise and batch", "Memory and bytes"),
            *("Plan", "Environment"),
        ]
        assert (
            seen.page.locator(".verdict").text_content().startswith("2.9 times the speed of one device, on 4 workers")
        )
        assert seen.page.locator("canvas.lanes").count() == 3 and seen.page.locator(".uplot").count() == 7
        assert fits(seen.page)
        check_quiet(seen)


def test_a_large_run_opens_in_less_than_two_seconds(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", steps=10_000, stages=8, replicas=8, microbatches=16))
    with opened("about:blank") as seen:
        start = time.perf_counter()
        seen.page.goto(page.as_uri())
        seen.page.wait_for_function(READY)
        assert time.perf_counter() - start < 2
        assert seen.messages == []


def test_the_keyboard_reaches_and_moves_everything(run: Path) -> None:
    with opened(write_report(run).as_uri()) as seen:
        page = seen.page
        page.wait_for_function(READY)
        lanes = page.locator("canvas.lanes >> nth=-1")
        whole = pixels(page)
        lanes.focus()
        page.keyboard.press("+")
        page.wait_for_timeout(60)
        zoomed = pixels(page)
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(60)
        assert len({whole, zoomed, pixels(page)}) == 3
        first = pixels(page, "canvas.lanes >> nth=0")  # theory has moved as well: one time axis
        page.keyboard.press("0")
        page.wait_for_timeout(60)
        assert pixels(page) == whole and pixels(page, "canvas.lanes >> nth=0") != first
        # Charts: all of them show the same steps.
        charts = page.locator(".chart")
        before = [pixels(page, f".uplot canvas >> nth={number}") for number in (0, 1)]
        charts.first.focus()
        page.keyboard.press("+")
        assert all(pixels(page, f".uplot canvas >> nth={number}") != before[number] for number in (0, 1))
        page.keyboard.press("0")
        assert [pixels(page, f".uplot canvas >> nth={number}") for number in (0, 1)] == before
        # Tab reaches the parts, the choice of a step and the swimlanes, in their order.
        page.reload()
        page.wait_for_function(READY)
        reached, focused = [], "document.activeElement.tagName + document.activeElement.textContent.slice(0, 7)"
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(focused))
        assert reached[1] == "AA step" and "BUTTONtypical" in reached and reached.count("CANVAS") == 3
        check_quiet(seen, 2)


def test_any_kept_step_can_be_chosen(run: Path) -> None:
    with opened(write_report(run).as_uri()) as seen:
        seen.page.wait_for_function(READY)
        before = pixels(seen.page)
        seen.page.get_by_role("button", name="slowest").click()
        assert "the slowest step" in seen.page.locator("#lanes").text_content()
        assert pixels(seen.page) != before
        assert seen.page.locator("button[aria-pressed=true]").first.text_content() == "slowest"
        check_quiet(seen)


def test_the_wheel_zooms_and_pointing_tells_a_box(run: Path) -> None:
    with opened(write_report(run).as_uri()) as seen:
        page = seen.page
        page.wait_for_function(READY)
        lanes = page.locator("canvas.lanes >> nth=-1")
        lanes.scroll_into_view_if_needed()
        box, before = lanes.bounding_box(), pixels(page)
        page.mouse.move(box["x"] + 200, box["y"] + 38)
        page.wait_for_function("() => document.getElementById('details').textContent.includes('rank 0')")
        page.mouse.wheel(0, -600)
        page.wait_for_timeout(80)
        assert pixels(page) != before
        page.mouse.dblclick(box["x"] + 200, box["y"] + 38)
        page.wait_for_timeout(80)
        assert pixels(page) == before
        check_quiet(seen)


def test_everything_can_be_named_by_a_screen_reader(run: Path) -> None:
    with opened(write_report(run).as_uri()) as seen:
        seen.page.wait_for_function(READY)
        unnamed = "nodes => nodes.filter(node => !node.getAttribute('aria-label')).length"
        for selector in ("canvas.lanes", "[role=img]", "[role=region]", "nav"):
            assert seen.page.locator(selector).evaluate_all(unnamed) == 0, selector
        assert seen.page.locator("button").evaluate_all("nodes => nodes.filter(node => !node.textContent).length") == 0


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    with opened(write_report(write_run(tmp_path / "run", name=HOSTILE)).as_uri()) as seen:
        seen.page.wait_for_function(READY)
        assert seen.page.title() == "run · polylane" and seen.page.locator("img").count() == 0
        assert HOSTILE in seen.page.locator("#page").text_content()
        check_quiet(seen)


def test_files_of_anything_are_shown_without_a_message(tmp_path: Path) -> None:
    """As far as they go: a page's script meets no type that it does not expect."""
    folder = write_run(tmp_path / "run")
    strange = {
        "stages": [{"ranks": 3, "sends": [1], "modules": {}}, 7],
        "memory": ["x", None],
        "environment": {"a": {"b": [1]}},
    }
    (folder / "predicted.json").write_text(
        json.dumps({**strange, "timeline": [], "theory": {"spans": 1}, "changes": [0]})
    )
    (folder / "goodput.json").write_text('{"attempts": [{"resumed_at": "x"}, 1], "seconds": {"a": "b"}, "verdict": 3}')
    lines = ['{"step": 1, "loss": "x", "memory": 3, "waiting_for": [], "noise": {"scale": "y"}}', '{"step": 2}', "[]"]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    with opened(write_report(folder).as_uri()) as seen:
        seen.page.wait_for_function(READY)
        check_quiet(seen)


def test_two_runs_stand_beside_each_other_on_the_same_axes(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.html"
    file.write_text(build_page([run, write_run(tmp_path / "b", steps=80, stages=4, replicas=1)]))
    with opened(file.as_uri(), scheme="dark") as seen:
        seen.page.wait_for_function(READY)
        assert seen.page.locator("h1").all_text_contents() == ["A: runended", "B: bended"]
        assert seen.page.locator("canvas.lanes").count() == 2 and fits(seen.page)
        rows = seen.page.locator("#compared tbody tr").all_text_contents()
        assert rows[0] == "steps60801.33"
        check_quiet(seen)


def test_a_page_prints(run: Path) -> None:
    with opened(write_report(run).as_uri()) as seen:
        seen.page.wait_for_function(READY)
        seen.page.emulate_media(media="print")
        assert not seen.page.locator("nav").is_visible() and seen.page.locator(".verdict").is_visible()
        assert len(seen.page.pdf()) > 20_000
        check_quiet(seen)


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_of_swimlanes_open_without_a_message(tmp_path: Path, run: Path, width: int) -> None:
    timeline, file = read_run(run).timelines["slowest"], tmp_path / "lanes.html"
    for page in (html(timeline), gallery("all", ["a"], [["b"]], {"one": make_theory(4, 1, 8)})):
        file.write_text(page)
        with opened(file.as_uri(), width) as seen:
            assert fits(seen.page)
            check_quiet(seen)
    file.write_text(html(timeline))
    with opened(file.as_uri(), width) as seen:
        before = pixels(seen.page, "#lanes")
        seen.page.locator("#lanes").focus()
        seen.page.keyboard.press("+")
        seen.page.wait_for_timeout(80)
        assert pixels(seen.page, "#lanes") != before
        check_quiet(seen)


# Served --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    folder = write_run(tmp_path / "live", steps=20)
    (folder / "goodput.json").unlink()
    (folder / "model.safetensors").unlink()
    with RunFolder(folder).claimed(True), ReportServer([folder]) as served:
        thread = Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(url: str, **headers: str) -> int:
    """Return the status with which an address is answered."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_served_page_follows_its_run(server: ReportServer, tmp_path: Path) -> None:
    with opened(server.url) as seen:
        seen.page.wait_for_function(READY)
        assert seen.page.locator(".state").text_content() == "running"
        with (tmp_path / "live" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 21, "epoch": 4, "loss": 0.25, "samples": 64}) + "\n")
        seen.page.wait_for_function("() => document.querySelector('dl.facts dd').textContent === '21'", timeout=15_000)
        assert seen.messages == [] and all(url.startswith(server.url) for url in seen.requests)


def test_a_served_page_is_for_who_knows_its_address_on_this_machine(server: ReportServer) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    assert ask(server.url) == ask(server.url + "data") == 200
    for url in (address, address + "/", address + "/data", address + "/" + "x" * 32 + "/", server.url + "../plan.yaml"):
        assert ask(url) == 404
    assert ask(server.url, Host="evil.example") == 404
