"""Text to ids and back; chat templates; stop tokens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.actors.errors import NotFound, UserError
from cosmos_actor.roles.tokenizer import ARITHMETIC_ALPHABET, CharTokenizer, DirectoryTokenizer, load_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@given(st.text(ARITHMETIC_ALPHABET))
def test_characters_come_back(text: str) -> None:
    tokenizer = CharTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
    assert tokenizer.encode_answer(text)[-1] in tokenizer.stop_ids


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(UserError, match="'x'"):
        CharTokenizer().encode("1+x")


def test_spare_rows_of_a_model_decode_to_something_visible() -> None:
    assert CharTokenizer().decode([3, 99, 2]) == "0\ufffd"


@pytest.fixture
def directory(tmp_path):
    """A byte-level tokenizer without merges, as a model directory has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 7]}))
    return tmp_path


def test_a_directory_has_its_template_and_its_stop_tokens(directory) -> None:
    tokenizer = load_tokenizer(str(directory))
    ids = tokenizer.encode_prompt("1 + 2 =")
    assert tokenizer.stop_ids == (257, 7) and tokenizer.pad_id == 257 and tokenizer.vocab_size == 258
    assert ids[0] == 256 and ids.count(257) == 1
    assert tokenizer.decode(ids) == "user\n1 + 2 =\nassistant\n"
    assert tokenizer.render([{"role": "user", "content": "é"}]).endswith("é<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode_answer("3")) == "3"
    assert tokenizer.encode_answer("3")[-1] == 257


def test_a_template_of_its_own_file_wins_and_may_refuse(directory) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    with pytest.raises(UserError, match="no users"):
        DirectoryTokenizer(directory).encode_prompt("hello")


def test_without_a_template_the_plain_text_is_the_prompt(directory) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = DirectoryTokenizer(directory)
    assert tokenizer.decode(tokenizer.encode_prompt("abc")) == "abc"


def test_what_is_missing_is_named(tmp_path, directory) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        DirectoryTokenizer(tmp_path / "nowhere")
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="end-of-sequence"):
        load_tokenizer(str(directory))


def test_no_torch_is_needed() -> None:
    program = (
        "import sys\n"
        "from cosmos_actor.roles import engine, sampling, tokenizer\n"
        "from cosmos_actor.trainer import settings\n"
        "import cosmos_actor.tasks.arithmetic, cosmos_actor.tasks.reasoning_gym\n"
        "print(sorted({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_damaged_tokenizer_is_one_line(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="tokenizer.json is damaged") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
