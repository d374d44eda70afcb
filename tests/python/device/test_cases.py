"""The faults that others met (`../cases`), tried once more on a device: the same tests, whose tensors are made there.

Left out are those that measure the processor's time, compile, take memory by mmap, or call attentions among others.
What is parametrised with an operator that has no CUDA kernels runs once it has: see conftest.py.
"""

import pytest
import torch

from cases import (
    test_determinism,
    test_empty_sets,
    test_functorch_and_export,
    test_gradients,
    test_layouts,
    test_nan_and_infinity,
    test_neighbours,
    test_precision_and_autocast,
    test_sizes,
    test_voxelize,
)
from cases.test_determinism import deterministic  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

CHECKED = ("test_bad_offsets_are_refused", "test_bad_offsets_of_queries_are_refused")
ELSEWHERE = {
    test_determinism: {"test_threads_do_not_change_bits"},
    test_functorch_and_export: {
        name for name in dir(test_functorch_and_export) if not name.startswith(("test_jacobian", "test_per_sample"))
    },
    test_gradients: {"test_compiled_second_derivative_is_refused"},
    test_layouts: {
        *("test_tiny_segments", "test_no_leak_between_voxels"),  # with attentions
        "test_offsets_of_another_form_are_refused",  # offsets on the CPU
    },
    test_neighbours: {"test_collapsed_coordinates_are_not_slower_than_brute_force"},
    test_precision_and_autocast: {
        *("test_autocast_keeps_coordinates_in_float", "test_autocast_around_layers"),  # with attentions
        *("test_no_operator_is_without_an_autocast_rule", "test_no_operator_is_without_gradient_or_fake"),
        "test_the_calls_are_all_there",
    },
    test_sizes: {
        *("test_rows_beyond_32_bits", "test_sets_beyond_32_bits"),
        *("test_voxelize_of_17_million_points", "test_devoxelize_of_17_million_voxels"),  # see test_large.py
        "test_impossible_sizes_are_refused",  # arguments on the CPU
    },
}
TESTS = {
    name: getattr(module, name)
    for module in (test_empty_sets, test_nan_and_infinity, test_voxelize, *ELSEWHERE)
    for name in dir(module)
    if name.startswith("test_") and name not in ELSEWHERE.get(module, ())
}
globals().update(TESTS)


@pytest.fixture(autouse=True)
def made_on_a_device(request, monkeypatch):
    if request.node.originalname in CHECKED:
        monkeypatch.setenv("MUVOX_CHECK", "1")  # or nobody would look at splits on a device
    with torch.device("cuda"):
        yield
