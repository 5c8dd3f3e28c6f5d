"""The rows of one file, in batches of the schema that the program declares. Knows nothing of splits or checkpoints."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ckpt_runtime.expressions.rows import as_list, with_elements, with_entries
from ckpt_runtime.graph.bad_rows import BadRecordError, letters_of, marked
from ckpt_runtime.graph.text_files import CsvRows, JsonRows, line_end
from ckpt_runtime.sources import BadRow
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location, naming

BATCH_ROWS = 32_768
SAMPLE_BYTES = 1 << 18
"""How much of a file of lines is read in order to estimate its number of rows."""
_MOST_SAMPLED_BYTES = 1 << 22
_MOST_VALUES = 1024
"""A column of text with more distinct values than that in a row group is read as plain text, not as a dictionary."""
_BLOCK_BYTES = 1 << 20
MOST_WHOLE_BYTES = 1 << 28
"""The greatest size, without compression, of a file that is read as a whole. Its rows take several times as much."""
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_FROM_HADOOP = {".snappy": "snappy", ".lz4": "lz4_raw"}
_UNREADABLE = (".xz", ".lzo")
_MOST_BLOCK_BYTES = 1 << 28
_FIRST_DATE, _FIRST_TIME = date(1582, 10, 15), datetime(1900, 1, 1, tzinfo=UTC)
"""The first ones that are the same in the Julian and the Gregorian calendar; times, in every zone."""


class FileFormatError(StorageError):
    """A file cannot be read as the program declares it. The message names the file."""

    def __init__(self, location: Location, problem: str) -> None:
        super().__init__(f"{location.url}: {problem}", location.url)


class NoFooterError(FileFormatError):
    """A file does not end as one of its format. None of its rows were read."""


@contextmanager
def _footer(format_: str, location: Location) -> Iterator[None]:
    """Reading the end of a file, which tells where its rows are. Raises NoFooterError."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise NoFooterError(location, f"it cannot be read as format {format_!r}: {error}") from error


