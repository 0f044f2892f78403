"""What vLLM is started with on each device, what of its versions is asked of it, and how an engine sleeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.roles.engine import WAKES, Asleep, AwakeParts, EngineError, GenerateItem, HeldWeights, NoWeights
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.vllm_adapters import RANKS, Slot, room_for, slot_of
from cosmos_actor.roles.vllm_engine import NOTHING, VllmEngine
from cosmos_actor.roles.vllm_start import SMALL_CACHE_BYTES, Start, _enough_cache, arguments, check, device_of
from cosmos_actor.roles.vllm_versions import layer_names, own_part, version_setter
from cosmos_actor.weight_plane.digest import weights_digest


class Platform:
    """vLLM's `current_platform`."""

    def __init__(self, kind: str) -> None:
        self.is_cpu, self.is_cuda = (lambda: kind == "cpu"), (lambda: kind == "cuda")


def wanted(**fields: Any) -> Start:
    return Start(**{"logprobs_mode": "processed_logprobs", **fields})


def test_the_build_that_is_installed_says_where_it_computes() -> None:
    assert device_of(Platform("cpu"), "auto") == device_of(Platform("cpu"), "cpu") == "cpu"
    assert device_of(Platform("cuda"), "auto") == device_of(Platform("cuda"), "cuda") == "cuda"
    with pytest.raises(BadValue, match=r"rollout\.device = \"cuda\", and the vLLM of rollout\.python is a build for"):
        device_of(Platform("cpu"), "cuda")
    with pytest.raises(BadValue, match="rollout.device = \"cpu\""):
        device_of(Platform("cuda"), "cpu")
    with pytest.raises(BadValue, match="on CPUs and on NVIDIA GPUs"):
        device_of(Platform("tpu"), "auto")


def test_on_a_cpu_nothing_of_a_gpu_is_asked_for() -> None:
    found = arguments(wanted(gpu_memory=0.7, sleeping=True, quantization="fp8"), "cpu")
    assert found["enforce_eager"] is True and found["block_size"] == 32 and found["async_scheduling"] is False
    assert not found.keys() & {"gpu_memory_utilization", "enable_sleep_mode", "compilation_config", "quantization"}


def test_on_a_gpu_decoding_is_graphs_without_compiling_unless_they_are_not_wanted() -> None:
    found = arguments(wanted(gpu_memory=0.3, sequences=10_000), "cuda")
    assert found["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert found["enforce_eager"] is False and found["async_scheduling"] is False
    assert found["gpu_memory_utilization"] == 0.3 and found["max_num_batched_tokens"] == 10_000
    assert found["enable_sleep_mode"] is False and "block_size" not in found and "quantization" not in found
    eager = arguments(wanted(cuda_graphs=False, sleeping=True, quantization="fp8"), "cuda")
    assert eager["enforce_eager"] is True and "compilation_config" not in eager
    assert eager["enable_sleep_mode"] is True and eager["quantization"] == "fp8_per_channel"


def test_a_small_model_has_the_cache_that_its_sequences_can_fill_and_not_millions_of_blocks() -> None:
    tiny = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=2, head_dim=64, max_position_embeddings=40)
    found = _enough_cache(tiny, wanted(dtype="bfloat16", sequences=256))["num_gpu_blocks_override"]
    assert 256 * 3 < found < 256 * 8
    larger = SimpleNamespace(**{**vars(tiny), "num_hidden_layers": 28, "max_position_embeddings": 4096})
    assert 28 * 2 * 64 * 2 * 2 * 4096 * 256 * 2 > SMALL_CACHE_BYTES and not _enough_cache(larger, wanted())
    assert not _enough_cache(SimpleNamespace(num_hidden_layers=1, max_position_embeddings=40), wanted())


def test_what_only_the_other_build_does_is_refused_when_it_is_seen_which_one_is_there() -> None:
    check(wanted(quantization="fp8", dtype="bfloat16", lora_rank=4), "cuda")
    check(wanted(lora_rank=4), "cpu")
    with pytest.raises(BadValue, match="needs vLLM's GPU build"):
        check(wanted(quantization="fp8"), "cpu")
    with pytest.raises(BadValue, match="take 16 bits"):
        check(wanted(lora_rank=4), "cuda")


def test_there_is_room_for_one_adapter_in_the_layers_that_have_one() -> None:
    found = arguments(wanted(lora_rank=3, lora_targets=("q_proj",)), "cpu")
    assert found["enable_lora"] and (found["max_loras"], found["max_lora_rank"]) == (1, 8)
    assert found["lora_target_modules"] == ["q_proj"]
    assert "enable_lora" not in arguments(wanted(), "cpu")
    assert [room_for(rank) for rank in (1, 8, 9, 512)] == [1, 8, 16, 512]
    with pytest.raises(BadValue, match=r"policy\.lora\.rank = 513"):
        room_for(RANKS[-1] + 1)


