"""The choice between one machine, a pipeline and groups (docs/protocol.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cluster.served_model import ServedModel
from coordinator.cluster.view import Member
from coordinator.planning.capacity import model_costs
from coordinator.planning.chips import LAYER_SECONDS, mac_spec, mac_specs
from coordinator.planning.groups import (
    DEFAULT_COLLECTIVE,
    ROW_COSTS,
    Machine,
    Parallel,
    Planning,
    choose_plan,
    group_machines,
    plan_machines,
    predict_plans,
)
from coordinator.planning.plan import LayerCost, ModelCosts, NodeSpec, Plan, Workload
from coordinator.planning.recommend import recommendations
from mtp.checkpoint.format.cut import Cut
from mtp.checkpoint.hub.known_repos import MLX_LM_MODELS
from mtp.checkpoint.hub.published import converted_headers, find_published
from proto import cluster_pb2 as pb
from proto.errors import ClusterError, MemoryLimitError, SpanError, UsageError
from proto.span import Span
from proto.stage_options import StageOptions

LAYERS = 8
LAYER_BYTES = 2**30
SECONDS = 10e-3
"""Seconds of a layer on a machine of speed 1, far above a sum over the default link."""


def costs_of(size: int) -> ModelCosts:
    """Return the costs of a member's share of eight layers with 16 heads."""
    if 16 % size:
        raise SpanError(f"the layers cannot be cut for {size} machines")
    layer = LayerCost(LAYER_BYTES // size, SECONDS / size)
    return ModelCosts((layer,) * LAYERS)


def machines(count: int, **changes: object) -> list[Machine]:
    """Return equal machines that hold the whole model, with direct links."""
    found = [Machine(NodeSpec(f"mac-{i}", 2 * LAYERS * LAYER_BYTES), "m4", "10.0.0.1") for i in range(count)]
    return [replace(machine, **changes) for machine in found]  # type: ignore[arg-type]


def planning(parallel: str, collective: float = DEFAULT_COLLECTIVE) -> Planning:
    return Planning(costs_of, Workload(), Parallel.parse(parallel), collective=collective)


def measured(some: list[Machine], seconds: float) -> list[Machine]:
    """Return machines that have measured a sum of `seconds` together."""
    names = frozenset(machine.node.name for machine in some)
    return [replace(one, collectives={**one.collectives, names: seconds}) for one in some]


def shape(parallel: str, some: list[Machine], epoch: int = 1) -> tuple[int, int]:
    """Return the number of stages of the chosen plan and the members of each."""
    plan = choose_plan(planning(parallel), some, epoch)
    assert len(set(plan.nodes)) == len(plan.nodes) == len(plan.stages) * plan.group_size
    return len(plan.stages), plan.group_size


@pytest.mark.parametrize(
    ("parallel", "some", "epoch", "expected"),
    [
        ("pipeline", machines(3), 1, (3, 1)),
        ("tensor", machines(1), 1, (1, 1)),
        ("tensor", machines(2), 1, (1, 2)),
        ("tensor", machines(4), 1, (1, 4)),
        ("2x2", machines(4), 1, (2, 2)),
        ("1x2", machines(3), 1, (1, 2)),
        ("auto", machines(2), 1, (1, 2)),
        ("tensor", machines(1), 2, (1, 1)),
        ("tensor", machines(3), 2, (1, 2)),
        ("2x2", machines(3), 2, (1, 2)),
        ("2x2", machines(1), 2, (1, 1)),
        ("1x2", [*machines(1), *machines(2, kind="m1")[1:]], 2, (2, 1)),
    ],
)
def test_machines_form_the_groups_that_are_asked_for(
    parallel: str, some: list[Machine], epoch: int, expected: tuple[int, int]
) -> None:
    """`auto` takes a group where reading the weights takes longer than the sums.

    In a later epoch, after a loss, any plan is better than none.
    """
    assert shape(parallel, some, epoch) == expected


def test_auto_refuses_a_slow_link() -> None:
    """A sum of 5 ms costs more than half of the layers saves, so one machine or a pipeline serves."""
    assert shape("auto", measured(machines(2), 5e-3))[1] == 1
    assert shape("auto", measured(machines(2), 30e-6)) == (1, 2)


def test_auto_says_why() -> None:
    """The reason of a plan has the predicted speed of every other one."""
    plan = choose_plan(planning("auto", collective=1e-3), machines(4), 1)
    assert plan.group_size > 1
    assert "tokens/s of one stream are predicted" in plan.reason
    assert "a pipeline of 4" in plan.reason


def test_every_plan_is_predicted() -> None:
    """The prediction has one machine, the pipeline and each group, with the time of a token."""
    found = {one.text: one for one in predict_plans(planning("auto", collective=1e-4), machines(4))}
    assert list(found) == ["one machine", "a pipeline of 4", "2 groups of 2", "a group of 4"]
    group, alone = found["a group of 4"], found["one machine"]
    assert group.token == pytest.approx(LAYERS * (SECONDS / 4 + 2e-4))
    assert alone.token == pytest.approx(LAYERS * SECONDS)


@pytest.mark.parametrize(
    ("parallel", "some", "error", "text"),
    [
        ("tensor", machines(2, direct=""), SpanError, "mac-0, mac-1 has no direct link.*--direct"),
        ("3x2", machines(4), SpanError, "4 machines make 2 groups of 2 equal ones, 3 are needed"),
        ("1x3", machines(3), SpanError, "cut for 3 machines"),
        (
            "tensor",
            [*machines(1), *machines(2, kind="m1")[1:]],
            SpanError,
            "mac-0: m4; mac-1: m1.*pipeline",
        ),
        (
            "tensor",
            machines(2, node=NodeSpec("a", LAYER_BYTES, pinned=Span(0, 4))),
            UsageError,
            "a has --layers",
        ),
        ("tensor", machines(2, node=NodeSpec("a", LAYER_BYTES)), ClusterError, "a"),
    ],
)
def test_machines_that_cannot_be_members_are_named(
    parallel: str, some: list[Machine], error: type[ClusterError], text: str
) -> None:
    """The first plan is what the user asked for, or an error that says what to change."""
    with pytest.raises(error, match=text):
        choose_plan(planning(parallel), some, 1)


def test_a_member_that_lacks_memory_is_named() -> None:
    """Each member needs memory for its share, whatever the others have."""
    small = Machine(NodeSpec("small", 3 * LAYER_BYTES), "m4", "10.0.0.1")
    with pytest.raises(MemoryLimitError, match="small"):
        choose_plan(planning("1x2"), [small, *machines(1)], 1)


def test_groups_are_made_of_equal_machines() -> None:
    """Machines of equal memory come together, the largest first. A machine without a partner is left out."""
    sizes = (64, 16, 64, 16, 16)
    some = [Machine(NodeSpec(f"{size}-{i}", size * 2**30), "m4", "h") for i, size in enumerate(sizes)]
    teams = group_machines(some, 2)
    assert [[m.node.name for m in team] for team in teams] == [["64-0", "64-2"], ["16-1", "16-3"]]
    assert group_machines(some, 2, groups=1) == teams[:1]


@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("change", [{"direct": ""}, {"direct": "127.0.0.1"}, {"kind": "m1"}])
def test_a_machine_that_cannot_be_a_member_is_left_out(epoch: int, change: dict[str, object]) -> None:
    """A worker without a link, or of another kind, that joins groups changes nothing."""
    (fifth,) = machines(1, node=NodeSpec("fifth", 2 * LAYERS * LAYER_BYTES))
    some = [*machines(4), replace(fifth, **change)]  # type: ignore[arg-type]
    plan = choose_plan(planning("2x2"), some, epoch)
    assert (len(plan.stages), plan.group_size, plan.unused) == (2, 2, ("fifth",))


THUNDERBOLT, RDMA = 180e-6, 30e-6
"""Seconds of a sum over the links of the published figures, by users of mlx-lm."""


def test_predictions_come_near_what_others_measured() -> None:
    """All published figures of 27B on one and two Macs are met within a fifth, with the same constants for all Macs.

    mlx-lm's request 990 has M4 Pro minis: 15.5 alone, and two with 17.0 plain and 25.0 with one draft a window. It is
    not known how the weights on the M3 Ultra of oMLX's 2423 (16.1) are stored, so its own figure gives its speed.
    """
    model = find_published("qwen3.5:27b")
    assert model is not None
    checkpoint = converted_headers(model, 4)

    def shares(size: int) -> ModelCosts:
        """Return the costs of a share."""
        return model_costs(checkpoint.cut_for(Cut(0, size)))

    def predicted(mac: NodeSpec, count: int, collective: float = 0.0, depth: int = 0) -> float:
        """Return the tokens a second of `count` Macs."""
        macs = [Machine(replace(mac, name=f"mac-{i}"), "one kind", "10.0.0.1") for i in range(count)]
        plans = predict_plans(Planning(shares, Workload(), Parallel.parse("auto"), collective=collective), macs)
        group = next(one for one in plans if one.plan.group_size == count)
        return 1 / (group.drafted[depth - 1] if depth else group.token)

    mini = mac_spec("M4 Pro 64GB")
    reads = 1 / predicted(NodeSpec("bytes alone", 2**36), 1)
    launches = len(shares(1).layers) * LAYER_SECONDS
    ultra = replace(mini, speed=reads / (1 / 16.1 - launches))
    found = {
        15.5: predicted(mini, 1),
        17.0: predicted(mini, 2, THUNDERBOLT),
        25.0: predicted(mini, 2, THUNDERBOLT, depth=1),
        16.1: predicted(ultra, 1),
        28.6: predicted(ultra, 2, RDMA),
    }
    assert found == {measured: pytest.approx(measured, rel=0.2) for measured in found}
    assert found[25.0] == pytest.approx(25.0, rel=0.05)


def test_a_measured_table_of_rows_replaces_the_published_one() -> None:
    """Rows that cost a whole read make drafts useless. Where the rows of a tile cost the same, more drafts are best."""
    model = find_published("qwen3.5:27b")
    assert model is not None
    macs = plan_machines([mac_spec("M4 Pro 64GB")])
    planned = Planning.of(converted_headers(model, 4), 2000)
    rates = {}
    for name, table in {"published": ROW_COSTS, "dear": {1: 1.0, 8: 8.0}, "even": {1: 1.0, 8: 2.4}}.items():
        (found,) = predict_plans(replace(planned, row_costs=table), macs)
        rates[name] = [found.token / seconds for seconds in found.drafted]
    assert max(rates["dear"]) < 1 < max(rates["even"]) < max(rates["published"])
    assert max(rates["even"][3:]) < max(rates["even"])
    assert max(rates["published"][:4]) < max(rates["published"])


def test_auto_counts_drafts() -> None:
    """A group that is slower without drafts, and faster with them, is chosen: each draft is verified in its pass."""
    model = find_published("qwen3.5:27b")
    assert model is not None
    checkpoint = converted_headers(model, 4)

    def chosen(*, with_head: bool) -> Plan:
        def shares(size: int) -> ModelCosts:
            return model_costs(checkpoint.cut_for(Cut(0, size)), with_head=with_head)

        macs = [Machine(replace(mac_spec("M4 Pro 64GB"), name=f"mac-{i}"), "m4", "10.0.0.1") for i in range(2)]
        return choose_plan(Planning(shares, Workload(), Parallel.parse("auto")), macs, 1)

    drafting, plain = chosen(with_head=True), chosen(with_head=False)
    assert (drafting.group_size, plain.group_size) == (2, 1)
    assert "a group of 2: 30.7 tokens/s of one stream are predicted with drafts (one machine 27.8" in drafting.reason
    assert "one machine: 15.1 tokens/s of one stream are predicted (" in plain.reason


def test_auto_counts_the_drafts_that_are_fixed() -> None:
    """The group that is fastest with more drafts is slower than one machine if --mtp fixes one draft.

    The workers report their chips, whose launches a group does not share.
    """
    model = find_published("qwen3.5:27b")
    assert model is not None
    parallel, speed = Parallel.parse("auto"), mac_spec("M4 Pro 64GB").speed
    served = ServedModel(converted_headers(model, 4), pb.ModelRef(), StageOptions(), 1, 1, parallel=parallel)
    hosts = ("10.0.0.1", "10.0.0.2")
    chip = {"chip": "Apple M4 Pro", "arithmetic": "metal applegpu_g16s", "speed": speed}
    members = [Member(f"{host}:1", host, host, 40 * 2**30, direct=host, **chip) for host in hosts]  # type: ignore[arg-type]
    sizes = {None: 2, 0: 1, 1: 1, 2: 2}
    found = {depth: replace(served, fixed_depth=depth).planner()(members, 1) for depth in sizes}
    assert {depth: plan.group_size for depth, plan in found.items()} == sizes
    assert "one machine: 21.9 tokens/s of one stream are predicted with drafts (" in found[1].reason


@pytest.mark.parametrize("macs", [("M4 Pro 64GB",) * 2, ("M4 Pro 64GB", "M4 Max 128GB"), ("M4 16GB",) * 4])
def test_a_recommendation_has_the_figures_of_one_plan(macs: tuple[str, ...]) -> None:
    """Speeds, context and number of Macs belong together: the row of one Mac is that of this Mac alone."""
    specs = mac_specs(macs)
    best = max(specs, key=lambda spec: spec.speed)
    alone = {one.name: one for one in recommendations([best])}
    found = list(recommendations(specs))
    assert found
    for one in found:
        assert one.drafted >= one.plain or one.machines == 1
        if one.machines == 1:
            assert replace(one, best=False) == replace(alone[one.name], best=False)
            assert one.flags == "--single-node"
        elif one.name in alone:  # more Macs are taken only where they are faster
            assert one.speed > 1.09 * alone[one.name].speed


def test_one_model_is_recommended_with_the_flags_of_its_plan() -> None:
    """The largest fast one with room for agents is marked. serve's flags give each plan, and rows on disk are apart."""
    found = {one.name: one for one in recommendations(mac_specs(["M4 Pro 64GB"] * 2))}
    assert [one.name for one in found.values() if one.best] == ["qwen3.8:flash-next"]
    large = found["qwen3.8:flash-next"]
    assert (large.flags, large.nbytes // 10**9, large.download // 10**9) == ("--nodes 2", 72, 104)
    assert found["qwen3.5:9b"].flags == "--single-node", "a group is less than a tenth faster"
    assert found["qwen3.8:27b"].flags == "--parallel 1x2"
    for one in found.values():
        flag, _, value = one.flags.partition(" ")
        if flag == "--parallel":
            assert Parallel.parse(value).machines == one.machines
        assert one.download == one.nbytes or one is large
    few = recommendations(mac_specs(["M4 16GB"]))
    assert [one.name for one in few if one.best] == ["qwen3.5:9b"], "8 bits leave no room for agents"


def test_models_of_mlx_lm_are_recommended_where_they_fit() -> None:
    """Each has its row on a large machine. A head that its conversions lack can be fetched for two of them."""
    found = {one.name: one for one in recommendations(mac_specs(["M3 Ultra 512GB"] * 2))}
    for model in MLX_LM_MODELS:
        one = found[model.short]
        head = False if one.name in ("glm4.7:355b-a32b", "deepseek-v3.2:671b-a37b") else None
        assert (one.repo, one.head, one.drafted) == (model.repo, head, one.plain)
    assert found["kimi-k2:1t-a32b"].machines == 2
    assert found["glm4.7:355b-a32b"].machines == 1
    small = {one.name for one in recommendations(mac_specs(["M4 Pro 48GB"] * 2))}
    assert small & {model.short for model in MLX_LM_MODELS} == {
        "mistral-small:24b", "nemotron-3-nano:30b-a3b", "llama3.3:70b", "gpt-oss:120b"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "2", "0x2", "2x0", "2x9", "4x1", "x", "tensor2", "999x2"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write auto, pipeline, tensor, or groups x machines"):
        Parallel.parse(text)


def test_exact_groups_divide_the_slices() -> None:
    """Three of four machines serve as a group of two in exact mode, and a group of three is refused by name."""
    exact = replace(planning("tensor"), slices=4)
    assert choose_plan(exact, machines(4), 1).group_size == 4
    assert choose_plan(exact, machines(3), 2).group_size == 2
    with pytest.raises(SpanError, match="groups of 3 machines cannot share 4 slices"):
        choose_plan(replace(exact, parallel=Parallel.parse("1x3")), machines(3), 1)
    sizes = {found.plan.group_size for found in predict_plans(exact, machines(4))}
    assert sizes == {1, 2, 4}


def test_a_group_over_a_slow_link_is_refused() -> None:
    """The error has the machines, the measured sum and the time of a token's sums. Other plans stay possible."""
    slow = measured(machines(2), 50e-3)
    with pytest.raises(SpanError, match=r"link of .*too slow for a group: a sum takes 50 ms, .* 0\.8 s"):
        choose_plan(planning("tensor"), slow, 1)
    assert shape("tensor", slow, epoch=2) == shape("pipeline", slow)
    assert shape("auto", slow)[1] == 1


def test_a_slow_cable_counts_for_its_own_group() -> None:
    """Two machines on a bad cable are refused, and a group of all, which has not measured a sum yet, is not."""
    first, second, third, fourth = machines(4)
    first, second = measured([first, second], 50e-3)
    some = [first, second, third, fourth]
    assert shape("tensor", some) == (1, 4)
    with pytest.raises(SpanError, match="too slow"):
        choose_plan(planning("2x2"), some, 1)
    assert shape("tensor", measured(some, 50e-3), epoch=2) == shape("pipeline", some)
