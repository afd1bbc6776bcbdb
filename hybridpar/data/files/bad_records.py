"""Records of a corpus that cannot be read: an error, or left out, counted and named
(`data.on_bad_record`).

A record is a line of JSON lines, an element of JSON, a row of CSV, parquet or Arrow, or a file of
plain text. A file that is damaged as a whole, or is no text at all, is an error whatever the
policy.
"""

from __future__ import annotations

from typing import IO

from hybridpar.errors import DataError

NUM_NAMED = 5
"""Number of bad records that messages name; the journal names all."""


class BadRecords:
    """The bad records of a corpus, in the order in which they are found.

    Args:
        skips: Leave bad records out, instead of raising an error for the first one.
        journal: A file that gets a line for each.

    Attributes:
        count: Number of records that were left out.
        first: Messages of the first ones, at most NUM_NAMED.
    """

    def __init__(self, *, skips: bool = False, journal: IO[str] | None = None):
        self.skips = skips
        self._journal = journal
        self.count = 0
        self.first: list[str] = []

    def add(self, error: DataError) -> None:
        """Count the record that `error` is about.

        Raises:
            DataError: Bad records are not skipped.
        """
        if not self.skips:
            raise DataError(
                f'{error}; data.on_bad_record = "skip" leaves bad records out'
            ) from None
        self.count += 1
        if len(self.first) < NUM_NAMED:
            self.first.append(str(error))
        if self._journal is not None:
            self._journal.write(f"{error}\n")
