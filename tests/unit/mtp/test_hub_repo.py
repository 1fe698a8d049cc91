"""Byte ranges from a hub, and downloads of whole repos, which stop at once and continue from there."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from coordinator.cli import import_command
from coordinator.cli.model_commands import assess_head
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.checkpoint.hub.remote_checkpoint import open_model
from mtp.checkpoint.hub.repo import ATTEMPTS, HubRepo, find_blobs
from mtp.checkpoint.hub.resolve import find_model, resolve_model
from proto.errors import CheckpointError, NotReadyError
from tests.conftest import Checkpoints
from tests.support.checkpoints.checkpoints import move_head
from tests.support.checkpoints.hub import TOKEN, Hub
from tests.support.checkpoints.hub import Repo as FakeRepo

FILE = "model-00002-of-00003.safetensors"
REPO = "someone/some-model"


@pytest.fixture
def source(checkpoints: Checkpoints) -> Path:
    return checkpoints(shards=3)


@pytest.fixture
def hub(hub: Hub, source: Path) -> Hub:
    hub.add(REPO, source)
    return hub


@pytest.fixture
def repo(hub: Hub) -> Iterator[HubRepo]:
    with HubRepo(REPO) as repo:
        yield repo


def test_a_range_is_those_bytes_and_no_more(hub: Hub, repo: HubRepo, source: Path) -> None:
    """A read follows the redirect to the storage, and only the requested bytes cross the network."""
    content = (source / FILE).read_bytes()
    assert b"".join(repo.read_range(FILE, 1000, 200_000)) == content[1000:200_000]
    assert hub.sent[FILE] == 199_000
    assert repo.size(FILE) == len(content)


def test_the_first_answer_pins_the_commit(hub: Hub, repo: HubRepo) -> None:
    """A branch that moves between two reads does not mix two versions."""
    repo.read("config.json")
    assert repo.revision == hub.repos[REPO].commit
    b"".join(repo.read_range(FILE, 0, 10))
    assert f"/resolve/{repo.revision}/" in [r for r in hub.requests if "resolve" in r][-1]


def test_a_broken_connection_is_gone_on_with(hub: Hub, repo: HubRepo, source: Path) -> None:
    """After a broken connection only the missing bytes are requested."""
    hub.faults.cut_after = [70_000, 0, 65_536]
    content = (source / FILE).read_bytes()
    assert b"".join(repo.read_range(FILE, 10, 300_000)) == content[10:300_000]
    assert hub.sent[FILE] == 300_000 - 10


def test_a_hub_that_stays_away_ends_the_wait(hub: Hub, repo: HubRepo) -> None:
    """A hub that stays unavailable ends the read with an error that names the repo."""
    hub.faults.unavailable = 1000
    with pytest.raises(CheckpointError, match=f"{REPO}/{FILE}.*is unavailable.*Try again later"):
        list(repo.read_range(FILE, 0, 5))
    hub.faults.unavailable = 0
    hub.faults.cut_after = [0] * ATTEMPTS
    with pytest.raises(CheckpointError, match="interrupts the download"):
        list(repo.read_range(FILE, 0, 5))
    assert hub.sent[FILE] == 0


def test_a_hub_without_ranges_is_refused(hub: Hub, repo: HubRepo) -> None:
    """A hub that ignores byte ranges is refused, since it would send 54 GB for 1."""
    hub.faults.ignore_ranges = True
    with pytest.raises(CheckpointError, match="does not serve byte ranges"):
        list(repo.read_range(FILE, 0, 5))


@pytest.mark.parametrize("gate", ["GatedRepo", "RepoNotFound"])
def test_a_repo_without_access(hub: Hub, repo: HubRepo, monkeypatch: pytest.MonkeyPatch, gate: str) -> None:
    """The error says what to do about a private and a gated repo; with the token in HF_TOKEN the read succeeds."""
    hub.repos[REPO].gate = gate
    message = "HF_TOKEN; for a gated one accept the terms"
    with pytest.raises(CheckpointError, match=message):
        repo.read("config.json")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CheckpointError, match=message):
        repo.read("config.json")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert repo.read("config.json")


def test_what_the_standard_cache_has_is_read_there(hub: Hub, repo: HubRepo, source: Path) -> None:
    """A repo in the cache is read without the network."""
    resolve_model(REPO)
    hub.sent.clear()
    hub.requests.clear()
    content = (source / FILE).read_bytes()
    assert b"".join(repo.read_range(FILE, 7, 99_999)) == content[7:99_999]
    assert repo.size(FILE) == len(content)
    assert repo.revision == hub.repos[REPO].commit
    assert hub.requests == []


def test_half_a_snapshot_is_not_a_model(hub: Hub, tmp_path: Path) -> None:
    """A repo that is incomplete in the cache is downloaded further and not opened."""
    whole = resolve_model(REPO)
    assert find_model(REPO) == whole
    shutil.rmtree(tmp_path / "home" / "hub" / "models--someone--some-model" / "trees", ignore_errors=True)
    (whole / FILE).unlink()
    assert find_model(REPO) is None
    hub.sent.clear()
    assert resolve_model(REPO) == whole
    assert (whole / FILE).is_file()
    assert set(hub.sent) <= {FILE}


@pytest.mark.parametrize("model", ["serve", "convert"])
def test_a_damaged_file_is_not_taken(hub: Hub, tmp_path: Path, model: str) -> None:
    """Whole downloads are checked against the hub's hashes; a damaged file is reported, removed and fetched again."""
    out = tmp_path / "out"

    def take() -> Path:
        if model == "serve":
            return resolve_model(REPO)
        args = ["--hf-path", REPO, "--mlx-path", str(out)]
        import_command("convert").main(args, standalone_mode=False)
        return out

    hub.faults.flip[FILE] = 100_000
    with pytest.raises(CheckpointError, match=f"{FILE} is damaged.*its SHA-256 differs from the hub's"):
        take()
    assert find_model(REPO) is None
    assert not out.exists()
    hub.faults.flip.clear()
    hub.sent.clear()
    assert Checkpoint.open(take()).mtp.complete
    assert {file for file in hub.sent if file.endswith(".safetensors")} == {FILE}


