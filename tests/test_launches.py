"""The count of a Reuse layer's kernels: what the second of two such layers adds."""

import pytest

from bench import launches
from dsv41.errors import UserError
from dsv41.plan import layer_plans
from tests.kernels import WITHOUT_GPU


def test_two_models_differ_by_one_reuse_layer():
    few, many = (layer_plans(launches.with_reuse(n)) for n in (1, 2))
    assert [plan.mode for plan in many] == [*(plan.mode for plan in few), "reuse"]
    assert not many[-1].owns_kv and not many[-1].selects


def test_what_the_second_adds():
    few = [("gemm", 2.0), ("sort", 1.0)]
    assert launches.added(few, [*few, ("gemm", 2.5), ("attention", 9.0)]) == (2, 11.5, {"gemm": 1, "attention": 1})


def test_a_loops_second_step_is_what_two_steps_have_beyond_one():
    one = [("before", 5.0), ("gemm", 2.0), ("gemm", 4.0), ("sort", 1.0)]
    two = [*one, ("gemm", 4.0), ("gemm", 2.0), ("sort", 2.0)]
    assert sorted(launches.of_one_step(one, two)) == [("gemm", 3.0), ("gemm", 3.0), ("sort", 1.5)]


@WITHOUT_GPU
def test_without_a_gpu_is_one_line():
    with pytest.raises(UserError, match="backend: found cpu, allowed is gpu"):
        launches.main(None)
