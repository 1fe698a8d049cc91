"""Families whose layers are this project's own, against themselves over stages, drafts, prefixes and conversions."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.drafts.controller import MtpMode
from coordinator.schedule.admission import Limits
from coordinator.schedule.request import GenerationRequest
from mtp.checkpoint.convert.convert import Quantization, Settings, convert
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.flash_next.layers import NgramState
from mtp.flash_next.ngrams import table_names
from mtp.layers.kv_cache import PlainKV
from mtp.layers.reference.gdn import GDNCache
from mtp.layers.sparse_attention import IndexedKV, LatentKV
from proto.errors import UsageError
from proto.params import SamplingParams
from tests.bench.exactness import answers_together
from tests.support.checkpoints.own_families import OWN_FAMILIES
from tests.support.stages.local_run import Answered, run
from tests.support.stages.local_stages import local_stages

pytest.importorskip("torch", reason="transformers needs torch")

EOS = 255


@pytest.fixture(scope="module", params=OWN_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Return the name of each family."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of the family with a head."""
    return OWN_FAMILIES[family].write(tmp_path_factory.mktemp(family) / "model")


def requests(count: int = 10, lengths: Sequence[int] = (30, 80, 151)) -> list[GenerationRequest]:
    """Return a greedy and a sampled request of `count` tokens for each length of a prompt.

    By default prompts end before and after the budget of a query.
    """
    chance = random.Random(3)
    found = []
    for seed, length in enumerate(lengths):
        prompt = [chance.randrange(EOS) for _ in range(length)]
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=seed, logprobs=1)
            found.append(GenerationRequest(tuple(prompt), count, params))
    return found


def answers(
    path: Path, mtp: str, stages: int, chunk: int, asked: Sequence[GenerationRequest] = (), **options: Any
) -> list[Answered]:
    """Return the answers of `stages` stages to `asked`, or to the usual requests."""
    options |= {"dtype": "float32", "limits": Limits(context=1024, prefill_chunk=chunk)}
    return run(path, asked or requests(), mtp=mtp, stages=stages, **options)


def different(found: Sequence[Answered], expected: Sequence[Answered]) -> int:
    """Return how many tokens and log-probabilities differ."""
    return sum(
        a != b
        for one, other in zip(found, expected, strict=True)
        for a, b in zip((*one.tokens, *one.logprobs), (*other.tokens, *other.logprobs), strict=True)
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Answered]:
    """Return the answers of one stage without drafts, one after another."""
    return answers(model, "off", 1, 512, one_by_one=True)


SLOW = (("2", 1, 64), ("auto", 4, 16), ("off", 2, 32))

RUNS = {("3", 2, 33): "glm", ("filled", 4, 7): "flash-next", ("1", 4, 50): "", **dict.fromkeys(SLOW)}
"""The family that runs by default with a value of --mtp, a number of stages and a length of chunks."""


def cases() -> Iterator[Any]:
    """Yield every run of every family."""
    for (case, usual), name in itertools.product(RUNS.items(), OWN_FAMILIES):
        mark = pytest.mark.slow if usual is None else pytest.mark.thorough
        yield pytest.param(name, *case, marks=() if name == usual else mark)


@pytest.mark.parametrize(("family", "mtp", "stages", "chunk"), [*cases()], indirect=["family"])
def test_stages_and_drafts_change_nothing(
    model: Path, family: str, expected: list[Answered], mtp: str, stages: int, chunk: int
) -> None:
    """Tokens and log-probabilities have the same bits, and drafts are accepted and rejected."""
    found = answers(model, mtp, stages, chunk, one_by_one=mtp == "filled")
    assert different(found, expected) == 0
    if mtp not in ("off", "auto"):
        accepted, drafted = (sum(getattr(a.stats, n) for a in found) for n in ("accepted", "drafted"))
        assert 0 <= accepted < drafted
        assert accepted or family == "glm"  # whose random head is seldom right


LONG = {name: requests(count, [20 + 7 * i for i in range(15)]) for name, count in (("flash-next", 280), ("glm", 140))}


