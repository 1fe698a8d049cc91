"""The whole diagnosis: every check in order, each with a deadline, and none able to stop the others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import LogRecord, getLogger

import mlx.core as mx

from coordinator.cluster.discovery import Discovery, collect
from coordinator.doctor import answer, kernels, machine, network, step
from coordinator.doctor.finding import Finding, Verdict, judged
from coordinator.pipeline.worker_client import Candidate, ConnectionPolicy
from mtp.checkpoint.format.checkpoint import Checkpoint
from mtp.device import this_device
from proto import cluster_pb2 as pb
from proto.errors import ClusterError

CHECK_SECONDS = 60.0
"""Seconds. Longest single check."""

FULL_CHECK_SECONDS = 600.0
"""Seconds. Longest single check with --full, which loads the model several times."""

MDNS_SECONDS = 3.0
"""Seconds. Time for workers to answer on the network. A local answer takes about one."""

Report = Callable[[Finding], None]


@dataclass(frozen=True)
class DoctorOptions:
    """The model to check with, the addresses of workers, and the scope. `policy` decides how to connect to workers."""

    checkpoint: Checkpoint
    addresses: tuple[str, ...] = ()
    mdns: bool = True
    full: bool = False
    policy: ConnectionPolicy = field(default_factory=ConnectionPolicy)


class Diagnosis:
    """A run of all checks. `findings` holds their results, and `report` gets each as soon as it is known."""

    def __init__(self, options: DoctorOptions, report: Report) -> None:
        self.options = options
        self.findings: list[Finding] = []
        self._report = report
        self._seconds = FULL_CHECK_SECONDS if options.full else CHECK_SECONDS

    async def run(self) -> list[Finding]:
        """Run the checks of the system, the network, the kernels and the model, and return the findings."""
        await self._check_system()
        await self._check_network()
        await self._check_kernels()
        await self._check_model()
        return self.findings

    # ---- parts

    async def _check_system(self) -> None:
        await self._run("versions", machine.check_versions)
        await self._run("power", machine.check_power)

    async def _check_network(self) -> None:
        found, problem = await self._candidates()
        mdns = self.options.mdns
        await self._run(
            "mDNS",
            lambda: network.check_discovery(
                found, enabled=mdns, problem=problem, seconds=MDNS_SECONDS
            ),
        )
        if reached := await self._check_workers(found):
            own = machine.own_version()
            await self._run(
                "versions of the workers", lambda: network.check_equal_versions(own, reached)
            )
            await self._run("Thunderbolt Bridge", lambda: network.check_bridge(len(reached)))

    async def _candidates(self) -> tuple[list[Candidate], str]:
        """Return the named and the announced workers, and the first warning of the mDNS browser."""
        options = self.options
        with _warnings_of("coordinator.cluster.discovery") as problems:
            async with Discovery(options.addresses, mdns=options.mdns) as discovered:
                seconds = MDNS_SECONDS if options.mdns else 0.0
                return await collect(discovered, seconds), next(iter(problems), "")

    async def _check_workers(self, found: Sequence[Candidate]) -> list[network.ReachedWorker]:
        checkpoint = self.options.checkpoint
        fingerprint = await asyncio.to_thread(checkpoint.fingerprint) if found else ""
        model = pb.ModelRef(name="doctor", fingerprint=fingerprint)
        me = pb.Coordinator(id=secrets.token_hex(8), name="mtp-coord doctor")
        reached: list[network.ReachedWorker] = []
        for candidate in found:

            async def check(candidate: Candidate = candidate) -> Finding:
                """Ask the candidate, and keep a worker that answers."""
                worker, finding = await network.check_worker(
                    candidate, model, me, self.options.policy
                )
                if worker is not None:
                    reached.append(worker)
                return finding

            await self._run_async(f"worker {candidate.name}", check)
        return reached

    async def _check_kernels(self) -> None:
        config = self.options.checkpoint.config
        dtype = mx.float32 if this_device().computes_on_host else mx.bfloat16
        await self._run("evaluation", kernels.check_evaluation)
        await self._run("bandwidth", machine.measure_bandwidth)
        await self._run("memory", machine.check_memory)
        await self._run("GDN", lambda: kernels.check_gdn(config, dtype))

    async def _check_model(self) -> None:
        checkpoint, full = self.options.checkpoint, self.options.full
        tokens = 200 if full else 64
        depths = [1, 2, 4] if full else [2]
        if not checkpoint.mtp.complete:
            depths = []
        answers: dict[int, answer.Answer] = {}

        async def plain() -> Finding:
            """Measure the plain answer."""
            found = answers[0] = await answer.measure_answer(checkpoint, 0, tokens, pause=full)
            if full:
                return answer.judge_restart(found)
            speed = f"{found.tokens_per_second:.1f} tokens/s without drafts"
            return judged("answer", speed, "", {"tokens": len(found.tokens)})

        await self._run_async("answer", plain)
        for depth in depths:

            async def drafted(depth: int = depth) -> Finding:
                """Compare the answer with drafts to the plain answer."""
                answers[depth] = await answer.measure_answer(checkpoint, depth, tokens, pause=False)
                return answer.judge_identity(answers[0], answers[depth])

            await self._run_async(f"answer with {depth} drafts", drafted)
        differ = len({found.tokens for found in answers.values()}) > 1
        if 0 in answers and (full or differ):
            depth = 2 if 2 in answers else 0

            async def exact() -> Finding:
                """Measure --exact."""
                alone = await answer.measure_answer(checkpoint, 0, tokens, exact=True)
                windows = (
                    await answer.measure_answer(checkpoint, depth, tokens, exact=True)
                    if depth
                    else None
                )
                return answer.judge_exact(answers[0], alone, windows)

            await self._run_async("exact mode", exact)
        if full and 0 in answers:
            await self._run("step", lambda: step.check_step(checkpoint))
        if 2 in answers and 0 in answers:
            await self._run("speed", lambda: answer.judge_speed(answers[0], answers[2]))

    # ---- one check

    async def _run(self, name: str, check: Callable[[], Finding]) -> None:
        """Run a check that does not wait. It stays on this thread, because MLX's arrays belong to a thread."""

        async def call() -> Finding:
            """Call the check."""
            return check()

        await self._run_async(name, call)

    async def _run_async(self, name: str, check: Callable[[], Awaitable[Finding]]) -> None:
        """Run a check, and turn its error or its deadline into a finding."""
        try:
            async with asyncio.timeout(self._seconds):
                finding = await check()
        except TimeoutError:
            text = f"no result within {self._seconds:g} s"
            finding = Finding(name, Verdict.FAIL, text, "Run it again on an idle machine.")
        except ClusterError as error:
            finding = Finding(name, Verdict.FAIL, str(error), "See the message.")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            advice = "This check failed itself. Please report it with the output of --json."
            finding = Finding(name, Verdict.FAIL, text, advice)
        self.findings.append(finding)
        self._report(finding)


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Collect the warnings that the logger `name` gets inside the block, instead of printing them."""
    found: list[str] = []
    logger = getLogger(name)

    def collect_warning(record: LogRecord) -> bool:
        """Keep the text of a record, and drop the record."""
        found.append(f"{record.getMessage()} {getattr(record, 'error', '')}".strip())
        return False

    logger.addFilter(collect_warning)
    try:
        yield found
    finally:
        logger.removeFilter(collect_warning)
