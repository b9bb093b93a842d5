"""Do arms agree, by how much, where, and why not: `lab.compare` and what stands behind its report."""

from moe_lab.numerics.distance import bits, nmse
from moe_lab.parity.attribution import Choice, attribute, shapley
from moe_lab.parity.block_errors import error_map, product_errors
from moe_lab.parity.carry import Between, between, tokens_of, walk
from moe_lab.parity.comparison import compare
from moe_lab.parity.emulated import emulate_layer
from moe_lab.parity.exact import exact_layer
from moe_lab.parity.hazard import hazards, product_hazards, tail_trap
from moe_lab.parity.layer_attribution import attribute_layer, attribute_product
from moe_lab.parity.next_layer import NextLayer
from moe_lab.parity.operands import Operands
from moe_lab.parity.report import Difference, ParityReport
from moe_lab.parity.setting import Mixed, Setting
from moe_lab.parity.statistics import STATISTICS, draw, heavy_tailed, wide_layer
from moe_lab.parity.stored import check_same, quantized

__all__ = [
    "STATISTICS", "Between", "Choice", "Difference", "Mixed", "NextLayer", "Operands", "ParityReport", "Setting",
    "attribute", "attribute_layer", "attribute_product", "between", "bits", "check_same", "compare", "draw",
    "emulate_layer",
    "error_map", "exact_layer", "hazards", "heavy_tailed", "nmse", "product_errors", "product_hazards", "quantized",
    "shapley", "tail_trap", "tokens_of", "walk", "wide_layer",
]  # fmt: skip