def open_rows(
    format_: str, location: Location, schema: pa.Schema, options: dict[str, Any], *, report_bad: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yields batches of at most :data:`BATCH_ROWS` lines or rows, none empty, in the order of the file.

    With ``report_bad``, which ``csv`` and ``json`` know, bad records are rows too, and batches have the column that
    marks them (``graph/bad_rows.py``). Text of few distinct values is read as dictionaries, if the file has them; then
    their batches share one. Raises StorageError for a file that cannot be opened, and FileFormatError for one in
    another format.
    """
    read = {"parquet": _parquet, "orc": _orc, "text": _text}.get(format_)
    with naming("read", location):
        try:
            if read is None:
                yield from _records(format_, location, schema, options, report_bad=report_bad)
            else:
                yield from read(location, schema, options)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError) as error:
            raise FileFormatError(location, f"it cannot be read as format {format_!r}: {error}") from error


def count_rows(format_: str, location: Location, size: int, options: dict[str, Any]) -> int:
    """The number of rows in a file of ``size`` bytes, at least 1 of them.

    Parquet and ORC files have the number in their footer. That of other files is estimated from the lines of their
    first :data:`SAMPLE_BYTES`; it is exact for a shorter file without blank lines and bad records. Raises StorageError
    for a file that cannot be opened, and FileFormatError for one in another format or whose line ends are unknown.
    """
    with naming("read", location), closing(location.filesystem.open(location.path, "rb")) as stream:
        try:
            if format_ == "parquet":
                return int(pq.read_metadata(stream).num_rows)
            if format_ != "orc":
                return _estimated_rows(stream.read(SAMPLE_BYTES), location, size, options)
            from pyarrow import orc

            return int(orc.ORCFile(stream).nrows)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError) as error:
            raise FileFormatError(location, f"it cannot be read as format {format_!r}: {error}") from error


def _estimated_rows(head: bytes, location: Location, size: int, options: dict[str, Any]) -> int:
    """The rows of a file of lines, by the lines in its first bytes."""
    if options.get("wholetext"):
        return 1
    if options.get("multiLine") and "header" not in options:
        raise FileFormatError(location, "how many rows its documents have is unknown before they are read")
    text, end = _decompressed(head, location), line_end(options)
    lines = len(text.removesuffix(end).split(end) if end else text.splitlines())
    if len(head) < size:
        lines = max(1, lines - 1) * size // len(head)  # the last line of the sample is a part of one
    return max(0, lines - bool(options.get("header")))


def _decompressed(head: bytes, location: Location) -> bytes:
    """As much of a file's text as its first bytes hold, up to a limit."""
    text, stream = bytearray(), _unpacked(io.BytesIO(head), location)
    # Read piece by piece: the piece in which the bytes end is an error, and lost.
    with suppress(OSError, EOFError):
        while len(text) < _MOST_SAMPLED_BYTES and (piece := stream.read(1024)):
            text += piece
    if head and not text:
        raise FileFormatError(location, f"its first {len(head)} bytes cannot be decompressed without the rest")
    return bytes(text)


def _parquet(location: Location, schema: pa.Schema, options: dict[str, Any]) -> Iterator[pa.RecordBatch]:  # noqa: ARG001
    with closing(location.filesystem.open(location.path, "rb")) as stream:
        with _footer("parquet", location):
            file = pq.ParquetFile(stream)
        names = _names_in_file(file.schema_arrow, schema, location)
        wanted = [name for name in names if name is not None]
        dictionaries = _Dictionaries(file, names, schema)
        facts = file.metadata.metadata or {}
        version = facts.get(b"org.apache.spark.version", b"4.")
        old_dates = b"org.apache.spark.legacyDateTime" in facts or version.startswith((b"1.", b"2."))
        old_times = old_dates or b"org.apache.spark.legacyINT96" in facts or version.startswith(b"3.0")
        for group in range(file.metadata.num_row_groups):
            if not wanted:
                yield from _batches_of_nulls(file.metadata.row_group(group).num_rows, schema)
                continue
            # Decoded piece by piece: decoding a whole group may take a second, during which no barrier is processed.
            for batch in dictionaries.batches(stream, group, wanted):
                if batch.num_rows:
                    if old_times:
                        _check_calendar(batch, location, dates=old_dates)
                    yield _conformed(batch, names, schema, location)


class _Dictionaries:
    """Reads columns of text in a Parquet file as dictionaries, as long as these are small."""

    def __init__(self, file: pq.ParquetFile, names: list[str | None], schema: pa.Schema) -> None:
        metadata = self._metadata = file.metadata
        self._shared: dict[str, pa.Array] = {}
        stored = {field.name for field in file.schema_arrow if field.type in (pa.string(), pa.large_string())}
        text = {name for name, field in zip(names, schema, strict=True) if field.type == pa.string() and name in stored}
        chunks = (
            metadata.row_group(0).column(at) for at in range(metadata.num_columns if metadata.num_row_groups else 0)
        )
        found = (chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page)
        self._names = [name for name in found if name in text]

    def batches(self, stream: Any, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The batches of a row group."""
        while True:
            # Spark writes its timestamps as INT96 by default; in nanoseconds they would not reach before 1677.
            file = pq.ParquetFile(
                stream, metadata=self._metadata, read_dictionary=self._names, coerce_int96_timestamp_unit="us"
            )
            batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)
            first = next(batches, None)
            if first is None:
                return
            large = [name for name in self._names if len(first.column(name).dictionary) > _MOST_VALUES]
            if not large:
                yield self._sharing(first)
                yield from map(self._sharing, batches)
                return
            self._names = [name for name in self._names if name not in large]

    def _sharing(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the dictionaries of the batches before, if they are equal: each batch has copies."""
        for name in self._names:
            column = batch.column(name)
            known = self._shared.get(name)
            if known is None or not known.equals(column.dictionary):
                self._shared[name] = column.dictionary
                continue
            shared = pa.DictionaryArray.from_arrays(column.indices, known, safe=False)
            batch = batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), shared)
        return batch


