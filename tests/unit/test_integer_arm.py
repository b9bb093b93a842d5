"""The integer decode arithmetic against float64 formulas of the operands it defines, and against the kernels'
reference.
"""

import pytest
import torch

from moe_lab.arms.integer import integer_matmul
from moe_lab.formats import get_format, quantize, quantize_q8_1
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv

FORMATS = ("q2_k", "q3_k", "q8_0")


def operands(name: str, n: int = 60, kd: int = 512, r: int = 9):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(r, kd, generator=g)
    return x, quantize_q8_1(x), quantize(torch.randn(n, kd, generator=g) * 0.05, name)


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_float64_dot_of_its_operands(name: str) -> None:
    _, rows, q = operands(name)
    x8 = rows.codes.double() * rows.scale.double().repeat_interleave(32, -1)
    form = get_format(name).integer_form(q.data)
    w = form.codes.double() * form.scale.double().repeat_interleave(form.group, -1)
    if form.mins is not None:
        w -= form.mins.double().repeat_interleave(16, -1) * form.min_scale.double().repeat_interleave(form.group, -1)
    assert nmse(integer_matmul(rows, form), x8 @ w.T) <= tol("gemv/emulation")


@pytest.mark.parametrize("name", FORMATS)
def test_agrees_with_the_kernels_reference(name: str) -> None:
    _, rows, q = operands(name)
    chunks = torch.tensor([[0, 0, 8], [0, 8, 1]], dtype=torch.int32)
    out = torch.full((9, 60), float("nan"))
    gemv.gemv_ref(rows.operands, torch.arange(9, dtype=torch.int32), q.data[None], chunks, name, out)
    assert nmse(integer_matmul(rows, get_format(name).integer_form(q.data)), out) <= tol("gemv/emulation")


@pytest.mark.parametrize("name", FORMATS)
def test_error_against_unrounded_activations(name: str) -> None:
    x, rows, q = operands(name, n=256, kd=1024, r=32)
    assert nmse(
        integer_matmul(rows, get_format(name).integer_form(q.data)), x.double() @ q.dequantize().double().T
    ) <= tol("gemv/product")


@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(name: str) -> None:
    _, rows, q = operands(name, r=37)
    form = get_format(name).integer_form(q.data)
    together = integer_matmul(rows, form)
    for r in range(37):
        alone = integer_matmul(rows[r : r + 1], form)
        assert torch.equal(alone[0], together[r])
