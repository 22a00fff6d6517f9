"""Where utterances come from: one file per kind of corpus, all of them giving the same rows."""

from sbkit.data.sources.base import Rows, Source, join_rows
from sbkit.data.sources.detect import open_source

__all__ = ["Rows", "Source", "join_rows", "open_source"]
