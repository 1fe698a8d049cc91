"""A checkpoint on a hub, opened from its config.json and its headers (a few hundred kilobytes), and its MTP head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtp.checkpoint.convert.foreign import plan_packed
from mtp.checkpoint.format.checkpoint import (
    INDEX,
    Checkpoint,
    check_not_head_only,
    check_not_packed,
    checked_weight_map,
    drop_replaced,
    head_alone,
    layout_of,
    merge_headers,
    settle_head,
)
from mtp.checkpoint.format.config import QUANTIZATION_FILE, ModelConfig, with_quantization
from mtp.checkpoint.format.names import is_bare_head, is_head
from mtp.checkpoint.format.shard import Entry, Header, ShardWriter, check_free_space, parse_json_object
from mtp.checkpoint.hub.repo import HubRepo, find_blobs
from mtp.checkpoint.hub.resolve import find_model, hub_errors
from proto.errors import CheckpointError
from proto.terminal.progress import OnProgress

_CONVOLUTION = "linear_attn.conv1d.weight"
_ONLY_FILE = "model.safetensors"


def open_model(name: str) -> Checkpoint:
    """Open model `name` (see `resolve_model`) without a download. Raises CheckpointError.

    Of a repo that is not in the local cache, `path` is not a directory and the tensors cannot be read.
    """
    local = find_model(name)
    if local is not None:
        return Checkpoint.open(local)
    with HubRepo(name) as hub:
        found = open_remote(hub)
        check_not_packed(found.path, found.config)
        check_not_head_only(found.path, found.config)
        return found


def fetch_head(
    hub: HubRepo,
    head: Checkpoint,
    names: Sequence[str],
    directory: Path,
    on_progress: OnProgress,
    beside: int = 0,
) -> Checkpoint:
    """Fetch the tensors `names` of `head` into a file in `directory`, and return it with its tensors there.

    Raises CheckpointError, also without space for them and `beside` further bytes.
    """
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be created: {error.strerror}") from error
    infos = {name: head.tensors[name] for name in names}
    infos = dict(sorted(infos.items(), key=lambda item: (item[1].file, item[1].start)))
    entries = [Entry(name, info.dtype, info.shape) for name, info in infos.items()]
    # The name contains the commit, so that a part file of another commit is not continued.
    writer = ShardWriter(directory / f"{hub.revision}.safetensors", entries, "pt")

    def write_all() -> None:
        writer.rewind(0)  # no hash of the hub finds bytes that a power failure lost
        for piece in hub.read_tensors(list(infos.values())):
            writer.write(piece)
            on_progress(writer.written, writer.nbytes)

    if not writer.is_finished():
        check_free_space(directory, writer.nbytes + beside)
        writer.complete(write_all)
    return plan_packed(Checkpoint.assemble(directory, head.config, head.layout, writer.tensors()))


def open_remote(hub: HubRepo, *, only_head: bool = False) -> Checkpoint:
    """Open the checkpoint in `hub`, or `only_head`, its MTP head."""
    path = Path(hub.repo)
    fields = _read_object(hub, "config.json")
    beside = None if hub.size(QUANTIZATION_FILE) is None else _read_object(hub, QUANTIZATION_FILE)
    fields = with_quantization(fields, beside)
    config = ModelConfig.parse(path / "config.json", fields)

    def accepts(name: str) -> bool:
        place = config.place(name)
        return config.head_only or not only_head or (place is not None and place.part == "mtp")

    headers = _headers(hub, accepts, config.head_file)
    config, headers = settle_head(config, headers)
    merged = merge_headers(headers).items()
    tensors = {n: info for n, info in merged if accepts(n)}
    layout = layout_of(path, config, headers)
    return Checkpoint.assemble(path, config, layout, tensors)


def _headers(hub: HubRepo, wanted: Callable[[str], bool], head_file: str) -> dict[Path, Header]:
    """Read the headers of the files with wanted tensors, and of one file whose convolution shows the layout.

    Without a head among them, they include that of a file beside them that holds one, `head_file` before others.
    """
    if hub.size(INDEX) is None:
        headers = {Path(_ONLY_FILE): hub.read_header(_ONLY_FILE)}
        places = dict.fromkeys(headers[Path(_ONLY_FILE)].tensors, _ONLY_FILE)
    else:
        places = checked_weight_map(_read_object(hub, INDEX), f"{hub.repo}/{INDEX}")
        headers = _indexed_headers(hub, places, wanted)
    if any(map(is_head, places)) or is_bare_head(places):
        return headers
    with hub_errors(hub.repo):
        stored = {blob.file for blob in find_blobs(hub.repo, hub.revision)}
    beside = stored.difference(places.values())
    for name in sorted(beside, key=lambda name: (name != head_file, name.count("/"), name)):
        if (head := head_alone(hub.read_header(name))).tensors:
            return headers | {Path(name): head}
    return headers


def _indexed_headers(hub: HubRepo, weight_map: dict[str, str], wanted: Callable[[str], bool]) -> dict[Path, Header]:
    files = {file for name, file in weight_map.items() if wanted(name)}
    telling = [file for name, file in weight_map.items() if name.endswith(_CONVOLUTION)]
    if files.isdisjoint(telling):
        files.update(telling[:1])
    headers = {Path(file): hub.read_header(file) for file in sorted(files)}
    drop_replaced(headers, weight_map)
    return headers


def _read_object(hub: HubRepo, file: str) -> dict[str, Any]:
    content = hub.read(file)
    if content is None:
        raise CheckpointError(f"{hub.repo}: no {file} found. Give a repo that holds a checkpoint.")
    return parse_json_object(content, f"{hub.repo}/{file}")
