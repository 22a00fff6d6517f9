"""What is asked of libraries in a process of its own is asked of the ones that are installed."""

from sbkit.doctor import probe


def test_nothing_is_imported_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("onnxruntime", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close(); raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    probe.inspect_library.cache_clear()
    assert "not this one" not in str(probe.inspect_library("onnxruntime")) and not (tmp_path / "ran").exists()
    probe.inspect_library.cache_clear()
