"""The check of a user's object against a protocol: one error says everything wrong, and nothing is refused in vain."""

from collections.abc import Mapping
from typing import Literal, Protocol

import pytest

from moe_lab.errors import LabError, LabTypeError
from moe_lab.protocols import check_new_name, check_object, describe


class Shape(Protocol):
    """Members of every kind."""

    name: str
    kind: Literal["flat", "solid"]
    parts: Mapping[str, int]

    @property
    def sides(self) -> int | None: ...

    def area(self, scale: float, *, unit: str) -> float: ...

    def _private(self) -> None: ...


class Extras(Protocol):
    def colour(self, dark: bool) -> str: ...


class Square:
    name, kind, parts, sides = "square", "flat", {"side": 4}, 4

    def area(self, scale, *, unit):
        return scale


def refusal(given: object, **more: object) -> str:
    with pytest.raises(LabTypeError) as caught:
        check_object(given, Shape, "shape", ("circle",), **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Larger(Square):
    """A subclass that takes more than it must."""

    sides = None

    def area(self, scale, extra=2, *, unit, **others):
        return scale


class Proxy:
    """Lends everything of another object."""

    def __getattr__(self, name):
        return getattr(Square(), name)


@pytest.mark.parametrize("given", [Square(), Larger(), Proxy()], ids=["whole", "subclass", "proxy"])
def test_what_has_the_members_passes(given: object) -> None:
    check_object(given, Shape, "shape", ("circle",), optional=Extras)


def test_everything_wrong_is_in_one_message() -> None:
    class Half:
        name, kind, sides = 3, "thin", True

        def area(self, scale):
            return scale

    said = refusal(Half())
    for part in ("lacks parts", "name = 3, which is no str", "kind = 'thin', which is no 'flat' or 'solid'",
                 "sides = True, which is no int or None", "area(scale), which cannot be called as area(scale, unit=)",
                 "wanted a name (circle) or an object with the members of", "Shape"):  # fmt: skip
        assert part in said
    assert "_private" not in said


@pytest.mark.parametrize("given", [None, 3, object(), [], lambda: None])
def test_an_object_of_another_kind_is_named_by_its_type(given: object) -> None:
    assert f"shape of type {type(given).__name__} lacks name, kind, parts, sides, area(scale, unit=)" in refusal(given)


def test_a_class_is_told_to_be_called() -> None:
    assert "Square is a class; pass an object of it, Square()" in refusal(Square)


def test_a_property_that_raises_is_told_with_its_error() -> None:
    class Broken(Square):
        @property
        def sides(self):
            raise ZeroDivisionError("no sides")

    assert "raises ZeroDivisionError where its sides is read: no sides" in refusal(Broken())


def test_an_optional_member_is_checked_where_there_is_one() -> None:
    class Painted(Square):
        colour = "red"

    check_object(Painted(), Shape, "shape", ())
    assert "has colour = 'red', which cannot be called" in refusal(Painted(), optional=Extras)


def test_a_built_in_without_a_signature_is_taken_at_its_word() -> None:
    odd = type("Odd", (Square,), {"area": staticmethod(type)})
    check_object(odd(), Shape, "shape", ())


def test_a_protocol_in_one_line() -> None:
    assert (
        describe(Shape) == "name: str, kind: 'flat' or 'solid', parts: Mapping, sides: int or None, area(scale, unit=)"
    )


@pytest.mark.parametrize(
    ("name", "says"), [("circle", "'circle' is the lab's own"), ("", "need a text"), (" ", "need")]
)
def test_names_that_tables_could_not_use(name: str, says: str) -> None:
    with pytest.raises(LabError, match=says):
        check_new_name(name, "shape", ("circle",))
    check_new_name("my_circle", "shape", ("circle",))
