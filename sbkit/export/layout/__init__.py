"""The layout of a bundle: what its files are called, and what config.json says of each kind.

Whoever defines a kind of bundle derives its configuration from one of these, and declares values with ``value``. Needs
neither torch nor numpy. What is where:

================  ============================================================================
``names.py``      names of files, formats and kinds, and of the inputs and outputs of graphs
``config.py``     the configuration of each kind, the table of kinds, and reading one of any
``limits.py``     what its values may be
``checks.py``     how values and combinations of them are refused
``integrity.py``  whether files are what the export wrote
================  ============================================================================
"""

from __future__ import annotations

from sbkit.export.layout.config import (
    ENTRY_POINTS,
    KINDS,
    Bundle,
    ByKind,
    CodecConfig,
    Config,
    EnhancerConfig,
    GraphConfig,
    LabelsConfig,
    Streaming,
    TransducerConfig,
    VoiceConfig,
    add_kind,
    check_kind,
    read,
)
from sbkit.export.layout.integrity import (
    check_files,
    fingerprint,
    is_as_written,
)
from sbkit.export.layout.limits import (
    MAX_BYTES,
)
from sbkit.export.layout.names import (
    CODES,
    CONFIG,
    DECODERS,
    FOLDER,
    FORMAT,
    INPUTS,
    INT8,
    JOINER,
    MODELS,
    ONNX,
    OUTPUTS,
    PARITY,
    PREDICTION,
    README,
    RECIPE,
    SHERPA,
    SHERPA_STREAM,
    SPEECHBRAIN,
    STREAMS,
    TOKENIZER,
    TOKENS,
    TORCH,
    TRACED,
    VOICE_INPUTS,
    VOICE_OUTPUTS,
    WEIGHTS,
    external_weights,
    size,
)
from sbkit.system.schema import (
    Array,
    Boolean,
    Enumerated,
    Nullable,
    Number,
    Object,
    String,
    integer,
    value,
)

__all__ = [
    "CODES",
    "CONFIG",
    "DECODERS",
    "ENTRY_POINTS",
    "FOLDER",
    "FORMAT",
    "INPUTS",
    "INT8",
    "JOINER",
    "KINDS",
    "MAX_BYTES",
    "MODELS",
    "ONNX",
    "OUTPUTS",
    "PARITY",
    "PREDICTION",
    "README",
    "RECIPE",
    "SHERPA",
    "SHERPA_STREAM",
    "SPEECHBRAIN",
    "STREAMS",
    "TOKENIZER",
    "TOKENS",
    "TORCH",
    "TRACED",
    "VOICE_INPUTS",
    "VOICE_OUTPUTS",
    "WEIGHTS",
    "Array",
    "Boolean",
    "Bundle",
    "ByKind",
    "CodecConfig",
    "Config",
    "EnhancerConfig",
    "Enumerated",
    "GraphConfig",
    "LabelsConfig",
    "Nullable",
    "Number",
    "Object",
    "Streaming",
    "String",
    "TransducerConfig",
    "VoiceConfig",
    "add_kind",
    "check_files",
    "check_kind",
    "external_weights",
    "fingerprint",
    "integer",
    "is_as_written",
    "read",
    "size",
    "value",
]
