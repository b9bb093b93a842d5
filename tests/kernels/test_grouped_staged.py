"""Weights decoded by whole words (`grouped.staged`) in the interpreter: the reference's bits, whatever the format."""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.grouped import grouped_gemm
from moe_lab_kernels.grouped.staged import STAGED
from moe_lab_kernels.grouped.tiles import Tile
from tests.support.grouped_cases import grouped_case
from tests.support.kernel_cases import same_bits

pytestmark = pytest.mark.usefixtures("interpreter")
WORDS = Tile(64, 4, 1, 2, None, True)


@pytest.mark.parametrize("format", STAGED)
def test_every_format(format: str) -> None:
    """Every second row of q3_k and q6_k, 110 and 210 bytes long, begins between words."""
    case = replace(grouped_case(format, 20, 256, [2, 0, 1]), tile=WORDS)
    got = case.product()
    assert same_bits(got.view, case.product(grouped_gemm.grouped_product_ref).view)
    assert got.intact()


def test_gate_and_up_and_fp16() -> None:
    case = replace(grouped_case("q2_k", 20, 256, [1, 2], dtype="f16"), tile=WORDS)
    assert same_bits(case.gated(dtype="f16").view, case.gated(grouped_gemm.grouped_gate_up_ref, "f16").view)


def test_rows_that_end_inside_a_step() -> None:
    """96 of 128 values: no word and no scale behind them is read."""
    case = replace(grouped_case("mxfp4_oss", 20, 96, [2, 1]), tile=WORDS)
    assert same_bits(case.product().view, case.product(grouped_gemm.grouped_product_ref).view)


def test_what_cannot_be_staged_says_so() -> None:
    case = replace(grouped_case("q5_k", 20, 256, [1]), tile=WORDS)
    with pytest.raises(LabError, match="q5_k weights are not decoded by whole words"):
        case.product()
    case = replace(grouped_case("mxfp4_oss", 20, 64, [1], dtype="f16"), tile=WORDS)
    with pytest.raises(LabError, match=r"mxfp4_oss weights are not decoded by whole words for torch.float16 rows"):
        case.product()
    case = replace(grouped_case("mxfp4_oss", 20, 64, [1]), tile=WORDS)
    crooked = torch.zeros(1, 20, 33, dtype=torch.uint8)[:, :, 1:]
    with pytest.raises(LabError, match=r"mxfp4_oss weights are not decoded by whole words .*4-byte addresses"):
        replace(case, gate=case.gate._replace(data=crooked)).product()
