"""Is this object what the lab can use in a name's place? Asked once, at the door, with one error that says it all.

A protocol class is the contract: its annotated attributes and properties are values, its functions are methods. What an
object lacks, what has another type and what cannot be called as the lab will call it come together in one message.
Knows nothing about arms, formats, policies or families; each of their rooms calls `check_object`.
"""

import inspect
import types
import typing
from collections.abc import Iterable
from typing import Any

from moe_lab.errors import LabError, LabTypeError


def check_object(
    given: object, protocol: type, what: str, names: Iterable[str], *, optional: type | None = None, hint: str = ""
) -> None:
    """LabTypeError unless `given` has every member of `protocol`, and those members of `optional` that it has fit.

    `what` ("arm") and `names` (what could be named instead) are for the message, and so is `hint`, a last sentence.
    """
    where = f"{protocol.__module__.removesuffix('.base').removesuffix('.row')}.{protocol.__name__}"
    listed = ", ".join(names)
    named = f"a name ({listed}) or " if listed else ""
    wanted = f"wanted {named}an object with the members of {where}: {describe(protocol)}."
    if isinstance(given, type):
        raise LabTypeError(f"{what} {given.__name__} is a class; pass an object of it, {given.__name__}(); {wanted}")
    faults = _faults(given, protocol, required=True)
    faults += [] if optional is None else _faults(given, optional, required=False)
    if faults:
        raise LabTypeError(f"{what} {called(given)} {', and '.join(faults)}; {wanted}{hint and ' '}{hint}")


def check_new_name(name: str, what: str, taken: Iterable[str]) -> None:
    """LabError for a name of the user's own that is empty or one of the lab's: tables and plots could not tell whose
    result it is.
    """
    if not name.strip():
        raise LabError(f"the {what}'s name is {name!r}; tables and plots need a text to call it by.")
    if name in taken:
        raise LabError(f"{what} {name!r} is the lab's own; give yours another name, such as 'my_{name}'.")


def called(given: object) -> str:
    """An object as messages name it: its `name` and its type, or the type alone."""
    kind, name = type(given).__name__, getattr(given, "name", None)
    return f"{name!r} ({kind})" if isinstance(name, str) and not isinstance(given, str) else f"of type {kind}"


def describe(protocol: type) -> str:
    """The members of a protocol in one line: name: str, supports(formats, backend), ..."""
    values = [f"{name}: {_type_name(kind)}" for name, kind in _values(protocol).items()]
    return ", ".join([*values, *(f"{name}({', '.join(args)})" for name, args in _methods(protocol).items())])


def _faults(given: object, protocol: type, *, required: bool) -> list[str]:
    values, methods, missing, wrong = _values(protocol), _methods(protocol), [], []
    for name in (*values, *methods):
        try:
            member = getattr(given, name)
        except AttributeError:
            missing += [f"{name}({', '.join(methods[name])})" if name in methods else name] if required else []
            continue
        except Exception as error:  # a property of the user's
            wrong.append(f"raises {type(error).__name__} where its {name} is read: {error}")
            continue
        if name in values and not _is(member, values[name]):
            wrong.append(f"has {name} = {member!r}, which is no {_type_name(values[name])}")
        elif name in methods:
            wrong += _call_faults(name, member, methods[name])
    return [*([f"lacks {', '.join(missing)}"] if missing else []), *wrong]


def _call_faults(name: str, member: Any, arguments: list[str]) -> list[str]:
    if not callable(member):
        return [f"has {name} = {member!r}, which cannot be called"]
    try:
        signature = inspect.signature(member)
    except (TypeError, ValueError):  # built in: nothing is known
        return []
    try:
        signature.bind(*(a for a in arguments if a[-1] != "="), **{a[:-1]: None for a in arguments if a[-1] == "="})
    except TypeError:
        return [f"has {name}{signature}, which cannot be called as {name}({', '.join(arguments)})"]
    return []


def _values(protocol: type) -> dict[str, Any]:
    """Attributes and properties of a protocol with their types."""
    found = {name: kind for name, kind in typing.get_type_hints(protocol).items() if not name.startswith("_")}
    for name, member in vars(protocol).items():
        if isinstance(member, property) and member.fget is not None:
            found[name] = typing.get_type_hints(member.fget).get("return", Any)
    return found


def _methods(protocol: type) -> dict[str, list[str]]:
    """Methods of a protocol with the arguments that the lab passes: by position, or as "name=" by keyword."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    return {
        name: [p.name + "=" * (p.kind is by_name) for p in inspect.signature(member).parameters.values()][1:]
        for name, member in vars(protocol).items()
        if isinstance(member, types.FunctionType) and not name.startswith("_")
    }


def _is(value: object, kind: Any) -> bool:
    """Whether a value has a type, as far as one look at it can tell."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, one) for one in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    kind = origin or kind
    if kind is int and isinstance(value, bool):
        return False
    return isinstance(value, kind) if isinstance(kind, type) else True


def _type_name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(one) for one in typing.get_args(kind))
    if origin is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    kind = origin or kind
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


__all__ = ["called", "check_new_name", "check_object", "describe"]
