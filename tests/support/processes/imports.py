"""The imports of `tests.support.processes.forked` before it forks programs. Importing this module has these effects.

transformers imports torch if it is installed, which takes seconds, and users have no torch.
"""

import importlib
import sys

from proto.terminal.console import keep_open_file_limit

MODULES = ("coordinator.cli", "coordinator.serve.server", "worker.cli", "worker.node.process")

sys.modules["torch"] = None  # type: ignore[assignment]
keep_open_file_limit()
for name in MODULES:
    importlib.import_module(name)
