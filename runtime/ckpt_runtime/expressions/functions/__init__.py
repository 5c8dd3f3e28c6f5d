"""Spark's functions over Arrow values, one module for each family. Importing this package registers all of them."""

from ckpt_runtime.expressions.functions import (
    arithmetic,
    casts,
    csv_texts,
    datetimes,
    documents,
    encryption,
    formats,
    hashing,
    intervals,
    key_texts,
    mathematics,
    nested,
    number_formats,
    predicates,
    strings,
    vectors,
)

__all__ = [
    "arithmetic",
    "casts",
    "csv_texts",
    "datetimes",
    "documents",
    "encryption",
    "formats",
    "hashing",
    "intervals",
    "key_texts",
    "mathematics",
    "nested",
    "number_formats",
    "predicates",
    "strings",
    "vectors",
]
