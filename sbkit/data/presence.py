"""Which recordings exist, with one listing per large folder instead of a query per file, and which may be opened."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.data.audio import split_member
from sbkit.data.manifest import Column
from sbkit.data.remote import Remote
from sbkit.errors import SbkitError

# From about this many files on, listing a folder is faster than checking each file.
WORTH_LISTING = 20


def existing(wavs: Column, listings: dict[str, pa.Array | None] | None = None) -> np.ndarray:
    """Which recordings exist, [N] booleans; ``listings`` caches the contents of large folders for further calls."""
    listings = {} if listings is None else listings
    result = np.ones(len(wavs), bool)
    path = wavs.arrow
    member = _np(pc.match_substring(path, "?offset="))
    remote = _np(pc.match_substring(path, "://"))
    names, codes = Column(pc.replace_substring_regex(path, r"[^/]*$", "")).numbered()  # folders
    plain = ~member & ~remote
    counts = np.bincount(codes[plain], minlength=len(names))
    listed_paths = []
    for code in np.flatnonzero(counts >= WORTH_LISTING).tolist():
        folder = names[code]
        if folder not in listings:
            try:  # without broken links
                with os.scandir(folder or ".") as entries:
                    listings[folder] = pa.array([folder + entry.name for entry in entries if not entry.is_symlink()
                                                 or os.path.exists(entry.path)], pa.large_string())
            except (OSError, UnicodeEncodeError):  # it can't be listed, or a name isn't UTF-8
                listings[folder] = None
        if listings[folder] is None:
            counts[code] = 0
        else:
            listed_paths.append(listings[folder])
    if listed_paths:
        listed = plain & (counts[codes] >= WORTH_LISTING)
        result[listed] = _np(pc.is_in(path, pa.concat_arrays(listed_paths)))[listed]
        plain[listed] = False
    for i in np.flatnonzero(plain).tolist():
        result[i] = os.path.isfile(wavs[i])
    sizes: dict[str, int] = {}
    for i in np.flatnonzero(member & ~remote).tolist():
        shard, offset, size = split_member(wavs[i])
        if shard not in sizes:
            sizes[shard] = os.path.getsize(shard) if os.path.isfile(shard) else -1
        result[i] = offset + (size or 0) <= sizes[shard]
    return result


def refused(wavs: Column, remote: Remote) -> np.ndarray:
    """Which recordings are URLs that aren't allowed, [N] booleans."""
    urls = pc.match_substring(wavs.arrow, "://")
    if not pc.any(urls).as_py():
        return np.zeros(len(wavs), bool)
    allowed = pc.and_not(pc.match_substring_regex(wavs.arrow, f"^(?i:{'|'.join(remote.schemes)})://"),
                         pc.match_substring(wavs.arrow, "::"))
    return _np(pc.and_not(urls, allowed))


def check_opened(wavs: Column, remote: Remote, where: object) -> None:
    """Refuse a list with URLs that aren't allowed; the error says how to allow them."""
    at = np.flatnonzero(refused(wavs, remote))
    if len(at):
        first = wavs[int(at[0])]
        raise SbkitError("url-not-allowed", f"{where}: {len(at):,} of its {len(wavs):,} recordings are URLs such as "
                         f"{first}", hint=remote.refusal(first), value=first)


def file_version(wav: str) -> tuple[str, str]:
    """Size and modification time of a recording's file as text, both empty if it can't be found."""
    try:
        status = os.stat(split_member(wav)[0])
    except OSError:
        return "", ""
    return str(status.st_size), str(status.st_mtime_ns)


def _np(mask: pa.Array) -> np.ndarray:
    return mask.to_numpy(zero_copy_only=False)