def test_a_download_that_was_not_checked_is_not_a_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download killed before its check is not a model: config.json comes last."""
    hub.faults.flip[FILE] = 100_000
    with monkeypatch.context() as patched:
        patched.setattr("mtp.checkpoint.hub.resolve._check_hashes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(REPO)
    assert find_model(REPO) is None
    with pytest.raises(CheckpointError, match="is damaged"):
        resolve_model(REPO)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options",
    [
        {"shards": 3},
        {"moe": True, "fused_experts": False, "shards": 2},
        {"layout": "mlx", "quantize": 4, "mtp": False},
    ],
    ids=repr,
)
def test_headers_of_a_repo(hub: Hub, checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """A remote checkpoint is opened with less than a tenth of its bytes; a local one is opened from disk."""
    source = checkpoints(**options)
    hub.add(REPO, source)
    here, there = Checkpoint.open(source), open_model(REPO)
    assert there.plans == here.plans
    assert there.mtp == here.mtp
    assert (there.layout, there.part_bytes()) == (here.layout, here.part_bytes())
    assert hub.weights_sent < sum(info.nbytes for info in here.tensors.values()) / 10
    assert there.mtp.complete or "head missing. Run hf download" in verdict(there)
    assert not there.mtp.complete or f"Download {REPO} first" in verdict(there)
    hub.sent.clear()
    assert open_model(str(source)).path == source
    assert hub.sent.total() == 0


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize(("place", "prefix"), [("mtp/weights.safetensors", "mtp."), ("head.safetensors", "")])
def test_a_head_beside_the_files_of_a_repo_is_found(
    hub: Hub, source: Path, tmp_path: Path, index: bool, place: str, prefix: str
) -> None:
    """By its headers, in a copy of the whole repo, and as the only thing that is read of it."""
    path = move_head(tmp_path / "moved", source, place, prefix, index=index)
    hub.add(REPO, path)
    here, there = Checkpoint.open(path), open_model(REPO)
    assert there.mtp.complete
    assert there.plans == here.plans
    with HubRepo(REPO) as repo:
        infos = {n: there.tensors[n] for n in there.tensors_of("mtp")}
        read = b"".join(repo.read_tensors(list(infos.values())))
    places = [here.tensors[name] for name in infos]
    assert read == b"".join(i.file.read_bytes()[i.start :][: i.nbytes] for i in places)
    assert Checkpoint.open(resolve_model(REPO)).mtp.complete


def test_a_hub_that_lists_no_files_is_an_error_that_says_so(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for a head fails as any other request does."""
    hub.add(REPO, move_head(tmp_path / "moved", source, "head.safetensors", "mtp."))

    def fail(*_: object) -> None:
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr("mtp.checkpoint.hub.remote_checkpoint.find_blobs", fail)
    with pytest.raises(CheckpointError, match=f"{REPO}.*the hub is unavailable"):
        open_model(REPO)


def verdict(checkpoint: Checkpoint) -> str:
    return assess_head(checkpoint).verdict


# ---- downloads of whole repos


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_an_interrupted_download_stops_and_continues(hub: Hub, source: Path) -> None:
    """A stopped download ends within a second. The next one fetches only the missing bytes."""
    total = sum(map(len, weights(source).values()))
    hub.faults.hold_at = total // 2
    stop = threading.Event()
    seen: list[tuple[int, int]] = []

    def on_progress(done: int, of: int) -> None:
        seen.append((done, of))
        if hub.weights_sent >= hub.faults.hold_at:
            stop.set()

    with pytest.raises(NotReadyError, match="The next start continues it"):
        resolve_model(REPO, on_progress, stop)
    assert find_model(REPO) is None
    assert 0 < seen[-1][0] < total
    assert {of for _, of in seen} == {total}
    hub.faults.hold_at = math.inf
    time.sleep(0.5)  # the server's held replies end
    hub.sent.clear()
    found = resolve_model(REPO, lambda done, of: seen.append((done, of)))
    assert weights(found) == weights(source)
    assert hub.weights_sent < total
    assert not list(found.parents[1].rglob("*.part"))


