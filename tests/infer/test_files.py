"""The runner of files that transcribe, enhance, run and label share."""

import contextlib
import io

from hypothesis import given
from hypothesis import strategies as st

from sbkit.data.audio import AudioError
from sbkit.infer.files import run_files
from sbkit.infer.recordings import Recording


@given(order=st.integers(1, 8).flatmap(lambda count: st.permutations(range(count))), data=st.data())
def test_results_are_printed_in_the_recordings_order(order, data):
    recordings = [Recording(f"{i}.wav") for i in range(len(order))]
    unreadable = data.draw(st.sets(st.sampled_from(order)))
    arrival, named = data.draw(st.permutations(range(len(order)))), data.draw(st.integers(1, 3))
    results = [str(i) for i in range(len(order)) if i not in unreadable]

    def run(given):
        for position in arrival:
            name = str(given[position].audio).removesuffix(".wav")
            yield position, 0.5  # seconds of it so far
            error = AudioError("empty-audio", f"{name}.wav", "holds no audio")
            yield position, error if int(name) in unreadable else name

    for in_order in (True, False):
        errors, err = {}, io.StringIO()
        with contextlib.redirect_stderr(err):
            found = [*run_files(recordings, run, errors, what="trying", seconds=[1.0] * len(order), order=order,
                                in_order=in_order, named=named, show=False)]
        assert [index for index, _ in found] == [int(result) for _, result in found]
        assert (found if in_order else sorted(found)) == [(int(each), each) for each in results]
        assert {index: error.wav for index, error in errors.items()} == {i: f"{i}.wav" for i in unreadable}
        lines = err.getvalue().splitlines()
        assert sum("holds no audio" in line for line in lines) == min(named, len(unreadable))
        assert lines[named:] == ([f"left out: {len(unreadable) - named} more"] if len(unreadable) > named else [])
