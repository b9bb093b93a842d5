"""What a claim about routing needs: inputs that a model really fed its MoE layers, and those layers."""

from collections.abc import Mapping

from moe_lab._types import Tensor
from moe_lab.activations import Activations, Inputs, require_recorded
from moe_lab.checks import came
from moe_lab.errors import LabError, LabTypeError
from moe_lab.layer import MoELayer
from moe_lab.open import Checkpoint


def recorded(inputs: Activations | Inputs, question: str) -> Activations:
    """The recorded rows of `inputs`. LabError for synthetic rows, LabTypeError for what is neither."""
    if not isinstance(inputs, Activations | Inputs):
        raise LabTypeError(f"lab.analysis.{question} wants recorded Activations, got {type(inputs).__name__}.")
    require_recorded(inputs, f"lab.analysis.{question}")
    found = inputs.recorded if isinstance(inputs, Inputs) else inputs
    assert found is not None  # recorded rows come from a recording
    return found


def layer_numbers(model: Checkpoint | Mapping[int, MoELayer], question: str) -> list[int]:
    """The model's MoE layers, ascending. LabTypeError for what is no Checkpoint and no mapping of layers, LabError for
    one without a MoE layer.
    """
    if not isinstance(model, Checkpoint | Mapping) or (
        isinstance(model, Mapping) and not all(isinstance(layer, MoELayer) for layer in model.values())
    ):
        raise LabTypeError(
            f"the model of lab.analysis.{question} is {came(model)}; wanted a Checkpoint (lab.open(path) opens one) or "
            "MoELayers by number."
        )
    numbers = model.moe_layers if isinstance(model, Checkpoint) else sorted(model)
    if not numbers:
        raise LabError(f"lab.analysis.{question}: the model has no MoE layer.")
    return list(numbers)


def layer_of(model: Checkpoint | Mapping[int, MoELayer], number: int) -> MoELayer:
    """One of the model's layers."""
    return model.layer(number) if isinstance(model, Checkpoint) else model[number]


def rows_for(layer: MoELayer, rows: Activations, number: int, question: str) -> Tensor:
    """The recorded rows [T, D] that the layer is asked about. LabError where they are another model's, by their D."""
    if rows.d_model != layer.spec.d_model:
        raise LabError(
            f"lab.analysis.{question}: the recording holds rows of D={rows.d_model}, but layer {number} reads rows of "
            f"D={layer.spec.d_model}. It is of another model."
        )
    return rows.layer(number)
