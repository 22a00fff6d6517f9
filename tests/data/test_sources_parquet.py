"""Parquet files that are small and unpack to what fills a machine, and honest ones with large pages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data.sources import open_source
from sbkit.errors import SbkitError

MEGABYTE = 1 << 20
LARGE = 400 * MEGABYTE
#: Reads a file as a corpus, in a process that may have two gigabytes more than after its imports, and prints the code
#: and the file of the error, and by how many megabytes its memory grew.
READER = """
import json, re, resource, sys
from pathlib import Path
import datasets, torch
from sbkit.data.sources import open_source
from sbkit.errors import SbkitError

def megabytes(name):
    return int(re.findall(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) // 1024

limit = (megabytes("VmSize") + 2048) << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before, code, file = megabytes("VmHWM"), "", ""
try:
    open_source({"train": sys.argv[1]}, cache=Path(sys.argv[2]), show_progress=False).read("train", False)
except SbkitError as error:
    code, file = error.code, error.file
print(json.dumps([code, file, megabytes("VmHWM") - before]))
"""


def constant_text(count):
    """A text of this many bytes, which takes no memory yet."""
    offsets = pa.py_buffer(np.array([0, count], np.int32))
    return pa.StringArray.from_buffers(1, offsets, pa.py_buffer(bytes(count)))


def recordings(data, count=1):
    paths = pa.array(["a.wav"] * count)
    return pa.StructArray.from_arrays([data, paths], ["bytes", "path"])


def one_large_text(path):
    table = pa.table({"audio": ["a.wav"], "text": constant_text(LARGE)})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def one_large_recording(path):
    data = constant_text(LARGE).view(pa.binary())
    table = pa.table({"audio": recordings(data), "text": ["good"]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)


def thirty_million_rows(path):
    indices = pa.array(np.zeros(30_000_000, np.int8))
    columns = {name: pa.DictionaryArray.from_arrays(indices, [value])
               for name, value in {"audio": "a.wav", "text": "good"}.items()}
    pq.write_table(pa.table(columns), path, store_schema=False)


def one_recording_in_many_rows(path):
    indices = pa.array(np.zeros(30_000, np.int32))
    data = pa.DictionaryArray.from_arrays(indices, pa.array([bytes(MEGABYTE)]))
    table = pa.table({"audio": data, "text": [f"text {i}" for i in range(30_000)]})
    pq.write_table(table, path, compression="zstd", store_schema=False)


def nulls_of_a_wide_type(path):
    """Each null takes the width of its type in memory, and nothing in the file."""
    width, count = 8 * MEGABYTE, 64
    memory = pa.py_buffer(np.zeros(width * count, np.uint8))
    nulls = pa.Array.from_buffers(pa.binary(width), count, [pa.py_buffer(bytes(count // 8)), memory], null_count=count)
    table = pa.table({"audio": recordings(nulls, count), "text": [f"text {i}" for i in range(count)]})
    pq.write_table(table, path, store_schema=False, use_dictionary=False, write_statistics=False)


def one_recording_in_a_column_with_a_dot(path):
    data = pa.DictionaryArray.from_arrays(pa.array(np.zeros(256, np.int32)), pa.array([bytes(65 * MEGABYTE)]))
    table = pa.table({"my.audio": recordings(data, 256), "text": [f"text {i}" for i in range(256)]})
    pq.write_table(table, path, compression="zstd", store_schema=False, write_statistics=False,
                   dictionary_pagesize_limit=1 << 30)


def a_footer_that_lies(path):
    """The same text, and a footer that says that it has a byte."""
    one_large_text(path)
    column = pq.read_metadata(path).row_group(0).column(1)
    data = path.read_bytes()
    written = varint(2 * column.total_uncompressed_size)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    assert written in footer
    short = b"\x82" + b"\x80" * (len(written) - 2) + b"\0"  # 1, in as many bytes
    path.write_bytes(data[:start] + footer.replace(written, short))
    assert pq.read_metadata(path).row_group(0).column(1).total_uncompressed_size == 1


def varint(value):
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux has it")
@pytest.mark.parametrize("write", [
    one_large_text, one_large_recording, thirty_million_rows, one_recording_in_many_rows, nulls_of_a_wide_type,
    one_recording_in_a_column_with_a_dot, a_footer_that_lies])
def test_a_small_file_that_unpacks_to_a_large_one_is_refused_in_little_memory(tmp_path, write):
    path = tmp_path / "train.parquet"
    write(path)
    assert path.stat().st_size < 500_000
    done = subprocess.run([sys.executable, "-c", READER, path, tmp_path / "cache"], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    code, file, grown = json.loads(done.stdout.splitlines()[-1])
    assert (code, file) == ("suspicious-file", str(path))
    assert grown < LARGE // MEGABYTE, f"{grown} MB"
    assert not [*(tmp_path / "cache").rglob("*.tar*")], "what was written is removed"


@pytest.mark.slow
def test_recordings_of_megabytes_in_one_dictionary_page_are_all_read(tmp_path):
    noise = np.random.default_rng(0).bytes(3 * MEGABYTE)
    data = pa.array([noise[i:] for i in range(24)], pa.binary())
    pq.write_table(pa.table({"audio": recordings(data, 24), "text": ["good"] * 24}), tmp_path / "train.parquet")
    rows = open_source({"train": tmp_path / "train.parquet"}, cache=tmp_path / "cache").read("train", False)
    assert len(rows) == 24
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.tar")) > 24 * (3 * MEGABYTE - 24)


def test_files_of_a_split_are_read_one_after_another_in_groups_of_any_size(tmp_path):
    clip = encoded(speechlike(0.5), 16000, "flac")
    for shard in range(2):
        data = pa.array([clip] * 7, pa.binary())
        texts = [f"text {7 * shard + i}" for i in range(7)]
        pq.write_table(pa.table({"audio": recordings(data, 7), "text": texts}),
                       tmp_path / f"train-0000{shard}-of-00002.parquet", row_group_size=3)
    rows = open_source(tmp_path, cache=tmp_path / "cache", show_progress=False).read("train", False)
    assert list(rows.texts) == [f"text {i}" for i in range(14)]


def test_a_file_without_a_column_of_the_first_is_named(tmp_path):
    pq.write_table(pa.table({"audio": ["a.wav"], "text": ["good"]}), tmp_path / "train-00000-of-00002.parquet")
    pq.write_table(pa.table({"audio": ["a.wav"]}), tmp_path / "train-00001-of-00002.parquet")
    with refused("missing-column"):
        open_source(tmp_path, cache=tmp_path / "cache", show_progress=False).read("train", False)


def test_a_damaged_page_is_an_error_in_a_line(tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"audio": ["a.wav"] * 9, "text": list("abcdefghi")}), path)
    whole = path.read_bytes()
    for place in range(4, 60):
        path.write_bytes(whole[:place] + b"\xff\xff\xff\xff\xff\xff" + whole[place + 6:])
        try:
            open_source({"train": path}, cache=tmp_path / f"{place}", show_progress=False).read("train", False)
        except SbkitError as error:
            assert "\n" not in str(error)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "train.parquet")
    with refused("unreadable-dataset"):
        open_source(tmp_path, cache=tmp_path / "cache", show_progress=False).read("train", False)
