"""Cases of operators that have no CUDA kernels yet are not collected where a device is."""

import torch

from muvox._library import WITHOUT_CUDA


def operators_of(item):
    """Names among the test's parameters, without what follows them: "neighbour_attention, offset"."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {value.split(",")[0].split(" ")[0] for value in values if isinstance(value, str)}


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        return  # all of them are skipped
    waiting = [x for x in items if x.path.name == "test_cases.py" and operators_of(x) & WITHOUT_CUDA]
    config.hook.pytest_deselected(items=waiting)
    items[:] = [x for x in items if x not in waiting]
