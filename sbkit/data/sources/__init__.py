"""Sources of utterances: one module per kind of corpus; all give the same rows.

What a corpus's ``source`` may be, how it is recognised, and the names of its splits:

===================================== ===================================== ==============================
source                                recognised by                         splits
===================================== ===================================== ==============================
nothing                               null or ""                            the demo corpus: all three
Common Voice, any release from 5 on   a folder with ``clips/`` and TSVs,    ``train.tsv``, ``dev.tsv``, ...
                                      or a folder of such folders
the same as downloaded                ``.tar.gz`` or ``.tar``               the same
LJSpeech and others laid out like it  ``metadata.csv`` with fields between  none: 2 % of the ids each are
                                      ``|``, no header, and ``wavs/``       dev and test, by their hash
VoxCeleb                              ``id10270/VIDEO/00001.wav`` in it or   none: test has the folder
                                      below it                              ``test`` and VoxCeleb1's 40
                                                                            speakers, dev 2 % of the others
SpeechBrain CSV, sbkit's manifests    a folder of ``.csv`` files            their names
JSON lines (NeMo, ESPnet, ...), or    a folder of ``.jsonl`` or ``.json``   their names, of shards such as
SpeechBrain's JSON                    files                                 ``train-3-of-16`` ``train``
``save_to_disk`` of `datasets`        its ``dataset_dict.json``             the dataset's (alone: train)
parquet files                         a folder of ``.parquet`` files        their names without numbers
the Hugging Face hub                  ``hf://owner/name?config=fr`` or      the dataset's
                                      ``owner/name``; further options:
                                      ``revision=``, ``streaming=true``
single files                          a mapping ``{train: FILE, dev: ...}`` the mapping's keys
                                      or ``{train: [FILE, FILE], ...}``
===================================== ===================================== ==============================

``validation``, ``valid`` and ``val`` count as dev; for other names set the corpus's ``splits``.

Every row has an id, a recording (a path, or a stretch of a tar as ``x.tar?offset=O&size=N``), start and duration in
seconds, a text, a speaker, and accent, age, gender and language if they are known. CSVs keep all their other columns
too; one whose name a manifest uses for something else gets a prefix, such as ``source_wrd``. Columns are found by name
(see ``ALIASES`` in ``base.py``); for other names set the corpus's ``columns``, which without a header are numbers.
"""

from sbkit.data.sources.base import Rows, Source, join_rows
from sbkit.data.sources.detect import Named, check_there, on_hub, open_source

__all__ = ["Named", "Rows", "Source", "check_there", "join_rows", "on_hub", "open_source"]
