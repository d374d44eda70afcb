"""Every test starts from the same random numbers and on one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    threads = torch.get_num_threads()
    torch.manual_seed(20)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
