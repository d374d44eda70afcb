"""Every test starts from the same random numbers and on one thread. Tests marked `cuda` need a device."""

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    threads = torch.get_num_threads()
    torch.manual_seed(20)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)
