"""The planner: exact, within memory, true to pinned layers, and clear where there is no plan."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.plan import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    SLOWER,
    LayerCost,
    ModelCosts,
    NodeSpec,
    Plan,
    StagePlan,
    Workload,
    make_plan,
)
from proto.errors import MemoryLimitError, SpanError, UsageError
from proto.span import Span

GB = 10**9

# ---- against brute force

layer_costs = st.builds(
    LayerCost,
    weight_bytes=st.integers(1, 20),
    seconds=st.integers(1, 20).map(float),
    kv_bytes=st.integers(0, 2),
    state_bytes=st.integers(0, 2),
)
model_strategy = st.builds(
    ModelCosts,
    layers=st.lists(layer_costs, min_size=1, max_size=7).map(tuple),
    embed_bytes=st.integers(0, 15),
    last_stage_bytes=st.integers(0, 15),
    lm_head_seconds=st.integers(0, 10).map(float),
    draft_seconds=st.integers(0, 10).map(float),
    head_kv_bytes=st.integers(0, 2),
    last_stage_needs_embed=st.booleans(),
)
workloads = st.builds(
    Workload,
    kv_tokens=st.integers(0, 3),
    draft_depth=st.integers(0, 2),
    reserve_bytes=st.integers(0, 3),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelCosts, list[NodeSpec], Workload]:
    """Draw a model, one to five nodes, of which one may be pinned, and a workload."""
    model = draw(model_strategy)
    count = draw(st.integers(1, 5))
    nodes = []
    for number in range(count):
        memory = draw(st.integers(5, 60) | st.just(10_000))
        speed = draw(st.sampled_from([0.5, 1.0, 2.0]))
        nodes.append(NodeSpec(f"n{number}", memory, speed))
    if draw(st.booleans()):
        start = draw(st.integers(0, len(model.layers) - 1))
        end = draw(st.integers(start + 1, len(model.layers)))
        pinned = draw(st.integers(0, count - 1))
        nodes[pinned] = replace(nodes[pinned], pinned=Span(start, end))
    return model, nodes, draw(workloads)


def stage_bytes(model: ModelCosts, work: Workload, span: Span) -> int:
    """Return the bytes of one stage, from the definition and not from the planner."""
    first, last = span.start == 0, span.end == len(model.layers)
    total = work.reserve_bytes + sum(model.layers[i].weight_bytes for i in span)
    total += work.kv_tokens * sum(model.layers[i].kv_bytes for i in span)
    total += 2 * sum(model.layers[i].state_bytes for i in span)
    if first or (last and model.last_stage_needs_embed):
        total += model.embed_bytes
    if last:
        total += model.last_stage_bytes + model.head_kv_bytes * work.kv_tokens
    return total


def stage_seconds(model: ModelCosts, work: Workload, node: NodeSpec, span: Span) -> float:
    """Return the seconds of one stage, from the definition."""
    seconds = sum(model.layers[i].seconds for i in span)
    if span.end == len(model.layers):
        seconds += model.lm_head_seconds + work.draft_depth * model.draft_seconds
    return seconds / node.speed


def every_plan(model: ModelCosts, nodes: Sequence[NodeSpec], work: Workload) -> Iterator[list[tuple[NodeSpec, Span]]]:
    """Yield every choice of nodes, order and cuts that fits the memory and the pinned layers."""
    layers = len(model.layers)
    must = [node for node in nodes if node.pinned is not None]
    for size in range(1, min(len(nodes), layers) + 1):
        for chosen in itertools.permutations(nodes, size):
            if any(node not in chosen for node in must):
                continue
            for cuts in itertools.combinations(range(1, layers), size - 1):
                ends = [0, *cuts, layers]
                spans = [Span(a, b) for a, b in itertools.pairwise(ends)]
                stages = list(zip(chosen, spans, strict=True))
                if all(
                    node.pinned in (None, span) and stage_bytes(model, work, span) <= node.memory_limit
                    for node, span in stages
                ):
                    yield stages


def brute_force(model: ModelCosts, nodes: Sequence[NodeSpec], work: Workload) -> tuple[int, float, float] | None:
    """Return (number of stages, value, value of the tie-breaker) of the best plan."""
    found = []
    for stages in every_plan(model, nodes, work):
        times = [stage_seconds(model, work, node, span) for node, span in stages]
        found.append((len(times), max(times), sum(t * t for t in times)))
    return min(found, key=lambda f: (-f[0], f[1], f[2]), default=None)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_as_good_as_trying_everything(problem: tuple[ModelCosts, list[NodeSpec], Workload]) -> None:
    """For up to 5 nodes the plan's value is that of the best of all plans, tie-breaker included.

    A plan that says so gives up at most SLOWER of it. Where no plan exists, the planner raises.
    """
    model, nodes, work = problem
    expected = brute_force(model, nodes, work)
    try:
        plan = make_plan(model, nodes, workload=work)
    except (MemoryLimitError, SpanError):
        assert expected is None
        return
    assert expected is not None
    times = [stage.predicted_seconds for stage in plan.stages]
    if plan.reason:
        assert len(times) == expected[0]
        assert max(times) <= expected[1] * (1 + SLOWER) + 1e-9
        return
    assert (len(times), max(times), sum(t * t for t in times)) == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_a_plan_keeps_its_promises(problem: tuple[ModelCosts, list[NodeSpec], Workload]) -> None:
    """A plan covers each layer once and in order, respects memory and pins, and has the defined bytes and times."""
    model, nodes, work = problem
    try:
        plan = make_plan(model, nodes, workload=work, epoch=7)
    except (MemoryLimitError, SpanError):
        return
    assert plan.epoch == 7
    assert [i for stage in plan.stages for i in stage.span] == list(range(len(model.layers)))
    by_name = {node.name: node for node in nodes}
    for stage in plan.stages:
        node = by_name.pop(stage.node)
        assert node.pinned in (None, stage.span)
        assert stage.first == (stage.span.start == 0)
        assert stage.last == (stage.span.end == len(model.layers))
        held = stage.weight_bytes + stage.cache_bytes
        assert held == stage_bytes(model, work, stage.span) <= node.memory_limit
        expected = stage_seconds(model, work, node, stage.span)
        assert stage.predicted_seconds == pytest.approx(expected)
    assert set(plan.unused) == set(by_name)
    assert all(node.pinned is None for node in by_name.values())


# ---- what a user sees


def test_a_stage_that_drafts_does_not_fill_the_others() -> None:
    """A cut that is little slower has room for many more tokens, and the plan says so. A much slower one is not taken.

    The last stage's drafts take as long as a layer, so the fastest cut gives the first machine more layers than half.
    """
    layers = tuple(LayerCost(GB, 0.001, kv_bytes=1000) for _ in range(48))
    nodes = [NodeSpec("first", 30 * GB), NodeSpec("last", 30 * GB)]

    def cut(drafts: int) -> tuple[int, str]:
        model = ModelCosts(layers=layers, draft_seconds=0.001)
        plan = make_plan(model, nodes, workload=Workload(1000, drafts))
        return len(plan.stages[0].span), plan.reason

    assert cut(2) == (25, "")
    layers_of_first, reason = cut(10)
    assert layers_of_first == 27
    assert reason.startswith("7% slower than the fastest cut, with room for 3.3 times")


def model_of(layers: int, *, seconds: float = 0.001, weight: int = GB) -> ModelCosts:
    """Return a model of equal layers."""
    return ModelCosts(layers=(LayerCost(weight, seconds),) * layers)


def test_unlike_machines_are_cut_for_whole_requests() -> None:
    """No other cut takes less time for a prompt and its answer on its slowest stage, if prompts count."""
    model = ModelCosts(layers=(LayerCost(GB, 0.001, prompt_operations=1e9),) * 24, lm_head_seconds=0.002)
    mac, box = NodeSpec("mac", 99 * GB, 4.0, operations=1e13), NodeSpec("box", 99 * GB, 4.0, operations=9e13)

    def request(cut: int, order: Sequence[NodeSpec]) -> float:
        ends, counts = (0.0, model.lm_head_seconds), (cut, 24 - cut)
        return max(
            PROMPT_TOKENS * count * 1e9 / node.operations + ANSWER_TOKENS * (count * 0.001 + end) / node.speed
            for node, count, end in zip(order, counts, ends, strict=True)
        )

    plan = make_plan(model, [mac, box])
    order = [mac if stage.node == "mac" else box for stage in plan.stages]
    best = min(request(cut, pair) for pair in ([mac, box], [box, mac]) for cut in range(1, 24))
    assert request(len(plan.stages[0].span), order) == pytest.approx(best)
    even = make_plan(model, [mac, replace(box, operations=1.2e13)])
    assert abs(len(even.stages[0].span) - 12) <= 1 and even.reason == ""
    assert [stage.prompt_seconds for stage in even.stages] != [0.0, 0.0]


def spans(plan: Plan) -> list[str]:
    """Return the stages as "node span"."""
    return [f"{stage.node} {stage.span}" for stage in plan.stages]


def test_pinned_layers_stay_and_others_fill_the_gaps() -> None:
    """Pinned nodes stay at their layers, and the other nodes fill the gaps."""
    nodes = [
        NodeSpec("free-1", 100 * GB),
        NodeSpec("last", 100 * GB, pinned=Span(8, 10)),
        NodeSpec("middle", 100 * GB, pinned=Span(2, 4)),
        NodeSpec("free-2", 100 * GB),
    ]
    assert spans(make_plan(model_of(10), nodes)) == [
        "free-1 0-1",
        "middle 2-3",
        "free-2 4-7",
        "last 8-9",
    ]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"a": (0, 5), "b": (4, 8)}, r"both a \(0-4\) and b \(4-7\) are pinned to layer 4:"),
        ({"a": (0, 8), "b": (2, 4)}, r"both a \(0-7\) and b \(2-3\) are pinned to layers 2-3:"),
        ({"a": (0, 3), "b": (5, 8)}, r"no worker holds layers 3-4 \(pinned: a 0-2, b 5-7\)"),
        ({"b": (1, 4), "a": (4, 7)}, r"holds layer 0 and layer 7 \(pinned: b 1-3, a 4-6\)"),
        ({"a": (2, 4), "free": None}, r"layers 0-1 and layers 4-7 .*; 1 without --layers cannot"),
        ({"a": (0, 9)}, r"a is pinned to layers 0-8: the model has 8, 0-7"),
    ],
)
def test_gaps_and_overlaps_are_named(pins: dict[str, tuple[int, int] | None], message: str) -> None:
    """The error names the layers, the workers and the flag to change."""
    nodes = [NodeSpec(n, 100 * GB, pinned=Span(*p) if p else None) for n, p in pins.items()]
    with pytest.raises(SpanError, match=message) as caught:
        make_plan(model_of(8), nodes)
    assert "--layers" in str(caught.value) or "the model has" in str(caught.value)


def test_a_shortage_says_where_and_how_much() -> None:
    """The error has the totals, and each node that lacks memory in the closest cut."""
    nodes = [NodeSpec("a", 3 * GB), NodeSpec("b", 4 * GB)]
    with pytest.raises(MemoryLimitError) as caught:
        make_plan(model_of(10), nodes)
    message = str(caught.value)
    assert "weights of 10 GB" in message
    assert "7 GB on 2 nodes" in message
    lacking = {name: int(n) for name, n in re.findall(r"(\w) \(limit \d GB\) lacks (\d) GB", message)}
    assert lacking == {"a": 1, "b": 2} or lacking == {"a": 2, "b": 1}


def test_requests_need_room_too() -> None:
    """K/V, states and snapshots of open windows, and the reserve, count against the limit."""
    layer = LayerCost(GB, 0.001, kv_bytes=1000, state_bytes=10**6)
    model = ModelCosts(layers=(layer,) * 2)
    node = [NodeSpec("a", 3 * GB)]
    assert make_plan(model, node, workload=Workload()).stages[0].cache_bytes == 4 * 10**6
    work = Workload(kv_tokens=10_000, reserve_bytes=5)
    stage = make_plan(model, node, workload=work).stages[0]
    assert stage.cache_bytes == 2 * (1000 * 10_000 + 10**6 * 2) + 5
    with pytest.raises(MemoryLimitError):
        make_plan(model, node, workload=replace(work, kv_tokens=10**6))


def test_a_plan_with_a_hole_cannot_be_made() -> None:
    """The constructor of Plan refuses stages that do not follow each other."""
    stage = StagePlan("a", Span(1, 2), False, True, 1, 0, 1, 0.0)
    with pytest.raises(SpanError):
        Plan(1, (stage,))
    with pytest.raises(SpanError):
        Plan(1, ())


def test_ten_different_nodes_are_planned_at_once() -> None:
    """The search over ten nodes and 64 layers takes at most one second of CPU time: recovery waits for it."""
    nodes = [NodeSpec(f"n{i}", 40 * GB, speed=1 + i / 7) for i in range(10)]
    model = model_of(64)
    started = time.process_time()  # CPU time: independent of other load
    plan = make_plan(model, nodes, workload=Workload(draft_depth=2))
    assert time.process_time() - started < 1.0
    assert len(plan.stages) == 10
    with pytest.raises(UsageError, match="at most 10 machines without --layers"):
        make_plan(model, [NodeSpec("more", 40 * GB), *nodes])


def test_equal_nodes_keep_their_order() -> None:
    """Equal nodes hold the layers in the order given, and the first ones serve where there are too many."""
    nodes = [NodeSpec(name, 40 * GB) for name in "dacb"]
    assert spans(make_plan(model_of(8), nodes)) == ["d 0-1", "a 2-3", "c 4-5", "b 6-7"]
    assert spans(make_plan(model_of(2), nodes)) == ["d 0-0", "a 1-1"]


# ---- prefixes on disk


def placed(*nodes: NodeSpec) -> list[tuple[str, Span]]:
    """Return which node has which layers of a model whose last stage does more."""
    model = ModelCosts((LayerCost(100, 1.0, kv_bytes=1),) * 8, last_stage_bytes=100, lm_head_seconds=4.0)
    return [(stage.node, stage.span) for stage in make_plan(model, nodes).stages]


def test_a_machine_gets_the_layers_whose_blocks_it_has() -> None:
    """Names and noise decide between equal machines only if neither has blocks. A faster machine stays first."""
    blocks = {"first": ((0, 6, 6000),), "last": ((6, 9, 3000),)}
    cold = [span for _, span in placed(NodeSpec("a", 10**6), NodeSpec("b", 10**6))]
    assert cold == [Span(0, 6), Span(6, 8)]
    for one, other in (("first", "last"), ("last", "first")):
        for noise in (0.97, 1.0, 1.03):
            nodes = [NodeSpec(one, 10**6, 1.0, blocks=blocks[one]), NodeSpec(other, 10**6, noise, blocks=blocks[other])]
            assert placed(*nodes) == [("first", cold[0]), ("last", cold[1])]
    slow = NodeSpec("first", 10**6, 0.5, blocks=blocks["first"]), NodeSpec("last", 10**6, blocks=blocks["last"])
    assert placed(*slow) == placed(*(replace(node, blocks=()) for node in slow)), "blocks never cost speed"


def test_of_three_machines_two_keep_what_they_have() -> None:
    """The cut is that of a cold start, and most layers stay."""
    known = {"x": ((6, 9, 900),), "y": ((0, 6, 6000),), "new": ()}
    for order in itertools.permutations(known):
        stages = placed(*(NodeSpec(name, 10**6, blocks=known[name]) for name in order))
        kept = {name: {*span} & {n for a, b, _ in known[name] for n in range(a, b)} for name, span in stages}
        assert kept["x"] and len(kept["y"]) >= 3
    wild = NodeSpec("a", 10**6, blocks=((5, 3, 10), (0, 2**40, 2**63), (7, 7, 1)))
    assert len(placed(wild, NodeSpec("b", 10**6))) == 2
