"""Products have the same bits wherever their matrices lie in memory."""

import pytest
import torch

import pfl_lightning  # noqa: F401  # sets MKL's mode


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="a mode of MKL, which this torch is built without")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(13, 6, 5), (10, 64, 10), (5, 17, 9)])
def test_products_do_not_depend_on_alignment(rows, inner, columns):
    x, weight, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    products = set()
    for offset in range(16):
        place = torch.empty(offset + x.numel())[offset:].view_as(x).copy_(x)
        products.add(tuple(torch.addmm(bias, place, weight.t()).flatten().tolist()))
    assert len(products) == 1
