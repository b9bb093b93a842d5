"""What a claim about routing needs: inputs that a model really fed its MoE layers."""

from moe_lab.activations import Activations, Inputs, require_recorded
from moe_lab.errors import LabTypeError


def recorded(inputs: Activations | Inputs, question: str) -> Activations:
    """The recorded rows of `inputs`. LabError for synthetic rows, LabTypeError for what is neither."""
    if not isinstance(inputs, Activations | Inputs):
        raise LabTypeError(f"lab.analysis.{question} wants recorded Activations, got {type(inputs).__name__}.")
    require_recorded(inputs, f"lab.analysis.{question}")
    found = inputs.recorded if isinstance(inputs, Inputs) else inputs
    assert found is not None  # recorded rows come from a recording
    return found
