"""Properties of stored bytes: every document and state file survives, and any damage is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import delete_tree, resolve
from ckpt_runtime.storage.metadata import decode, encode
from ckpt_runtime.storage.state_files import StateFileReader, StateFileWriter
from ckpt_runtime.storage.versioned_document import VersionedDocument, decode_document, encode_document
from tests.support.effort import examples

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
leaves = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | texts
values = st.recursive(
    leaves | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)
documents = st.dictionaries(texts, values, max_size=5)


@given(documents)
def test_metadata_is_decoded_as_it_was_encoded(document: dict[str, Any]) -> None:
    assert decode(encode(document), "x") == document


@given(documents, st.data())
def test_damaged_metadata_is_always_refused(document: dict[str, Any], data: st.DataObject) -> None:
    content = encode(document)
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    damaged = content[:start] + data.draw(st.binary(max_size=8)) + content[end:]
    if damaged != content:
        with pytest.raises(CorruptFileError):
            decode(damaged, "x")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_never_metadata(content: bytes) -> None:
    with pytest.raises(CorruptFileError):
        decode(content, "x")
    with pytest.raises(CorruptFileError):
        decode_document(content, "x")


@given(documents)
def test_small_documents_are_decoded_as_they_were_encoded(document: dict[str, Any]) -> None:
    assert decode_document(encode_document(document), "x") == document


@settings(max_examples=examples(50))
@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(0, 100))
def test_a_state_file_holds_what_was_written_however_it_was_cut(pieces: list[bytes], threshold: int) -> None:
    directory = resolve("memory://property-state-files")
    with StateFileWriter(directory, threshold) as writer:
        for piece in pieces:
            writer.write(piece)
        file = writer.finish()
    content = b"".join(pieces)
    assert (file.inline is not None) == (len(content) <= threshold)
    reader = StateFileReader(directory, file)
    assert bytes(reader.read(0, len(content))) == content
    reader.close()
    delete_tree(directory)


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 4), documents), max_size=6))
def test_a_versioned_document_changes_only_from_its_present_revision(writes: list[tuple[int, dict[str, Any]]]) -> None:
    document = VersionedDocument(resolve("memory://property-versions/document"))
    present: tuple[int, dict[str, Any]] = (0, {})
    for expected, content in writes:
        if expected == present[0]:
            document.write(expected, content)
            present = (expected + 1, content)
        else:
            with pytest.raises(OSError, match="changed by another process"):
                document.write(expected, content)
        found = document.read()
        assert ((0, {}) if found is None else (found.number, found.document)) == present
    document.delete()
    assert document.read() is None
