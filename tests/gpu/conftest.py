"""What depends on the device: ``pytest -m gpu`` on a machine that has one.

Each test takes the fixture ``device``. What means something without a GPU runs on the CPU as well,
so that the tests themselves are tried; kernels, graphs and host syncs run on GPUs alone.
"""

from __future__ import annotations

import pytest
import torch

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request):
    return request.param


@pytest.fixture
def gpu(request):
    """The device of tests that have no meaning without a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda"


@pytest.fixture
def exact_products():
    """Products of float32 without TF32, which commands switch on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
