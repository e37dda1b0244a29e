"""The key table has exactly the release's tensors, and each of them one place."""

import math
from collections import Counter
from pathlib import Path

import pytest

from dsv41.config import QuantizationConfig, from_released, load_config, preset, replace, to_released
from dsv41.errors import UserError
from dsv41.hf.names import key_table, released_tensors, text_leaves, tile, vision_specs
from dsv41.hf.safetensors import open_safetensors
from dsv41.params import count_parameters, draft_specs
from tests.hf.release import released_config

GOLDEN = Path(__file__).parents[1] / "golden" / "model_a"


@pytest.mark.pitfall("K1", "K2")
def test_the_release_to_the_last_tensor():
    config = preset("flash")
    elements, size = Counter(), 0
    for tensor in released_tensors(config):
        elements[tensor.dtype] += math.prod(tensor.shape)
        size += tensor.bytes
    assert size == 510_286_023_000
    assert elements == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
    }
    names = [tensor.name for tensor in released_tensors(config)]
    assert len(names) == len(set(names)) == 96_085
    assert sum(1 for _ in released_tensors(config, "text")) == 93_418
    assert count_parameters(draft_specs(config)) == 14_225_362_530
    assert count_parameters(vision_specs(config)) == 485_253_120 + 15_360


@pytest.mark.pitfall("K2")
def test_roles_of_the_release():
    names = set(key_table(preset("flash")))
    layers = lambda suffix: [n for n in range(40) if f"layers.{n}.attn.{suffix}" in names]  # noqa: E731
    assert layers("compressor.wkv.weight") == layers("indexer.wk.weight") == [2, 8, 14, 20]
    assert layers("compressor.wgate.weight") == [2, 8, 14]
    assert layers("indexer.wq_b.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert sum(name.endswith((".gate.bias", ".gate.bias_vl")) for name in names) == 2 * 43
    assert not any("hc_head" in name for name in names)


@pytest.mark.pitfall("K1")
def test_every_leaf_is_filled_once():
    config = released_config()
    slots = [slot for slot in key_table(config).values() if slot.part == "text"]
    experts = {path: [s.expert for s in slots if s.path == path] for path in text_leaves(config)}
    for path, spec in text_leaves(config).items():
        assert experts[path] == (list(range(spec.shape[0])) if spec.stacked else [None])
    assert sum(math.prod(slot.shape) for slot in slots) == sum(spec.size for spec in text_leaves(config).values())


def test_golden_weights_have_these_names():
    table = key_table(load_config(GOLDEN))
    entries = {}
    for file in GOLDEN.glob("weights*.safetensors"):
        entries |= open_safetensors(file).entries
    assert {name: e.shape for name, e in entries.items()} == {n: s.shape for n, s in table.items() if s.part != "vision"}


def test_tile_from_the_configuration():
    config = released_config(quantization_config=QuantizationConfig(weight_block_size=(16, 8)))
    assert tile(config) == (16, 8)
    scale = key_table(config)["layers.0.attn.wq_a.weight"].scale
    assert scale is not None and scale.shape == (3, 4)
    assert tile(replace(config, quantization_config=None)) == (32, 32)


@pytest.mark.pitfall("K5")
def test_other_model_types_are_refused():
    data = to_released(preset("flash"))
    assert from_released(data) == preset("flash")
    for model_type in ("deepseek_v4", "deepseek_v41_text", "deepseek_v411"):
        with pytest.raises(UserError, match="model_type"):
            from_released({**data, "model_type": model_type})
    with pytest.raises(UserError, match="model_type"):
        from_released({**data, "text_config": {**data["text_config"], "model_type": "deepseek_v4_text"}})
    with pytest.raises(UserError, match="text_config"):
        from_released(data["text_config"])
