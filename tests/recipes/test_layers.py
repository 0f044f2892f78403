"""Layers of settings: later ones win; a mistake is one line with the setting, the value and the place it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_actor.actors.errors import BadValue, NotFound, UnknownName, UserError
from cosmos_actor.recipes.layers import layer_of_flag
from cosmos_actor.recipes.resolve import recipe_names, resolve
from cosmos_actor.recipes.settings import fields

BASE = "grpo-arithmetic"

MISTAKES = [
    ("rollout.temprature=1", UnknownName,
     "unknown setting `rollout.temprature`; did you mean `rollout.temperature`? (from --set rollout.temprature=1)"),
    ("learning_rate=1", UnknownName, "did you mean `policy.optimizer.learning_rate`?"),
    ("rollout.samples=1", UnknownName, "unknown setting `rollout.samples`"),
    ("supervisr.strategy=1", UnknownName, "did you mean a setting of `supervisor`?"),
    ("x.y=1", UnknownName, "unknown setting `x`; there are the sections run, data, rollout"),
    ("rollout={count=2, cuont=3}", UnknownName, "unknown setting `rollout.cuont`; did you mean `rollout.count`?"),
    ("run.steps=abc", BadValue, "setting `run.steps` = \"abc\": expected a whole number (from --set run.steps=abc)"),
    ("run.steps=1.5", BadValue, "expected a whole number"),
    ("run.steps=true", BadValue, "expected a whole number"),
    ("run.steps=0", BadValue, "expected a number greater than 0"),
    ("run.name=\"a b\"", BadValue, "expected text that matches"),
    ("run.placement=foo", BadValue, "expected 'colocated' or 'disaggregated'"),
    ("rollout=3", BadValue, "setting `rollout` = 3: expected a table of settings"),
    ("rollout.env.A=3", BadValue, "setting `rollout.env.A` = 3: expected text"),
    ("policy.lora.targets=[]", BadValue, "setting `policy.lora.targets` = []: expected a list of 1 or more (from"),
    ("rollout.stop_ids=[\"a\"]", BadValue, "setting `rollout.stop_ids` = \"a\": expected a whole number"),
    ("data.reasoning_gym.config.a=[1]", BadValue, "expected true or false or a whole number or a number or text"),
    ("policy.optimizer.learning_rate=nan", BadValue, "expected a finite number"),
    ("bus.port=70000", BadValue, "expected a number less than or equal to 65535"),
    ("bulk.chunk_bytes=4", BadValue, "bulk.chunk_bytes is 1 to 16 MiB, not 4"),
    ("bus.lost_after_s=1.5", BadValue, "`bus.lost_after_s`"),
    ("supervisor.back_off_most_s=0.1", BadValue, "supervisor.back_off_first_s = 0.5 is over"),
    ("run.steps=" + "9" * 5000, BadValue, "setting `run.steps` = \"999"),
    ("run.steps=" + "[" * 5000, BadValue, "setting `run.steps` = \"[[["),
    ("run.seed=9223372036854775808", BadValue, "expected a number less than or equal to 9223372036854775807"),
    ("run.steps", BadValue, "expected NAME=VALUE"),
    ("=3", BadValue, "expected NAME=VALUE"),
    ("run..steps=3", BadValue, "expected NAME=VALUE"),
]


@pytest.mark.parametrize(("flag", "kind", "words"), MISTAKES)
def test_a_mistake_is_one_line_that_says_what_and_where(flag: str, kind: type[UserError], words: str) -> None:
    with pytest.raises(kind) as caught:
        resolve(BASE, [flag])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("flag", "value"), [
    ("policy.model=/some/dir", "/some/dir"), ("policy.model='quoted = text'", "quoted = text"),
    ("run.name=7", "7"), ("run.name=true", "true"), ("run.name=2024-05-01", "2024-05-01"),
    ("run.steps=1_000", 1000), ("policy.optimizer.learning_rate=5e-4", 5e-4), ("rollout.temperature=1", 1.0),
    ("policy.gradient_checkpointing=true", True), ("rollout.stop_ids=[1, 2]", (1, 2)),
    ("rollout.devices=[0, 1]", ("0", "1")),
    ("rollout.env.OMP_PROC_BIND=close", "close"), ("rollout.env={A = 'b'}", {"A": "b"}),
    ("data.task=package.module:function", "package.module:function"),
    ("policy.model=two\nlines = 3", "two\nlines = 3"), ("policy.model=", ""),
])
def test_a_flag_takes_toml_or_bare_text(flag: str, value: object) -> None:
    node: object = resolve(BASE, [flag])
    for name in flag.partition("=")[0].split("."):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    assert node == value and type(node) is type(value)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    with pytest.raises(BadValue, match=r"policy\.grpo\.kl_coefficient = 0\.1 needs reference\.count >= 1"):
        resolve(BASE, ["reference.count=0", "policy.grpo.kl_coefficient=0.1"])


def test_the_last_of_two_flags_wins() -> None:
    assert resolve(BASE, ["run.steps=3", "run.steps=4"]).run.steps == 4


def test_a_flag_is_a_layer_that_knows_itself() -> None:
    layer = layer_of_flag("rollout.count=2")
    assert (layer.origin, layer.tree) == ("--set rollout.count=2", {"rollout": {"count": 2}})


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_stands_on_a_packaged_recipe_and_is_named_after_itself(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.toml", f'base = "{BASE}"\nrun.steps = 5\n[rollout]\ncount = 3\n')
    settings = resolve(mine, ["rollout.count=4"])
    assert (settings.run.steps, settings.rollout.count, settings.run.name) == (5, 4, "mine")
    assert settings.policy.model == resolve(BASE).policy.model


def test_a_base_is_looked_for_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "first.toml", f'base = "{BASE}"\nrun.steps = 5\n')
    second = write(tmp_path / "below" / "second.toml", 'base = "../first.toml"\nrun.seed = 2\n')
    settings = resolve(second)
    assert (settings.run.steps, settings.run.seed) == (5, 2)


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path / "first.toml", "run.stpes = 5\n")
    second = write(tmp_path / "second.toml", 'base = "first.toml"\n')
    with pytest.raises(UnknownName, match=r"`run.stpes`; did you mean `run.steps`\? \(from .*first.toml\)"):
        resolve(second)


@pytest.mark.parametrize(("text", "words"), [
    ("run.steps = ", "is not valid TOML"), ("a = " + "[" * 5000, "is not valid TOML"),
    ("run.steps = " + "9" * 5000, "is not valid TOML"), ("base = 3", "expected the name or path of a recipe"),
    ('base = "loop.toml"', "does `base` go in a circle?"), ('base = "nothing.toml"', "can not read"),
])
def test_a_file_that_can_not_be_used_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "loop.toml", text)
    with pytest.raises(UserError) as caught:
        resolve(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_that_does_not_exist_has_a_nearest_one() -> None:
    with pytest.raises(UnknownName, match=f"no recipe named `grpo-arithmetc`; did you mean `{BASE}`?"):
        resolve("grpo-arithmetc")
    with pytest.raises(UnknownName, match="there are .*grpo-arithmetic.* or the path of a TOML file"):
        resolve("zzz")
    with pytest.raises(NotFound, match="can not read no/such.toml"):
        resolve("no/such.toml")


def test_what_nobody_set_is_derived() -> None:
    settings = resolve(BASE, ["run.seed=5"])
    assert (settings.run.name, settings.policy.seed) == (BASE, 5)
    assert resolve(BASE, ["run.seed=5", "policy.seed=1"]).policy.seed == 1


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_resolves(name: str) -> None:
    assert resolve(name).run.name == name


def test_every_setting_says_why_it_exists() -> None:
    assert [path for path, field in fields() if len(field.description or "") < 10] == []


def test_a_run_directory_in_the_place_of_a_recipe_is_told_how_to_go_on(tmp_path):
    with pytest.raises(BadValue, match=r"is a directory and no recipe; .*`up RECIPE --resume --run-dir "):
        resolve(str(tmp_path))
