"""Commands of other programs, and commands on a machine where no coordinator runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coordinator.cli import COMMANDS, OTHER_WORDS, app
from coordinator.cli.client import no_answer
from proto.errors import UsageError
from proto.state_dir import COORDINATOR, STATE_DIR


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_a_word_of_another_program_names_a_command_of_this_one(word: str) -> None:
    """The word is no command here, and the commands in the advice are."""
    assert word not in COMMANDS
    with pytest.raises(UsageError, match=rf"^{word} is no command of mtp-coord\. ") as raised:
        app([word, "anything"], prog_name="mtp-coord")
    assert "anything" not in str(raised.value), "it may be a token"
    named = re.findall(r"mtp-coord ([a-z]+)", str(raised.value).partition(". ")[2])
    assert set(named) <= set(COMMANDS)


def test_the_machine_of_the_coordinator_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that joined another one's cluster says where the coordinator runs, unless --url names a machine."""
    monkeypatch.setenv(STATE_DIR, str(tmp_path))
    here, refused = "http://127.0.0.1:8080", ConnectionRefusedError()
    assert "Start mtp-coord serve" in str(no_answer(here, refused))
    file = tmp_path / COORDINATOR
    file.parent.mkdir()
    named = {"join": "10.0.0.1:50504", "name": "mac-1:8080"}
    for content, where in ((named, r"mac-1 \(10.0.0.1\)"), ({"join": "h:1"}, "h")):
        file.write_text(json.dumps(content))
        found = str(no_answer(here, refused))
        assert re.search(rf"a worker of a cluster that runs on {where}\. Run the command there", found)
    assert "Start mtp-coord serve" in str(no_answer("http://10.0.0.9:8080", refused))
    file.write_text("damaged")
    assert "Start mtp-coord serve" in str(no_answer(here, refused))