def test_progress_is_reported_every_second(hub: Hub, source: Path) -> None:
    """A download that receives nothing still reports, so that a bar moves and an interruption is noticed."""
    hub.faults.hold_at = 1
    times: list[float] = []
    stop = threading.Event()

    def on_progress(done: int, of: int) -> None:
        times.append(time.monotonic())
        if len(times) == 4:
            stop.set()

    with pytest.raises(NotReadyError):
        resolve_model(REPO, on_progress, stop)
    hub.faults.hold_at = math.inf
    assert max(b - a for a, b in pairwise(times)) < 1


ESCAPES = ["../../../../outside/x", "/{tmp}/outside/x", "a/../../../../../outside/x"]


@pytest.fixture(params=ESCAPES)
def escape(request: Any, tmp_path: Path) -> str:
    """Return a value that leads out of the cache."""
    return str(request.param).replace("/{tmp}", str(tmp_path))


def check_nothing_outside(tmp_path: Path) -> None:
    assert not list(tmp_path.glob("outside*"))


@pytest.mark.parametrize("tagged", ["weights", "other files"])
def test_a_hash_names_no_file_outside_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, escape: str, tagged: str
) -> None:
    """A hash that is a path is refused, and no weights are requested. The cache names its files by hashes."""
    etag = hub.etag

    def lying_etag(file: Path) -> str:
        return escape if (file.suffix == ".safetensors") == (tagged == "weights") else etag(file)

    monkeypatch.setattr(hub, "etag", lying_etag)
    with pytest.raises(CheckpointError, match=r"the hub at .* sent .*outside.*Use another hub"):
        resolve_model(REPO)
    assert hub.weights_sent == 0
    check_nothing_outside(tmp_path)


@pytest.mark.parametrize("commit", [*ESCAPES, "main", "A" * 40, "0" * 39, "0" * 41, "0" * 40 + "\u00b2"])
def test_a_commit_has_40_digits(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """A header or an answer with another commit is refused, by every reader, before it becomes a path."""
    monkeypatch.setattr(FakeRepo, "commit", property(lambda repo: commit))
    monkeypatch.chdir(tmp_path)
    for read in (resolve_model, open_model):
        with pytest.raises(CheckpointError, match=r"sent .* as a commit\. Use another hub"):
            read(REPO)
    with pytest.raises(CheckpointError, match="as a commit"), HubRepo(REPO) as found:
        found.read("config.json")
    check_nothing_outside(tmp_path)


def test_a_commit_after_a_redirect_is_checked(hub: Hub, repo: HubRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a mirror's weights would otherwise be written to the place that the commit names."""
    config = repo.read("config.json")
    assert config
    monkeypatch.setattr(FakeRepo, "commit", property(lambda _: "../../x"))
    repo.revision = "main"
    with pytest.raises(CheckpointError, match="as a commit"):
        repo.read_header(FILE)
    assert repo.revision == "main"


def test_a_listing_names_no_file_outside_the_repo(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, escape: str
) -> None:
    """Neither a download nor a look for a head beside the model's files follows such a name."""
    tree = hub._server.RequestHandlerClass._tree  # type: ignore[attr-defined]
    hub.repos[REPO].path.joinpath("mtp.safetensors").touch()

    def lying_tree(self: Any, *args: Any) -> None:
        answer = self._json
        self._json = lambda entries: answer([*entries, {**entries[-1], "path": f"{escape}.safetensors"}])
        tree(self, *args)

    monkeypatch.setattr(hub._server.RequestHandlerClass, "_tree", lying_tree)
    for read in (resolve_model, lambda name: find_blobs(name, hub.repos[REPO].commit)):
        with pytest.raises(CheckpointError, match="as the name of a file"):
            read(REPO)
    check_nothing_outside(tmp_path)


@pytest.mark.parametrize("name", ["../x", "a b/c", "a/..", "a/b/c", "-/x", "a/b?c", "a/b\n"])
def test_a_name_that_is_no_repo_is_refused(name: str) -> None:
    """A model card or a coordinator may send any text."""
    with pytest.raises(CheckpointError, match="neither a directory here nor a repo"):
        HubRepo(name)
    for revision in ("../../x", "refs/pr/1", "MAIN", ""):
        with pytest.raises(CheckpointError, match="as a commit"):
            HubRepo(REPO, revision)


def test_a_cached_file_in_a_folder_pins_the_commit(hub: Hub, source: Path) -> None:
    (source / "mtp").mkdir()
    shutil.copy(source / FILE, source / "mtp" / "weights.safetensors")
    resolve_model(REPO)
    with HubRepo(REPO) as found:
        assert found.size("mtp/weights.safetensors")
        assert found.revision == hub.repos[REPO].commit
