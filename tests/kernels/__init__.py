"""Tests of kernels run on the backend that jax has: interpreted on a CPU, on the card itself where one is."""

import jax
import pytest

WITHOUT_GPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="of a machine without a GPU")