def _orc(location: Location, schema: pa.Schema, options: dict[str, Any]) -> Iterator[pa.RecordBatch]:  # noqa: ARG001
    from pyarrow import orc

    with closing(location.filesystem.open(location.path, "rb")) as stream:
        with _footer("orc", location):
            file = orc.ORCFile(stream)
        names = _names_in_file(file.schema, schema, location)
        wanted = [name for name in names if name is not None]
        for stripe in range(file.nstripes):
            # Without columns, a stripe would not report its number of rows.
            rows = file.read_stripe(stripe, columns=wanted or None)
            for batch in pa.Table.from_batches([rows]).to_batches(max_chunksize=BATCH_ROWS):
                if batch.num_rows:
                    _check_calendar(batch, location)
                    yield _conformed(batch, names, schema, location, orc=True)


def _check_calendar(batch: pa.RecordBatch, location: Location, *, dates: bool = True) -> None:
    """Raises FileFormatError for a time, or date, that the writer may have counted by another calendar or zone."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for values in _leaves(column):
            if not pa.types.is_timestamp(values.type) and not (dates and pa.types.is_date(values.type)):
                continue
            first = _FIRST_DATE if pa.types.is_date(values.type) else _FIRST_TIME
            if pc.any(pc.less(values, pa.scalar(first, values.type))).as_py():
                raise FileFormatError(
                    location,
                    f"column {name!r} has a value before {first:%Y-%m-%d}, which depends on the calendar of the file's "
                    "writer: write the rows to Parquet files with Spark, and read those",
                )


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    """The values within a column that are no structs, lists or maps."""
    if pa.types.is_struct(column.type):
        for field in column.flatten():
            yield from _leaves(field)
    elif pa.types.is_map(column.type):
        yield from _leaves(as_list(column))
    elif pa.types.is_list(column.type):
        yield from _leaves(column.flatten())
    else:
        yield column


def _names_in_file(found: pa.Schema, schema: pa.Schema, location: Location) -> list[str | None]:
    """The name in the file of each declared column, None for one that the file lacks. Case does not matter."""
    names: list[str | None] = []
    for field in schema:
        same = [name for name in found.names if name.lower() == field.name.lower()]
        if len(same) > 1:
            raise FileFormatError(location, f"it has several columns {field.name!r}: {', '.join(same)}")
        names.append(same[0] if same else None)
    return names


def _batches_of_nulls(rows: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        yield pa.RecordBatch.from_arrays([pa.nulls(count, field.type) for field in schema], schema=schema)


def _conformed(
    batch: pa.RecordBatch, names: list[str | None], schema: pa.Schema, location: Location, *, orc: bool = False
) -> pa.RecordBatch:
    columns = []
    for name, field in zip(names, schema, strict=True):
        if name is None:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(name)
        if not _is_widened(column.type, field.type, orc=orc):
            way_out = "declare the type of the file and cast the column in the program"
            if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
                way_out = f"declare BIGINT, for nanoseconds, and use timestamp_micros({field.name} DIV 1000)"
            raise FileFormatError(
                location, f"column {field.name!r} is {column.type} and was declared as {field.type}; {way_out}"
            )
        keeps = pa.types.is_dictionary(column.type) and pa.types.is_string(field.type)
        columns.append(column if keeps else _widened(column, field.type))
    return batch_of(columns, schema)


def batch_of(columns: list[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """A batch of columns that may be dictionaries of what ``schema`` declares."""
    fields = [field.with_type(column.type) for field, column in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _widened(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Converts values to a type for which :func:`_is_widened` holds. Fields of structs are found by their names."""
    if column.type == wanted:
        return column
    if pa.types.is_struct(wanted) and pa.types.is_struct(column.type):
        fields = []
        for field in wanted:
            place = _place_of(field.name, column.type)
            fields.append(
                pa.nulls(len(column), field.type) if place is None else _widened(column.field(place), field.type)
            )
        return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=column.is_null())
    if pa.types.is_list(wanted) and pa.types.is_list(column.type):
        return with_elements(column, _widened(column.flatten(), wanted.value_type), wanted)
    if pa.types.is_map(wanted) and pa.types.is_map(column.type):
        lists = as_list(column)
        entries = lists.flatten()
        keys, items = _widened(entries.field(0), wanted.key_type), _widened(entries.field(1), wanted.item_type)
        return with_entries(lists, keys, items, wanted)
    if pa.types.is_timestamp(column.type) and pa.types.is_timestamp(wanted) and column.type.tz != wanted.tz:
        column = column.cast(pa.timestamp(column.type.unit))
    # Only a cast that is safe checks that bytes are UTF-8.
    return column.cast(wanted, safe=pa.types.is_string(wanted))


