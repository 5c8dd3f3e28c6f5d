"""Splits CSV into fields as the parser of Spark does, univocity's, with Spark's settings of it.

A field that begins with the quote is quoted. Within it the escape character turns a following quote or escape character
into plain text; outside it has no meaning. A malformed quoted field is not an error: it is then taken as it is written,
up to the next separator (``STOP_AT_DELIMITER``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NO_CHARACTER = "\0"
"""Means "no character": a field's text never contains it."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How fields are written. ``quote`` and ``escape`` may be the character NUL, which means that there is none.

    ``strip_left`` and ``strip_right`` remove blanks and control characters from both ends of unquoted fields. ``null``
    is the value of an empty field, ``empty`` that of a pair of quotes.
    """

    separator: str = ","
    quote: str = '"'
    escape: str = "\\"
    strip_left: bool = False
    strip_right: bool = False
    null: str = ""
    empty: str = ""


def fields_of(line: str, dialect: Dialect) -> list[str]:
    """Returns the fields of a line that is not blank; there is at least one."""
    if dialect.quote in line or dialect.strip_left:
        return _Fields(line, dialect).all()
    if not dialect.null:
        return line.split(dialect.separator)
    return [field or dialect.null for field in line.split(dialect.separator)]


class Record(NamedTuple):
    """A record that may have several lines: its fields, and its text without the end of its last line."""

    fields: list[str]
    text: str


_END = "\n"
_LINE_END = re.compile(r"(?:\r\n|\n|\r)\Z")


def records_of(text: str, dialect: Dialect, comment: str) -> Iterator[Record]:
    """Yields the records of a text whose quoted fields may contain ends of lines; those become LF, as in Spark.

    Lines end as the first one does: in LF, CR LF or CR. Empty lines and lines that begin with ``comment`` produce none.
    """
    end = _first_end(text)
    # In a text whose lines end in CR LF, a single LF is a blank like any other control character.
    blank = next((chr(code) for code in range(1, 0x20) if chr(code) not in text), " ")
    plain = text.replace(_END, blank).replace(end.replace(_END, blank), _END) if end != _END else text
    at = 0
    while at < len(plain):
        if comment and plain[at] == comment:
            at = (plain.find(_END, at) + 1) or len(plain)
            continue
        found = _Fields(plain, dialect, at, _END)
        fields = found.all()
        start, at = at, found.at + 1
        if fields:
            whole = plain[start:at]
            if end != _END:
                whole = whole.replace(_END, end).replace(blank, _END)
            yield Record(fields, _LINE_END.sub("", whole))


def _first_end(text: str) -> str:
    """How the first line of a text ends; LF if no line ends."""
    places = [place for place in (text.find("\r"), text.find(_END)) if place >= 0]
    if not places or text[min(places)] == _END:
        return _END
    return "\r\n" if text[min(places) + 1 : min(places) + 2] == _END else "\r"


class _EndOfText(Exception):
    """Raised at the end of the text."""


class _Fields:
    """One pass over a record. Methods that read a quoted field follow univocity's, with its states, where it is odd.

    The record ends with the text, or before an ``end`` outside of quotes; then :attr:`at` is its place.
    """

    def __init__(self, text: str, dialect: Dialect, at: int = 0, end: str = "") -> None:
        self._text = text
        self.at = at
        self._end = end
        self._stops = (dialect.separator, end) if end else (dialect.separator,)
        self._dialect = dialect
        self._char = ""
        self._previous = ""
        self._unescaped = False
        self._field: list[str] = []

    def all(self) -> list[str]:
        """Returns the fields; none for an empty line that ends before the text does."""
        text, dialect = self._text, self._dialect
        fields: list[str] = []
        while True:
            if dialect.strip_left:
                while self.at < len(text) and text[self.at] <= " " and text[self.at] not in self._stops:
                    self.at += 1
            if not fields and self._ends_here():
                return fields
            if text[self.at : self.at + 1] == dialect.quote:
                fields.append(self._quoted())
            else:
                plain = self._up_to_separator()
                fields.append((plain.rstrip(_BLANKS) if dialect.strip_right else plain) or dialect.null)
            if self.at >= len(text) or self._ends_here():
                return fields
            self.at += 1  # the separator

    def _ends_here(self) -> bool:
        return self._end != "" and self._text[self.at : self.at + 1] == self._end

    def _up_to_separator(self) -> str:
        last = self._text.find(self._end, self.at) if self._end else -1
        last = len(self._text) if last < 0 else last
        end = self._text.find(self._dialect.separator, self.at, last)
        start, self.at = self.at, last if end < 0 else end
        return self._text[start : self.at]

    def _quoted(self) -> str:
        """Returns a quoted field; its opening quote is the next character."""
        dialect = self._dialect
        closing = self._text.find(dialect.quote, self.at + 1)
        if closing > 0 and self._text[closing + 1 : closing + 2] in self._stops:
            text = self._text[self.at + 1 : closing]
            if dialect.escape not in text:
                self.at = closing + 1
                return text or dialect.empty
        self._field, self._previous, self._char, self._unescaped = [], "", dialect.quote, False
        try:
            self.at += 1
            self._read_quoted()
        except _EndOfText:
            if not self._ends_with_value():
                return dialect.null
        else:
            self.at -= 1
        return "".join(self._field) or dialect.empty

    def _next(self) -> None:
        if self.at >= len(self._text):
            raise _EndOfText
        self._char = self._text[self.at]
        self.at += 1

    def _ends_with_value(self) -> bool:
        """Ends a field at the end of the line as univocity does; returns whether there is a value."""
        quote = self._dialect.quote
        if self._char == quote:
            if self._previous == quote:
                return True
            if not self._unescaped:
                self._field.append(quote)
        return bool(self._field) or (self._previous != "" and self._char not in self._stops)

    def _read_quoted(self) -> None:
        quote, escape = self._dialect.quote, self._dialect.escape
        self._next()
        while not (self._previous == quote and (self._char <= " " or self._char in self._stops)):
            if self._char in (quote, escape):
                self._take_quote_or_escape()
                self._previous = self._char
                self._next()
                if self._unescaped and self._char in self._stops:
                    return
                continue
            if self._previous == quote:
                self._unescaped = True
                self._field.append(quote)
                self._read_as_written()
                return
            if self._previous == escape:
                self._field.append(escape)
            self._field.append(self._char)
            self._previous = self._char
            self._next()
        blanks = []
        while self._char <= " " and self._char not in self._stops:
            blanks.append(self._char)
            self._next()
        if self._char not in self._stops:
            self._field += [quote, *blanks]
            self._read_as_written()

    def _read_as_written(self) -> None:
        """An unescaped quote was found: the field is all characters up to the separator."""
        self._field = [self._dialect.quote, *self._field, self._char]
        self._previous = self._char
        self._next()
        self.at -= 1
        text = "".join(self._field) + self._up_to_separator()
        self._field = [text.rstrip(_BLANKS) if self._dialect.strip_right else text]
        self._next()

    def _take_quote_or_escape(self) -> None:
        quote, escape = self._dialect.quote, self._dialect.escape
        if self._char == escape and self._previous == escape and escape != quote:
            self._field.append(escape)
            self._char = NO_CHARACTER
        elif self._previous == escape:
            if self._char == quote:
                self._field.append(quote)
                self._char = NO_CHARACTER
            else:
                self._field.append(self._previous)
        elif self._char == quote and self._previous == quote:
            self._field.append(quote)
        elif self._previous == quote:
            self._take_unescaped_quote()

    def _take_unescaped_quote(self) -> None:
        quote, escape = self._dialect.quote, self._dialect.escape
        self._field.append(quote)
        self._previous = self._char
        while self._char not in self._stops:
            if self._char in (quote, escape):
                self._take_quote_or_escape()
            elif self._previous == quote:
                self._take_unescaped_quote()
                return
            else:
                self._field.append(self._char)
            self._previous = self._char
            self._next()


_BLANKS = "".join(map(chr, range(0x21)))
