"""A package on the simulated accelerator: its products are the model's, and wrong bytes in memory are seen."""

import hashlib
import json

import numpy as np
import pytest

from model.export import export
from model.package import Package
from sim.image import Image
from sim.package import main
from tests.packages import CONFIG, SIZES, refined_matrix, write_model, write_package
from tests.tiny_llama import folder_tensors, tiny_tensors, write_folder


@pytest.fixture
def path(tmp_path, seed):
    return write_model(tmp_path / "p.safetensors", np.random.default_rng(seed))[0]


def test_a_layer_of_a_package_runs_in_every_mode(tmp_path, path, capsys):
    assert (
        main([str(path), "--layer", "1", "--tokens", "3", "--gaussian", "7", "--json", str(tmp_path / "r.json")]) == 0
    )
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    modes = ("AutoFP2", "NVFP4", "AutoFP6")
    assert [(row["name"], row["mode"]) for row in rows] == [(f"1.{p}", mode) for p in CONFIG.shapes for mode in modes]
    for row in rows:
        assert (row["m"], row["n"]) == (3, CONFIG.shapes[row["name"][2:]][0])
        assert row["compared"] == row["m"] * row["n"]
    compared = 3 * 3 * sum(n for n, _ in CONFIG.shapes.values())
    assert capsys.readouterr().out.endswith(f"12 products, {compared} outputs, all equal to the model's\n")


def test_activations_are_those_of_a_checkpoint(tmp_path, path, capsys):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors(sizes=SIZES), SIZES["size"]), sizes=SIZES)
    arguments = [str(path), "--layer", "1", "--projections", "o", "down", "--modes", "AutoFP6", "--checkpoint"]
    assert main([*arguments, str(folder)]) == 0
    # The tokenizer of that checkpoint makes one token of any text.
    assert capsys.readouterr().out.endswith("2 products, 96 outputs, all equal to the model's\n")
    other = write_folder(tmp_path / "other", folder_tensors(tiny_tensors()))
    assert main([*arguments, str(other)]) == 2
    message = "--checkpoint must be that of the package, with K = 64 for 1.o, not 24"
    assert capsys.readouterr().err == f"sim.package: {message}\n"


@pytest.mark.parametrize(
    ("part", "mode"), [("codes", "NVFP4"), ("scales", "NVFP4"), ("masks", "AutoFP6"), ("offsets", "AutoFP6")]
)
def test_a_wrong_byte_in_memory_is_seen(path, monkeypatch, capsys, part, mode):
    original = Image.store_operand
    damaged = []

    def store(self, operands, refined=True):
        place = original(self, operands, refined)
        if len(operands.codes) > 3:
            address = getattr(place, part)
            self.write(address, bytes([self.read(address, 1)[0] ^ 1]))
            damaged.append(address)
        return place

    monkeypatch.setattr(Image, "store_operand", store)
    arguments = ["--layer", "0", "--projections", "o", "--tokens", "3", "--gaussian", "7", "--modes", mode]
    assert main([str(path), *arguments]) == 1
    assert len(damaged) == 1
    assert "differ, first at" in capsys.readouterr().err


def test_the_memory_image_is_what_the_accelerator_reads(tmp_path, path, capsys):
    folder = tmp_path / "image"
    export(Package(path), "image", folder)
    arguments = [str(path), "--layer", "1", "--tokens", "3", "--gaussian", "7", "--image", str(folder)]
    assert main(arguments) == 0
    compared = 3 * 3 * sum(n for n, _ in CONFIG.shapes.values())
    assert capsys.readouterr().out.endswith(f"12 products, {compared} outputs, all equal to the model's\n")
    # Another image whose checksum fits: the weights in memory are its weights.
    index, octets = json.loads((folder / "index.json").read_text()), bytearray((folder / "image.bin").read_bytes())
    for part, mode in (("codes", "NVFP4"), ("scales", "NVFP4"), ("masks", "AutoFP6"), ("offsets", "AutoFP6")):
        wrong = bytearray(octets)
        wrong[index["matrices"]["1.o"]["arrays"][part]["offset"]] ^= 1
        (folder / "image.bin").write_bytes(wrong)
        assert main(arguments) == 2
        assert "size and checksum of" in capsys.readouterr().err
        digest = hashlib.sha256(wrong).hexdigest()
        (folder / "index.json").write_text(json.dumps(index | {"sha256": digest}))
        assert main([*arguments, "--projections", "o", "--modes", mode]) == 1
        assert "differ, first at" in capsys.readouterr().err
    far = index["matrices"]["1.o"] | {"n": 10_000}
    for text in ("[" * 100_000, "{}", json.dumps(index | {"matrices": index["matrices"] | {"1.o": far}})):
        (folder / "index.json").write_text(text)
        assert main(arguments) == 2
        message = f"index.json must be that of an image, not {folder / 'index.json'}"
        assert capsys.readouterr().err == f"sim.package: {message}\n"


def test_what_cannot_run_is_one_line(tmp_path, path, seed, capsys):
    wide = write_package(tmp_path / "wide", {"0.o": refined_matrix(np.random.default_rng(seed), 2, 32, bits=4)}, bits=4)
    for arguments, message in (
        ([wide, "--layer", "0", "--projections", "o"], "bits of the package must be 2, as in hardware, not 4"),
        ([path, "--layer", "7"], "the package must have matrix 7.qkv, it has 0.qkv, 0.o, 0.gate_up, 0.down, ..."),
        ([path, "--tokens", "0"], "--tokens must be at least 1, not 0"),
        ([tmp_path / "absent"], f"path must be a package, not {tmp_path / 'absent'}"),
        ([path, "--rows", "0"], "rows must be"),
    ):
        assert main([*map(str, arguments), "--gaussian", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.startswith(f"sim.package: {message}")
