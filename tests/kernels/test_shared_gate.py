"""The gate of a shared expert: the reference's bits for any rows, widths, dtypes and strides."""

import math

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.rows import shared_gate as op
from tests.support.kernel_cases import same_bits

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("d", [1, 60, 2880])
@pytest.mark.parametrize("t", [0, 1, 7, 37])
def test_bits_of_the_reference(t: int, d: int) -> None:
    g = torch.Generator().manual_seed(t + d)
    for x_dtype, v_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        x, v = torch.randn(t, d, generator=g).to(x_dtype), (3 * torch.randn(d, generator=g)).to(v_dtype)
        made = op.shared_gate(x, v)
        assert made.shape == (t,)
        assert same_bits(made, op.shared_gate_ref(x, v))
        wide = torch.full((t, 2 * d), math.nan).to(x_dtype)
        wide[:, ::2] = x
        assert same_bits(op.shared_gate(wide[:, ::2], v), made)


def test_rows_that_are_not_finite_stay_alone() -> None:
    x, v = torch.randn(4, 60, generator=torch.Generator().manual_seed(1)), torch.ones(60)
    want = op.shared_gate(x, v)
    x[1, 3], x[2, 3] = math.nan, math.inf
    made = op.shared_gate(x, v)
    assert same_bits(made, op.shared_gate_ref(x, v))
    assert same_bits(made[::3], want[::3])
    assert made[1].isnan()
    assert made[2] == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LabError, match=r"v must have shape \[60\], got \[61\]"):
        op.shared_gate(torch.ones(2, 60), torch.ones(61))
    with pytest.raises(LabTypeError, match="x must be fp32 or fp16 or bf16"):
        op.shared_gate(torch.ones(2, 60).double(), torch.ones(60))