def _place_of(name: str, struct: pa.StructType) -> int | None:
    """The field of a struct with a name, or else the only one with that name in another case; None without one."""
    names = [field.name for field in struct]
    if name in names:
        return names.index(name)
    same = [at for at, other in enumerate(names) if other.lower() == name.lower()]
    return same[0] if len(same) == 1 else None


def _is_widened(found: pa.DataType, wanted: pa.DataType, *, orc: bool = False) -> bool:
    """Whether Spark's readers convert the file's type to the declared one without changing values."""
    if pa.types.is_dictionary(found):
        return _is_widened(found.value_type, wanted)
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return _is_widened(found.value_type, wanted.value_type, orc=orc)
    if pa.types.is_map(found) and pa.types.is_map(wanted):
        keys = _is_widened(found.key_type, wanted.key_type, orc=orc)
        return keys and _is_widened(found.item_type, wanted.item_type, orc=orc)
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        names, declared = [field.name for field in found], [field.name for field in wanted]
        if len({name.lower() for name in names}) < len(names) or (orc and names != declared):
            return bool(found == wanted)
        places = [(field, _place_of(field.name, found)) for field in wanted]
        known = [(field, found.field(place)) for field, place in places if place is not None]
        return all(_is_widened(inside.type, field.type, orc=orc) for field, inside in known)
    if pa.types.is_fixed_size_binary(found):
        found = pa.binary()
    found = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(found, found)
    if found == wanted or pa.types.is_null(found):
        return True
    return _is_wider(found, wanted) or (not orc and _is_widened_in_parquet(found, wanted))


def _is_wider(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_signed_integer(found) and pa.types.is_signed_integer(wanted):
        return bool(found.bit_width <= wanted.bit_width)
    if pa.types.is_decimal(found) and pa.types.is_decimal(wanted):
        return bool(found.scale == wanted.scale and found.precision <= wanted.precision)
    if pa.types.is_timestamp(found) and found.unit == "ns":
        return bool(wanted == pa.int64())  # as in Spark, by an option: microseconds would lose digits
    if pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted):
        return wanted.tz is not None or found.tz is None
    return (found, wanted) == (pa.float32(), pa.float64())


_FURTHER_IN_PARQUET = {
    (pa.string(), pa.binary()),
    (pa.binary(), pa.string()),
    (pa.int8(), pa.float64()),
    (pa.int16(), pa.float64()),
    (pa.int32(), pa.float64()),
    (pa.date32(), pa.timestamp("us")),
    (pa.uint8(), pa.int16()),
    (pa.uint16(), pa.int32()),
    (pa.uint32(), pa.int64()),
    (pa.uint64(), pa.decimal128(20, 0)),
    (pa.int64(), pa.duration("us")),
}


