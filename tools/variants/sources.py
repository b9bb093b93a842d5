"""What machine code depends on besides a launch's arguments: the text of functions and the constants they read."""

import ast
import hashlib
import inspect
import textwrap
from types import ModuleType
from typing import Any

from triton.language import constexpr
from triton.runtime.jit import JITFunction

PLAIN = (int, float, str, bool, tuple, type(None))


def digest(kernel: JITFunction) -> str:
    """A short hash of the kernel's text, of that of every device function it can reach, and of their constants. Where
    in a file they stand does not matter, nor do comments."""
    seen: dict[str, str] = {}
    _visit(kernel, seen)
    return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()[:12]


def _visit(function: JITFunction, seen: dict[str, str]) -> None:
    python = function.fn
    name = f"{python.__module__}.{python.__qualname__}"
    if name in seen:
        return
    seen[name] = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(python))))
    names = python.__code__.co_names
    for word in names:
        value = python.__globals__.get(word)
        if isinstance(value, ModuleType) and value.__name__.startswith("moe_lab_kernels"):
            for inner in names:
                _note(f"{value.__name__}.{inner}", getattr(value, inner, None), seen)
        else:
            _note(f"{python.__module__}.{word}", value, seen)


def _note(name: str, value: Any, seen: dict[str, str]) -> None:
    if isinstance(value, JITFunction):
        _visit(value, seen)
    elif isinstance(value, constexpr):
        seen[name] = repr(value.value)
    elif value is not None and isinstance(value, PLAIN):
        seen[name] = repr(value)