def test_a_tensor_of_an_adapter_is_found_in_the_layer_that_vllm_joined_it_into() -> None:
    joined = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    name = "base_model.model.model.layers.0.{}.lora_{}.weight"
    assert slot_of(name.format("attn.v_proj", "B"), joined) == Slot("model.layers.0.attn.qkv_proj", 2, False)
    assert slot_of(name.format("mlp.down_proj", "A"), joined) == Slot("model.layers.0.mlp.down_proj", 0, True)


def test_what_a_version_of_vllm_has_not_is_done_without() -> None:
    told: list[str] = []
    version_setter(SimpleNamespace(set_weight_version=told.append))("7")
    version_setter(SimpleNamespace())("8")
    assert told == ["7"]
    assert own_part([{"a": 1}, {"a": 2}], 1) == {"a": 2} and own_part({"a": 3}, 1) == {"a": 3}
    older = SimpleNamespace(get_unstacked_mapper=lambda: "older")
    newer = SimpleNamespace(get_rename_mapper=lambda: "newer", get_unstacked_mapper=lambda: "older")
    assert [layer_names(SimpleNamespace(hf_to_vllm_mapper=one)) for one in (older, newer, "plain")] == [
        "older", "newer", "plain"]
    assert layer_names(SimpleNamespace()) is None


class Vllm:
    """In the place of vLLM's engine, which sleeps on GPUs only: what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.sleep, self.wake_up = self.asked.append, self.asked.append


def engine(sleeping: bool = True, device: str = "cuda", adapted: bool = False) -> tuple[VllmEngine, Vllm]:
    """One that holds version 3, without vLLM."""
    made, vllm = VllmEngine.__new__(VllmEngine), Vllm()
    made.held, made.on_new_weights = HeldWeights(3, "d"), "wait"
    made._sleeping, made._device, made._adapted, made._awake = sleeping, device, adapted, AwakeParts()
    made._llm, made._flights = SimpleNamespace(llm_engine=vllm), ()  # type: ignore[assignment]
    made._loader = SimpleNamespace(read_back=lambda: "d")  # type: ignore[assignment]
    return made, vllm


ITEM = GenerateItem([1], 0)  # type: ignore[arg-type]


def test_weights_that_slept_on_the_host_are_held_again_and_those_that_slept_nowhere_are_not() -> None:
    made, vllm = engine()
    made.sleep(1)
    for call in (lambda: made.begin([ITEM], SamplingSettings()), made.step, made.read_back,
                 lambda: made.load_weights({}, 4, weights_digest({}))):
        with pytest.raises(Asleep, match="has no weights"):
            call()
    made.wake(WAKES)
    assert made.held == HeldWeights(3, "d") and made.read_back() == "d"
    made.sleep(2)
    assert made.held == NOTHING
    made.wake(["weights"])
    with pytest.raises(Asleep, match="has no kv_cache on its device"):
        made.begin([ITEM], SamplingSettings())
    made.wake(WAKES)  # what is awake stays so
    made.wake(("kv_cache",))
    for call in (lambda: made.begin([ITEM], SamplingSettings()), made.read_back):
        with pytest.raises(NoWeights):
            call()
    assert vllm.asked == [1, ["weights", "kv_cache"], 2, ["weights"], ["kv_cache"]]


def test_an_adapter_may_be_lost_in_a_sleep_and_its_base_may_not() -> None:
    made, vllm = engine(adapted=True)
    made.sleep(2)
    assert vllm.asked == [1] and made.held == NOTHING


def test_a_sleep_in_a_sleep_is_that_of_its_own_level() -> None:
    made, vllm = engine()
    made.sleep(1)
    made.sleep(1)
    assert vllm.asked == [1] and made.held.version == 3
    made.wake(["weights"])
    made.sleep(2)
    assert vllm.asked[1:] == [["weights"], ["kv_cache"], 2] and made.held == NOTHING


def test_what_can_not_sleep_or_wake_says_why() -> None:
    for kinds in ({"sleeping": False}, {"device": "cpu"}):
        with pytest.raises(EngineError, match="can not sleep: vLLM gives memory back on GPUs"):
            engine(**kinds)[0].sleep(1)
    with pytest.raises(EngineError, match="no sleep of level 3"):
        engine()[0].sleep(3)
    made, _ = engine()
    made._flights = (1,)  # type: ignore[assignment]
    with pytest.raises(EngineError, match="sequences are in flight"):
        made.sleep(1)
    made, _ = engine()
    made.sleep(1)
    with pytest.raises(EngineError, match="weights wake before kv_cache"):
        made.wake(["kv_cache"])
    with pytest.raises(EngineError, match="nothing called scheduling sleeps"):
        made.wake(["scheduling"])
