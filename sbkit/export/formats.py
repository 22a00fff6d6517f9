"""The formats of a bundle while it is made: which are wanted, which are kept, and why others are left out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from sbkit.errors import SbkitError, is_out_of_memory, summary
from sbkit.export import graph, layout
from sbkit.export.exported import Exported


def choose_formats(exported: Exported, requested: Sequence[str] | None) -> list[str]:
    """Return the formats to write, in the order in which they are made.

    requested : as the user named them; None: all that the model has
    """
    available = [name for name in exported.formats if exported.judges_words or name != layout.INT8]
    wanted = available if requested is None else requested
    unknown = sorted(set(wanted) - set(available))
    if unknown or not wanted:
        reasons = {layout.INT8: "judged by words, so a task of your own needs labels for it", **exported.left_out}
        what = f"this model has no format {', '.join(unknown)}" if unknown else "--formats names no format"
        why_not = [f"{name}: {reasons[name]}" for name in unknown if name in reasons]
        raise SbkitError("unknown-format", what, hint="; ".join([f"it has {', '.join(available)}", *why_not]),
                         key="--formats")
    if {layout.ONNX, layout.INT8} & set(wanted):
        graph.check_onnx_tools()
    return [name for name in available if name in wanted]


class Formats:
    """The formats of one export.

    folder : where their files are written
    title : what messages call that folder, which is a temporary one
    names : in the order in which they are made
    must_have_all : whether the user named the formats: then none is left out, and one that fails refuses the bundle
    """

    def __init__(self, folder: Path, title: str, names: Sequence[str], must_have_all: bool):
        self.folder = folder
        self.title = title
        self.names = names
        self.must_have_all = must_have_all
        self.kept = list(names)
        self.left_out: dict[str, str] = {}
        """The reason of each format that isn't kept."""
        self._written: dict[str, set[Path]] = {name: set() for name in names}

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Write or run a format inside this context; leave it out if that fails."""
        before = set(self.folder.iterdir())
        reason = None
        try:
            yield
        except Exception as error:  # of torch, ONNX Runtime, SpeechBrain or the recipe's own classes
            reason = self._reason(name, error)
        self._written[name] |= set(self.folder.iterdir()) - before
        if reason is not None:
            self.leave_out(name, reason)

    def _reason(self, name: str, error: Exception) -> str:
        """Return why a format can't be made or run; raises if that refuses the whole bundle."""
        if isinstance(error, OSError) or is_out_of_memory(error):  # which is no property of the format
            raise error
        if isinstance(error, SbkitError):
            if self.must_have_all:
                raise error
            reason = str(error)
        else:
            reason = summary(error)
        reason = reason.replace(str(self.folder), self.title)
        if self.must_have_all:
            raise SbkitError("format-failed", f"the format {name} can't be made or run: {reason}",
                             hint="leave it out of --formats", key="--formats", value=name) from error
        return reason

    def leave_out(self, name: str, reason: str) -> None:
        """Remove what was written of a format."""
        self.kept.remove(name)
        self.left_out[name] = reason
        for path in self._written[name]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if name == layout.ONNX and layout.INT8 in self.kept:  # its own gate, of words, is wider than onnx's
            self.leave_out(layout.INT8, f"it is made from {layout.ONNX}, which is left out")

    def refuse_if_none_is_kept(self) -> None:
        """Raise if no format could be written."""
        if not self.kept:
            raise SbkitError("format-failed",
                             f"no format of the model can be written, so nothing was published:{self._reasons()}")

    def refuse_if_only_programs_are_kept(self) -> None:
        """Raise if all formats that are data were left out, unless the user named the others.

        Whoever gets a bundle could run it only by trusting its author: that is for the author to choose, by name.
        """
        data_alone = {layout.ONNX, layout.INT8}
        if self.must_have_all or not data_alone & set(self.names) or data_alone & set(self.kept):
            return
        raise SbkitError("only-code-formats", "the only formats that match the checkpoint can run code when they are "
                         f"opened, so nothing was published:{self._reasons()}",
                         hint=f"to publish them all the same, name them: --formats {','.join(self.kept)}")

    def _reasons(self) -> str:
        return "".join(f"\n  {name}: {reason}" for name, reason in self.left_out.items())
