"""The documentation against the code: links, commands, options, settings, make targets, and the quickstart's files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.source import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    yield from BLOCK.findall(document.read_text())


def command_lines(document: Path) -> Iterator[list[str]]:
    """The words of each line of a block that calls cosmos-actor."""
    for language, text in blocks(document):
        lines = text.splitlines() if language in ("", "sh", "bash") else []
        for line in lines:
            match = re.match(r"(?:\$ |\w+=\S+ |\S*/)*cosmos-actor ([a-z].*)", line)
            if match:
                yield shlex.split(match[1], comments=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_and_options_exist(document: Path) -> None:
    typer = pytest.importorskip("typer")
    from cosmos_actor.cli.app import app

    commands = typer.main.get_command(app).commands
    for words in command_lines(document):
        assert words[0] in commands, words
        known = {option for parameter in commands[words[0]].params for option in parameter.opts}
        used = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help"}, words


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_settings_exist(document: Path) -> None:
    from cosmos_actor.recipes.settings import RunSettings, fields

    known = {path for path, _ in fields()}
    sections = "|".join(RunSettings.model_fields)
    text = document.read_text()
    named = re.findall(rf"(?:`|--set )((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?=[`= ])", text)
    files = {name for name in named if name.endswith((".json", ".key", ".py", ".toml"))}
    assert {name for name in named if name not in known} - files == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = document.read_text()
    named = set(re.findall(r"`make ([a-z]+)", text)) | set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE))
    assert named <= targets


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of docs/quickstart.md, named by the comment in their first line."""
    for language, text in blocks(ROOT / "docs" / "quickstart.md"):
        if language in ("python", "toml"):
            name = text.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("recipe", ["longer-sums.toml", "larger.toml"])
def test_the_quickstarts_recipes_are_valid(quickstart: Path, recipe: str) -> None:
    from cosmos_actor.cli import main

    assert main(["check", recipe]) == 0


def test_the_quickstarts_task_is_a_task(quickstart: Path) -> None:
    from larger import make_task  # type: ignore[import-not-found]

    from cosmos_actor.roles.tokenizer import CharTokenizer

    task, tokenizer = make_task(None, 7), CharTokenizer()
    prompts = {split: {task.problem(split, index)[0] for index in range(50)} for split in ("train", "held_out")}
    assert not prompts["train"] & prompts["held_out"]
    prompt, payload = task.problem("train", 3)
    assert task.problem("train", 3) == (prompt, payload)
    assert task.reward(payload, task.answer(payload)) == 1.0
    assert task.reward(payload, "no") == 0.0
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt


def test_help_lists_every_public_target() -> None:
    shown = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True,
                           timeout=30, check=True).stdout
    listed = {line.split()[1] for line in shown.splitlines()}
    assert listed == {"help", "demo", "test", "lint", "heavy", "bench", "soak", "clean"}


SHORT = ("run.steps=2", "policy.sft_steps=3", "run.eval_every=0")


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_quickstarts_own_task_trains_in_processes_and_in_one(quickstart: Path) -> None:
    command = [Path(sys.executable).parent / "cosmos-actor", "up", "larger.toml"]
    command += [word for setting in SHORT for word in ("--set", setting)]
    for more in (["--run-dir", "many"], ["--run-dir", "one", "--inproc"]):
        done = subprocess.run(
            [*command, *more], cwd=quickstart, env={**os.environ, "PYTHONPATH": "."},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [losses_of(quickstart / name / "metrics.jsonl") for name in ("many", "one")]
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


def losses_of(metrics: Path) -> list[float]:
    return [json.loads(line)["loss/total"] for line in metrics.read_text().splitlines()]
