"""Recognizes a plain PySpark script, which starts its queries when it is run, without running it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def builds_session(module: ast.Module) -> bool:
    """Returns whether running a module builds a session, in its own statements or in a function that they may call.

    A file with functions that build one is a script only if it has statements for ``__main__``; otherwise it is a
    module that others import.
    """
    own = [statement for statement in module.body if not isinstance(statement, _DEFINITIONS)]
    return _names_builder(own) or (_names_main(own) and _names_builder(module.body))


def _names_builder(statements: Sequence[ast.stmt]) -> bool:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and node.attr == "builder":
                value = node.value
                if (value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")) == "SparkSession":
                    return True
    return False


def _names_main(statements: Sequence[ast.stmt]) -> bool:
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any(isinstance(node, ast.Constant) and node.value == "__main__" for test in tests for node in ast.walk(test))
