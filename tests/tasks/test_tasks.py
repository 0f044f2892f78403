"""Problems are functions of seed, split and index; splits never meet; verifiers are exact."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cosmos_actor.actors.errors import BadValue, UnknownName
from cosmos_actor.roles.tokenizer import CharTokenizer
from cosmos_actor.tasks import arithmetic, reasoning_gym


def arithmetic_task(seed: int = 0, largest: int = 19):
    return arithmetic.make_task(SimpleNamespace(arithmetic=SimpleNamespace(largest=largest)), seed)


def gym_task(seed: int = 0, dataset: str = "chain_sum", instruction: str = "Answer with the number only.", **config):
    pytest.importorskip("reasoning_gym")
    chosen = SimpleNamespace(dataset=dataset, config=config, instruction=instruction)
    return reasoning_gym.make_task(SimpleNamespace(reasoning_gym=chosen), seed)


@pytest.fixture(params=[arithmetic_task, gym_task], ids=["arithmetic", "chain_sum"])
def make(request):
    return request.param


def test_a_problem_is_a_function_of_seed_split_and_index(make) -> None:
    one, two, other = make(seed=3), make(seed=3), make(seed=4)
    far = 1 << 41
    for split in ("train", "held_out"):
        forward = [one.problem(split, index) for index in (*range(20), far)]
        backward = [two.problem(split, index) for index in (far, *reversed(range(20)))]
        assert forward == backward[::-1]
        assert forward != [other.problem(split, index) for index in (*range(20), far)]
        assert len({prompt for prompt, _ in forward}) > 5


def test_the_splits_never_meet(make) -> None:
    tasks = [make(seed=seed) for seed in (0, 1)]
    train, held_out = (
        {task.problem(split, index)[0] for task in tasks for index in range(300)} for split in ("train", "held_out")
    )
    assert train and held_out and not train & held_out


def test_the_right_answer_and_nothing_else_is_rewarded(make) -> None:
    task = make(seed=0)
    for index in range(50):
        _, payload = task.problem("train", index)
        answer = task.answer(payload)
        assert task.reward(payload, answer) == 1.0
        assert [task.reward(payload, text) for text in ("", answer + "1", str(int(answer) + 1), "x")] == [0.0] * 4


def test_another_split_is_refused(make) -> None:
    with pytest.raises(ValueError, match="validation"):
        make().problem("validation", 0)


def test_sums_fit_the_tokenizer_and_are_right() -> None:
    task, tokenizer = arithmetic_task(largest=9), CharTokenizer()
    for index in range(200):
        prompt, payload = task.problem("train", index)
        first, second = map(int, prompt.rstrip("=").split("+"))
        assert payload == {"answer": str(first + second)} and max(first, second) <= 9
        assert tokenizer.decode(tokenizer.encode_prompt(prompt) + tokenizer.encode_answer(payload["answer"])) == (
            prompt + payload["answer"])


def test_too_few_numbers_leave_no_split() -> None:
    with pytest.raises(ValueError, match="data.arithmetic.largest"):
        arithmetic_task(largest=1)


def test_a_sum_is_judged_by_the_whole_text() -> None:
    task = arithmetic_task()
    assert [task.reward({"answer": "7"}, text) for text in ("7", " 7", "7=", "07", "77")] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [("It is 21.", "21"), ("5 + 9 = 14, so -3", "-3"), ("1,234.50", "1,234.50"), ("no idea", ""), ("7, 8,", "8")],
)
def test_the_last_number_is_what_was_said(text: str, said: str) -> None:
    assert reasoning_gym.last_number(text) == said


def test_chain_sum_is_judged_by_its_last_number() -> None:
    task = gym_task(min_digits=1, max_digits=1)
    prompt, payload = task.problem("train", 0)
    answer = task.answer(payload)
    assert prompt.endswith("= Answer with the number only.")
    assert task.reward(payload, f"The answer is {answer}.") == 1.0
    assert task.reward(payload, f"{answer} or 12345") == 0.0


def test_a_data_set_is_named_and_configured() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UnknownName, match="chain_sun"):
        gym_task(dataset="chain_sun")
    with pytest.raises(BadValue, match="min_digitz"):
        gym_task(min_digitz=1)
    with pytest.raises(BadValue, match="min_terms"):
        gym_task(min_terms=0)


def test_other_data_sets_work() -> None:
    task = gym_task(dataset="gcd", instruction="")
    _, payload = task.problem("held_out", 5)
    assert task.reward(payload, f"so gcd = {task.answer(payload)}") == 1.0


def test_a_data_set_with_too_few_questions_is_refused() -> None:
    task = gym_task(min_terms=1, max_terms=1, min_digits=1, max_digits=1)
    splits = {reasoning_gym.is_held_out(f"State the final answer to the following arithmetic problem: {n} =")
              for n in range(10)}
    if splits == {False}:
        with pytest.raises(BadValue, match="held_out"):
            task.problem("held_out", 0)
    else:
        assert task.problem("held_out", 0)