def _is_widened_in_parquet(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_decimal(wanted) and pa.types.is_signed_integer(found):
        return bool(wanted.precision - wanted.scale >= (20 if found == pa.int64() else 10))
    if pa.types.is_decimal(wanted) and pa.types.is_decimal(found):
        more = wanted.scale - found.scale
        return bool(more >= 0 and wanted.precision - found.precision >= more)
    return (found, wanted) in _FURTHER_IN_PARQUET


def _text(location: Location, schema: pa.Schema, options: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    if len(schema) != 1:
        raise FileFormatError(
            location, f"format 'text' has one column, followed by those of partitions, not {schema.names}"
        )
    if options["wholetext"]:
        whole = _whole(location, "wholetext").decode("utf-8", "replace")
        yield pa.RecordBatch.from_arrays([pa.array([whole], pa.string())], schema=schema)
        return
    for lines in lines_of(location, line_end(options)):
        yield pa.RecordBatch.from_arrays(
            [pa.array([line.decode("utf-8", "replace") for line in lines], pa.string())], schema=schema
        )


def _records(
    format_: str, location: Location, schema: pa.Schema, options: dict[str, Any], *, report_bad: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of a file with a record in each line, or with ``multiLine`` in any number of lines."""
    # In a decompressed stream, Spark's reader does not find the text of an object again.
    copies = options["multiLine"] and _suffix(location) in (*_COMPRESSIONS, *_FROM_HADOOP, ".deflate")
    reader: Any = CsvRows(options, schema) if format_ == "csv" else JsonRows(options, schema, copies=copies)
    header_comes = format_ == "csv" and options["header"]
    place = "record" if options["multiLine"] else "line"
    number = 1
    for lines in _pieces(reader, location, options):
        start = 0
        while header_comes and start < len(lines):
            problem = reader.header(lines[start])
            if problem:
                raise FileFormatError(location, problem)
            header_comes = problem is None
            start += 1
        try:
            if report_bad:
                batch = _reported(reader, lines[start:], f"{location.url}, {place}", number + start)
            else:
                batch = reader.rows(lines[start:])
        except BadRecordError as error:
            raise FileFormatError(location, f"{place} {number + start + error.line}: {error}") from error
        if batch.num_rows:
            yield batch
        number += len(lines)


def _pieces(reader: Any, location: Location, options: dict[str, Any]) -> Iterator[Any]:
    """The part that a reader parses at a time: some lines of a file, or of its records."""
    if not options["multiLine"]:
        yield from lines_of(location, line_end(options))
        return
    yield from reader.whole(_whole(location, "multiLine"))


def _whole(location: Location, option: str) -> bytes:
    """The bytes of a file. Raises FileFormatError for more than :data:`MOST_WHOLE_BYTES`."""
    with _opened(location) as stream:
        data = bytes(stream.read(MOST_WHOLE_BYTES + 1))
    if len(data) > MOST_WHOLE_BYTES:
        raise FileFormatError(
            location,
            f"it has more than {MOST_WHOLE_BYTES >> 20} MiB (without compression), and option {option} reads a file as "
            "a whole: split it into smaller files, or write one record per line and leave the option out",
        )
    return data


def _reported(reader: Any, lines: Any, place: str, first: int) -> pa.RecordBatch:
    """The rows of lines or records, with the column that marks bad ones; ``first`` is the number of the first."""
    batch, bad = reader.parsed(lines)
    if not bad:
        return marked(batch)
    found = {row: BadRow(line.reason, f"{place} {first + line.line}", line.raw) for row, line in bad.items()}
    return marked(batch, letters_of(batch.num_rows, found))


@contextmanager
def _opened(location: Location) -> Iterator[Any]:
    """The bytes of a file, decompressed if its name has the suffix of a compression."""
    with closing(location.filesystem.open(location.path, "rb")) as raw, closing(_unpacked(raw, location)) as stream:
        yield stream


def _suffix(location: Location) -> str:
    return location.name[location.name.rfind(".") :].lower()


def _unpacked(raw: Any, location: Location) -> Any:
    """A stream of what another one has, decompressed if the file's name has the suffix of a compression."""
    suffix = _suffix(location)
    if suffix in _UNREADABLE:
        raise FileFormatError(
            location, "its compression is not supported; use .gz, .bz2, .zst, .snappy, .lz4 or .deflate"
        )
    if suffix in _COMPRESSIONS:
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), _COMPRESSIONS[suffix])
    if suffix in _FROM_HADOOP:
        return io.BufferedReader(_Pieces(_from_hadoop(raw, _FROM_HADOOP[suffix])))
    return io.BufferedReader(_Pieces(_inflated(raw))) if suffix == ".deflate" else raw


class _Pieces(io.RawIOBase):
    """A stream of pieces, none of which is None."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def _inflated(raw: Any) -> Iterator[bytes]:
    inflater = zlib.decompressobj()
    while data := raw.read(1 << 16):
        yield inflater.decompress(data)
    if not inflater.eof:
        raise EOFError("it ends in the middle of compressed data")


def _from_hadoop(raw: Any, codec: str) -> Iterator[bytes]:
    """From Hadoop's form: blocks, each with its length, of pieces, each with the length of what is stored."""
    length_of = _snappy_length if codec == "snappy" else _lz4_length
    while (left := _block_length(raw)) is not None:
        while left > 0:
            stored = _block_length(raw) or 0
            data = raw.read(stored)
            size = length_of(data) if len(data) == stored else 0
            piece = pa.decompress(data, min(size, left), codec, asbytes=True) if size else b""
            if not piece:
                raise EOFError("it ends in the middle of a block")
            yield piece
            left -= len(piece)


def _snappy_length(data: bytes) -> int:
    """A piece begins with its own length."""
    size = shift = 0
    for byte in data[:5]:
        size, shift = size | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    return size


def _lz4_length(data: bytes) -> int:
    """The sum of the sequences: each is some literal bytes, and then, but in the last, a copy of earlier bytes."""
    at = size = 0

    def number(first: int) -> int:
        nonlocal at
        more = 255 if first == 15 else 0
        while more == 255:
            more, at = data[at], at + 1
            first += more
        return first

    try:
        while at < len(data):
            token, at = data[at], at + 1
            literals = number(token >> 4)
            at, size = at + literals, size + literals
            if at < len(data):
                at += 2  # where the copied bytes are
                size += number(token & 15) + 4
    except IndexError:
        return 0
    return size


def _block_length(raw: Any) -> int | None:
    """None at the end. Raises EOFError for what cannot be a length."""
    data = raw.read(4)
    length = int.from_bytes(data, "big")
    if data and (len(data) < 4 or length > _MOST_BLOCK_BYTES):
        raise EOFError("it is not what Hadoop stores with this compression")
    return length if data else None


def lines_of(location: Location, end: bytes | None) -> Iterator[list[bytes]]:
    """Yields the lines of a file, some at a time. Without a separator a line ends with LF, CR or both.

    A byte order mark at the beginning is skipped.
    """
    rest = b""
    first = True
    with _opened(location) as stream:
        block = stream.read(_BLOCK_BYTES)
        while True:
            # Read ahead, so that the last line of a file comes with those before it: a small file is one batch.
            following = stream.read(_BLOCK_BYTES) if block else b""
            data = rest + block
            if first and (len(data) >= len(codecs.BOM_UTF8) or not following):
                data = data.removeprefix(codecs.BOM_UTF8)
                first = False
            if end is None:
                # The last character may be the first half of CR LF.
                lines = data.splitlines(keepends=True)
                rest = lines.pop() if lines and following else b""
                lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
            else:
                lines = data.split(end)
                rest = lines.pop()
                if not following and rest:
                    lines.append(rest)
            for start in range(0, len(lines), BATCH_ROWS):
                yield lines[start : start + BATCH_ROWS]
            if not following:
                return
            block = following
