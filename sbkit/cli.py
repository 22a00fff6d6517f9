"""The command line: words to calls. Each command imports what it needs when it is called."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sbkit.errors import SbkitError
from sbkit.system import disk

RECIPE_HELP = """usage: sbkit {command} RECIPE.yaml [--key value ...]
{what}

Any key of the YAML can be overridden: --d_model 256 --number_of_epochs 3 --data_folder /data/cv/fr
Beside them SpeechBrain's run options work: --device --precision --debug --test_only --noprogressbar
--ckpt_interval_minutes --grad_accumulation_factor --max_grad_norm --compile --profile_training ...
--no-check starts a run without the check of its recipe.

A recipe is code: what it names is imported and called, by check too. For one that you don't trust: check --no-run."""

RUNS_CODE = "The recipe in a run's folder is code, which this imports and calls: name only runs that you trust."

#: Commands that take a recipe and overrides, as SpeechBrain's scripts do. argparse below never sees these words.
RECIPE_COMMANDS = {
    "train": "Train, test and report. On several devices: torchrun --nproc_per_node=8 train.py RECIPE.yaml ...\n"
             "The same command resumes a run. One run at a time holds an output_folder: a second start is refused.",
    "check": "Say all that is wrong with a recipe, what it costs and what fits. --json for programs, --measure to run "
             "a few steps.\n--no-run imports nothing but speechbrain, torch and sbkit, builds and calls nothing, and "
             "lists what it could not see.",
    "tune": "Find the largest batch that fits, by trying; remembered per model, device and precision (--fresh).\n"
            "--memory GIB: what a run may take (default: the whole GPU; on a CPU most of what is free).",
    "prepare": "Only prepare the corpus and the tokenizer, and say what was left out and why.",
}

