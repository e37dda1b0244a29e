"""config.json both ways, and one clear line for whatever it must refuse."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import ConfigError, ModelConfig, from_released, load_config, preset, replace, save_config, to_released
from tests.models import tiny_config

FLASH = preset("flash")


@pytest.mark.parametrize("config", [FLASH, preset("toy"), tiny_config(num_hash_layers=2, hc_single_pass=False)])
def test_released_layout_round_trip(config, tmp_path):
    assert from_released(json.loads(json.dumps(to_released(config)))) == config
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_flash_is_the_release():
    data = to_released(FLASH)
    assert data["architectures"] == ["DeepseekV41ForCausalLM"]
    text = data["text_config"]
    assert text["compress_ratios"] == [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0]
    assert text["rope_scaling"]["original_max_position_embeddings"] == 65536
    assert not {"gate_temp", "num_hash_layers", "hc_single_pass"} & set(text)
    assert data["quantization_config"]["weight_block_size"] == [32, 32]
    assert from_released({"text_config": {**text, "engram_pad_id": 2}}).engram_pad_token_id == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 0}, "vocab_size: found 0"),
        ({"vocab_size": 1.5}, "vocab_size: found 1.5, allowed is a whole number"),
        ({"vocab_size": True}, "whole number"),
        ({"head_dim": 48}, "multiple of 32"),
        ({"qk_rope_head_dim": 7}, "multiple of 2"),
        ({"qk_rope_head_dim": 256}, "at most head_dim and index_head_dim"),
        ({"num_attention_heads": 63}, "o_groups"),
        ({"num_key_value_heads": 8}, "allowed is 1"),
        ({"compress_ratios": [0, 2]}, "compress_ratios: found '2 entries'"),
        ({"compress_ratios": "x"}, "list of whole numbers"),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "increasing"),
        ({"kv_source_layer_ids": [3, 8, 14, 20]}, "index_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "before every source"),
        ({"kv_source_layer_ids": [2, 8, 14], "candidate_source_layer_id": 20}, "the ratio of its kv source"),
        ({"index_source_layer_ids": [1, 2, 8, 14, 20]}, "layer 1 has 0"),
        ({"candidate_source_layer_id": 21}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "come later"),
        ({"candidate_topk_blocks": 8}, "enough blocks to hold index_topk"),
        ({"engram_num_embeddings": [384006167, 384016682]}, "at least 384006168"),
        ({"engram_num_embeddings": [384006168]}, "one for each of 2 tables"),
        ({"engram_compressed_vocab_size": 200000}, "at most vocab_size"),
        ({"num_experts_per_tok": 400}, "384 routed experts"),
        ({"num_hash_layers": 41}, "0..40"),
        ({"rope_scaling": {"factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {"facter": 2}}, "did you mean 'factor'"),
        ({"vocab_sise": 3}, "did you mean 'vocab_size'"),
        ({"scoring_func": "softmax"}, "sqrtsoftplus"),
        ({"dspark_noise_token_id": 129280}, "a token id"),
        ({"norm_topk_prob": 1}, "true or false"),
    ],
)
def test_impossible_configs_are_named_in_one_line(change, says):
    data = to_released(FLASH)
    data["text_config"].update(change)
    with pytest.raises(ConfigError) as error:
        from_released(data)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_config(tmp_path):
    for text in ("{", "[]", "{}", '{"text_config": 3}', "\xff", '{"a": 1' + "0" * 5000 + "}"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"config"):
            load_config(tmp_path)
    with pytest.raises(ConfigError, match="no file"):
        load_config(tmp_path / "missing")
    with pytest.raises(ConfigError, match="did you mean 'flash'"):
        preset("flesh")


@pytest.mark.parametrize("form", [None, "in a folder"])
def test_what_would_hang_or_fill_the_memory_is_no_config(tmp_path, form):
    def refused(place) -> str:
        with pytest.raises(ConfigError, match=r"^config: found ") as error:
            load_config(place)
        return str(error.value)

    file = tmp_path / "config.json"
    place = tmp_path if form else file
    os.mkfifo(file)
    assert refused(place) == f"config: found a device or pipe at {str(file)!r}, allowed is a regular file"
    file.unlink()
    file.symlink_to("/dev/zero")
    assert "a device or pipe" in refused(place)
    file.unlink()
    save_config(preset("toy"), file)
    text = file.read_text()
    file.write_text(text + " " * ((1 << 20) - len(text)))
    assert load_config(place) == preset("toy")
    file.write_text(file.read_text() + " ")
    assert refused(place) == f"config: found 1,048,577 bytes in {str(file)!r}, allowed are at most 1,048,576"
    file.unlink()
    (file / "config.json").mkdir(parents=True)
    assert "a folder at" in refused(place)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(to_released(FLASH)["text_config"])), value=_JSON)
def test_any_value_is_taken_or_refused_by_name(name, value):
    data = to_released(preset("toy"))
    data["text_config"][name] = value
    try:
        config = from_released(data)
    except ConfigError as error:
        said = str(error)
    else:
        said = ""
        assert isinstance(config, ModelConfig)
        assert from_released(to_released(config)) == config
    assert "\n" not in said


@pytest.mark.parametrize("name", ["engram_n_heads", "engram_max_ngram_size"])
def test_no_endless_search_for_primes(name):
    data = to_released(preset("toy"))
    data["text_config"][name] = 10**9
    with pytest.raises(ConfigError, match="at most 256 rows a token"):
        from_released(data)


def test_replace_validates_again():
    with pytest.raises(ConfigError, match="hidden_size"):
        replace(FLASH, hidden_size=100)
