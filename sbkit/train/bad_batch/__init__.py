"""A step that was not finite: its batches are run again to name the first bad layer, and saved for ``sbkit rerun``.

================  ============================================================================================
``examine.py``    runs a batch again and measures each layer; nothing is decided or written
``report.py``     decides with all ranks which batches are to blame, what to save and what the log says
``files.py``      writes a bad batch as a folder, finds it and reads it back
``replay.py``     runs a saved batch through a Brain, and shows every layer and each utterance alone
================  ============================================================================================
"""

from sbkit.train.bad_batch.replay import replay

__all__ = ["replay"]
