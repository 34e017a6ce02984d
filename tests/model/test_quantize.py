"""From a checkpoint to a package: the streaming run against the whole model, budgets, memory, the real model, and the command."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest

from model import autofp6, block_scaled, calibration_text, checkpoint, llm, quantize
from model.calibration import RULES, Options, budget, calibrate, gram, loss
from model.checkpoint import PROJECTIONS, Checkpoint
from model.formats import E2M3
from model.package import Package
from model.quantised_llm import Format, PackageStore, QuantisedLlama, Settings
from model.quantize import Texts, main, perplexities, quantise
from model.quantize_report import picture, total
from model.tokenizer import BytePairs
from tests.packages import CONFIG, write_model


def tiny(rng, config=CONFIG):
    def matrix(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    weights = {name: matrix(config.vocabulary, config.width) for name in ("embedding", "head")}
    weights["norm"] = np.ones(config.width, np.float32)
    for layer in range(config.layers):
        weights |= {f"{layer}.{norm}": np.ones(config.width, np.float32) for norm in ("attention_norm", "ffn_norm")}
        weights |= {f"{layer}.{name}": matrix(*shape) for name, shape in config.shapes.items()}
    return Checkpoint(config, weights, None)


def texts(rng, count=40, held=14):
    return Texts(rng.integers(0, 30, count), rng.integers(0, 30, held))


@pytest.mark.parametrize("rule", RULES)
def test_package_is_that_of_the_whole_model_matrix_by_matrix(rule, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "WINDOW", 15)
    rng = np.random.default_rng(seed)
    source, chosen, options = tiny(rng), texts(rng), Options(rule=rule, density=0.25)
    rows = quantise(source, tmp_path / "p", options, chosen, compare=True)
    package = Package(tmp_path / "p")
    assert [row.name for row in rows] == package.names
    weights = dict(source.weights)
    compared = 0
    for row in rows:
        layer, _, name = row.name.partition(".")
        model = llm.Llama(source.config, weights, None)

        def hessian(parts, wanted=(int(layer), name), model=model):
            return sum(gram(llm.capture_inputs(model, part, [wanted])[wanted]) for part in parts)

        w = source.weights[row.name]
        seen = hessian([chosen.calibration[start : start + 15] for start in (0, 15, 30)])
        wanted = calibrate(w, options, None if rule == "nmse" else seen).weights
        made = package.read(row.name)
        assert (made.base.codes == wanted.base.codes).all()
        assert (made.base.scales == wanted.base.scales).all()
        assert (made.mask == wanted.mask).all()
        assert (made.offsets == wanted.offsets).all()
        assert made.base.tensor_scale == wanted.base.tensor_scale
        assert made.mask.sum() == budget(0.25, w.shape[1])
        decoded = {
            "NVFP4": block_scaled.dequantize(block_scaled.quantize(w)),
            "FP6g": block_scaled.dequantize(block_scaled.quantize(w, E2M3)),
            "AutoFP6 (nmse)": autofp6.dequantize(calibrate(w, Options(0.25, "nmse")).weights),
            "AutoFP6": autofp6.dequantize(made),
        }
        held = hessian([chosen.evaluation])
        for form, values in decoded.items():
            np.testing.assert_allclose(row.weights[form], ((w - values) ** 2).sum() / (w**2).sum(), rtol=1e-5)
            np.testing.assert_allclose(row.outputs[form], loss(w - values, held) / loss(w, held), rtol=1e-4)
            compared += 1
        weights[row.name] = decoded["AutoFP6"]
    assert compared == 4 * 4 * CONFIG.layers
    for name in ("embedding", "head", "norm", "1.ffn_norm"):
        assert (package.plain(name) == source.weights[name]).all()


def test_storage_bits_are_those_of_the_file(seed, tmp_path):
    rng = np.random.default_rng(seed)
    for row in quantise(tiny(rng), tmp_path / "p", Options(rule="nmse")):
        refined = Package(tmp_path / "p").read(row.name)
        offsets = np.repeat(refined.mask, 4).sum() * 2 * row.shape[0]
        bits = 4 * refined.base.codes.size + 8 * refined.base.scales.size + offsets
        assert row.bits == bits / (row.shape[0] * row.shape[1])
        assert row.outputs == {}


def test_picture_is_the_same_each_time(seed, tmp_path):
    rows = quantise(tiny(np.random.default_rng(seed)), tmp_path / "p", Options(rule="nmse"))
    assert picture(rows) == picture(rows)
    assert all(f">{name}<" in picture(rows) for name in PROJECTIONS)


def test_failure_in_the_middle_leaves_nothing(seed, tmp_path):
    source = tiny(np.random.default_rng(seed))
    source.weights["1.down"][3, 5] = np.inf
    with pytest.raises(ValueError, match=r"^w must be finite, not inf at index \(3, 5\)"):
        quantise(source, tmp_path / "p", Options(rule="nmse"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_finite_behind_a_layer_is_refused(seed, tmp_path):
    rng = np.random.default_rng(seed)
    source = tiny(rng)
    source.weights["1.down"][:] = 3e38
    message = r"^weights must keep the residual stream finite, which it is not after layer 1$"
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(ValueError, match=message):
        quantise(source, tmp_path / "p", Options(rule="nmse"), texts(rng), compare=True)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_zeros_has_no_ratio_of_errors(seed, tmp_path, recwarn):
    source = tiny(np.random.default_rng(seed))
    for array in source.weights.values():
        array[:] = 0
    rows = quantise(source, tmp_path / "p", Options(), texts(np.random.default_rng(seed)))
    assert "output_ratio" not in total(rows)
    json.dumps(total(rows), allow_nan=False)
    assert picture(rows)
    assert not recwarn.list


def test_rules_with_hessians_need_a_text(seed, tmp_path):
    with pytest.raises(ValueError, match=r"^texts must have a calibration text for rule gptq$"):
        quantise(tiny(np.random.default_rng(seed)), tmp_path / "p", Options())


def test_memory_stays_below_three_times_the_largest_layer_or_twice_with_its_hessian(tmp_path):
    # Layers of a shape as large models have, so small only to be quick.
    config = checkpoint.LlamaConfig(2, 256, 768, 4, 2, 64, 512, 64, 1e4, 1e-5)
    rng = np.random.default_rng(1)
    largest = 4 * sum(n * k for n, k in config.shapes.values())
    folder = tiny(rng, config).weights
    assert largest > folder["embedding"].nbytes

    class Lazy(dict):
        def __getitem__(self, name):
            return super().__getitem__(name).copy()

    hessian = 8 * config.hidden**2
    both = largest + hessian
    for rule, most in (("nmse", 3 * largest), ("hessian", 2 * both), ("gptq", 2 * both)):
        source = Checkpoint(config, Lazy(folder), None)
        chosen = None if rule == "nmse" else Texts(rng.integers(0, 512, 256), rng.integers(0, 512, 64))
        tracemalloc.start()
        try:
            quantise(source, tmp_path / "p", Options(rule=rule), chosen)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < most, (rule, peak / most)


# ---- The real model ----


@pytest.fixture(scope="module")
def smollm2():
    return llm.load()


def test_errors_of_outputs_are_in_order_on_a_text_that_calibration_did_not_see(smollm2):
    wanted = [(11, "qkv"), (11, "o")]
    encoded = [smollm2.tokenizer.encode(text) for text in (calibration_text.TEXT[:9000], calibration_text.EVALUATION)]
    seen, held = (llm.capture_inputs(smollm2, tokens[:1200], wanted) for tokens in encoded)
    for layer, name in wanted:
        w, h = smollm2.weight(layer, name), gram(held[layer, name])
        values = [
            block_scaled.dequantize(block_scaled.quantize(w)),
            autofp6.dequantize(calibrate(w, Options(rule="nmse")).weights),
            autofp6.dequantize(calibrate(w, Options(), gram(seen[layer, name])).weights),
            block_scaled.dequantize(block_scaled.quantize(w, E2M3)),
        ]
        losses = [loss(w - value, h) for value in values]
        assert losses == sorted(losses, reverse=True)
        assert losses[2] < 0.8 * losses[0]


def test_texts_share_no_line():
    lines = [
        {line for line in text.splitlines() if len(line) > 20}
        for text in (calibration_text.TEXT, calibration_text.EVALUATION)
    ]
    assert min(map(len, lines)) > 10
    assert not lines[0] & lines[1]


# ---- Perplexity ----


def test_perplexities_run_the_weights_of_the_package(seed, tmp_path):
    path, matrices, arrays = write_model(tmp_path / "p", np.random.default_rng(seed))
    shrunk = {name: np.zeros(CONFIG.shapes[name.partition(".")[2]], np.float32) for name in matrices}
    model = llm.Llama(CONFIG, {**arrays, **shrunk}, None)
    tokens = np.arange(9)
    found = perplexities(model, Package(path), tokens)
    assert list(found) == ["reference", "NVFP4", "AutoFP6 (nmse)", "AutoFP6", "FP6g"]
    # All weights of the checkpoint are zero here, so only the package makes a difference.
    assert len({found[name] for name in ("reference", "NVFP4", "AutoFP6 (nmse)", "FP6g")}) == 1
    assert found["AutoFP6"] != found["reference"]
    store = PackageStore(model, Package(path))
    assert (store.values(1, "o", Format.AUTOFP6) == autofp6.dequantize(matrices["1.o"])).all()
    assert (store.values(1, "o", Format.NVFP4) == block_scaled.dequantize(matrices["1.o"].base)).all()
    assert not (store.values(1, "o", Format.FP6G)).any()
    assert (store.mask(0, "down") == matrices["0.down"].mask).all()
    assert QuantisedLlama(model, store=store).settings == store.settings


def test_a_package_runs_alone(seed, tmp_path):
    source = tiny(np.random.default_rng(seed))
    quantise(dataclasses.replace(source, tokenizer=Letters()), tmp_path / "p", Options(rule="nmse"))
    package, model = Package(tmp_path / "p"), llm.load(tmp_path / "p")
    assert (model.config, model.tokenizer.decode([0, 1])) == (CONFIG, "ab")
    for name in package.names:
        assert (model.weights[name] == autofp6.dequantize(package.read(name))).all()
    assert (model.weights["head"] == source.weights["head"]).all()
    assert np.isfinite(llm.perplexity(model, np.arange(9)))
    quantise(source, tmp_path / "q", Options(rule="nmse"))
    with pytest.raises(ValueError, match=r"^path must be a package of a whole model, not .*, which has no tokenizer$"):
        llm.load(tmp_path / "q")


def test_package_of_another_model_is_refused(seed, tmp_path):
    path, _, arrays = write_model(tmp_path / "p", np.random.default_rng(seed))
    other = checkpoint.LlamaConfig(3, 48, 80, 4, 2, 16, 30, 16, 10000.0, 2.0**-17)
    model = llm.Llama(other, tiny(np.random.default_rng(seed), other).weights, None)
    with pytest.raises(ValueError, match=r"^shape of 2.qkv in .* must be \(128, 48\), not None$"):
        PackageStore(model, Package(path))
    with pytest.raises(ValueError, match=r"^slots must be at least 2, those of .*, not 1$"):
        PackageStore(model, Package(path), Settings(slots=1))
    assert arrays


# ---- Command ----


class Letters(BytePairs):
    def __init__(self):
        super().__init__([chr(ord("a") + i) for i in range(30)], ["a b"])

    def encode(self, text):
        return np.array([ord(letter) % 30 for letter in text])


def use_tiny(seed, monkeypatch, tokenizer):
    made = tiny(np.random.default_rng(seed))
    monkeypatch.setattr(checkpoint, "open", lambda path: Checkpoint(made.config, made.weights, tokenizer))
    monkeypatch.setattr(llm, "load", lambda path: llm.Llama(made.config, made.weights, tokenizer))


def test_command_writes_package_report_and_picture(seed, tmp_path, monkeypatch, capsys):
    use_tiny(seed, monkeypatch, Letters())
    names = ["-o", str(tmp_path / "p"), "--json", str(tmp_path / "j"), "--picture", str(tmp_path / "s")]
    assert main([*names, "--tokens", "64", "--compare", "--perplexity"]) == 0
    report = json.loads((tmp_path / "j").read_text())
    assert report["total"]["matrices"] == len(report["rows"]) == 8
    assert (report["calibration_tokens"], report["evaluation_tokens"]) == (64, CONFIG.context)
    assert report["total"]["output_ratio"]["NVFP4"] == 1
    assert set(report["perplexity"]) == {"reference", "NVFP4", "AutoFP6 (nmse)", "AutoFP6", "FP6g"}
    assert Package(tmp_path / "p").metadata["calibration_text"] == calibration_text.NAME
    assert Package(tmp_path / "p").tokenizer.text() == Letters().text()
    assert (tmp_path / "s").read_text().startswith("<?xml")
    out = capsys.readouterr().out
    assert "8 matrices" in out
    assert "evaluated on 16 of model/sample_text.py, LONG_TEXT" in out
    assert all(row["name"] in out for row in report["rows"])


def test_package_report_and_picture_appear_together(seed, tmp_path, monkeypatch, capsys):
    use_tiny(seed, monkeypatch, Letters())
    names = ["-o", str(tmp_path / "p"), "--rule", "nmse", "--json", str(tmp_path / "j"), "--picture"]
    assert main([*names, "/dev/full"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "model.quantize: [Errno 28] No space left on device: '/dev/full'"
    assert list(tmp_path.iterdir()) == []
    assert main([*names, str(tmp_path / "s")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j", "p", "s"]
    # A package may be replaced, by another rule and without the report.
    assert main(["-o", str(tmp_path / "p"), "--rule", "hessian", "--tokens", "20"]) == 0
    metadata = Package(tmp_path / "p").metadata
    assert (metadata["rule"], "damping" in metadata) == ("hessian", False)


def test_tokens_that_the_embedding_lacks_are_refused(seed, tmp_path, monkeypatch, capsys):
    class Large(Letters):
        def encode(self, text):
            return np.array([30, *super().encode(text)])

    use_tiny(seed, monkeypatch, Large())
    assert main(["-o", str(tmp_path / "p"), "--tokens", "20"]) == 2
    line = "model.quantize: the tokenizer must have ids below 30, as the embedding, not 30\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "{tmp}/p"], "--output must be a file of its own, not {tmp}/p"),
        (["--output", "{tmp}/short"], "--output must be a new file, or a package that it replaces, not {tmp}/short"),
        (["--output", "/dev/null"], "--output must be a new file, or a package that it replaces, not /dev/null"),
        (["--text", "{tmp}/part", "--rule", "nmse"], "--text must go with what reads it, not with rule nmse"),
        (["--text", "{tmp}/none"], "--text must be a file that can be read, not {tmp}/none: No such file"),
        (["--density", "0.6"], "density must be from 0 to 0.5 with 2 slots, not 0.6"),
        (["--damping", "nan"], "damping must be from 0 to 1e+06, not nan"),
        (["--bits", "3"], "--bits must be 2 or 4, not 3"),
        (["--bits", "4", "--perplexity"], "--perplexity must go with --bits 2, not 4"),
        (["--tokens", "1"], "--tokens must be at least 2, not 1"),
        (["--json", "{tmp}/none/x"], "--json must name a file in an existing folder, not {tmp}/none/x"),
        (["{tmp}/none"], "path must be a GGUF file or a folder, not {tmp}/none"),
        (
            ["--text", "{tmp}/latin"],
            "--text must be UTF-8, not {tmp}/latin: 'utf-8' codec can't decode byte 0xe9 in position 0",
        ),
        (["--text", "{tmp}/part"], "--text and --evaluation must be different texts, not one a part of the other"),
        (["--text", "{tmp}/short"], "--text must have at least 2 tokens, not 1"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    if arguments != ["{tmp}/none"]:
        use_tiny(1, monkeypatch, Letters())
    (tmp_path / "latin").write_bytes(b"\xe9t\xe9")
    (tmp_path / "part").write_text(calibration_text.EVALUATION[100:900])
    (tmp_path / "short").write_text("~")
    wanted = message.format(tmp=tmp_path)
    assert main(["-o", str(tmp_path / "p"), *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"model.quantize: {wanted}")
    assert not (tmp_path / "p").exists()
