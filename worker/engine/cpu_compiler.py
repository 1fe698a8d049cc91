"""The C++ compiler that MLX's CPU backend runs while it computes, once for each new function.

A run takes about a second on an idle core, and its results stay in the temporary folder. Where this folder is full,
every frame with a new function fails. So functions run uncompiled until the folder has room. On x86-64 their results
had the same bits, in fp32 and in bf16.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

import mlx.core as mx
import psutil

from mtp.kernels.cuda import backend

log = logging.getLogger(__name__)

NEEDED_BYTES = 2**17
"""Bytes that one compilation may write. A function of the built-in model takes about 40 KB in all."""

COMPILERS = ("sh", "g++", "c++", "clang++")
"""Names of the process that MLX starts: the compiler, or the shell around it."""

VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Environment variables that name the folder, in the order of C++'s `temp_directory_path`."""


DEFAULT_FOLDER = Path("/", "tmp")
"""The folder without these variables, also chosen by C++."""


def compiler_folder() -> Path:
    """Return the folder in which MLX compiles."""
    named = (os.environ[name] for name in VARIABLES if os.environ.get(name))
    return Path(next(named, DEFAULT_FOLDER))


class CompiledFunctions:
    """The switch of MLX's compilation of functions. Use it on the engine thread when a plan starts."""

    def __init__(self) -> None:
        self._off = False

    def adjust(self) -> None:
        """Turn compilation off if its folder has no room, with a warning, and on again once it has."""
        if backend() != "cpu":
            return
        problem = _problem_with(compiler_folder())
        if problem is not None and not self._off:
            log.warning(
                "MLX has no room to compile functions, so they run slower. Free space in its folder, or set TMPDIR",
                extra={"folder": str(compiler_folder()), "error": problem},
            )
            mx.disable_compile()
        elif problem is None and self._off:
            log.info("MLX compiles functions again", extra={"folder": str(compiler_folder())})
            mx.enable_compile()
        self._off = problem is not None


def compiler_runs() -> bool:
    """Return whether a compiler runs for this process."""
    if backend() != "cpu":
        return False
    with contextlib.suppress(psutil.Error):
        return any(child.name() in COMPILERS for child in psutil.Process().children())
    return False


def _problem_with(folder: Path) -> str | None:
    """Return why a file of NEEDED_BYTES cannot be written into `folder`, or None."""
    file = folder / f"mtp-room-{os.getpid()}-{threading.get_ident()}"
    try:
        with file.open("xb", buffering=0) as stream:
            written = stream.write(bytes(NEEDED_BYTES))
        return None if written == NEEDED_BYTES else "it is full"
    except OSError as error:
        return str(error.strerror or error)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


compiled_functions = CompiledFunctions()
"""The one instance, because the setting of MLX belongs to the process."""
