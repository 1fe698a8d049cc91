"""MLX's CPU backend compiles functions into the temporary folder, which may be full."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from mtp.kernels.cuda import backend
from worker.engine.cpu_compiler import CompiledFunctions, compiler_folder
from worker.engine.engine_thread import EngineThread

COMPUTE = """
import mlx.core as mx
from worker.engine.cpu_compiler import compiled_functions
compiled_functions.adjust()
print(mx.compile(lambda x: mx.exp(x) * 2 + mx.sin(x) * 3)(mx.ones(2)).tolist())
"""


@pytest.mark.skipif(backend() != "cpu", reason="only the CPU backend compiles into this folder")
def test_functions_run_without_compilation_while_the_folder_has_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning is logged, and compilation returns with the room."""
    switches: list[str] = []
    monkeypatch.setattr(mx, "disable_compile", lambda: switches.append("off"))
    monkeypatch.setattr(mx, "enable_compile", lambda: switches.append("on"))
    functions, missing = CompiledFunctions(), tmp_path / "missing"
    monkeypatch.setenv("TMPDIR", str(missing))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            functions.adjust()
        assert switches == ["off"]
        missing.mkdir()
        for _ in range(3):
            functions.adjust()
    assert switches == ["off", "on"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert not list(missing.iterdir())


def test_the_folder_is_the_one_that_mlx_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any of the variables it is /tmp."""
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert compiler_folder() == Path("/tmp")
    monkeypatch.setenv("TEMP", "/elsewhere")
    assert compiler_folder() == Path("/elsewhere")


def test_mlx_computes_without_a_temporary_folder(tmp_path: Path) -> None:
    """The real MLX computes the same numbers. Without `adjust` it would raise RuntimeError."""
    outputs = []
    for folder in (tmp_path, tmp_path / "missing"):
        done = subprocess.run(
            [sys.executable, "-c", COMPUTE],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(backend() != "cpu", reason="other backends run no compiler of their own")
async def test_work_that_waits_for_a_compiler_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process with a compiler's name moves the deadline. Work without one is late, and so is endless work."""
    thread, late, release = EngineThread(), threading.Event(), threading.Event()

    def work() -> None:
        """Exceed the deadline by five seconds until `release`."""
        thread.expect(-5.0)
        late.set()
        release.wait(20)

    thread.submit(work)
    assert await asyncio.to_thread(late.wait, 20)
    thread.wait_for_compiler()
    assert thread.stall > 4
    compiler = await asyncio.create_subprocess_exec("sh", "-c", "sleep 20; true")
    with monkeypatch.context() as patch:
        patch.setattr("worker.engine.engine_thread.COMPILER_SECONDS", 0.0)
        thread.wait_for_compiler()
        assert thread.stall > 4, "it compiles for longer than any function takes"
    thread.wait_for_compiler()
    assert thread.stall == 0
    compiler.kill()
    await compiler.wait()
    release.set()
    await thread.close()
