"""``python -m model.quantize``: a checkpoint to an AutoFP package, matrix by matrix (docs/weights.md)."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import autofp6, block_scaled, calibration_text, checkpoint, llm
from model import quantize_report as report_of
from model.calibration import RULES, Calibrated, Options, budget, calibrate, gram
from model.checkpoint import PROJECTIONS, Checkpoint
from model.command import command, write_files
from model.formats import E2M3
from model.llm import Llama
from model.package import Entry, Package, Plain, Writer
from model.quantised_llm import Format, PackageStore, QuantisedLlama, Settings
from model.quantize_report import GRID, NMSE, OURS, PLAIN, Row
from model.vmac import SUBGROUP

__all__ = ["Streams", "Texts", "main", "perplexities", "quantise", "read_texts", "storage_bits"]

Float = NDArray[np.float32]
Progress = Callable[[str], None]

WINDOW = 512
"""Tokens of the calibration text that see each other."""


@dataclass(frozen=True)
class Texts:
    """Tokens of the two texts.

    Attributes
    ----------
    calibration : ndarray of int, shape (tokens,)
        Read in windows of 512 that do not see each other.
    evaluation : ndarray of int, shape (tokens,)
        One window; may be empty.
    """

    calibration: NDArray[np.int64]
    evaluation: NDArray[np.int64]


def storage_bits(refined: autofp6.Refined) -> float:
    """Return the bits per weight of codes, scales and offsets, padding included; masks and T are shared by all rows and left out."""
    rows, padded = refined.base.codes.shape
    bits = 4 * padded + 8 * refined.base.scales.shape[1] + refined.bits * SUBGROUP * int(refined.mask.sum())
    return rows * bits / (rows * refined.base.length)


class _FoundError(Exception):
    """Ends a layer in which the input that was looked for has been seen."""


@dataclass
class Streams:
    """The residual stream of both texts, layer after layer, through the weights that the model has at the time.

    Attributes
    ----------
    model : Llama
    windows, evaluated : list of ndarray of float32, shape (tokens, width)
        Of the calibration text, in windows of 512 tokens, and of the evaluation text.
    """

    model: Llama
    windows: list[Float] = field(default_factory=list)
    evaluated: list[Float] = field(default_factory=list)

    def begin(self, table: Float, texts: Texts) -> None:
        """Go behind the embedding, whose rows are ``table``."""
        self.windows = _windows(table, texts.calibration, WINDOW)
        self.evaluated = _windows(table, texts.evaluation, max(len(texts.evaluation), 1))

    def hold(self, layer: int, weights: Mapping[str, Float]) -> dict[str, Float]:
        """Read the weights of a layer; the model takes them from the result, where they may be replaced."""
        held = {f"{layer}.{name}": weights[f"{layer}.{name}"] for name in (*PROJECTIONS, "attention_norm", "ffn_norm")}
        self.model.weights = held
        return held

    def inputs(self, layer: int, name: str, windows: Sequence[Float]) -> Iterator[Float]:
        """Yield the inputs of a projection, window by window."""
        for x in windows:
            found: list[Float] = []

            def keep(_: int, projection: str, given: Float, found: list[Float] = found) -> None:
                if projection == name:
                    found.append(given)
                    raise _FoundError

            # The rest of the layer is not needed.
            with contextlib.suppress(_FoundError):
                self.model.layer(layer, x, capture=keep)
            yield found.pop()

    def hessian(self, layer: int, name: str) -> NDArray[np.float64]:
        """Return ``XᵀX`` of a projection's inputs on the calibration text."""
        size = self.model.config.shapes[name][1]
        total = np.zeros((size, size))
        for x in self.inputs(layer, name, self.windows):
            gram(x, total)
        return total

    def advance(self, layer: int) -> None:
        """Go behind a layer."""
        for windows in (self.windows, self.evaluated):
            windows[:] = [self.model.layer(layer, x) for x in windows]
            if not all(np.isfinite(x).all() for x in windows):
                raise ValueError(f"weights must keep the residual stream finite, which it is not after layer {layer}")


def _windows(table: Float, tokens: NDArray[np.int64], size: int) -> list[Float]:
    return [table[tokens[start : start + size]] for start in range(0, len(tokens), size)]


