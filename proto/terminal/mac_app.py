"""The app of a Mac's services, to which macOS gives the permission for the local network in place of Python.

Its launcher runs the program of a service as a child (deploy/macos/launcher.c). The app stays the same when Python, the
flags or mtp-cluster change, and so does the permission.
"""

from __future__ import annotations

import contextlib
import hashlib
import plistlib
import subprocess
import tempfile
from pathlib import Path

import typer

IDENTIFIER = "mtp-cluster.service"
"""The identifier of the app. The signature of the launcher names it, too."""

LAUNCHER = Path(__file__).with_name("mac_launcher")

INFO, PROGRAM = Path("Contents", "Info.plist"), Path("Contents", "MacOS", "mtp-cluster")

TOOL_SECONDS = 20.0
"""Seconds. Bound of a run of codesign, lsregister or the launcher, which take less than one."""

REGISTER = "/System/Library/Frameworks/CoreServices.framework/Frameworks/LaunchServices.framework/Support/lsregister"


def app_files(launcher: bytes) -> dict[Path, bytes]:
    """Return the files of the app. Info.plist has the digest of `launcher`, because codesign changes its bytes."""
    info = {
        "CFBundleExecutable": PROGRAM.name,
        "CFBundleIdentifier": IDENTIFIER,
        "CFBundleName": "mtp-cluster",
        "CFBundlePackageType": "APPL",
        "CFBundleVersion": "1",
        "LSUIElement": True,  # no icon in the Dock
        "MTPLauncherDigest": hashlib.sha256(launcher).hexdigest(),
        "NSLocalNetworkUsageDescription": "The machines of your cluster find each other and compute together.",
    }
    return {INFO: plistlib.dumps(info), PROGRAM: launcher}


def installed_app() -> Path:
    """Return the place of the app. One place for all services, because copies would share the UUID of the launcher."""
    return Path.home() / "Applications" / "mtp-cluster.app"


def install() -> list[str]:
    """Install the app unless it is there, and return its launcher; nothing, with a warning, if it cannot run here."""
    app, files = installed_app(), app_files(LAUNCHER.read_bytes())
    try:
        if (app / PROGRAM).is_file() and (app / INFO).is_file() and (app / INFO).read_bytes() == files[INFO]:
            _check(app)
        else:
            _replace(app, files)
    except (OSError, subprocess.SubprocessError) as error:
        typer.echo(f"{app}: does not work: {error}. macOS may refuse the service the local network", err=True)
        return []
    return [str(app / PROGRAM)]


def _replace(app: Path, files: dict[Path, bytes]) -> None:
    """Write the app beside its place, sign and run it there, and move it. An earlier one stays if that fails."""
    app.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".mtp-cluster.", dir=app.parent) as folder:
        made = Path(folder, app.name)
        for name, content in files.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_bytes(content)
        (made / PROGRAM).chmod(0o755)
        # It adds Info.plist to the signature. Without the Command Line Tools it may fail: that of the linker remains.
        _try("codesign", "--force", "--sign", "-", str(made))
        _check(made)
        if app.exists():
            app.rename(Path(folder, "earlier"))
        made.rename(app)
    _try(REGISTER, "-f", str(app))


def _check(app: Path) -> None:
    subprocess.run([str(app / PROGRAM), "/usr/bin/true"], capture_output=True, check=True, timeout=TOOL_SECONDS)


def _try(*command: str) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, check=False, timeout=TOOL_SECONDS)
