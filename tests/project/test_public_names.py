"""Names that others build on, pinned: what is imported, called, caught, implemented, typed, and what travels.

A name that goes breaks somebody, and one that comes is kept for ever. Either is a decision: change the list with it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.project.source import modules

BUS = """
    AddressInUse Array ArrayReference BulkCorrupt BulkError BulkFull BulkGone Bus BusError Clock CloseReport
    CorruptFrame DeadlineExceeded DescriptorLimit GapError Identity Json KeyFileError KeyRing Limits Link LinkClosed
    MemoryNetwork MemoryTransport MessageTooLarge PeerLost PeerRefused Receipt RemoteError SchemaError SchemaMismatch
    UnknownSchema WouldBlock ZmqTransport array decode encode host_id known_schemas make_run_keys new_incarnation
    schema_key
"""

CALLED = {
    "cosmos_actor.bus:Bus": """
        __init__(identity, transport, keys, *, limits, clock, resolve_bulk, executor, bulk, schemas)
        start(listen)
        connect(address, *, role, actor, deadline_s)
        serve(message_type, handler, *, concurrency)
        serve_event(message_type, handler)
        serve_state(topic, handler)
        publish_state(topic, message)
        on_link_up(callback)
        on_link_down(callback)
        on_gap(callback)
        declare_busy(label, expected_s)
        forget(actor, incarnation, reason)
        release(message)
        close(drain_s)
        statistics()
        """,
    "cosmos_actor.bus:Link": """
        send_work(message, *, deadline_s)
        call(message, *, deadline_s, key)
        emit(message, *, deadline_s)
        publish_state(message, topic)
        statistics()
        """,
    "cosmos_actor.bus:Receipt": "result(deadline_s)",
    "cosmos_actor.bus.schema:schema": "schema(name, *, version)",
    "cosmos_actor.actors.role:handles": "handles(message_type, *, concurrency)",
    "cosmos_actor.actors.role:follows": "follows(topic)",
    "cosmos_actor.recipes.resolve:resolve": "resolve(recipe, flags)",
    "cosmos_actor.roles.collector:Collector": """
        __init__(gateway, acting, leases, source, noise, limits, clock, tell, prefix, told)
        collect(tasks)
        interrupt()
        statistics()
        """,
    "cosmos_actor.roles.unit_source:in_turn": "in_turn(tasks, seed)",
    "cosmos_actor.simulator_bridge.conformance:run": "run(simulator, *, name, envs, steps, begin, end)",
    "cosmos_actor.trainer.policy:PolicyTrainer": """
        sft_step(batch)
        grpo_step(groups)
        logprobs(groups)
        weights()
        save(directory)
        load(directory)
        """,
}
"""What is called from outside, with the names of its parameters."""

IMPLEMENTED = {
    "cosmos_actor.actors.role:Role":
        "close followers handlers name setup setup_after stateful weights_held weights_proof",
    "cosmos_actor.actors.context:Context": "busy busy_label compute progress rng tick waiting",
    "cosmos_actor.actors.handle:Handle": "cancel done resolve value",
    "cosmos_actor.roles.driver:Driver": "collect interrupt statistics",
    "cosmos_actor.roles.engine:RolloutEngine": "begin drop held in_flight load_weights read_back statistics step",
    "cosmos_actor.roles.engine:Sleeper": "sleep wake",
    "cosmos_actor.roles.task:Task": "answer problem reward",
    "cosmos_actor.simulator_bridge.contract:Environment": "close expert observe reset step success",
    "cosmos_actor.simulator_bridge.contract:SimSession": "close expert observe reset step",
    "cosmos_actor.simulator_bridge.contract:Simulator": "describe embodiment open seeds_may_be_alike",
    "cosmos_actor.roles.tokenizer:Tokenizer": "decode encode encode_answer encode_prompt pad_id stop_ids vocab_size",
    "cosmos_actor.weight_plane.version:Version": "epoch ordinal require_newer_than require_run run_id step",
    "cosmos_actor.weight_plane.manifest:Manifest": (
        "buckets check delta_bytes deltas digest nbytes tensors version why_whole"),
}
"""Extension points: every public member of them."""

MESSAGES = """
    action_spec/1 actor_status/1 announce/1 array_spec/1 ask_links/1 ask_mute/1 ask_settings/1 ask_time/1
    ask_weights/1 not_published/1 mend_request/2 mended/1 snapshotted/1 weights_alarm/2 weights_proof/1
    bucket_source/1 bucket_taken/1 bucket_wanted/1 buckets_dropped/1
    bulk_ref/1 bulk_returned/1 clone_request/1 collect_request/1 collect_task/1 column/1
    cosmos_actor.introduction/1 demonstration/1 demonstrations/1 demonstrations_request/1 describe_request/1
    dump_stacks/1 evaluate_request/1 evaluated/2 fragment/1 generate_task/1 generation/2 generation_request/1
    group_batch/2 heard/1 job_finished/1 judge_request/1 judged/1 kill_order/1 leaving/1 link_report/1
    links_report/1 member/1 membership/1 mute_role/1 prepare_request/1 prepared/1 processes/1
    publish_reference_request/1 publish_request/2 published/1 put_reply/1 put_request/1 reference_request/1
    restore_request/1 restored/1 run_settings/1 sample/1 sample_request/1 save_request/1 saved/1 score_request/1
    park_request/1 sleep_request/1 turn_begun/1 turn_over/1 unpark_request/1 wake_request/1
    scores/1 sft_request/1 shown/1 shown_request/1 sim_assignment/1 sim_attach/2 sim_attached/3 sim_detach/1
    sim_reset/1 sim_slot_failure/1 sim_step/1 sim_stepped/1 simulator_description/1 simulator_event/1
    stacks_dumped/1 stop_actor/1 task_spec/1 tasks/1 tasks_request/1 time_reply/1 trajectory_group/1
    update_reply/1 update_request/1 warning/1 weight_delta/1 weight_manifest/2 weight_tensor/1 weight_version/1
    weights_report/3 work_unit/1
