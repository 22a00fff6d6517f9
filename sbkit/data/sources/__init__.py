"""Sources of utterances: one module per kind of corpus, which all return the same kind of rows.

``docs/how-to/data.md`` lists what a corpus's ``source`` may be, how it is recognised, and the names of its splits.

Every row has an id, a recording (a path, or a member of a tar as ``x.tar?offset=O&size=N``), start and duration in
seconds, a text, a speaker, and accent, age, gender and language if they are known. CSVs keep all their other columns
too; one with a name that manifests reserve gets a prefix, such as ``source_wrd``. Columns are found by name (see
``ALIASES`` in ``base.py``); for other names set the corpus's ``columns``, by number if there is no header.
"""

from sbkit.data.sources.base import Rows, Source, join_rows
from sbkit.data.sources.detect import ONE_SPLIT, Named, check_exists, is_hub_address, open_source

__all__ = ["ONE_SPLIT", "Named", "Rows", "Source", "check_exists", "is_hub_address", "join_rows", "open_source"]