@pytest.fixture(scope="module")
def long_answers(family: str, model: Path) -> list[Answered]:
    """Return 30 long answers of one stage without drafts."""
    return answers(model, "off", 1, 512, LONG[family], one_by_one=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mtp", ["1", "3", "filled", "auto"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_fifty_thousand_tokens(family: str, model: Path, long_answers: list[Answered], stages: int, mtp: str) -> None:
    """Each of twelve runs has the tokens of one stage without drafts, while the pipeline fails twice."""
    limits = Limits(context=1024, prefill_chunk=40 + stages)
    options: dict[str, Any] = {"dtype": "float32", "limits": limits, "stages": stages, "mtp": MtpMode.parse(mtp)}

    async def main() -> list[Answered]:
        async with local_stages(Checkpoint.open(model), **options) as loop:
            found = await answers_together(loop, LONG[family], 1 if mtp == "filled" else 8, kills=2)
            assert loop.recoveries == 2
            return found

    found = asyncio.run(main())
    assert different(found, long_answers) == 0
    assert sum(len(a.tokens) for a in found) >= 4200


def _commit_but_for(commit: Callable[..., None], name: str) -> Callable[..., None]:
    """Return a commit that leaves a field of the state as it is."""

    def faulty(self: Any, *args: Any) -> None:
        kept = getattr(self, name)
        commit(self, *args)
        setattr(self, name, kept)

    return faulty


FAULTS: dict[tuple[str, str], tuple[type, str, Callable[..., Any]]] = {
    **{
        ("flash-next", what): (NgramState, "apply_commit", _commit_but_for(NgramState.apply_commit, field))
        for what, field in (("tokens of n-grams", "context"), ("rows of the convolution", "rows"))
    },
    **{
        ("glm", what): (GDNCache, "apply_commit", _commit_but_for(GDNCache.apply_commit, field))
        for what, field in (("state of KDA", "state"), ("rows of the convolutions", "conv"))
    },
    **{(name, "keys of blocks"): (IndexedKV, "trim", PlainKV.trim) for name in OWN_FAMILIES},
    ("glm", "latents"): (LatentKV, "trim", lambda cache, count: count),
}


@pytest.mark.parametrize(("family", "fault"), FAULTS, indirect=["family"])
def test_a_faulty_commit_of_a_state_is_seen(
    family: str, model: Path, expected: list[Answered], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that keeps what was rejected changes an answer, or is out of order."""
    owner, name, replacement = FAULTS[family, fault]
    monkeypatch.setattr(owner, name, replacement)
    try:
        found = answers(model, "2", 1, 64)
    except AssertionError:  # the engine refuses rows that do not follow the end of a state
        assert family == "glm"
        return
    assert different(found, expected) > 0


@pytest.mark.parametrize(
    ("family", "cuts"),
    [("flash-next", (1, 2)), pytest.param("glm", (1, 1, 2), marks=pytest.mark.thorough)],
    indirect=["family"],
)
def test_a_prefix_and_a_disk_change_nothing(
    model: Path, expected: list[Answered], cuts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are asked again, in memory and after a restart over another cut, have the same answers."""
    # A machine that runs other tests too may take long to write.
    monkeypatch.setattr("worker.engine.prefix_disk.CLOSE_SECONDS", 30.0)
    for stages in cuts:
        options: dict[str, Any] = {"state": tmp_path, "prefix_disk": 2**28, "one_by_one": True}
        found = answers(model, "2", stages, 64, **options)
        assert different(found, expected) == 0
    assert sum(answer.stats.cached_tokens for answer in found) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("bits", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_conversion_keeps_the_answers(family: str, model: Path, tmp_path: Path, bits: int | None) -> None:
    """A plain conversion has the answers of its source. A quantized one has the same over stages."""
    quantization = None if bits is None else Quantization(bits, 32)
    convert(Checkpoint.open(model), tmp_path / "mlx", Settings(quantization=quantization))
    converted = Checkpoint.open(tmp_path / "mlx")
    assert converted.unknown == ()
    assert converted.mtp.complete
    if family == "flash-next":
        stored = {converted.tensors[name].dtype for name in table_names(converted, "layers.1")["weight"]}
        assert stored == ({"F32"} if bits is None else {"U32"})
    alone = answers(model if bits is None else tmp_path / "mlx", "off", 1, 512, one_by_one=True)
    assert different(answers(tmp_path / "mlx", "2", 2, 64), alone) == 0


def test_flags_that_a_family_lacks_are_refused(family: str, model: Path) -> None:
    """--kv-bits and --exact name the family."""
    for flag, options in (("--kv-bits", {"kv_bits": 8}), ("--exact", {"exact": True})):
        with pytest.raises(UsageError, match=f"{flag} is not supported for {OWN_FAMILIES[family].name}"):
            answers(model, "off", 1, 64, **options)
