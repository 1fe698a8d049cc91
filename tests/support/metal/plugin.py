"""A pytest plugin that runs every test on the Metal path, with heads of 128 and 256 as published models have.

python -m pytest -p tests.support.metal.plugin tests/parity/test_rollback.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.checkpoints import checkpoints
from tests.support.metal.metal_path import metal_path
from tests.support.metal.runner import reason_not_to_run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test where this machine cannot run Metal kernels."""
    if reason := reason_not_to_run():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def on_the_metal_path() -> Iterator[None]:
    """Run all tests of the session on the Metal path."""
    with pytest.MonkeyPatch.context() as patch, metal_path():
        patch.setattr(checkpoints, "GDN_DIM", 128)
        patch.setattr(checkpoints, "HEAD_DIM", 256)
        yield
