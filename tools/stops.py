"""Counts the functions of sbkit that one optimizer step enters, from one call of ``Trainer.train_step`` to the next.

    python -m tools.stops                                    the flagship, small, on the CPU
    python -m tools.stops --max_batch_seconds 2              with accumulation: several micro-batches in a step
    python -m tools.stops --ranks 2                          the first of two processes
    python -m tools.stops --recipe hparams/streaming.yaml --d_model 16 ...    any arguments of `sbkit train`

Prints functions, files and calls, with the model's layers (``nn/``) and without, the calls between two steps, and the
functions by file in the order in which they were entered. Only the training thread is counted, in the middle of an
epoch: reading, forward, loss, backward, update, and what is due before the next step. Comprehensions and lambdas belong
to the function around them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: The step that is counted, from 0: after the first ones, which load kernels, and none of those that are timed.
STEP = 4
RECIPE = "hparams/ctc.yaml"
SMALL = ("--language none --least_steps 0 --optimizer_step_limit 6 --d_model 72 --num_encoder_layers 2 "
         "--step_seconds 4 --max_batch_seconds 12 --num_workers 1 --device cpu --no-check --noprogressbar").split()
#: SpeechBrain's hooks, and sbkit's around them: what they do is the task's or the recipe's.
HOOKS = ("open_step", "close_step", "on_fit_batch_start", "on_fit_batch_end")


class Stops(NamedTuple):
    """How often a step entered each function, by file and name, in the order in which they were first entered.

    calls : the functions of sbkit
    between : those of any package that are neither in ``train_step``, which reads the data too, nor in hooks
    """

    calls: Counter[tuple[str, str]]
    between: Counter[tuple[str, str]]

    def size(self, without: str | None = None) -> tuple[int, int, int]:
        """Return the numbers of functions, files and calls; ``without``: the folder to leave out."""
        found = {key: count for key, count in self.calls.items() if without is None or not key[0].startswith(without)}
        return len(found), len({file for file, _ in found}), sum(found.values())

    def text(self) -> str:
        """Format all that was counted."""
        lines = ["{}: {} functions in {} files, {} calls".format(what, *self.size(without))
                 for what, without in (("one step", None), ("without the model's layers (nn)", "sbkit/nn/"))]
        between = ", ".join(_times(name, count) for (_, name), count in self.between.items())
        lines.append(f"between two steps, beside hooks: {sum(self.between.values())} calls: {between}")
        files: dict[str, list[str]] = {}
        for (file, name), count in self.calls.items():
            files.setdefault(file, []).append(_times(name, count))
        return "\n".join([*lines, *(f"  {file}: {', '.join(names)}" for file, names in files.items())])


@contextlib.contextmanager
def counted(step: int = STEP) -> Iterator[Stops]:
    """Count one step of what trains inside this context: the one before which ``step`` updates have been done."""
    stops = Stops(Counter(), Counter())
    begun = False
    aside: FrameType | None = None  # the outermost hook or train_step that runs

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal begun, aside
        code = frame.f_code
        if event == "return" and frame is aside:
            aside = None
        if event != "call":
            return
        if not begun and code.co_name != "train_step":
            return
        file = code.co_filename.removeprefix(f"{ROOT}/")
        if (file, code.co_name) == ("sbkit/train/trainer.py", "train_step"):
            done = frame.f_locals["self"].state.optimizer_step
            begun = begun or done == step
            if done > step:
                sys.setprofile(None)
                return
        if not begun or code.co_name.startswith("<"):
            return
        key = file, getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name alone
        if file.startswith("sbkit/"):
            stops.calls[key] += 1
        if aside is None and code.co_name in ("train_step", *HOOKS):
            aside = frame
        elif aside is None:
            stops.between[key] += 1

    sys.setprofile(watch)
    try:
        yield stops
    finally:
        sys.setprofile(None)


def of_training(folder: Path, *words: str) -> Stops:
    """Train in this process into a folder with a corpus in ``data``, and count a step; ``words``: train's arguments."""
    from sbkit.cli import main as sbkit

    with counted() as stops:
        code = sbkit(["train", *words, "--data_folder", str(folder / "data"), "--output_folder", str(folder / "run")])
    if code or not stops.calls:
        raise SystemExit(f"no step was counted (sbkit train ended with {code or 0})")
    return stops


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run, connected by gloo")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of one of several ranks
    args, words = parser.parse_known_args(given)
    if args.folder is not None:
        stops = of_training(args.folder, str(ROOT / args.recipe), *words)
        if os.environ.get("RANK", "0") == "0":
            print(stops.text())
        return
    from tools.golden import corpus

    words = [*(SMALL if args.recipe == RECIPE else []), *words]
    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder, "data"))
        several = ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}", "-m"]
        subprocess.run([sys.executable, "-m", *(several if args.ranks > 1 else []), "tools.stops", "--recipe",
                        args.recipe, "--folder", folder, *words], cwd=ROOT, check=True)


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{name} x{count}"


if __name__ == "__main__":
    main()
