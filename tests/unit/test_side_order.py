"""In what order a call uses the side's queue: it forks before its router, and joins whatever happens."""

import pytest

import moe_lab as lab
import moe_lab.layer
from moe_lab.arms.gemv import Gemv
from moe_lab.errors import LabError
from moe_lab.execution import state
from moe_lab.execution.shared_lane import NoLane
from tests.support.decode_layers import decode_layer, decode_rows

SIDE = lab.Options(shared="side")


class Told(NoLane):
    """A lane that writes down what it is told."""

    def __init__(self) -> None:
        self.story: list[str] = []

    def fork(self) -> None:
        self.story.append("fork")

    def join(self) -> None:
        self.story.append("join")


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forks, joins, and the router's logits between them."""
    told, right = Told(), moe_lab.layer.router_logits
    monkeypatch.setattr(state, "side_lane", lambda device: told)
    monkeypatch.setattr(moe_lab.layer, "router_logits", lambda *given: told.story.append("router") or right(*given))
    return told.story


@pytest.mark.parametrize("routing", ["host", "device"])
def test_the_side_forks_before_the_router_and_joins_before_the_sum(story: list[str], routing: str, monkeypatch) -> None:
    right = moe_lab.layer.Execution.combine
    monkeypatch.setattr(moe_lab.layer.Execution, "combine", lambda *given: story.append("sum") or right(*given))
    decode_layer()(decode_rows(2), "gemv", options=lab.Options(shared="side", routing=routing))
    assert story[:4] == ["fork", "router", "join", "sum"]


def test_an_error_of_the_routed_experts_joins_the_side(story: list[str]) -> None:
    class Broken(Gemv):
        name = "broken"

        def experts(self, *args) -> None:
            raise RuntimeError("planted")

    with pytest.raises(LabError, match="planted"):
        decode_layer()(decode_rows(2), Broken(), options=SIDE)
    assert story == ["fork", "router", "join"]


def test_an_error_of_the_router_joins_the_side(story: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(moe_lab.layer, "router_logits", broken)
    with pytest.raises(RuntimeError, match="planted"):
        decode_layer()(decode_rows(2), "gemv", options=SIDE)
    assert story == ["fork", "join"]
