"""What is public says in its docstring what ruff does not ask for: shapes, dtypes, and where a formula is from.

A docstring may leave something to that of another function or class, which it then names in backticks.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import types
import typing

import jax
import jaxtyping
import pytest

import interdomain_jax.modules
import interdomain_jax.ops
from pallas_kernels import reference

PACKAGES = [
    importlib.import_module(f"interdomain_jax{name}") for name in ("", ".ops", ".modules", ".inference", ".export")
]
OPS, MODULES = (
    [importlib.import_module(f"{package.__name__}.{module.name}") for module in pkgutil.iter_modules(package.__path__)]
    for package in (interdomain_jax.ops, interdomain_jax.modules)
)
WITHOUT_FORMULAS = {
    "interdomain_jax.modules.layer_layout": "names of parameters",
    "interdomain_jax.modules.placement": "bookkeeping of rows",
    "interdomain_jax.ops.chunk_sizes": "measured numbers",
    "interdomain_jax.ops.fused": "those of `chunked.py`, made ready for kernels",
    "interdomain_jax.ops.packing": "bookkeeping of rows",
}


def public_names():
    """All that is public, by its full name: names of `__all__`, what `ops` defines, and the methods of the classes."""
    found = {f"{x.__module__}.{x.__name__}": x for package in PACKAGES for x in exported(package)}
    for module in (*OPS, reference):
        for name, x in vars(module).items():
            if not name.startswith("_") and callable(x) and getattr(x, "__module__", None) == module.__name__:
                found[f"{module.__name__}.{name}"] = x
    classes = {name: x for name, x in found.items() if inspect.isclass(x)}
    for full_name, x in classes.items():
        for name, method in vars(x).items():
            is_public = name == "__call__" or not name.startswith("_")
            if is_public and inspect.isfunction(method) and method.__module__ == x.__module__:
                found[f"{full_name}.{name}"] = method
    return found


def exported(package):
    return [x for name in package.__all__ if hasattr(x := getattr(package, name), "__name__")]


PUBLIC = public_names()


def arrays(annotation):
    """Whether a type is that of an array, or may be, or of several."""
    if typing.get_origin(annotation) in (tuple, typing.Union, types.UnionType):
        return any(map(arrays, typing.get_args(annotation)))
    return isinstance(annotation, type) and issubclass(annotation, jax.Array | jaxtyping.AbstractArray)


def documentation(x):
    """The docstring, and those of what it names."""
    text = inspect.getdoc(x)
    named = set(re.findall(r"`(\w+)`", text))
    return [text, *(inspect.getdoc(y) for y in PUBLIC.values() if named & set(y.__qualname__.split(".")))]


def says_shape(text, name):
    """Whether a shape stands in the argument's line or behind its name; a scalar and a key of PRNGs have none."""
    line = re.search(rf"^    {name}: .*(?:\n {{8}}.*)*", text, re.MULTILINE)
    return re.search(r"\[.*?\]|\bscalar\b|PRNG key", line[0]) if line else re.search(rf"\b{name} \[", text)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_say_shapes_and_dtypes(name):
    x = PUBLIC[name]
    assert x.__doc__
    texts = documentation(x)
    if inspect.isclass(x):
        given, returned = getattr(x, "__annotations__", {}), None
    else:
        signature = inspect.signature(x)
        given = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        returned = signature.return_annotation
    for argument, annotation in given.items():
        if arrays(annotation):
            assert any(says_shape(text, argument) for text in texts), f"{argument} has no shape"
    if arrays(returned):
        assert any(re.search(r"dtype|float32|int32|complex128|\b[Ww]hether\b", text) for text in texts), "no dtype"


@pytest.mark.parametrize("module", [*OPS, *MODULES], ids=lambda module: module.__name__)
def test_formulas_have_a_source(module):
    """In the module's docstring or in one of those in it: the paper, or a publication by its year."""
    docstrings = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    named = any(re.search(r"\((the )?(paper|article)\b|\b(19|20)\d\d\)", text) for text in docstrings)
    assert named is (module.__name__ not in WITHOUT_FORMULAS)