def quantise(
    source: Checkpoint,
    out: str | Path,
    options: Options,
    texts: Texts | None = None,
    *,
    compare: bool = False,
    metadata: dict[str, str] | None = None,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """Write the package of a checkpoint.

    One matrix at a time is in memory, beside the embedding while it is copied, one Hessian, and the residual streams. Inputs of a
    matrix are those that the quantised matrices before it make.

    Parameters
    ----------
    source : Checkpoint
        As :func:`model.checkpoint.open` gives it.
    out : str or Path
        File; appears when all is done.
    options : Options
        Offsets of 2 or 4 bits.
    texts : Texts, optional
        Not needed by the rule ``nmse``, whose errors of outputs are missing then.
    compare : bool
        Also measure selection by NMSE and FP6g.
    metadata : dict of str to str, optional
        Goes into the package.
    progress : callable
        Called with a line of text now and then.

    Raises
    ------
    ValueError
        A rule other than ``nmse`` has no text, a text does not fit the model, a weight or what the texts make of it is not finite, or the
        package cannot hold it.
    """
    config, weights = source.config, source.weights
    if options.rule != "nmse" and (texts is None or not len(texts.calibration)):
        raise ValueError(f"texts must have a calibration text for rule {options.rule}")
    tied = bool(getattr(weights, "tied", False))
    plain = {"embedding": (config.vocabulary, config.width), "norm": (config.width,)}
    plain |= {} if tied else {"head": (config.vocabulary, config.width)}
    norms = [f"{layer}.{norm}" for layer in range(config.layers) for norm in ("attention_norm", "ffn_norm")]
    plain |= dict.fromkeys(norms, (config.width,))
    entries: list[Entry | Plain] = [Plain(name, shape) for name, shape in plain.items()]
    for layer in range(config.layers):
        for name, shape in config.shapes.items():
            entries.append(Entry(f"{layer}.{name}", shape, budget(options.density, shape[1])))
    model = Llama(config, weights, source.tokenizer)
    rows: list[Row] = []
    written = {"step": options.step, "bits": options.bits, "slots": options.slots, "metadata": metadata}
    with Writer(out, entries, config=config, tokenizer=source.tokenizer, **written) as writer:  # type: ignore[arg-type]
        streams = Streams(model)
        for name in plain:
            array = weights[name]
            if name == "embedding" and texts is not None:
                streams.begin(array, texts)
            writer.add_plain(name, array)
            del array
        for layer in range(config.layers):
            held: dict[str, Float] = {}
            if texts is not None:
                held = streams.hold(layer, weights)
            for name in PROJECTIONS:
                key = f"{layer}.{name}"
                progress(f"{key}, matrix {len(rows) + 1} of {4 * config.layers}")
                row, made = _matrix(key, held[key] if held else weights[key], options, streams, compare)
                writer.add(key, made)
                rows.append(row)
                if held:
                    held[key] = autofp6.dequantize(made)
            if texts is not None:
                streams.advance(layer)
    return rows


def _matrix(key: str, w: Float, options: Options, streams: Streams, compare: bool) -> tuple[Row, autofp6.Refined]:
    layer, _, name = key.partition(".")
    started = time.monotonic()
    needed = options.rule != "nmse"
    hessian = streams.hessian(int(layer), name) if needed else None
    made: Calibrated = calibrate(w, options, hessian, overwrite=True)
    seconds = time.monotonic() - started
    del hessian
    inputs = list(streams.inputs(int(layer), name, streams.evaluated))
    errors: dict[str, float] = {}
    outputs: dict[str, float] = {}
    size, power = _energy(w), sum(_energy(x @ w.T) for x in inputs)
    for form, difference in _differences(w, made.weights, options, compare):
        errors[form] = _energy(difference) / (size or 1)
        if inputs:
            outputs[form] = sum(_energy(x @ difference.T) for x in inputs) / (power or 1)
    share = float(made.weights.mask.sum()) / -(-w.shape[1] // SUBGROUP)
    rows, length = w.shape
    return Row(
        key, (rows, length), storage_bits(made.weights), share, errors, outputs, made.condition, seconds
    ), made.weights


def _energy(x: Float) -> float:
    return float(np.einsum("nk,nk->", x, x, dtype=np.float64))


def _differences(w: Float, made: autofp6.Refined, options: Options, compare: bool) -> Iterator[tuple[str, Float]]:
    yield PLAIN, w - block_scaled.dequantize(block_scaled.quantize(w))
    if compare:
        yield NMSE, w - autofp6.dequantize(calibrate(w, dataclasses.replace(options, rule="nmse")).weights)
        yield GRID, w - block_scaled.dequantize(block_scaled.quantize(w, E2M3))
    yield OURS, w - autofp6.dequantize(made)


def perplexities(
    model: Llama,
    package: Package,
    tokens: NDArray[np.int64],
    settings: Settings | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, float]:
    """Return the perplexity of a text with weights, activations, keys and values in each format, AutoFP6 also with weights selected by NMSE.

    Parameters
    ----------
    model : Llama
        The checkpoint that the package was made of, in memory.
    package : Package
    tokens : ndarray of int, shape (tokens,)
        At least 2.
    settings : Settings, optional
        Of activations, and of the weights selected by NMSE.
    """
    settings = settings or Settings(slots=package.slots)
    made = QuantisedLlama(model, store=PackageStore(model, package, settings))
    rounded = QuantisedLlama(model, made.settings)
    found = {}
    for name, runner, form in (
        ("reference", rounded, Format.REFERENCE),
        (PLAIN, rounded, Format.NVFP4),
        (NMSE, rounded, Format.AUTOFP6),
        (OURS, made, Format.AUTOFP6),
        (GRID, rounded, Format.FP6G),
    ):
        progress(f"perplexity, {name}")
        hidden = runner.run(tokens, form)
        losses, _ = llm.predictions(model, hidden[:-1], tokens[1:])
        found[name] = float(np.exp(losses.mean()))
        runner.store.forget(form)
    return found


# ---- Command ----


def _text(path: Path | None, default: str, option: str) -> str:
    if path is None:
        return default
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} must be UTF-8, not {path}: {error}") from None
    except OSError as error:
        raise ValueError(f"{option} must be a file that can be read, not {path}: {error.strerror}") from None


def read_texts(source: Checkpoint, options: argparse.Namespace) -> Texts:
    """Return the texts that ``--text``, ``--evaluation`` and ``--tokens`` say, or the default ones.

    Raises
    ------
    ValueError
        A text cannot be read or encoded, is too short, or is a part of the other.
    """
    calibration = _text(options.text, calibration_text.TEXT, "--text")
    evaluation = _text(options.evaluation, calibration_text.EVALUATION, "--evaluation")
    encoded = [np.asarray(source.tokenizer.encode(text), np.int64) for text in (calibration, evaluation)]
    most, vocabulary = min(options.tokens, source.config.context), source.config.vocabulary
    for option, tokens in zip(("--text", "--evaluation"), encoded, strict=True):
        if len(tokens) < 2:
            raise ValueError(f"{option} must have at least 2 tokens, not {len(tokens)}")
        if tokens.max() >= vocabulary:
            raise ValueError(f"the tokenizer must have ids below {vocabulary}, as the embedding, not {tokens.max()}")
    if most < 2:
        raise ValueError(f"the evaluation text must have a model with a context of at least 2 tokens, not {most}")
    shorter, longer = sorted((calibration.strip(), evaluation.strip()), key=len)
    if shorter in longer:
        raise ValueError("--text and --evaluation must be different texts, not one a part of the other")
    return Texts(encoded[0][: options.tokens], encoded[1][:most])


def _check_files(options: argparse.Namespace) -> None:
    paths = [(option, getattr(options, option)) for option in ("output", "json", "picture")]
    for option, path in paths:
        if [other for _, other in paths].count(path) > 1 and path is not None:
            raise ValueError(f"--{option} must be a file of its own, not {path}")
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ValueError(f"--{option} must name a file in an existing folder, not {path}")
    if options.output.exists() and not _is_package(options.output):
        # It may be the checkpoint's own file.
        raise ValueError(f"--output must be a new file, or a package that it replaces, not {options.output}")
    rounds, measures = options.rule == "nmse", options.compare or options.perplexity
    for option, unused in (("text", rounds), ("evaluation", rounds and not measures)):
        if unused and getattr(options, option) is not None:
            raise ValueError(
                f"--{option} must go with what reads it, not with rule nmse{' alone' * (option != 'text')}"
            )
    if options.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {options.tokens}")
    if options.bits not in (2, 4):
        raise ValueError(f"--bits must be 2 or 4, not {options.bits}")
    if options.perplexity and options.bits != autofp6.OFFSET_BITS:
        raise ValueError(f"--perplexity must go with --bits 2, not {options.bits}")
    if options.picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("the picture needs the package matplotlib: pip install matplotlib")


def _is_package(path: Path) -> bool:
    try:
        return path.is_file() and bool(Package(path))
    except ValueError:
        return False


def _run(options: argparse.Namespace, out: Path, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
    """Write the package to ``out``, which is not yet its own name; return what there is to report."""
    chosen = Options(options.density, options.rule, options.damping, options.slots, options.step, options.bits)
    source = checkpoint.open(options.checkpoint)
    compare = options.compare or options.rule != "nmse"
    texts = read_texts(source, options) if compare or options.perplexity else None
    names = {
        "checkpoint": "SmolLM2-135M-Instruct" if options.checkpoint is None else options.checkpoint.name,
        "calibration_text": calibration_text.NAME if options.text is None else options.text.name,
        "evaluation_text": calibration_text.EVALUATION_NAME if options.evaluation is None else options.evaluation.name,
    }
    made = {"made_by": "model.quantize", "checkpoint": names["checkpoint"]}
    made |= {"rule": chosen.rule, "density": f"{chosen.density:g}"}
    made |= {"damping": f"{chosen.damping:g}"} if chosen.rule == "gptq" else {}
    if chosen.rule != "nmse" and texts is not None:
        made |= {"calibration_text": names["calibration_text"], "calibration_tokens": str(len(texts.calibration))}
    rows = quantise(
        source,
        out,
        chosen,
        texts if compare else None,
        compare=options.compare,
        metadata=made,
        progress=progress,
    )
    report: dict[str, Any] = {"options": dataclasses.asdict(chosen), **names}
    if texts is not None:
        report["calibration_tokens"] = len(texts.calibration) if chosen.rule != "nmse" else 0
        report["evaluation_tokens"] = len(texts.evaluation)
    report["total"] = report_of.total(rows)
    if options.perplexity and texts is not None:
        # Only now is the whole model in memory.
        model = llm.load(options.checkpoint)
        report["perplexity"] = perplexities(model, Package(out), texts.evaluation, progress=progress)
    report["rows"] = [dataclasses.asdict(row) for row in rows]
    return rows, report


@command(prefix="model.quantize", status=2, interrupted="interrupted, nothing was written")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.quantize",
        description="Quantise the matrices of a checkpoint to an AutoFP package, with a report; docs/weights.md.",
    )
    add = parser.add_argument
    add(
        "checkpoint",
        nargs="?",
        type=Path,
        metavar="CHECKPOINT",
        help="GGUF file or folder of Hugging Face (default: SmolLM2-135M-Instruct)",
    )
    add("-o", "--output", type=Path, required=True, metavar="OUT", help="package, a safetensors file")
    add(
        "--rule", choices=RULES, default="gptq", help="what to refine, and whether to compensate (default: %(default)s)"
    )
    add(
        "--density",
        type=float,
        default=0.2,
        metavar="RHO",
        help="share of subgroups that are refined (default: %(default)s)",
    )
    add(
        "--damping",
        type=float,
        default=Options.damping,
        metavar="X",
        help="of the Hessian, as a share of its mean diagonal (default: %(default)s)",
    )
    add("--slots", type=int, default=2, metavar="N", help="most refined subgroups of a group (default: %(default)s)")
    add("--step", choices=("fixed", "exponent"), default="fixed", help="step of offsets (default: %(default)s)")
    add(
        "--bits",
        type=int,
        default=autofp6.OFFSET_BITS,
        metavar="N",
        help="width of offsets, 2 or 4 (default: %(default)s)",
    )
    add("--text", type=Path, metavar="FILE", help=f"calibration text (default: {calibration_text.NAME})")
    add(
        "--evaluation",
        type=Path,
        metavar="FILE",
        help=f"text to measure on (default: {calibration_text.EVALUATION_NAME})",
    )
    add("--tokens", type=int, default=16384, metavar="N", help="most tokens of each text (default: %(default)s)")
    add("--compare", action="store_true", help="also measure selection by NMSE, and FP6g")
    add(
        "--perplexity",
        action="store_true",
        help="of the evaluation text, before and after; takes the whole model into memory",
    )
    add("--json", type=Path, metavar="FILE", help="write the report as JSON as well")
    add("--picture", type=Path, metavar="FILE", help="draw the errors by layer as SVG")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    terminal = sys.stderr.isatty()
    started = time.monotonic()

    def show(line: str) -> None:
        if terminal and not options.quiet:
            print(f"\r\x1b[K{line}, {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)
        elif not options.quiet and (".qkv" in line or "perplexity" in line):
            print(f"{line}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    _check_files(options)
    part = options.output.with_name(f".{options.output.name}.{os.getpid()}.new")
    try:
        # What is not finite is refused where it does harm, with more to say than NumPy has.
        with np.errstate(over="ignore", invalid="ignore"):
            rows, report = _run(options, part, show)
        files: dict[Path, str | bytes | Path] = {options.output: part}
        if options.json is not None:
            text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
            files[options.json] = f"{text}\n"
        if options.picture is not None:
            files[options.picture] = report_of.picture(rows)
        write_files(files)
    finally:
        part.unlink(missing_ok=True)
        if terminal and not options.quiet:
            print("\r\x1b[K", end="", file=sys.stderr)
    print(report_of.table(rows))
    print(f"\n{report_of.summary(report)}\nwrote {options.output}, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
