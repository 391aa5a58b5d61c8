"""The pages for a browser besides the dashboard: links, routes, the icon. They need nothing from other hosts."""

import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.servers.running import Server
from twinkle.server.protocols.operator import pages

PLAIN_PAGES = ("/", "/docs", "/redoc")
DASHBOARD = Path(pages.__file__).parent / "dashboard"
PARTS = sorted(f"/dashboard/{file.name}" for file in DASHBOARD.iterdir() if file.suffix in (".js", ".css", ".svg"))
SVG = "http://www.w3.org/2000/svg"  # the name of a format, which nothing loads


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(server.url + path, trust_env=False, verify=False)  # no TLS here; certificates take long to load


def test_the_address_of_a_server_leads_to_its_pages(server: Server) -> None:
    page = get(server, "/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'<a href="([^"]+)"', page.text)
    assert {"dashboard", "docs", "openapi.json"} <= {*links}
    for link in links:
        assert get(server, "/" + link).status_code == 200, link


def test_docs_lists_every_route_with_its_body(server: Server) -> None:
    page, document = get(server, "/docs").text, get(server, "/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<code>{method.upper()} {path}</code>" in page
    assert "body: <code>application/json CreateModelRequest</code>" in page


@pytest.mark.parametrize("path", PLAIN_PAGES)
def test_a_plain_page_runs_no_scripts(server: Server, path: str) -> None:
    page = get(server, path)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; img-src 'self'; ")
    assert "script" not in policy
    assert not re.search(r"<script|<style|<form|<iframe|\son\w+=|\sstyle=|\ssrc=", page.text)
    loaded = [urllib.parse.urljoin(path, link) for link in re.findall(r'<link [^>]*href="([^"]+)"', page.text)]
    assert sorted(loaded) == ["/dashboard/icon.svg", "/dashboard/style.css"]
    assert page.headers["x-frame-options"] == "DENY"
    assert page.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [*PLAIN_PAGES, "/dashboard", "/favicon.ico", *PARTS])
def test_no_page_names_another_host(server: Server, path: str) -> None:
    """So all pages work without a connection to the internet, and nobody else learns that they were opened."""
    answer = get(server, path)
    assert answer.status_code == 200
    assert set(re.findall(r"(?:https?:)?//[\w-]+\.[^\s\"'`)]+", answer.text)) <= {SVG}
    assert "'none'" in answer.headers["content-security-policy"]


def test_all_pages_are_tested(server: Server) -> None:
    """Every public route with an answer for browsers is in the list above."""
    document = get(server, "/openapi.json").json()
    found = {path for path in document["paths"] if "{" not in path and "get" in document["paths"][path]}
    html = {path for path in found if "text/html" in get(server, path).headers.get("content-type", "")}
    assert html == {*PLAIN_PAGES, "/dashboard"}


def test_a_browser_leaves_no_complaint_in_the_log(own_server: Callable[..., Server]) -> None:
    """Browsers ask for the icon on their own, and a mistyped address is not an error of the server."""
    server = own_server()
    before = server.log()
    for path in ("/", "/favicon.ico", "/docs", "/dashboard", "/dashboard/icon.svg", "/nowhere"):
        assert get(server, path).status_code == (404 if path == "/nowhere" else 200)
    icon = get(server, "/favicon.ico")
    assert icon.headers["content-type"] == "image/svg+xml"
    assert icon.text == (DASHBOARD / "icon.svg").read_text()
    assert server.log() == before


def test_the_pages_are_announced(server: Server) -> None:
    said = server.log()
    assert f"dashboard: {server.url}/dashboard\n" in said
    assert f"routes of the API: {server.url}/docs\n" in said
