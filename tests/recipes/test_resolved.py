"""A resolved configuration reloads equal, whatever was set; its digest names what is computed."""

from __future__ import annotations

import types
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cosmos_actor.actors.errors import BadValue, NotFound
from cosmos_actor.recipes.layers import Layer, resolve_layers
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import load_resolved, load_text, resolved_text
from cosmos_actor.recipes.settings import RunSettings, digest, fields, resumable_names, values


def values_of(kind: Any, limits: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of an annotation within `limits` (ge, gt, le, lt, pattern)."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return values_of(arguments[0], {**limits, **limits_in(kind.__metadata__)})
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values_of(one, limits) for one in arguments if one is not type(None)))
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), values_of(arguments[1], {}), max_size=3)
    if origin is tuple:
        return st.lists(values_of(arguments[0], {}), max_size=3)
    if kind is bool:
        return st.booleans()
    if kind is int:
        low = limits.get("ge", limits.get("gt", 0) + 1)
        return st.integers(low, limits.get("le", limits.get("lt", max(low, 10**9) + 1) - ("le" not in limits)))
    if kind is float:
        low, high = limits.get("ge", limits.get("gt", 1.0)), limits.get("le", limits.get("lt", 1e9))
        return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits)
    assert kind is str, kind
    return st.from_regex(limits["pattern"], fullmatch=True) if limits.get("pattern") else st.text(max_size=20)


def limits_in(metadata: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in metadata:
        for name in ("ge", "gt", "le", "lt", "pattern"):
            if getattr(one, name, None) is not None:
                found[name] = getattr(one, name)
    return found


FIELDS = dict(fields())


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """A few settings, each with a legal value of its own."""
    tree: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=12, unique=True)):
        node, names = tree, path.split(".")
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = draw(values_of(FIELDS[path].annotation, limits_in(FIELDS[path].metadata)))
    return tree


@hypothesis_settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees())
def test_every_legal_configuration_reloads_equal(tree: dict[str, Any]) -> None:
    try:
        settings = resolve_layers([Layer("here", tree)])
    except BadValue:  # two settings that exclude each other; what is legal alone is in the table of bad values
        return
    again = load_text(resolved_text(settings), "written")
    assert again == settings
    assert digest(again) == digest(settings)


@hypothesis_settings(max_examples=30, deadline=None)
@given(trees())
def test_settings_survive_the_wire_as_plain_values(tree: dict[str, Any]) -> None:
    try:
        settings = resolve_layers([Layer("here", tree)])
    except BadValue:
        return
    assert RunSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_every_table_of_free_keys_is_empty_by_default_so_that_leaving_it_out_is_right() -> None:
    defaults = values(RunSettings())
    assert all(value == {} for value in defaults.values() if isinstance(value, dict))


def test_every_unset_value_is_the_default_so_that_leaving_it_out_is_right() -> None:
    assert {path for path, value in values(RunSettings()).items() if value is None} >= {
        path for path, field in fields() if type(None) in typing.get_args(field.annotation)}


def test_the_digest_changes_with_what_is_computed_and_only_with_that() -> None:
    base = resolve("grpo-arithmetic")
    for path in ("policy.optimizer.learning_rate=1e-6", "run.seed=7", "rollout.chunk_prompts=4", "data.task=x"):
        assert digest(resolve("grpo-arithmetic", [path])) != digest(base), path
    for path in ("run.steps=7", "run.run_dir=/tmp/x", "supervisor.intensity=3", "bus.port=5555", "bulk.streams=2"):
        assert digest(resolve("grpo-arithmetic", [path])) == digest(base), path
        assert path.partition("=")[0] in resumable_names()


def test_flags_go_on_top_of_a_resolved_file(tmp_path: Any) -> None:
    path = tmp_path / "config.resolved.toml"
    path.write_text(resolved_text(resolve("grpo-arithmetic", ["run.seed=3"])), encoding="utf-8")
    settings = load_resolved(path, ["run.steps=9"])
    assert (settings.run.steps, settings.run.seed, settings.policy.seed) == (9, 3, 3)


def test_a_file_that_is_not_there_or_not_text_is_one_line(tmp_path: Any) -> None:
    with pytest.raises(NotFound, match="can not read .*gone.toml: No such file"):
        load_resolved(tmp_path / "gone.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(NotFound, match="not UTF-8"):
        load_resolved(tmp_path / "bytes.toml")
