"""The torch engine: what an answer depends on, what it does not, and that weights go in whole or not at all."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosmos_actor.roles.engine import GenerateItem, PromptTooLong, StaleWeights, WeightsRefused
from cosmos_actor.roles.sampling import SamplingSettings, uniforms
from cosmos_actor.roles.torch_engine import TorchEngine, choose
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import load_model
from cosmos_actor.trainer.settings import TrainerSettings
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.flat import aside
from tests.trainer.make import MODEL

STOP = 2


def make_engine(seed: int = 0) -> TorchEngine:
    return TorchEngine(load_model(MODEL, seed=seed), stop_ids=(STOP,), pad_id=0)


def weights_of(seed: int) -> dict[str, np.ndarray]:
    return host_copies(named_tensors(load_model(MODEL, seed=seed)).items())


def items(count: int = 6) -> list[GenerateItem]:
    prompts = [[1, 4, 5], [1, 9], [1, 7, 8, 11, 12, 3]]
    return [GenerateItem(np.array(prompts[i % 3], np.int32), seed=i // 3, sample=i) for i in range(count)]


def settings(**fields: object) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": 12, **fields})


def same(one, other) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and np.allclose(one.logprobs, other.logprobs, atol=1e-6)


def test_an_answer_ends_with_its_first_stop_token_or_at_the_limit() -> None:
    done = make_engine().generate(items(60), settings())
    assert {completion.finished for completion in done} == {True, False}
    for completion in done:
        assert completion.tokens.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert len(completion.tokens) == len(completion.logprobs) <= 12
        assert completion.finished == (completion.tokens[-1] == STOP)
        assert STOP not in completion.tokens[:-1]
        assert completion.finished or len(completion.tokens) == 12


def test_an_answer_depends_on_its_own_prompt_and_seed_alone() -> None:
    engine = make_engine()
    together = engine.generate(items(), settings())
    alone = [engine.generate([item], settings())[0] for item in items()]
    backwards = engine.generate(items()[::-1], settings())[::-1]
    for first, second, third in zip(together, alone, backwards, strict=True):
        assert same(first, second) and same(first, third)


def test_the_same_batch_twice_is_bit_equal_and_another_seed_is_another_answer() -> None:
    engine = make_engine()
    prompt = np.array([1, 4, 5], np.int32)
    batch = [GenerateItem(prompt, seed, sample) for seed in (0, 1) for sample in range(8)]
    one, two = engine.generate(batch, settings()), engine.generate(batch, settings())
    assert all(a.logprobs.tobytes() == b.logprobs.tobytes() for a, b in zip(one, two, strict=True))
    assert len({completion.tokens.tobytes() for completion in one}) > 12


def test_a_longer_limit_only_continues_the_answer() -> None:
    engine = make_engine()
    short, long = (engine.generate(items(), settings(max_new_tokens=limit)) for limit in (4, 12))
    for before, after in zip(short, long, strict=True):
        assert after.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()


def test_logprobs_are_those_of_the_tempered_distribution_without_padding_or_cache() -> None:
    engine = make_engine()
    for completion, item in zip(engine.generate(items(), settings(temperature=0.6)), items(), strict=True):
        sequence = torch.tensor([[*item.prompt.tolist(), *completion.tokens.tolist()]])
        with torch.no_grad():
            table = torch.log_softmax(engine.model(input_ids=sequence).logits[0].double() / 0.6, dim=-1)
        start = len(item.prompt)
        expected = [table[start + i - 1, token].item() for i, token in enumerate(completion.tokens.tolist())]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_greedy_takes_the_likeliest_token_and_scores_it_at_temperature_one() -> None:
    engine = make_engine()
    first, second = engine.generate(
        [GenerateItem(np.array([1, 4], np.int32), seed) for seed in (1, 2)], settings(temperature=0.0))
    assert first.tokens.tolist() == second.tokens.tolist()
    with torch.no_grad():
        table = torch.log_softmax(engine.model(input_ids=torch.tensor([[1, 4]])).logits[0, -1], dim=-1)
    assert first.tokens[0] == table.argmax() and first.logprobs[0] == pytest.approx(table.max().item(), abs=1e-5)


def drawn(logits: torch.Tensor, count: int = 20_000, **fields: object) -> np.ndarray:
    """How often each token is chosen, [V]."""
    noise = torch.from_numpy(uniforms([(5, 0)], count)[0])
    tokens, _ = choose(logits.expand(count, -1), noise, settings(**fields))
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / count


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, float("-inf")]])
    frequencies = drawn(logits, temperature=1.7)
    np.testing.assert_allclose(frequencies, torch.softmax(logits[0] / 1.7, -1).numpy(), atol=0.01)
    assert frequencies[4] == 0.0


def test_top_k_and_top_p_forbid_the_unlikely_and_leave_the_logprobs() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))
    np.testing.assert_allclose(drawn(logits, top_k=2), [0, 2 / 3, 0, 1 / 3], atol=0.015)
    np.testing.assert_allclose(drawn(logits, top_p=0.7), [0, 2 / 3, 0, 1 / 3], atol=0.015)
    np.testing.assert_allclose(drawn(logits, top_p=0.0001), [0, 1, 0, 0])
    np.testing.assert_allclose(drawn(logits, top_p=0.95, top_k=3), [0, 5 / 9, 1.5 / 9, 2.5 / 9], atol=0.015)
    _, logprob = choose(logits, torch.tensor([0.1], dtype=torch.float64), settings(top_k=1))
    assert logprob.exp().item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_noise_choose_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.3, 0.1, float("-inf")]])
    token, logprob = choose(logits, torch.tensor([uniform], dtype=torch.float64), settings())
    assert token.item() == (1 if uniform == 0.0 else 2) and torch.isfinite(logprob).all()


def test_noise_is_a_function_of_seed_sample_and_position() -> None:
    noise = uniforms([(3, 0), (3, 1), (4, 0)], 8)
    assert noise.tolist() == np.concatenate([uniforms([pair], 20)[:, :8] for pair in ((3, 0), (3, 1), (4, 0))]).tolist()
    assert len(set(noise.ravel().tolist())) == 24 and 0 <= noise.min() and noise.max() < 1


def test_weights_are_swapped_whole_and_named_by_what_is_held() -> None:
    engine = make_engine(seed=0)
    offered = weights_of(1)
    held = engine.load_weights(offered, 3, weights_digest(offered))
    assert engine.held == (engine.held.__class__)(3, held)
    assert held == weights_digest(offered)
    other = make_engine(seed=1).generate(items(), settings())
    assert all(same(a, b) for a, b in zip(engine.generate(items(), settings()), other, strict=True))
    assert engine.statistics()["swaps"] == 1


def broken(kind: str) -> dict[str, np.ndarray]:
    weights = weights_of(1)
    name = "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        del weights[name]
    elif kind == "unknown":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    elif kind == "shape":
        weights[name] = weights[name][:, 1:]
    else:
        weights[name] = weights[name].astype(np.float64)
    return weights


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "dtype"])
def test_weights_that_do_not_fit_leave_the_old_ones_in_place(kind: str) -> None:
    engine = make_engine()
    before = engine.generate(items(), settings())
    offered = broken(kind)
    with pytest.raises(WeightsRefused, match="lm_head" if kind == "unknown" else "up_proj"):
        engine.load_weights(offered, 1, weights_digest(offered))
    assert engine.held.version == -1
    assert all(same(a, b) for a, b in zip(before, engine.generate(items(), settings()), strict=True))


def test_weights_with_another_digest_or_an_old_version_are_refused() -> None:
    engine, offered = make_engine(), weights_of(1)
    with pytest.raises(WeightsRefused, match="manifest"):
        engine.load_weights(offered, 1, weights_digest(weights_of(2)))
    engine.load_weights(offered, 1, weights_digest(offered))
    with pytest.raises(StaleWeights, match="not newer"):
        engine.load_weights(offered, 1, weights_digest(offered))


def test_what_float16_can_not_hold_is_refused_and_the_version_before_serves() -> None:
    engine = TorchEngine(load_model(MODEL, dtype="float16"), stop_ids=(STOP,), pad_id=0)
    model = load_model(MODEL, seed=1)
    for version, scale in ((1, 1.0), (2, 1e6)):
        model.lm_head.weight.data *= scale
        with np.errstate(over="ignore"):
            offered = {name: array.astype(np.float16)
                       for name, array in host_copies(named_tensors(model).items()).items()}
        digest = weights_digest(offered)
        if version == 1:
            held = engine.load_weights(offered, version, digest)
            continue
        with pytest.raises(WeightsRefused, match="version 2: model.embed_tokens.weight has numbers that are not fin"):
            engine.load_weights(offered, version, digest)
        assert (engine.held.version, engine.held.digest, engine.read_back()) == (1, held, held)


def test_a_prompt_that_does_not_fit_names_the_setting() -> None:
    with pytest.raises(PromptTooLong, match=r"rollout\.max_new_tokens"):
        make_engine().generate(items(), settings(max_new_tokens=60))
    with pytest.raises(PromptTooLong, match="no tokens"):
        make_engine().generate([GenerateItem(np.zeros(0, np.int32), 0)], settings())


def test_an_engine_is_made_from_a_runs_settings() -> None:
    policy = TrainerSettings(model=MODEL, publish_dtype="bfloat16")
    engine = TorchEngine.from_settings(SimpleNamespace(policy=policy, rollout=SimpleNamespace(
        device="cpu", threads=1, on_new_weights="wait", cuda_graphs=True, quantization="none")))
    assert engine.model.dtype == torch.bfloat16 and engine.held.version == -1
    assert engine.generate(items(2), settings())[0].logprobs.dtype == np.float32


@pytest.mark.gpu
def test_an_answer_in_bfloat16_is_the_same_every_time() -> None:
    model = load_model("tiny:qwen3?hidden=256&layers=4&heads=4&kv_heads=4&intermediate=512&vocab=32000&positions=256",
                       dtype="bfloat16", device=torch.device("cuda", 0))
    engine = TorchEngine(model, stop_ids=(STOP,), pad_id=0)
    batch = [GenerateItem(np.array([1, *range(3, 4 + number % 4)], np.int32), number, sample)
             for number in range(8) for sample in range(8)]
    first = engine.generate(batch, settings(max_new_tokens=100))
    for _ in range(3):
        assert all(same(a, b) for a, b in zip(engine.generate(batch, settings(max_new_tokens=100)), first, strict=True))


@pytest.mark.gpu
def test_a_graph_is_captured_while_another_thread_fetches_the_next_version() -> None:
    device, over, met, failed = torch.device("cuda", 0), threading.Event(), threading.Event(), []
    engine = TorchEngine(load_model(MODEL, device=device), stop_ids=(STOP,), pad_id=0)

    def fetch() -> None:
        held: list[torch.Tensor] = []
        try:
            while not over.is_set():
                with aside(device):  # what a fetch asks for: memory, a copy, whether it is done
                    held = [*held[-8:], torch.zeros((16 + len(held)) << 20, dtype=torch.uint8, device=device)]
                    done = torch.cuda.Event()
                    done.record()
                    done.query()
                met.set()
        except Exception as error:
            failed.append(error)

    before = engine.generate(items(), settings())
    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        assert met.wait(30.0)
        for _ in range(20):
            assert all(same(a, b) for a, b in zip(engine.generate(items(), settings()), before, strict=True))
    finally:
        over.set()
        thread.join()
    assert not failed


def test_the_number_of_threads_is_the_settings_own() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        make_engine().generate(items(1), settings())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_statistics_count_what_was_sampled() -> None:
    engine = make_engine()
    assert engine.generate([], settings()) == []
    done = engine.generate(items(), settings())
    counts = engine.statistics()
    assert counts["sequences"] == 6 and counts["tokens"] == sum(len(completion.tokens) for completion in done)
    assert counts["prompt_tokens"] == 3 * 6  # each distinct prompt is read once, padded to the longest
    assert counts["seconds"] > 0
