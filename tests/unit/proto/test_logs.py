"""The log's two forms: the same facts as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import warnings

import pytest

from proto.terminal.logs import LogFormat, LogLevel, configure


@pytest.fixture(autouse=True)
def bare_root() -> None:
    """Without pytest's own handlers, which `configure` would close. The loggers are given back in tests/conftest.py."""
    logging.getLogger().handlers.clear()


def test_json_is_one_object_a_record_with_the_fields_given() -> None:
    """Each line parses by itself; what came through `extra` stands beside the message, with its type."""
    out = io.StringIO()
    configure(LogLevel.info, LogFormat.json, out)
    logging.getLogger("coordinator.x").warning("worker %s lost", "mac-2", extra={"epoch": 3})
    logging.getLogger("coordinator.x").info("two\nlines")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "warning",
        "logger": "coordinator.x",
        "message": "worker mac-2 lost",
        "epoch": 3,
    }
    assert second["message"] == "two\nlines"


def test_json_carries_the_exception() -> None:
    """A traceback is a field, so that the record stays one line."""
    out = io.StringIO()
    configure(LogLevel.info, LogFormat.json, out)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("mtp").exception("failed")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["exception"]


def test_level_is_for_our_loggers() -> None:
    """Ours speak from the level on; libraries and Python's warnings from warning on, whatever the level."""
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure(LogLevel.debug, LogFormat.text, out)
        logging.getLogger("grpc.x").info("library detail")
        logging.getLogger("coordinator.x").debug("our detail")
        warnings.warn("odd", UserWarning, stacklevel=1)
        configure(LogLevel.error, LogFormat.text, out)
        logging.getLogger("coordinator.x").warning("unheard")
        logging.getLogger("grpc.x").warning("unheard")
    written = out.getvalue()
    assert "our detail" in written
    assert "odd" in written
    assert "library detail" not in written
    assert "unheard" not in written
