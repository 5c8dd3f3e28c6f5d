"""Recognizes a plain PySpark script, which starts its queries when it is run, without running it."""

from __future__ import annotations

import ast

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def builds_session(module: ast.Module) -> bool:
    """Returns whether a module's own statements name ``SparkSession.builder``."""
    for statement in module.body:
        if isinstance(statement, _DEFINITIONS):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and node.attr == "builder":
                value = node.value
                if (value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")) == "SparkSession":
                    return True
    return False
