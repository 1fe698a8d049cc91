"""The promises of the project, and the tests that guard them. Each test exists and runs by default."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

UNIT, PARITY, CLUSTER = "tests/unit", "tests/parity", "tests/cluster"
COORDINATOR = f"{UNIT}/coordinator"

PROMISES: dict[str, tuple[str, ...]] = {
    # ---- heads
    "dense heads and heads of experts draft": (
        f"{PARITY}/test_head.py::test_drafts_follow_the_formula",
        f"{COORDINATOR}/cli/test_head_health.py::test_a_good_head_works",
    ),
    "experts stored one by one and fused ones are the same experts": (
        f"{UNIT}/mtp/test_checkpoint_names.py::test_unfused_experts_become_one_stack_in_order_of_expert",
        f"{UNIT}/mtp/test_checkpoint_names.py::test_fused_experts_are_split_gate_first",
    ),
    "the head may lie in the checkpoint or in a file beside it": (
        f"{UNIT}/mtp/test_checkpoint_names.py::test_a_head_under_another_name_is_the_same_head",
        f"{UNIT}/mtp/test_checkpoint_names.py::test_a_head_beside_the_model_is_found_by_its_tensors",
    ),
    "a lost head can be added afterwards": (
        f"{COORDINATOR}/cli/test_add_mtp.py::test_the_result_is_that_of_a_conversion_that_keeps_it",
        f"{UNIT}/mtp/test_missing_head.py::test_the_head_of_the_base_model_is_fetched_once",
    ),
    "a conversion loses no bit of the model and keeps the head": (
        f"{UNIT}/mtp/test_convert.py::test_unquantized_output_is_the_source_to_the_bit",
        f"{UNIT}/mtp/test_convert.py::test_quantized_output_is_what_mlx_lm_makes",
    ),
    "norms as trained are told from converted ones": (
        f"{UNIT}/worker/test_loader.py::test_raw_and_converted_heads_are_equal",
        f"{COORDINATOR}/cli/test_head_health.py::test_wrong_norms_are_found",
    ),
    "a missing head is an error that says how to get one": (
        f"{COORDINATOR}/cli/test_head_health.py::test_drafts_without_a_complete_head_are_refused_with_a_repair_hint",
        f"{PARITY}/test_head.py::test_a_checkpoint_without_a_head_refuses_drafts",
    ),
    "Macs that emulate bfloat16 are told to use float16": (
        f"{UNIT}/worker/test_hardware.py::test_bfloat16_on_m1_and_m2_is_advised_against",
    ),
    # ---- drafts
    "drafts are verified in greedy and in sampled answers, by equality": (
        f"{PARITY}/test_identity.py::test_drafts_stages_and_concurrency_change_nothing",
        f"{UNIT}/mtp/test_sampling.py::test_accepted_length_counts_the_token_and_leading_correct_drafts",
    ),
    "one draft or several": (
        f"{PARITY}/test_head.py::test_each_row_of_a_frame_drafts_as_deep_as_it_asks",
        f"{COORDINATOR}/schedule/test_scheduler.py::test_a_request_has_the_drafts_that_it_asks_for",
    ),
    "the depth follows acceptance and cost, and the choice costs at most three percent": (
        f"{COORDINATOR}/drafts/test_controller.py::test_auto_comes_within_three_percent_of_the_best_fixed_depth",
        f"{COORDINATOR}/drafts/test_controller.py::test_a_fall_of_acceptance_turns_drafting_off",
    ),
    "drafts stop where a busy server gains nothing by them": (
        f"{COORDINATOR}/schedule/test_simulation.py::test_filling_costs_nothing_where_drafts_are_worthless",
        f"{COORDINATOR}/drafts/test_prompt_lookup.py::test_one_match_among_many_sequences_pays_by_its_own_rows",
    ),
    "the head has read the prompt before its first draft": (
        f"{PARITY}/test_head.py::test_the_cache_never_drifts_from_the_text",
    ),
    "states of GDN return to a snapshot and replay, and keys and values are cut": (
        f"{PARITY}/test_rollback.py::test_every_width_and_accepted_length",
        f"{PARITY}/test_rollback.py::test_any_order_of_frames_and_signals",
        f"{PARITY}/test_kv_bytes.py::test_open_and_rejected_windows_copy_nothing",
    ),
    "a rejection is one small signal to every worker": (
        f"{CLUSTER}/test_wire_budget.py::test_a_rejection_sends_the_signal_and_nothing_more",
        f"{UNIT}/proto/test_control.py::test_a_rollback_is_small",
        f"{COORDINATOR}/schedule/test_scheduler.py::test_rollbacks_name_the_lost_tokens",
    ),
    "the text drafts beside the head": (
        f"{COORDINATOR}/schedule/test_matched_windows.py::test_a_text_that_repeats_takes_fewer_passes",
        f"{PARITY}/test_identity.py::test_drafts_from_the_text_change_nothing",
    ),
    # ---- sampling
    "temperature, top-p, top-k and min-p": (
        f"{UNIT}/mtp/test_sampling.py::test_a_draw_follows_the_softmax",
        f"{UNIT}/mtp/test_sampling.py::test_a_filter_keeps_what_mlx_lm_keeps",
    ),
    "a seed gives the same tokens": (
        f"{UNIT}/mtp/test_sampling.py::test_noise_is_the_same_in_every_release",
        f"{COORDINATOR}/dialects/test_chat.py::test_several_choices_have_their_own_seeds_and_indices",
    ),
    "penalties of repetition, presence and frequency, and a bias of logits": (
        f"{UNIT}/mtp/test_sampling.py::test_penalties_follow_their_definition",
        f"{UNIT}/mtp/test_sampling.py::test_a_window_of_five_chooses_what_five_windows_of_one_choose",
        f"{COORDINATOR}/prompts/test_parameters.py::test_every_sampling_field_reaches_the_engine",
    ),
    # ---- one engine for many
    "several answers draft in one step": (
        f"{PARITY}/test_identity.py::test_drafts_stages_and_concurrency_change_nothing",
        f"{COORDINATOR}/schedule/test_scheduler_order.py::test_micro_batches_fill_the_pipeline_and_share_it",
    ),
    "prompts are read in chunks, beside streams": (
        f"{COORDINATOR}/schedule/test_admission.py::test_long_prompts_of_many_clients_hold_nobody_up",
        f"{COORDINATOR}/schedule/test_simulation.py::test_a_long_prompt_does_not_stall_an_open_stream",
    ),
    "keys and values can be quantized": (
        f"{COORDINATOR}/planning/test_model_costs.py::test_quantized_kv_costs_its_bits_and_scales",
        f"{PARITY}/test_prefix_disk.py::test_another_arithmetic_finds_nothing",
    ),
    "a known beginning of a prompt is not computed again": (
        f"{COORDINATOR}/schedule/test_prefix_cache.py::test_the_next_turn_of_a_chat_finds_the_one_before",
        f"{PARITY}/test_engine.py::test_a_restored_prefix_equals_a_prefill",
        f"{COORDINATOR}/schedule/test_scheduler.py::test_prefixes_keep_the_answers",
    ),
    "memory that runs out and an engine that fails end no server": (
        f"{COORDINATOR}/pipeline/test_local.py::test_any_loading_error_is_a_cluster_error",
        f"{COORDINATOR}/pipeline/test_local.py::test_an_engine_that_failed_frees_its_weights",
        f"{COORDINATOR}/schedule/test_loop.py::test_a_request_outlives_plans",
        f"{COORDINATOR}/schedule/test_loop.py::test_a_long_prompt_is_tried_with_shorter_chunks",
    ),
    "statistics of answers, drafts and machines": (
        f"{COORDINATOR}/serve/test_operations.py::test_metrics_cover_requests_and_the_cluster",
        f"{COORDINATOR}/schedule/test_scheduler.py::test_draft_counters_are_by_position",
    ),
    "a command measures first tokens, times between tokens, streams, acceptance and the cost of drafts": (
        f"{CLUSTER}/test_bench_command.py::test_a_server_of_ours",
        f"{CLUSTER}/test_bench_command.py::test_another_server_with_openais_api",
        f"{CLUSTER}/test_bench_command.py::test_the_figures_of_a_row_by_hand",
    ),
    # ---- clients
    "reasoning and calls are read from the text": (
        f"{COORDINATOR}/text/test_answer_reader.py::test_a_call_is_read_as_models_write_it",
        f"{COORDINATOR}/text/test_answer_reader.py::test_marks_of_reasoning",
        f"{COORDINATOR}/text/test_answer_reader.py::test_any_pieces_give_the_parts_of_the_whole",
    ),
    "an answer has the format that a client forces": (
        f"{PARITY}/test_grammar.py::test_every_complete_answer_has_its_format",
        f"{CLUSTER}/test_forced_formats.py::test_forced_calls_in_three_dialects",
    ),
    "a worker can be pinned to layers": (
        "tests/repository/test_flags.py::test_a_workers_flag_sets_its_option",
        f"{COORDINATOR}/planning/test_plan.py::test_pinned_layers_stay_and_others_fill_the_gaps",
    ),
    "a coordinator serves the answers of its workers over HTTP": (
        f"{CLUSTER}/test_cluster.py::test_any_number_of_workers_gives_one_answer",
    ),
    "workers are found by mDNS or named by address": (
        f"{CLUSTER}/test_discovery.py::test_a_worker_on_loopback_is_found_and_lost",
        f"{CLUSTER}/test_describe.py::test_a_worker_becomes_a_member",
    ),
    "the coordinator serves alone when no worker is left": (
        f"{CLUSTER}/test_alone.py::test_streams_go_on_alone",
        f"{COORDINATOR}/cluster/test_decide.py::test_this_machine_serves_when_workers_do_not_come_back",
    ),
    "the page shows what drafts do": (
        "tests/browser/test_page.py::test_speed_shows_acceptance_and_ten_minutes",
        f"{COORDINATOR}/web/test_live_feed.py::test_history_and_events_reach_open_pages_and_later_ones",
    ),
    "the folders, the language and the libraries of the original": (
        "tests/repository/test_promises.py::test_the_top_level_is_that_of_the_original",
    ),
    # ---- one answer on any machines
    "any cut gives the same tokens": (
        f"{PARITY}/test_stage_parity.py::test_every_cut_is_bit_equal",
        f"{CLUSTER}/test_cluster.py::test_any_number_of_workers_gives_one_answer",
    ),
    "exact arithmetic makes rows independent of each other on GPUs": (
        f"{PARITY}/test_exact_mode.py::test_exact_answers_do_not_depend_on_drafts_batch_or_cut",
        f"{UNIT}/mtp/test_exact.py::test_every_call_is_in_the_range_and_every_row_is_its_own",
    ),
    "slices give a group of any size the same bits": (
        f"{PARITY}/test_group.py::test_exact_slices_have_the_bits_of_any_group",
    ),
    "an answer goes on, token for token, after a lost worker": (
        f"{CLUSTER}/test_alone.py::test_streams_go_on_alone",
        f"{PARITY}/test_backup.py::test_a_restored_backup_equals_a_prefill",
        f"{CLUSTER}/test_faults.py::test_a_worker_that_is_stopped",
    ),
    "and after a lost member of a group": (
        f"{COORDINATOR}/cluster/test_preparation.py::test_a_lost_process_of_a_group_fails_the_plan",
        f"{COORDINATOR}/pipeline/test_group_pipeline.py::test_a_backup_has_the_shares_of_all_members",
    ),
    "and after a lost coordinator": (
        f"{CLUSTER}/test_stored_answers.py::test_answers_outlive_a_killed_coordinator",
        f"{COORDINATOR}/answers/test_stored_answers.py::test_every_event_arrives_once_whatever_the_place_of_the_restart",
    ),
    # ---- samplers and rules that went once
    "XTC draws once for drafts and verification, and spares special tokens": (
        f"{UNIT}/mtp/test_sampling.py::test_xtc_removes_what_mlx_lm_removes",
        f"{PARITY}/test_head.py::test_drafts_are_drawn_with_the_noise_and_the_past_of_their_positions",
        f"{PARITY}/test_identity.py::test_drafts_stages_and_concurrency_change_nothing",
        f"{COORDINATOR}/prompts/test_parameters.py::test_xtc_spares_the_ends_and_line_breaks_in_every_dialect",
    ),
    "drafts accepted by the ratio leave the distribution as it is": (
        f"{UNIT}/mtp/test_sampling.py::test_the_ratio_rule_follows_the_target",
        f"{UNIT}/mtp/test_sampling.py::test_a_text_of_the_ratio_rule_has_the_models_transitions",
        f"{PARITY}/test_head.py::test_the_ratio_rule_decides_about_a_draft_that_was_not_sent",
    ),
    "a trimmed draft head changes no answer": (
        f"{PARITY}/test_identity.py::test_a_trimmed_draft_head_changes_nothing",
        f"{UNIT}/mtp/test_draft_vocabulary.py::test_logits_of_the_part_are_those_of_lm_head",
        f"{UNIT}/mtp/test_draft_vocabulary.py::test_drafts_come_from_the_part_and_tokens_from_all",
    ),
    "a forced format survives the end of the reasoning": (
        f"{PARITY}/test_reasoning_limit.py::test_a_format_survives_the_end_of_the_reasoning",
        f"{COORDINATOR}/dialects/test_chat.py::test_each_choice_with_a_budget_is_one_submission",
    ),
    # ---- clients beside each other
    "a client that holds all places makes room for another one": (
        f"{COORDINATOR}/schedule/test_admission.py::test_one_client_never_holds_the_last_place",
        f"{COORDINATOR}/schedule/test_admission.py::test_clients_that_share_a_place_take_turns",
        f"{PARITY}/test_identity.py::test_pauses_change_nothing",
    ),
    # ---- prefixes on disk
    "prefixes on disk serve other machines": (
        f"{CLUSTER}/test_prefix_disk.py::test_workers_with_disks_of_their_own_keep_the_prefixes",
    ),
    "prefixes on disk outlive a restart and serve another cut": (
        f"{PARITY}/test_prefix_disk.py::test_a_restart_and_other_cuts_keep_the_prefixes",
        f"{UNIT}/worker/test_block_index.py::test_any_cut_finds_its_layers",
    ),
    "a full disk keeps what was used last, from the beginning of each chain": (
        f"{UNIT}/worker/test_block_index.py::test_the_least_recently_used_block_goes_first",
        f"{UNIT}/worker/test_block_index.py::test_the_end_of_a_chain_goes_first",
        f"{PARITY}/test_prefix_disk.py::test_a_full_disk_stops_the_writing",
    ),
    # ---- machines
    "a worker needs no files": (
        f"{CLUSTER}/test_share_weights.py::test_the_commands_people_type",
        f"{UNIT}/worker/test_fetch_fill.py::test_a_quarter_of_the_layers_is_what_comes",
    ),
    "a worker reads the bytes of its own layers only": (
        f"{UNIT}/worker/test_loader.py::test_only_files_of_the_span_are_opened",
        f"{UNIT}/worker/test_fetch_fill.py::test_another_span_fetches_only_what_is_new",
    ),
    "machines join by a token": (f"{CLUSTER}/test_join.py::test_machines_join_by_token",),
    "all calls are checked over mutual TLS": (
        f"{CLUSTER}/test_call_access.py::test_every_call_by_every_peer",
        f"{CLUSTER}/test_call_access.py::test_tls_is_1_3",
    ),
    "the authority is rotated while the cluster serves": (
        f"{CLUSTER}/test_trust_updates.py::test_a_rotation_reaches_the_worker",
        f"{COORDINATOR}/trust/test_authority.py::test_rotation_overlaps",
    ),
    "a coordinator runs a worker of its own": (
        f"{CLUSTER}/test_own_worker.py::test_the_own_worker_serves_is_restarted_and_ends_with_the_server",
    ),
    "two commands start two machines": (f"{CLUSTER}/test_two_machines.py::test_the_session_of_the_readme",),
    # ---- bounds
    "a client that floods the queue takes no place from another": (
        f"{COORDINATOR}/schedule/test_admission.py::test_the_client_with_the_fewest_sequences_is_next",
        f"{COORDINATOR}/schedule/test_admission.py::test_a_full_queue_refuses_the_client_that_fills_it",
    ),
    "each request is bounded in memory and in time": (
        f"{COORDINATOR}/web/test_large_requests.py::test_the_memory_of_large_bodies_is_bounded",
        f"{COORDINATOR}/web/test_large_requests.py::test_a_body_of_many_values_is_refused",
        f"{COORDINATOR}/answers/test_delivery.py::test_an_answer_that_nobody_reads_is_cancelled",
        f"{COORDINATOR}/answers/test_delivery.py::test_a_body_that_never_ends_is_a_408",
        f"{COORDINATOR}/text/test_grammar_process.py::test_a_slow_format_is_refused_within_its_time",
        f"{COORDINATOR}/text/test_grammar_process.py::test_a_format_may_not_take_more_memory",
    ),
    # ---- models and dialects
    "machines compute each layer together": (
        f"{PARITY}/test_group.py::test_a_group_gives_the_tokens_of_one_process",
        f"{CLUSTER}/test_groups.py::test_a_group_gives_the_answers_of_one_process",
    ),
    "models with a vision part read images": (
        f"{PARITY}/test_images.py::test_answers_are_those_of_transformers",
        f"{CLUSTER}/test_images.py::test_the_clients_of_all_dialects_send_images",
    ),
    "Flash-Next": (
        f"{PARITY}/test_flash_next.py::test_logits_are_those_of_transformers",
        f"{PARITY}/test_own_families.py::test_stages_and_drafts_change_nothing",
    ),
    "GLM-5.3-Flash": (
        f"{PARITY}/test_glm_flash.py::test_logits_are_those_of_transformers",
        f"{PARITY}/test_own_families.py::test_stages_and_drafts_change_nothing",
    ),
    "chat completions and completions": (
        f"{COORDINATOR}/dialects/test_chat.py::test_a_stream_adds_up_to_the_whole_answer",
        f"{COORDINATOR}/dialects/test_completions.py::test_a_stream_adds_up_to_the_whole_text",
    ),
    "responses": (f"{CLUSTER}/test_makers_clients.py::test_a_response_whole_and_streamed",),
    "messages of Anthropic": (f"{CLUSTER}/test_makers_clients.py::test_a_message_with_thinking_whole_and_streamed",),
    "the dialect of Ollama": (f"{CLUSTER}/test_makers_clients.py::test_an_ollama_chat_whole_and_streamed",),
    "a session goes on whatever its history holds": (
        f"{COORDINATOR}/dialects/test_histories.py::test_a_history_never_locks_a_session",
        f"{COORDINATOR}/dialects/test_histories.py::test_an_earlier_message_is_never_refused",
    ),
    "one command starts an agent": (
        f"{COORDINATOR}/cli/test_launch.py::test_a_program_is_started_with_its_arguments",
        f"{CLUSTER}/test_agents.py::test_a_session_of_claude_code",
    ),
    # ---- kernels
    "on a CPU plain decoding takes 1 / 1.3 of the processor time of stock mlx-lm": (
        f"{PARITY}/test_cpu_speed.py::test_plain_decoding_takes_less_processor_time_than_stock_mlx_lm",
        f"{UNIT}/worker/test_cpu_layers.py::test_a_row_has_the_same_bits_in_frames_of_every_width",
    ),
    "NVIDIA GPUs run kernels of this project": (
        f"{PARITY}/test_cuda_kernels.py::test_the_stage_agrees_with_its_reference",
        f"{PARITY}/test_packed_layers.py::test_the_layers_are_packed",
        f"{PARITY}/test_packed_layers.py::test_the_parts_of_the_members_are_added",
        f"{PARITY}/test_packed_layers.py::test_a_row_does_not_see_rejected_rows",
    ),
    "a Mac uses a kernel that is right and faster in a trial": (
        f"{PARITY}/test_metal_layers.py::test_a_kernel_is_used_if_it_is_right_and_not_slower",
        f"{PARITY}/test_metal_layers.py::test_layers_compute_what_the_reference_does",
    ),
}
"""The promises and their tests. A change may alter how a promise is kept, and never whether."""

NOT_RUN = {"skip", "slow", "xfail"}
"""Marks of a test that no one runs before a change."""


@cache
def marks_of(path: str) -> dict[str, set[str]]:
    """Return the tests of a file, each with its own marks, those of the file, and those that all its cases have."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    files = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            nodes = [
                n
                for mark in (*node.decorator_list, *files)
                for n in (mark.elts if isinstance(mark, ast.List) else [mark])
            ]
            marks = [n.func if isinstance(n, ast.Call) else n for n in nodes]
            found[node.name] = {mark.attr for mark in marks if isinstance(mark, ast.Attribute)}
            for call in node.decorator_list:
                found[node.name] |= marks_of_all_cases(call)
    return found


