"""The precision policy in the loop on SmolLM2: its trace, its picture and what it costs in accuracy (docs/trace.md)."""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model import llm
from model.command import command, write_files
from model.figures import Figure
from model.package import Package, is_package
from model.policy import PHASES, FixedPolicy, Phase, Policy, PolicyConfig, generation_entropy, layer_activity
from model.policy_replay import PolicyRow, TraceSample, picture
from model.quantised_llm import LEVELS, Format, PackageStore, QuantisedLlama, Settings
from model.sample_text import LONG_TEXT

__all__ = [
    "Outcome",
    "Recording",
    "Report",
    "Score",
    "compact_csv",
    "fixed_run",
    "main",
    "measure",
    "policy_run",
    "trace_csv",
]

Float = NDArray[np.float32]

Told = Callable[[str, int, int], None]
"""Told a stage, and how many of its parts are done, of how many."""

PREFILL, DECODE = 2048, 384
_ALL_SLOTS = 4


def _untold(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Score:
    """How well a phase predicts the text.

    Attributes
    ----------
    perplexity : float
    agreement : float
        Share of positions at which the most likely token is that of the reference.
    """

    perplexity: float
    agreement: float


@dataclass(frozen=True)
class Outcome:
    """What a way of running the layers gives.

    Attributes
    ----------
    name : str
    scores : dict of str to Score
        By phase.
    shares : dict of str to dict of int to float
        By phase, the share of layers at each precision; empty where there are no levels.
    """

    name: str
    scores: dict[str, Score]
    shares: dict[str, dict[int, float]]

    def bits(self, phase: str) -> float | None:
        """Return the mean precision of a phase's layers."""
        shares = self.shares.get(phase)
        return sum(level * share for level, share in shares.items()) if shares else None


@dataclass(frozen=True)
class Recording:
    """A run of the policy.

    Attributes
    ----------
    hidden : ndarray of float32, shape (prefill + decode, width)
        Final hidden states.
    rows : list of PolicyRow
        A row for each layer of each step, step 0 being the prefill.
    spike : int or None
        Layer in which prefill's spike was seen.
    """

    hidden: Float
    rows: list[PolicyRow]
    spike: int | None

    def shares(self, phase: Phase) -> dict[int, float]:
        """Return the share of layers at each precision in a phase."""
        counts = Counter(row.precision for row in self.rows if row.sample.phase == phase)
        return {level: counts[level] / counts.total() for level in sorted(counts)}


@dataclass(frozen=True)
class Report:
    """Everything that the command measures.

    Attributes
    ----------
    outcomes : list of Outcome
        Reference, FP6g, NVFP4, AutoFP6, AutoFP6 with all four slots, policy; or only the first and the last.
    recording : Recording
    """

    outcomes: list[Outcome]
    recording: Recording

    def figures(self) -> list[Figure]:
        """Compare all outcomes with what was measured elsewhere on the same model; perplexities depend on the text."""
        perplexity = {outcome.name: outcome.scores["prefill"].perplexity for outcome in self.outcomes}
        reference = perplexity["reference"]
        of_text = "another text: own tolerance"
        spike = self.recording.spike
        return [
            Figure.near("prefill", "perplexity of the reference", reference, 22.9, 0.2, of_text),
            Figure.near("prefill", "AutoFP6, times reference", perplexity["AutoFP6"] / reference, 1.50, 0.15, of_text),
            Figure.near(
                "prefill", "AutoFP6, 4 slots, times reference", perplexity[_UNLIMITED] / reference, 1.38, 0.15, of_text
            ),
            Figure("prefill", "layer of the spike", -1 if spike is None else spike, 11, 11, 11, "-1: none found"),
        ]


_UNLIMITED = "AutoFP6, 4 slots"


def _check_levels(config: PolicyConfig) -> None:
    for level in config.levels:
        if level not in LEVELS:
            raise ValueError(f"levels must be among {', '.join(map(str, LEVELS))}, not {level}")


def _rounded(x: float) -> float:
    # The policy sees what the trace says, so that a replay decides alike: eight digits are more than float32 has.
    return float(f"{x:.8g}")


def fixed_run(
    model: QuantisedLlama,
    form: Format,
    tokens: ArrayLike,
    prefill: int,
    told: Callable[[int], None] = lambda layer: None,
) -> Float:
    """Run a text with all layers in one format.

    The tokens after the first ``prefill`` are run together with a tensor scale for each of them, which gives what decoding
    them one by one gives, but for the order of sums.

    Parameters
    ----------
    model : QuantisedLlama
    form : Format
    tokens : array_like of int, shape (prefill + decode,)
    prefill : int
    told : callable
        Called with the layers done, of two passes.

    Returns
    -------
    ndarray of float32, shape (prefill + decode, width)
        Final hidden states.
    """
    ids = np.asarray(tokens)
    cache = llm.Cache()
    done = iter(range(1, 2 * model.config.layers + 1))

    def control(layer: int, before: Float, after: Float) -> Format:
        told(next(done))
        return form

    first = model.run(ids[:prefill], form, control, cache=cache)
    if len(ids) == prefill:
        return first
    return np.concatenate([first, model.run(ids[prefill:], form, control, cache=cache, scales="row")])


def policy_run(
    model: QuantisedLlama,
    policy: Policy,
    tokens: ArrayLike,
    prefill: int,
    told: Callable[[int], None] = lambda step: None,
) -> Recording:
    """Run a text with the policy choosing the format of each layer: a prefill, then step by step the tokens that follow.

    L_A of a step is taken over all its tokens together (Frobenius norm). G_E belongs to the logits that the step before
    ended with; for the first decode step these are those of prefill. Both are rounded to eight digits, for policy and trace alike.

    Parameters
    ----------
    model : QuantisedLlama
    policy : Policy
        A new one; its levels have a format in ``LEVELS``.
    tokens : array_like of int, shape (prefill + decode,)
    prefill : int
        At least 1.
    told : callable
        Called with the steps done.

    Raises
    ------
    ValueError
        A level has no format, or there are fewer tokens than ``prefill``.
    """
    _check_levels(policy.config)
    ids = np.asarray(tokens)
    if not 1 <= prefill <= len(ids):
        raise ValueError(f"prefill must be from 1 to the {len(ids)} tokens, not {prefill}")
    cache = llm.Cache()
    rows: list[PolicyRow] = []
    spike: int | None = None

    def control(layer: int, before: Float, after: Float, step: int, phase: Phase, entropy: float | None) -> Format:
        nonlocal spike
        precision, seen = policy.precision, policy.spike
        activity = _rounded(layer_activity(before, after))
        policy.observe(layer, activity)
        if policy.spike and not seen:
            spike = layer
        about = [None if np.isnan(x) else float(x) for x in (policy.metric, policy.mean, policy.sigma)]
        rows.append(PolicyRow(TraceSample(step, phase, layer, activity, entropy), precision, *about))
        return LEVELS[policy.precision]

    first = LEVELS[policy.reset_step("prefill")]
    watched = functools.partial(control, step=0, phase="prefill", entropy=None)
    parts = [model.run(ids[:prefill], first, watched, cache=cache)]
    told(1)
    for step, token in enumerate(ids[prefill:], 1):
        entropy = _rounded(float(generation_entropy(model.logits(parts[-1][-1]))))
        first = LEVELS[policy.reset_step("decode", entropy)]
        watched = functools.partial(control, step=step, phase="decode", entropy=entropy)
        parts.append(model.run(token[None], first, watched, cache=cache, scales="row"))
        told(step + 1)
    return Recording(np.concatenate(parts), rows, spike)


def measure(
    model: llm.Llama,
    tokens: ArrayLike,
    prefill: int,
    settings: Settings | None = None,
    policy: Policy | None = None,
    told: Told = _untold,
    *,
    baselines: bool = True,
    package: Package | None = None,
) -> Report:
    """Run a text in every fixed format and under the policy.

    Parameters
    ----------
    model : Llama
    tokens : array_like of int, shape (prefill + decode + 1,)
        Decode is at least 1; the last token is only predicted.
    prefill : int
    settings : Settings, optional
    policy : Policy, optional
        A new one; the paper's in float64 by default.
    told : callable, optional
        Told the progress.
    baselines : bool
        Whether to run the fixed formats too; the reference is always run.
    package : Package, optional
        Weights prepared before; selected by NMSE by default.

    Raises
    ------
    ValueError
        As :func:`policy_run`; there is no token to decode.
    """
    settings, policy = settings or Settings(), policy or Policy()
    _check_levels(policy.config)
    ids = np.asarray(tokens)
    decode = len(ids) - prefill - 1
    if prefill < 1 or decode < 1:
        raise ValueError(f"tokens must be at least prefill + 2 = {prefill + 2}, not {len(ids)}")
    parts: dict[str, slice] = {"prefill": slice(0, prefill), "decode": slice(prefill, prefill + decode)}
    likeliest: NDArray[np.int64] | None = None

    def outcome(name: str, hidden: Float, shares: dict[str, dict[int, float]]) -> Outcome:
        nonlocal likeliest
        losses, best = llm.predictions(model, hidden, ids[1:])
        likeliest = best if likeliest is None else likeliest
        same = best == likeliest
        scores = {
            phase: Score(float(np.exp(losses[part].mean())), float(same[part].mean())) for phase, part in parts.items()
        }
        return Outcome(name, scores, shares)

    def runner_of(chosen: Settings) -> QuantisedLlama:
        return QuantisedLlama(model, chosen, None if package is None else PackageStore(model, package, chosen))

    quantised, free = runner_of(settings), runner_of(dataclasses.replace(settings, slots=_ALL_SLOTS))
    ways: list[tuple[str, QuantisedLlama, Format, int | None]] = [
        ("reference", quantised, Format.REFERENCE, None),
        ("FP6g", quantised, Format.FP6G, None),
        (_UNLIMITED, free, Format.AUTOFP6, None),
        ("NVFP4", quantised, Format.NVFP4, 4),
        ("AutoFP6", quantised, Format.AUTOFP6, 6),
    ]
    layers = 2 * model.config.layers
    outcomes = []
    for name, runner, form, level in ways if baselines else ways[:1]:

        def tell(done: int, name: str = name) -> None:
            told(name, done, layers)

        hidden = fixed_run(runner, form, ids[:-1], prefill, tell)
        outcomes.append(outcome(name, hidden, {} if level is None else {phase: {level: 1.0} for phase in PHASES}))
        if level is None:
            # The policy does without these.
            runner.store.forget(form)
    recording = policy_run(quantised, policy, ids[:-1], prefill, lambda done: told("policy", done, decode + 1))
    shares = {phase: recording.shares(phase) for phase in ("prefill", "decode")}
    outcomes.append(outcome("policy", recording.hidden, shares))
    order = ("reference", "FP6g", "NVFP4", "AutoFP6", _UNLIMITED, "policy")
    return Report(sorted(outcomes, key=lambda each: order.index(each.name)), recording)


# ---- what is written ----


def trace_csv(rows: Iterable[PolicyRow]) -> str:
    """Return a trace as CSV, a line for each layer of each step; ``python -m model.policy`` reads it."""
    lines = [row.fields() for row in rows]
    head = ",".join(lines[0])
    body = (",".join("" if value is None else str(value) for value in line.values()) for line in lines)
    return "".join(f"{line}\n" for line in (head, *body))


def compact_csv(rows: Iterable[PolicyRow]) -> str:
    """Return a trace as CSV with only signals and precision, all that a replay needs and can be compared with."""
    names = ("step", "phase", "layer", "L_A", "G_E", "precision")
    body = (",".join("" if (v := row.fields()[name]) is None else str(v) for name in names) for row in rows)
    return "".join(f"{line}\n" for line in (",".join(names), *body))


def _trace_json(report: Report, context: Mapping[str, Any]) -> str:
    outcomes = [
        dataclasses.asdict(outcome) | {"bits": {phase: outcome.bits(phase) for phase in PHASES}}
        for outcome in report.outcomes
    ]
    head = {**context, "spike": report.recording.spike, "outcomes": outcomes}
    lines = ",\n".join(f"    {json.dumps(row.fields())}" for row in report.recording.rows)
    return f'{json.dumps(head, indent=2, ensure_ascii=False)[:-2]},\n  "samples": [\n{lines}\n  ]\n}}\n'


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _outcome_table(outcomes: Sequence[Outcome], levels: Sequence[int]) -> str:
    shares = f"{' / '.join(map(str, levels))} bits, %"
    head = ["layers"]
    for phase in PHASES:
        head += [f"{phase}: {shares}", "mean bits", "perplexity", "agreement"]
    rows = [head]
    for outcome in outcomes:
        row = [outcome.name]
        for phase in PHASES:
            parts, bits, score = outcome.shares.get(phase), outcome.bits(phase), outcome.scores[phase]
            row += [
                " / ".join(f"{100 * parts.get(level, 0):.0f}" for level in levels) if parts else "–",
                "–" if bits is None else f"{bits:.2f}",
                f"{score.perplexity:.4g}",
                f"{100 * score.agreement:.1f} %",
            ]
        rows.append(row)
    return _markdown(rows)


def _figure_table(figures: Sequence[Figure]) -> str:
    verdict = {True: "pass", False: "FAIL", None: ""}
    rows = [["figure", "measured", "goal", "", "note"]]
    rows += [[f"{f.data}: {f.name}", f"{f.measured:.4g}", f.target(), verdict[f.passed], f.note] for f in figures]
    return _markdown(rows)


class _Progress:
    """A bar on the standard error stream; in a log, a line for each stage."""

    _WIDTH = 24

    def __init__(self) -> None:
        self._stage, self._began, self._terminal = "", 0.0, sys.stderr.isatty()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._end()
            self._stage, self._began = stage, time.monotonic()
            if not self._terminal:
                print(stage, file=sys.stderr, flush=True)
        if self._terminal:
            filled = self._WIDTH * done // total
            spent = time.monotonic() - self._began
            left = f"{spent * (total - done) / done:.0f} s left"
            bar = "#" * filled + "." * (self._WIDTH - filled)
            print(f"\r\x1b[K{stage:18}[{bar}] {done}/{total}, {left}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line, if there is one."""
        self._end()
        self._stage = ""

    def _end(self) -> None:
        if self._terminal and self._stage:
            print(file=sys.stderr)


def _config(assignments: Sequence[str]) -> PolicyConfig:
    """Return the policy that ``name=value`` arguments describe."""
    defaults = {field.name: field.default for field in dataclasses.fields(PolicyConfig)}
    given: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in defaults:
            raise ValueError(f"--set must be name=value with a name among {', '.join(defaults)}, not {assignment!r}")
        try:
            if name == "levels":
                given[name] = tuple(int(word) for word in text.split(","))
            else:
                given[name] = float(text) if isinstance(defaults[name], float) else int(text)
        except ValueError:
            raise ValueError(f"--set must give {name} as a number, not {text!r}") from None
    return PolicyConfig(**given)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output must be a folder, not the file {folder}")
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise ValueError(f"--output must lie in an existing folder, not {folder}")
    if not os.access(folder if folder.exists() else folder.absolute().parent, os.W_OK | os.X_OK):
        raise ValueError(f"--output must be a folder that can be written, not {folder}")
    for name in _FILES:
        if (folder / name).is_dir():
            raise ValueError(f"--output must be a folder in which {name} is no folder, not {folder}")


_FILES = ("trace.csv", "trace.json", "trace.svg")


def _run(options: argparse.Namespace, progress: Told) -> tuple[Report, dict[str, Any], bool]:
    """Check everything, then measure; also says whether the text and the settings are the default ones."""
    for name in ("prefill", "decode"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(options, name)}")
    _check_folder(options.output)
    config, settings = _config(options.set or ()), Settings(slots=options.slots)
    _check_levels(config)
    if not options.no_picture and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("the picture needs the package matplotlib: pip install matplotlib, or --no-picture")
    text = LONG_TEXT
    if options.text is not None:
        try:
            text = options.text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text must be UTF-8, not {options.text}: {error}") from None
    if options.weights is None and options.model is not None and is_package(options.model):
        options.weights = options.model
    model = llm.load(options.model)
    tokens = model.tokenizer.encode(text)
    needed = options.prefill + options.decode + 1
    if len(tokens) < needed:
        raise ValueError(f"--text must have at least prefill + decode + 1 = {needed} tokens, not {len(tokens)}")
    if needed > model.config.context:
        raise ValueError(f"--prefill and --decode must fit the context of {model.config.context}, not {needed} tokens")
    baselines = not options.no_baselines
    policy = FixedPolicy(config) if options.fixed else Policy(config)
    package = None if options.weights is None else Package(options.weights)
    report = measure(
        model, tokens[:needed], options.prefill, settings, policy, progress, baselines=baselines, package=package
    )
    context = {
        "model": "SmolLM2-135M-Instruct" if options.model is None else str(options.model),
        "weights": None if options.weights is None else options.weights.name,
        "text": "model/sample_text.py" if options.text is None else str(options.text),
        "prefill": options.prefill,
        "decode": options.decode,
        "settings": dataclasses.asdict(settings),
        "fixed": options.fixed,
        "config": dataclasses.asdict(config),
    }
    default = (
        options.model is None
        and options.weights is None
        and options.text is None
        and (options.prefill, options.slots) == (PREFILL, Settings().slots)
    )
    return report, context, default and baselines and not options.fixed and config == PolicyConfig()


@command(prefix="model.trace", status=2, interrupted="interrupted, nothing was written")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if a figure is out of tolerance, or 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.trace",
        description="Run a language model in every format and under the precision policy: a table, the policy's trace and a picture.",
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="GGUF file or folder of Hugging Face (default: SmolLM2-135M-Instruct)",
    )
    add(
        "--weights",
        type=Path,
        metavar="PACKAGE",
        help="quantised weights of the model, from model.quantize (default: selected by NMSE)",
    )
    add("--text", type=Path, metavar="FILE", help="text to read (default: one of this package's own)")
    add("--prefill", type=int, default=PREFILL, metavar="N", help="tokens of the prefill (default: %(default)s)")
    add("--decode", type=int, default=DECODE, metavar="N", help="tokens that are decoded (default: %(default)s)")
    add("--slots", type=int, default=Settings().slots, metavar="N", help="slots per block (default: %(default)s)")
    add("--set", nargs="+", metavar="NAME=VALUE", help="parameters of the policy, such as band=1 or levels=4,6")
    add("--fixed", action="store_true", help="decide in fixed point, as the hardware does")
    add("--no-baselines", action="store_true", help="run only the reference and the policy")
    add("--compact", action="store_true", help="only signals and precision in trace.csv")
    add("--no-picture", action="store_true", help="write no picture; does without matplotlib")
    add("-o", "--output", type=Path, required=True, metavar="OUT", help=f"folder for {', '.join(_FILES)}")
    options = parser.parse_args(arguments)
    progress = _Progress()
    started = time.monotonic()
    try:
        try:
            report, context, default = _run(options, progress)
        finally:
            progress.close()
        figures = report.figures() if default else []
        context["figures"] = [dataclasses.asdict(figure) | {"passed": figure.passed} for figure in figures]
        rows = report.recording.rows
        files = {
            "trace.csv": (compact_csv if options.compact else trace_csv)(rows),
            "trace.json": _trace_json(report, context),
        }
        if not options.no_picture:
            files["trace.svg"] = picture(rows, context["config"]["levels"])
        write_files({options.output / name: text for name, text in files.items()})
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        print(f"model.trace: {error}", file=sys.stderr)
        return 2
    print(_outcome_table(report.outcomes, context["config"]["levels"]))
    if figures:
        print(f"\n{_figure_table(figures)}")
    spike = report.recording.spike
    print(f"\nspike of prefill: {'none' if spike is None else f'layer {spike}'}")
    print(f"wrote {', '.join(str(options.output / name) for name in files)}, {time.monotonic() - started:.0f} s")
    return 1 if any(figure.passed is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
