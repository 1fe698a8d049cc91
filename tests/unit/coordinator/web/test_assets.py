"""The files of the page: what is served, with which headers, and what they may contain."""

from __future__ import annotations

import re

import pytest

from coordinator.cli import COMMANDS
from coordinator.trust.keys import Scope
from coordinator.web.access import scope_of
from coordinator.web.live_feed import ASSETS
from tests.support.api.api_client import ApiClient

SCRIPTS = sorted(file.name for file in ASSETS.glob("*.js"))


async def test_the_page_comes_with_a_strict_policy() -> None:
    """No script, style or connection of another origin, no inline script, and no HTML from text."""
    response = await ApiClient().get("/")
    policy = response.headers["content-security-policy"]
    assert response.status_code == 200
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "trusted-types 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"


async def test_every_file_the_page_names_is_served() -> None:
    """Links, scripts and imports lead to files with the right media type."""
    client = ApiClient()
    page = (await client.get("/")).text
    named = set(re.findall(r'"(/assets/[^"]+)"', page))
    for name in SCRIPTS:
        imports = re.findall(r'from "\./([^"]+)"', (ASSETS / name).read_text())
        named |= {f"/assets/{other}" for other in imports}
    assert named == {f"/assets/{name}" for name in {file.name for file in ASSETS.iterdir()} - {"index.html"}}
    for path in named:
        response = await client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] in {
            "text/javascript",
            "text/css",
            "image/svg+xml",
        }


@pytest.mark.parametrize("name", ["none.js", "..%2fassets.py", "%2e%2e", "assets.py"])
async def test_other_names_are_not_found(name: str) -> None:
    """No name leads out of the folder."""
    response = await ApiClient().get(f"/assets/{name}")
    assert response.status_code == 404


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_html_from_text(name: str) -> None:
    """Text of the model reaches the page as text nodes only. Nothing comes from another host."""
    script = (ASSETS / name).read_text()
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in script
    assert not re.search(r"\b(import|fetch)\s*\(?[\"']https?:", script)


def test_the_stream_needs_the_scope_of_the_status() -> None:
    """A key for inference alone cannot watch the cluster."""
    assert scope_of("/v1/events") is scope_of("/status") is Scope.METRICS


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_that_the_page_names_exist(name: str) -> None:
    """A reader can type what the page tells."""
    script = (ASSETS / name).read_text()
    for command in re.findall(r"mtp-coord ([a-z-]+)", script):
        assert command in COMMANDS
