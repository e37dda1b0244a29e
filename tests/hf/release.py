"""Small folders in the release's exact layout: drafts and vision included, partial edge tiles, any legal stored bytes."""

import json
from pathlib import Path

import numpy as np

from dsv41.config import ModelConfig, VisionConfig
from dsv41.hf.names import key_table
from dsv41.hf.safetensors import DTYPES
from dsv41.hf.save import Unit, write_weights
from dsv41.params import ReleasedTensor
from tests.models import drafting_config

VISION = VisionConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=24, patch_size=2)


def released_config(**changes) -> ModelConfig:
    """Every role in four layers, two draft stages, a vision tower, tiles that do not divide the weights (40, 20 over 32)."""
    return drafting_config(**{"q_lora_rank": 40, "o_lora_rank": 20, "vision_config": VISION, **changes})


def random_tensor(tensor: ReleasedTensor, rng: np.random.Generator) -> np.ndarray:
    """Any finite values; scales anywhere from the subnormal 2**-127 up, some tiles all zero."""
    dtype = DTYPES[tensor.dtype]
    if tensor.dtype in ("F32", "BF16"):
        return rng.standard_normal(tensor.shape).astype(np.float32).astype(dtype)
    if tensor.dtype == "I64":
        return rng.integers(0, 2, tensor.shape)
    data = rng.integers(0, 240, tensor.shape, dtype=np.uint8)
    if tensor.dtype == "F8_E8M0":
        data.flat[0] = 0
    else:
        data[(data & 127) == 127] = 1
        data[: len(data) // 2, :16] = 0
    return data.view(dtype)


def write_release(path: Path, config: ModelConfig, seed: int = 0, shard_bytes: int = 1 << 17) -> Path:
    """A folder that our writer wrote."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    slots = key_table(config).values()
    units = [Unit(s.tensors, lambda s=s: [random_tensor(t, rng) for t in s.tensors]) for s in slots]
    write_weights(path, units, config, shard_bytes)
    return path


def write_headers(path: Path, files: dict[str, list[ReleasedTensor]]) -> None:
    """Files of the tensors' headers over holes in place of data, and their index."""
    path.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for name, tensors in files.items():
        header, stop = {}, 0
        for tensor in tensors:
            start, stop = stop, stop + tensor.bytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
            weight_map[tensor.name] = name
        text = json.dumps(header).encode()
        with open(path / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + stop)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
