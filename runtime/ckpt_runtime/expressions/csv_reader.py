"""Splits a line of CSV into its fields as the parser of Spark does, univocity's, with Spark's settings of it.

A field that begins with the quote is quoted. Within it the escape character turns a following quote or escape character
into plain text; outside it has no meaning. A malformed quoted field is not an error: it is then taken as it is written,
up to the next separator (``STOP_AT_DELIMITER``).
"""

from __future__ import annotations

from dataclasses import dataclass

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


class _EndOfLine(Exception):
    """Raised at the end of the line."""


class _Fields:
    """One pass over a line. Methods that read a quoted field follow univocity's, with its states, where it is odd."""

    def __init__(self, line: str, dialect: Dialect) -> None:
        self._line = line
        self._at = 0
        self._dialect = dialect
        self._char = ""
        self._previous = ""
        self._unescaped = False
        self._field: list[str] = []

    def all(self) -> list[str]:
        line, dialect = self._line, self._dialect
        fields = []
        while True:
            if dialect.strip_left:
                self._skip_blanks()
            if line[self._at : self._at + 1] == dialect.quote:
                fields.append(self._quoted())
            else:
                fields.append(self._plain())
            if self._at >= len(line):
                return fields
            self._at += 1  # the separator

    def _skip_blanks(self) -> None:
        line, separator = self._line, self._dialect.separator
        while self._at < len(line) and line[self._at] <= " " and line[self._at] != separator:
            self._at += 1

    def _plain(self) -> str:
        """Returns an unquoted field."""
        text = self._up_to_separator()
        return (text.rstrip(_BLANKS) if self._dialect.strip_right else text) or self._dialect.null

    def _up_to_separator(self) -> str:
        end = self._line.find(self._dialect.separator, self._at)
        start, self._at = self._at, len(self._line) if end < 0 else end
        return self._line[start : self._at]

    def _quoted(self) -> str:
        """Returns a quoted field; its opening quote is the next character."""
        dialect = self._dialect
        closing = self._line.find(dialect.quote, self._at + 1)
        if closing > 0 and self._line[closing + 1 : closing + 2] == dialect.separator:
            text = self._line[self._at + 1 : closing]
            if dialect.escape not in text:
                self._at = closing + 1
                return text or dialect.empty
        self._field, self._previous, self._char, self._unescaped = [], "", dialect.quote, False
        try:
            self._at += 1
            self._read_quoted()
        except _EndOfLine:
            if not self._ends_with_value():
                return dialect.null
        else:
            self._at -= 1
        return "".join(self._field) or dialect.empty

    def _next(self) -> None:
        if self._at >= len(self._line):
            raise _EndOfLine
        self._char = self._line[self._at]
        self._at += 1

    def _ends_with_value(self) -> bool:
        """Ends a field at the end of the line as univocity does; returns whether there is a value."""
        quote = self._dialect.quote
        if self._char == quote:
            if self._previous == quote:
                return True
            if not self._unescaped:
                self._field.append(quote)
        return bool(self._field) or (self._previous != "" and self._char != self._dialect.separator)

    def _read_quoted(self) -> None:
        separator, quote, escape = self._dialect.separator, self._dialect.quote, self._dialect.escape
        self._next()
        while not (self._previous == quote and (self._char <= " " or self._char == separator)):
            if self._char in (quote, escape):
                self._take_quote_or_escape()
                self._previous = self._char
                self._next()
                if self._unescaped and self._char == separator:
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
        while self._char <= " " and self._char != separator:
            blanks.append(self._char)
            self._next()
        if self._char != separator:
            self._field += [quote, *blanks]
            self._read_as_written()

    def _read_as_written(self) -> None:
        """An unescaped quote was found: the field is all characters up to the separator."""
        self._field = [self._dialect.quote, *self._field, self._char]
        self._previous = self._char
        self._next()
        self._at -= 1
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
        separator, quote, escape = self._dialect.separator, self._dialect.quote, self._dialect.escape
        self._field.append(quote)
        self._previous = self._char
        while self._char != separator:
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