"""
"""name/version of everything that travels."""

COMMANDS = {
    "up": "--faults --inproc --listen --resume --run-dir --set recipe",
    "start": "--connect --host --key --name --rejoin --role --run-dir",
    "attach": "--connect --envs --key --max-memory-mb --name --option --rejoin simulator",
    "sim": "--dir --envs --episodes --json --noise --only-success --out --seed --steps --task --video --workers "
           "name what",
    "check": "--explain --json --live --run-dir --set recipe",
    "doctor": "--json --key --name --role --run address",
    "status": "--json run",
    "why": "--json run",
    "weights": "--deadline --json run what",
    "dead-letters": "--json --show run",
    "stop": "--deadline --json --now run",
    "logs": "--follow --incarnation --lines -f -n words",
    "version": "--json",
}


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def test_the_bus() -> None:
    import cosmos_actor.bus

    assert cosmos_actor.bus.__all__ == BUS.split()
    assert all(hasattr(cosmos_actor.bus, name) for name in BUS.split())


@pytest.mark.parametrize("path", CALLED)
def test_calls_have_these_parameters(path: str) -> None:
    thing = load(path)
    wanted = [line.strip() for line in CALLED[path].strip().splitlines()]
    for line in wanted:
        name = line.partition("(")[0]
        assert shown(name, thing if inspect.isfunction(thing) else getattr(thing, name)) == line


def shown(name: str, function: Any) -> str:
    """`name(a, b, *, c)`: parameters without self, annotations and defaults."""
    parts, only_keywords = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not only_keywords:
            parts.append("*")
            only_keywords = True
        parts.append(parameter.name)
    return f"{name}({', '.join(part for part in parts if part != 'self')})"


@pytest.mark.parametrize("path", IMPLEMENTED)
def test_extension_points_have_these_members(path: str) -> None:
    thing = load(path)
    members = {*vars(thing), *getattr(thing, "__annotations__", {})}
    assert sorted(name for name in members if not name.startswith("_")) == IMPLEMENTED[path].split()


def test_messages_have_these_versions() -> None:
    names = [module.name for module in modules() if "@schema(" in module.path.read_text()]
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "from cosmos_actor.bus import known_schemas\n"
        "print(json.dumps({name: key[0] for name, key in known_schemas().items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True, timeout=100, check=True
    )
    found = {f"{name}/{version}" for name, version in json.loads(done.stdout).items()}
    assert found == set(MESSAGES.split())


def test_commands_have_these_options() -> None:
    typer = pytest.importorskip("typer")
    from cosmos_actor.cli.app import app

    commands = typer.main.get_command(app).commands.items()
    found = {
        name: " ".join(sorted(word for parameter in command.params for word in parameter.opts))
        for name, command in commands
    }
    assert found == COMMANDS