def marks_of_all_cases(call: ast.expr) -> set[str]:
    """Return the marks of NOT_RUN that each case of a `parametrize` has, if its cases are written out."""
    values = call.args[1] if isinstance(call, ast.Call) and len(call.args) > 1 else None
    cases = [ast.unparse(case) for case in values.elts] if isinstance(values, ast.List) else []
    return {mark for mark in NOT_RUN if cases and all(f"pytest.mark.{mark}" in case for case in cases)}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_has_tests_that_run(promise: str) -> None:
    """Each test of a promise exists, and is neither skipped nor left to the slow ones."""
    assert PROMISES[promise]
    for name in PROMISES[promise]:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert test in marks_of(path), f"{name} does not exist"
        assert not marks_of(path)[test] & NOT_RUN, f"{name} does not run by itself"


def test_a_missing_or_slow_test_would_be_seen() -> None:
    """The marks of a test are read, also those of its whole file and of all its cases."""
    assert "slow" in marks_of(f"{PARITY}/test_identity.py")["test_all_answers_are_one"]
    assert "slow" in marks_of("tests/chaos/test_chaos.py")["test_no_fault_loses_or_changes_a_token"]
    assert "slow" not in marks_of(f"{CLUSTER}/test_alone.py")["test_streams_go_on_alone"]
    assert "slow" in marks_of(f"{CLUSTER}/test_groups.py")["test_a_lost_process_changes_no_answer"]
    assert "test_that_is_not_there" not in marks_of(f"{CLUSTER}/test_alone.py")


def test_the_top_level_is_that_of_the_original() -> None:
    """The folders, and the libraries that the project is built on, are where its first documents put them."""
    for folder in ("coordinator", "worker", "proto", "mtp", "tests", "deploy"):
        assert (ROOT / folder).is_dir(), folder
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = str(project["project"]["dependencies"]) + str(project.get("dependency-groups", project))
    for library in ("mlx", "mlx-lm", "grpcio", "protobuf", "zeroconf", "msgpack", "pytest"):
        assert f"'{library}" in declared, library
