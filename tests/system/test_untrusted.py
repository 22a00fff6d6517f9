"""Files that others made: what isn't a regular file, or is too large, is an error before it is read."""

from __future__ import annotations

import collections
import contextlib
import gzip
import io
import os
import pickle
import struct
import sys
import threading
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from sbkit.decode import lm
from sbkit.errors import SbkitError
from sbkit.infer import inputs, speaking
from sbkit.nn.pretrained.tensors import TensorFiles
from sbkit.runs.initial.files import plain_state, tensors_in
from sbkit.system import untrusted
from sbkit.system.untrusted import standard_input
from sbkit.train.bad_batch.files import load_batches
from sbkit.train.checkpoint.state import load_file


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "a").write_bytes(b"{\"b\": [1]}")
    assert untrusted.read_bytes(tmp_path / "a", 10) == b'{"b": [1]}' and untrusted.read_json(tmp_path / "a", 10)
    with pytest.raises(OSError, match="it has 10 bytes; the limit is 9 bytes"):
        untrusted.read_bytes(tmp_path / "a", 9)


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        found = []

        def read(name=name, found=found):
            with pytest.raises(OSError, match="not a regular file") as error:
                untrusted.read_bytes(tmp_path / name, 10)
            found.append(error)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(10)
        assert found, f"{name} was waited for"
    with pytest.raises(IsADirectoryError):
        untrusted.read_bytes(tmp_path, 10)


def test_no_file_descriptor_stays_open(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "a", tmp_path, tmp_path / "pipe"):
        for most in (0, 1):
            with contextlib.suppress(OSError):
                untrusted.read_bytes(path, most)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "1" * 5000, b"\xff"])
def test_whatever_is_wrong_with_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        untrusted.parse_json(text)


def test_packed_text_is_unpacked_and_a_bomb_is_not(tmp_path):
    text = "".join(f"-{i % 97}.25\tword{i}\n" for i in range(100_000)).encode()
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    assert untrusted.unpack(tmp_path / "a.gz", 1 << 30) == text
    (tmp_path / "a").write_bytes(text)
    assert untrusted.unpack(tmp_path / "a", 1 << 30) == text
    with pytest.raises(OSError, match=r"unpacks to more than 1\.0 MB, too much"):
        untrusted.unpack(tmp_path / "a.gz", len(text) - 1)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(OSError, match=r"unpacks to more than 16\.8 MB, too much for a text"):
        untrusted.unpack(tmp_path / "bomb.gz", 1 << 40)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(text)[:-20])
    with pytest.raises((OSError, EOFError)):
        untrusted.unpack(tmp_path / "cut.gz", 1 << 30)
    (tmp_path / "long.gz").write_bytes(gzip.compress(text))
    os.truncate(tmp_path / "long.gz", 200 << 20)  # takes no room on the disk
    with pytest.raises(OSError, match="it has a long run of zeros"):
        untrusted.unpack(tmp_path / "long.gz", 1 << 30)


@pytest.mark.parametrize("read", [
    lambda: inputs.collect(["-"]),
    lambda: list(lm.read_texts(["-"])),
    lambda: speaking.write_text(SimpleNamespace(text="-", file=None), io.BytesIO()),
], ids=["transcribe", "lm", "speak"])
def test_closed_standard_input_is_an_error_with_a_command_that_works(monkeypatch, read):
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it then
    with refused("no-standard-input"):
        read()


def test_a_terminal_is_an_error_and_a_pipe_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with refused("no-standard-input"):
        standard_input("audio", "cat a")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert standard_input("audio", "cat a") is sys.stdin


def lying(path, numbers):
    """A file of weights whose one record has other many numbers than its pickle says."""
    torch.save({"weight": torch.zeros(4)}, path)
    with zipfile.ZipFile(path) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    for count in (b"K\x04tq", b"K\x04\x85"):  # of the storage, and of the tensor
        written = b"\x8a\x08" + struct.pack("<q", numbers) + count[2:]
        parts = {name: part.replace(count, written) if name.endswith("data.pkl") else part
                 for name, part in parts.items()}
    with zipfile.ZipFile(path, "w") as out:
        for name, part in parts.items():
            out.writestr(name, part)


@pytest.mark.parametrize("numbers", [2**40, 2**61, 10_000, -4])
def test_tensors_that_are_larger_than_their_record_are_one_plain_error(tmp_path, numbers):
    lying(tmp_path / "model.ckpt", numbers)
    for read in (load_file, plain_state, tensors_in):
        with refused("damaged-file", file=tmp_path / "model.ckpt", wording=False):
            read(tmp_path / "model.ckpt")
    with pytest.raises(SbkitError, match=r"model\.ckpt is incomplete or not a file of torch\.save"):
        TensorFiles([tmp_path / "model.ckpt"], ())


def test_nothing_is_unpickled_by_a_torch_that_a_file_could_corrupt(tmp_path, monkeypatch):
    torch.save({"weight": torch.zeros(4)}, tmp_path / "model.ckpt")
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    readers = (load_file, plain_state, tensors_in, lambda path: TensorFiles([path], ()),
               lambda path: load_batches(path, "cpu"))
    for read in readers:
        with refused("wrong-version", wording=False):
            read(tmp_path / "model.ckpt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_class_of_a_million_characters_is_refused_at_once(zipped, tmp_path):
    """torch would search its own message of it for hours."""
    path = tmp_path / "a.pt"
    torch.save({"a": collections.OrderedDict()}, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            members = {each: archive.read(each) for each in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data.replace(b"OrderedDict", b"x" * 10**6))
    else:
        path.write_bytes(path.read_bytes().replace(b"OrderedDict", b"x" * 10**6))
    began = time.monotonic()
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL collections x{900}"):
        untrusted.load_tensors(path)
    assert time.monotonic() - began < 5