#: What each of the limits of ``sbkit serve`` bounds (``sbkit.serve.limits``).
SERVE_LIMITS = {
    "max-upload-mb": "megabytes of one request", "max-audio-seconds": "of one recording, decoded",
    "max-requests": "in the house at once; the next one gets a 429", "max-active": "of those, worked on at once",
    "max-live": "live sessions at once",
    "client-share": "of the places for requests, and for live sessions, that one address may have; this machine's "
                    "own address has no share, nor has who comes through a proxy there",
    "max-connections": "open at once, if ulimit -n allows it; one that asks for nothing gives way to a new one",
    "max-disk-mb": "that uploads and decoded audio may take of the temporary folder, and never more than half of "
                   "what is free there; the next one gets a 503",
    "min-upload-kbs": "kilobytes a second that an upload has to come in at",
    "upload-grace-seconds": "before that is looked at",
    "request-seconds": "for one request, upload and all",
    "decoders": "processes that decode audio", "decode-seconds": "of processor time to decode one recording",
    "idle-seconds": "that a live session may send nothing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with disk.told(os.environ.get("TMPDIR", "/tmp"), "the output or a temporary file"):  # others are told before
            return _dispatch(argv)
    except SbkitError as error:
        if "--debug" in argv:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":  # every rank meets the same mistake; one of them says it
            print(f"error: {error}", file=sys.stderr)
        _tell_torchrun(error)
        return error.exit_code
    except KeyboardInterrupt:  # outside of training's steps, which save a checkpoint first
        if "--debug" in argv:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped by Ctrl-C; the same command does what is missing", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `sbkit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _tell_torchrun(error: SbkitError) -> None:
    """torchrun ends with a page of its own about processes that failed; this puts the reason into its last lines."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = f"error: {error}"
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # a full disk may be what it tells of
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def _dispatch(argv: list[str]) -> int:
    command, words = (argv or [""])[0], argv[1:]
    if command not in RECIPE_COMMANDS:
        args = _parser().parse_args(argv)
        return args.call(args)
    if "-h" in words or "--help" in words:
        print(RECIPE_HELP.format(command=command, what=RECIPE_COMMANDS[command]))
        return 0
    from sbkit import run

    return getattr(run, command)(words)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """Nothing is left to the parser above, which knows none of this command's options."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            self._refuse(f"unrecognized arguments: {' '.join(unknown)}", unknown[0].partition("=")[0], options)
        return known, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        self._refuse(message, *(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ("", []))

    def _refuse(self, message: str, word: str, options: list[str]) -> NoReturn:
        near = difflib.get_close_matches(word, options, n=1)
        raise SbkitError(message, hint=(f"did you mean {near[0]}? " if near else "") + f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    from sbkit.serve.limits import Limits

    parser = _Parser(prog="sbkit", description="Train speech models from recipes and ship them.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what in RECIPE_COMMANDS.items():
        commands.add_parser(name, help=what.split(".")[0], add_help=False)

    demo = commands.add_parser("demo-data", help="synthesise a small corpus in Common Voice's layout")
    demo.add_argument("out", metavar="OUT")
    demo.add_argument("--hours", type=float, default=1.0)
    demo.add_argument("--language", default="en", help="any language that espeak-ng speaks")
    demo.add_argument("--seed", type=int, default=1234)
    demo.add_argument("--workers", type=int, help="processes (default: one a core)")
    demo.set_defaults(call=_demo_data)

    shard = commands.add_parser("shard", help="pack a manifest's recordings into tar shards that train directly")
    shard.add_argument("manifest", metavar="MANIFEST.csv")
    shard.add_argument("out", metavar="OUT")
    shard.add_argument("--encode", choices=["flac", "wav16k"], help="decode once, to 16 kHz mono (default: as is)")
    shard.add_argument("--shard-size-mb", type=float, default=512)
    shard.add_argument("--data-root", help="what $data_root in the manifest stands for")
    shard.add_argument("--workers", type=int, default=2)
    _add_schemes(shard)
    shard.set_defaults(call=_shard)

    evaluate = commands.add_parser("evaluate", help="score any checkpoint of a run on any corpus", epilog=RUNS_CODE)
    evaluate.add_argument("run", metavar="RUN", type=Path, help="the output folder of a training")
    evaluate.add_argument("--on", metavar="CORPUS", help="a corpus of any kind (default: the run's own)")
    evaluate.add_argument("--split", help="of the corpus (default: its test split)")
    evaluate.add_argument("--checkpoint", nargs="+", default=["best"], metavar="CKPT", dest="checkpoints",
                          help="best, last, or names of checkpoints: a row of the table each")
    evaluate.add_argument("--average", type=int, default=1, metavar="N", help="the mean of the N best (or last)")
    evaluate.add_argument("--max-wer", type=float, metavar="PERCENT", help="exit with 1 when a WER is higher")
    evaluate.add_argument("--name", help="what the folder of results begins with (default: the corpus)")
    evaluate.add_argument("--out", type=Path, metavar="FOLDER", help="for results (default: RUN/evaluations)")
    _add_search(evaluate)
    evaluate.add_argument("--tune-lm", action="store_true", help="find the two weights on the run's dev split first")
    evaluate.add_argument("--nbest", type=int, metavar="N", help="transcripts of each utterance in nbest.jsonl")
    evaluate.add_argument("--joint", action="store_true", help="search with the attention decoder and CTC together")
    evaluate.add_argument("--ctc-weight", type=float, metavar="W", help="of CTC in that search (0.4)")
    evaluate.add_argument("--device")
    evaluate.add_argument("--precision", choices=["fp32", "bf16", "fp16"])
    evaluate.add_argument("--max-batch-seconds", type=float, metavar="S", help="audio that a device holds at once")
    evaluate.add_argument("--workers", type=int, help="processes that read audio")
    evaluate.set_defaults(call=_evaluate)

    lm = commands.add_parser("lm", epilog=RUNS_CODE, help="estimate a language model from text, for a search with --lm")
    lm.add_argument("sources", metavar="TEXT", nargs="+",
                    help="text files (.gz too), - for stdin, manifests, and runs: their training transcripts")
    lm.add_argument("--out", metavar="FILE", type=Path, required=True, help="ARPA (.gz: compressed), or .bin: KenLM's")
    lm.add_argument("--order", type=int, default=3, metavar="N", help="words in the longest n-gram (3)")
    lm.add_argument("--prune", type=_prune, metavar="P", help="1e-7: leave out what raises the perplexity by less; "
                    "0,0,1: n-grams seen so often or less, a number per order")
    lm.add_argument("--unit", choices=["word", "piece"], default="word", help="piece: of the run's tokenizer")
    lm.add_argument("--min-count", type=int, default=1, metavar="N", help="rarer words become the unknown word")
    lm.add_argument("--like", metavar="RUN", help="the run that it is for: texts are written by its rules")
    lm.add_argument("--evaluate", metavar="TEXT", nargs="+", default=[],
                    help="text to report perplexity and unknown words on (default: the run's dev transcripts)")
    lm.add_argument("--binary", action="store_true", help="write KenLM's binary beside the ARPA file")
    lm.set_defaults(call=_lm)

    report = commands.add_parser("report", help="one page about a run: its curves, its errors, what to fix next")
    report.add_argument("run", metavar="RUN", type=Path, help="the output folder of a training, or RUN/evaluations/...")
    report.add_argument("--against", metavar="OTHER", type=Path, help="another one on the same test set")
    report.add_argument("--out", metavar="FILE", type=Path,
                        help="where the page goes (default: RUN/report.html, or RUN/report-against-OTHER.html)")
    report.add_argument("--utterances", type=int, default=24, metavar="N", help="to show of each kind")
    report.add_argument("--audio-mb", type=float, default=8.0, metavar="MB", help="that recordings may add to the page")
    _add_schemes(report)
    report.set_defaults(call=_report)

    replay = commands.add_parser("replay", epilog=RUNS_CODE,
                                 help="run a step that was not finite again, layer by layer")
    replay.add_argument("folder", metavar="FOLDER", type=Path, help="RUN/culprits/step-N-rank-R, or RUN for the newest")
    replay.add_argument("--device")
    replay.set_defaults(call=_replay)

    export = commands.add_parser("export", help="make a bundle of a run that others can use", epilog=RUNS_CODE)
    export.add_argument("run", metavar="RUN", type=Path, help="the output folder of a training")
    export.add_argument("--to", metavar="BUNDLE", type=Path, required=True, help="the folder to make")
    export.add_argument("--checkpoint", default="best", help="best, last, or the name of one (default: best)")
    export.add_argument("--average", type=int, default=1, metavar="N", help="the mean of the N best (or last)")
    export.add_argument("--formats", type=lambda text: text.split(","), metavar="A,B",
                        help="of onnx,int8,torch,speechbrain (default: all)")
    export.add_argument("--target", choices=["sherpa"], help="also a model for sherpa-onnx")
    export.add_argument("--clips", type=_count, default=40, help="test utterances to compare the formats on")
    export.add_argument("--tolerance", type=_above, metavar="D", help="largest difference of a log-probability (0.001)")
    export.add_argument("--force", action="store_true", help="replace the bundle that is there")
    export.set_defaults(call=_export)

    transcribe = commands.add_parser("transcribe", help="what is said in recordings, by an exported bundle")
    transcribe.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that sbkit export made")
    transcribe.add_argument("files", metavar="FILES", nargs="+", help="files, folders, a manifest.csv, - for stdin")
    transcribe.add_argument("--output", metavar="FOLDER", type=Path,
                            help="write a file for each recording, and skip what is there already")
    transcribe.add_argument("--format", dest="formats", default=["txt"], type=lambda text: text.split(","),
                            metavar="A,B", help="of txt,json,srt,vtt,ctm (default: txt)")
    transcribe.add_argument("--model", default="auto", help="onnx, int8 (on a CPU) or torch (default: the first "
                            "that is there)")
    transcribe.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    transcribe.add_argument("--threads", type=_count, help="of the model on the CPU (default: all it may use)")
    transcribe.add_argument("--readers", type=_count, default=2, help="threads that decode audio (2)")
    transcribe.add_argument("--batch-seconds", type=_above, metavar="S", help="audio in one batch, padding counted")
    transcribe.add_argument("--chunk-seconds", type=_above, metavar="S", help="longest that the model hears at once")
    transcribe.add_argument("--references", metavar="FILE", help="manifest.csv or lines name<TAB>text: show the WER")
    transcribe.add_argument("--overwrite", action="store_true", help="do again what is in the folder")
    _add_schemes(transcribe)
    _add_search(transcribe)
    transcribe.set_defaults(call=_transcribe)

    serve = commands.add_parser("serve", help="bundles behind an OpenAI-shaped API, a live WebSocket and a page")
    serve.add_argument("bundles", metavar="BUNDLE", nargs="+",
                       help="BUNDLE, called as its folder, or NAME=BUNDLE; several are served side by side")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--model", default="auto", help="onnx, int8 (on a CPU) or torch (default: the first "
                            "that is there)")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    serve.add_argument("--threads", type=_count, help="of each model on the CPU (default: all it may use)")
    serve.add_argument("--batch-seconds", type=_above, metavar="S", help="audio in one batch, padding counted")
    serve.add_argument("--chunk-seconds", type=_above, metavar="S", help="longest that a model hears at once")
    serve.add_argument("--no-batching", dest="batching", action="store_false", help="run each signal alone")
    serve.add_argument("--api-key-file", type=Path, metavar="FILE",
                       help="keys, one a line (one alone: SBKIT_API_KEY in the environment)")
    serve.add_argument("--allow-origin", dest="allow_origins", action="append", default=[], metavar="URL",
                       help="a web page elsewhere that may use this server (again for more; * for all)")
    serve.add_argument("--allow-host", dest="allow_hosts", action="append", default=[], metavar="NAME",
                       help="a name that this server answers to (again for more). On this machine's own address it "
                            "answers to localhost, 127.0.0.1 and [::1] alone; on others to every name unless this is "
                            "given")
    serve.add_argument("--trust-proxy", dest="trust_proxies", action="append", default=[], metavar="ADDRESS",
                       help="a proxy whose X-Forwarded-For says who asks (again for more). Without it nobody's does: "
                            "all who come through a proxy on another machine share one address, see --client-share")
    serve.add_argument("--grace-seconds", type=_above, default=30.0, metavar="S",
                       help="in all, for what is in flight at SIGTERM (30)")
    for name, what in SERVE_LIMITS.items():
        usual = getattr(Limits, name.replace("-", "_"))
        serve.add_argument(f"--{name}", type=type(usual), default=argparse.SUPPRESS,
                           metavar="S" if "seconds" in name else "N", help=f"{what} ({usual:g})")
    _add_search(serve)
    serve.set_defaults(call=_serve)

    doctor = commands.add_parser("doctor", help="what this machine offers and what stands in the way")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--data", metavar="FOLDER", type=Path, help="a corpus to read from, to see how fast it comes")
    doctor.add_argument("--run", metavar="RUN", type=Path, help="the output folder of a training to look at")
    doctor.add_argument("--gpu", action="store_true",
                        help="prove on this machine's cards what works and how fast, in ten minutes, and write a page")
    doctor.add_argument("--rehearse", action="store_true", help="with --gpu: the same checks small, on the CPU")
    doctor.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="CHECK[,CHECK]",
                        help="with --gpu: these checks alone")
    doctor.add_argument("--out", type=Path, default=Path("gpu-report"), metavar="FILE",
                        help="with --gpu: the page's name without .md and .json (default: gpu-report)")
    doctor.add_argument("--minutes", type=_above, default=10.0, metavar="M", help="with --gpu: at most so many (10)")
    doctor.set_defaults(call=_doctor)

    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_schemes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--schemes", type=lambda text: text.split(","), default=[], metavar="A,B",
                         help="kinds of URL that may be opened among recordings, such as https,s3 (default: none)")


def _add_search(command: argparse.ArgumentParser) -> None:
    command.add_argument("--lm", metavar="FILE", help="a language model: ARPA, or KenLM's binary")
    command.add_argument("--lm-weight", type=float, metavar="W", help="what its scores are multiplied by")
    command.add_argument("--word-score", type=float, metavar="W", help="what each word adds to a transcript's score")
    command.add_argument("--beam", type=int, help="transcripts followed at a time")
    command.add_argument("--hot-word", dest="hot_words", action="append", default=[], metavar="PHRASE[=BOOST]",
                         help="a phrase to expect (again for more; @FILE has one a line)")


def _demo_data(args: argparse.Namespace) -> int:
    from sbkit.data.demo import make_demo_corpus

    folder = make_demo_corpus(
        Path(args.out), hours=args.hours, language=args.language, seed=args.seed, workers=args.workers
    )
    print(f"{folder}  (train on it: torchrun train.py hparams/ctc.yaml --data_folder {folder} "
          f"--language {args.language})")
    return 0


def _shard(args: argparse.Namespace) -> int:
    from sbkit.data.manifest import Manifest
    from sbkit.data.presence import check_opened
    from sbkit.data.remote import Remote, check_schemes
    from sbkit.data.shards import write_shards

    source, out = Path(args.manifest), Path(args.out)
    if (out / f"{source.stem}.csv").resolve() == source.resolve():
        raise SbkitError(f"{source}: the manifest of the shards would replace it", hint="choose another folder")
    rows = Manifest.read(source, args.data_root, remote=Remote(check_schemes("--schemes", args.schemes)))
    check_opened(rows.wavs, rows.remote, source)
    manifest = write_shards(
        rows, out, name=source.stem, shard_size_mb=args.shard_size_mb,
        encode=args.encode, workers=args.workers,
    )
    print(f"{len(manifest)} utterances, {manifest.hours:.2f} hours: {out / source.stem}.csv")
    return 0


def _export(args: argparse.Namespace) -> int:
    from sbkit.system.environment import check_torch_exports, check_torch_pair

    check_torch_pair()
    check_torch_exports()
    from sbkit.export.bundle import Request, export

    wanted = {name: getattr(args, name) for name in Request.__dataclass_fields__}
    return export(Request(**{name: value for name, value in wanted.items() if value is not None}))


def _transcribe(args: argparse.Namespace) -> int:
    from sbkit.infer.transcription import Request, transcribe

    return transcribe(Request(**{name: getattr(args, name) for name in Request.__dataclass_fields__}))


def _serve(args: argparse.Namespace) -> int:
    from sbkit.infer.inputs import search
    from sbkit.serve.limits import Limits
    from sbkit.serve.server import Request, serve

    given = vars(args)
    limits = Limits(**{name: given[name] for name in Limits.__dataclass_fields__ if name in given})
    found = search(args.lm, args.lm_weight, args.word_score, args.beam, args.hot_words)
    taken = {name: given[name] for name in Request.__dataclass_fields__ if name in given}
    return serve(Request(**taken, search=found, limits=limits))


def _evaluate(args: argparse.Namespace) -> int:
    from sbkit.evaluate import Request, evaluate

    wanted = vars(args)
    return evaluate(Request(**{name: wanted[name] for name in Request.__dataclass_fields__}))


def _count(text: str) -> int:
    return _above_zero(text, int, "whole number")


def _above(text: str) -> float:
    return _above_zero(text, float, "number")


def _above_zero(text: str, kind: type, what: str) -> int | float:
    with contextlib.suppress(ValueError):
        if (value := kind(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no {what} above 0")


def _prune(text: str) -> list[int] | int | float:
    for read in (lambda: [int(count) for count in text.split(",")] if "," in text else int(text), lambda: float(text)):
        with contextlib.suppress(ValueError):
            return read()
    raise argparse.ArgumentTypeError(f"{text!r} is neither a share such as 1e-7 nor counts such as 0,0,1")


def _lm(args: argparse.Namespace) -> int:
    from sbkit.lm import Request, estimate

    return estimate(Request(**{name: getattr(args, name) for name in Request.__dataclass_fields__}))


def _report(args: argparse.Namespace) -> int:
    from sbkit.data.remote import Remote, check_schemes
    from sbkit.score.report import write_report

    remote = Remote(check_schemes("--schemes", args.schemes))
    print(write_report(args.run, against=args.against, out=args.out, utterances=args.utterances,
                       audio_megabytes=args.audio_mb, remote=remote, tell=print))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    alone = [name for name, given in (("--data", args.data), ("--run", args.run), ("--json", args.json)) if given]
    proving = [name for name, given in (("--rehearse", args.rehearse), ("--only", args.only)) if given]
    if (alone if args.gpu else proving):
        raise SbkitError(f"{(alone if args.gpu else proving)[0]} goes {'without' if args.gpu else 'with'} --gpu")
    if args.gpu:
        from sbkit.doctor.gpu import proof

        return proof.prove(proof.Request(rehearse=args.rehearse, out=args.out, only=args.only,
                                             minutes=args.minutes))
    from sbkit.doctor.examination import Request, doctor

    return doctor(Request(data=args.data, run=args.run, json=args.json))


def _replay(args: argparse.Namespace) -> int:
    from sbkit.evaluate import replay

    print(replay(args.folder, args.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
