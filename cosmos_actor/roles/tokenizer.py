"""Text to token ids and back, without torch and without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cosmos_actor.actors.errors import UserError
from cosmos_actor.trainer.model_directory import model_directory
from cosmos_actor.trainer.model_files import need_file
from cosmos_actor.trainer.tiny_model import TINY

ARITHMETIC_ALPHABET = "0123456789+-*/=()., ?"


class Tokenizer(Protocol):
    """Encodes prompts and answers, decodes what was sampled."""

    vocab_size: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, with no special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a user's request, ready to be continued by the answer."""
        ...

    def encode_answer(self, text: str) -> list[int]:
        """The ids of a whole answer, its stop token included."""
        ...


class CharTokenizer:
    """One id a character; 0 pads, 1 begins, 2 stops. decode(encode(text)) == text for every text over the alphabet."""

    SPECIAL = 3

    def __init__(self, alphabet: str = ARITHMETIC_ALPHABET) -> None:
        self.alphabet = alphabet
        self.pad_id, self.begin_id, self.stop_id = 0, 1, 2
        self.stop_ids: tuple[int, ...] = (self.stop_id,)
        self.vocab_size = self.SPECIAL + len(alphabet)
        self._ids = {character: index + self.SPECIAL for index, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        """Raises UserError naming the first character outside the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as missing:
            raise UserError(f"character {missing} of {text!r} is not in the tokenizer's alphabet") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Ids outside the vocabulary (a model may have spare rows) become U+FFFD."""
        return "".join(self._character(int(token)) for token in ids)

    def encode_prompt(self, text: str) -> list[int]:
        """The beginning token, then the text."""
        return [self.begin_id, *self.encode(text)]

    def encode_answer(self, text: str) -> list[int]:
        """The text, then the stop token."""
        return [*self.encode(text), self.stop_id]

    def _character(self, token: int) -> str:
        if token < self.SPECIAL:
            return ""
        return self.alphabet[token - self.SPECIAL] if token < self.vocab_size else "\ufffd"


class DirectoryTokenizer:
    """The tokenizer of a Hugging Face model directory: its tokenizer.json, chat template and stop tokens."""

    def __init__(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer as Rust

        self.directory = Path(directory)
        file = need_file(self.directory, "tokenizer.json")
        try:
            self._tokenizer = Rust.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise for a damaged file
            raise UserError(f"{file} is damaged: {error}", setting="policy.model") from error
        self._config = _read_json(self.directory / "tokenizer_config.json")
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = self._find_stop_ids()
        pad = self._id_of(self._config.get("pad_token"))
        self.pad_id = self.stop_ids[0] if pad is None else pad
        self._template = _chat_template(self.directory, self._config)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def encode_prompt(self, text: str) -> list[int]:
        """One user turn through the chat template up to the assistant's turn; the plain text where there is none."""
        if self._template is None:
            return list(self._tokenizer.encode(text).ids)
        return self.encode(self.render([{"role": "user", "content": text}]))

    def encode_answer(self, text: str) -> list[int]:
        return [*self.encode(text), self.stop_ids[0]]

    def render(self, messages: list[dict[str, str]]) -> str:
        """The chat template's text for `messages`, ending where the assistant begins."""
        special = {name: _token_text(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        return str(self._template.render(messages=messages, add_generation_prompt=True, **special))

    def _id_of(self, token: Any) -> int | None:
        text = _token_text(token)
        return None if not text else self._tokenizer.token_to_id(text)

    def _find_stop_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for source in ("generation_config.json", "config.json"):
            value = _read_json(self.directory / source).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        named = self._id_of(self._config.get("eos_token"))
        ids = ([] if named is None else [named]) + found
        if not ids:
            raise UserError(f"{self.directory} names no end-of-sequence token", setting="rollout.stop_ids")
        return tuple(dict.fromkeys(ids))


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer that goes with a model: a directory's own, or the characters of arithmetic for ``tiny:``."""
    return CharTokenizer() if model.startswith(TINY) else DirectoryTokenizer(model_directory(model))


def _read_json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _chat_template(directory: Path, config: dict[str, Any]) -> Any:
    """The compiled template, in the sandbox and with the options of transformers; None where there is none."""
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if not source:
        return None
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_template_error
    return environment.from_string(source)


def _raise_template_error(message: str) -> None:
    raise UserError(f"the model's chat template refuses the prompt: {message}", setting="policy.model")
