"""DeepSeek-V4.1-Flash in JAX: the model as pure functions on pytrees."""

__version__ = "0.1.0"
