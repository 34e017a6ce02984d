"""Readers of damaged files: a few of the cases of `python -m model.fuzz`, and that its judge sees what it must."""

import dataclasses
import json

import numpy as np
import pytest

from model import checkpoint, fuzz
from model.fuzz import KINDS, FuzzError, campaign, main, mutate, samples
from model.package import Package, reseal

CASES = 60


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused(tmp_path, seed, kind):
    outcome = campaign(tmp_path, kind, range(CASES), seed)
    assert CASES * 0.95 <= outcome.cases <= CASES
    assert outcome.refused + outcome.same + outcome.other == outcome.cases
    assert outcome.refused > CASES / 2


def test_the_same_numbers_give_the_same_damage(tmp_path):
    def counts(name):
        folder = tmp_path / name
        folder.mkdir()
        outcome = campaign(folder, "gguf", range(5, 25), 3)
        return outcome.cases, outcome.refused, outcome.same, outcome.other

    assert counts("first") == counts("second")


def test_damage_is_of_every_kind():
    data = bytes(range(256)) * 8
    hows = {mutate(np.random.default_rng(n), data, 512)[1] for n in range(200)}
    assert hows == {
        *("flip", "number", "fill", "cut", "repeat", "remove", "swap", "snippet", "longer", "header"),
    }


def test_a_package_reader_without_checksums_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(Package, "_tensor", lambda self, name: self._file.read(name))
    with pytest.raises(
        FuzzError, match=r"^package, seed 1, case \d+ \(\w+\): it is accepted, though every byte is under"
    ):
        campaign(tmp_path, "package", range(200), 1)


def crash(path):
    raise IndexError("list index out of range")


def two_lines(path):
    raise ValueError("first\nsecond")


def other_values(path):
    found = sound(path)
    return dataclasses.replace(found, weights=found.weights | {"norm": 2 * found.weights["norm"]})


def infinite(path):
    found = sound(path)
    return dataclasses.replace(found, weights=found.weights | {"norm": found.weights["norm"] * np.inf})


def sound(path):
    return SOUND[0]


SOUND = []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (crash, "IndexError: list index out of range"),
        (two_lines, "the message must be one line, not 'first"),
        (other_values, "it is accepted with other values, though its size is wrong"),
        (infinite, "norm is accepted with values that are not finite"),
    ],
)
def test_the_judge_sees_readers_that_do_wrong(tmp_path, monkeypatch, wrong, message):
    original = checkpoint.read
    SOUND.clear()

    def read(path):
        # The sound file is read first.
        if SOUND:
            return wrong(path)
        SOUND.append(original(path))
        return SOUND[0]

    monkeypatch.setattr(checkpoint, "read", read)
    with pytest.raises(FuzzError, match=rf"^gguf, seed 1, case \d+ \(\w+\): {message}"):
        campaign(tmp_path, "gguf", range(200), 1)


def test_a_reader_that_hangs_is_stopped(monkeypatch, tmp_path):
    original = checkpoint.read
    calls = []

    def slow(path):
        calls.append(path)
        while len(calls) > 1:
            pass
        return original(path)

    monkeypatch.setattr(checkpoint, "read", slow)
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    with pytest.raises(FuzzError, match=r"it takes more than 1 s$"):
        campaign(tmp_path, "index", range(3), 1)


def test_a_wrong_package_with_right_checksums_is_refused(tmp_path):
    sample = samples(tmp_path)["package"]
    data = sample.path.read_bytes()
    assert reseal(data) == reseal(reseal(data))
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__")
    first, last = header["0.down.scales"]["data_offsets"]
    mask = header["0.down.mask"]["data_offsets"][0]
    for at, value, message in (
        (first, 0x7F, "scales must be from 0x00 to 0x7e, not 0x7f"),
        (last - 1, 0x80, "scales must be from 0x00 to 0x7e, not 0x80"),
        (mask, 0xFF, "mask must mark "),
        (header["0.down.tensor_scale"]["data_offsets"][0] + 3, 0xBF, "tensor_scale must be positive and finite"),
        (header["0.down.tensor_scale"]["data_offsets"][0] + 3, 0x7E, "tensor_scale must be at most 9.494e"),
        (header["norm"]["data_offsets"][0] + 2, 0xFF, ""),
    ):
        wrong = bytearray(data)
        wrong[end + at] = value
        if not message:
            wrong[end + at : end + at + 2] = b"\x80\x7f"
        sample.path.write_bytes(reseal(bytes(wrong)))
        with pytest.raises(ValueError, match=message or "tensor norm of .* must be finite"):
            list(Package(sample.path).verify())
        sample.path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"does not fit its checksum$"):
            list(Package(sample.path).verify())


def test_names_that_are_paths_are_refused(tmp_path):
    sample = samples(tmp_path)["package"]
    data = sample.path.read_bytes()
    for name in (b"../n", b"a..b", b"a/bc", b"/abc"):
        sample.path.write_bytes(reseal(data.replace(b'"norm":{', b'"' + name + b'":{')))
        with pytest.raises(ValueError, match=r"names must be words with dots between them, not '"):
            Package(sample.path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bits", "two", "bits and slots must be numbers, not 'two' and '2'"),
        ("bits", "3", "bits must be 2 or 4, not 3"),
        ("slots", "5", "slots must be from 1 to 4, not 5"),
        ("step", "other", "step must be one of fixed, exponent, not 'other'"),
        ("config", '{"layers": 1}', "config of the metadata must have layers, width, "),
        ("config", "[" * 100_000, "config of the metadata must be an object, not nested so deep"),
        ("matrices", '{"0.o": [32, 32.0]}', "matrices of the metadata must be an object of the right values"),
        ("matrices", '{"0.o": [33, 32]}', r"type and shape of tensor 0\.o\.codes must be "),
        ("matrices", '{"1.o": [32, 32]}', r"type and shape of tensor 1\.o\.tensor_scale must be .*, not None"),
        ("matrices", "{}", r"type of tensor 0\.\S+ must be F32, not (U8|F8_E4M3)"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(tmp_path, key, value, message):
    sample = samples(tmp_path)["package"]
    data = sample.path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"][key] = value
    text = json.dumps(header).encode()
    sample.path.write_bytes(reseal(len(text).to_bytes(8, "little") + text + data[end:]))
    with pytest.raises(ValueError, match=rf"^path must be a sound package, not .*: {message}"):
        Package(sample.path)


def test_the_command_prints_a_table(tmp_path, capsys):
    assert main(["--count", "3", "--kinds", "index", "config.json", "--json", str(tmp_path / "r.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], len(lines)) == ("seed 1", 4)
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["kind"], row["cases"]) for row in rows] == [("index", 3), ("config.json", 3)]
    assert main(["--count", "0"]) == 2
    assert capsys.readouterr().err == "model.fuzz: --count must be at least 1, not 0\n"
    for arguments, line in (
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--case", "-2"], "--case must be at least 0, not -2"),
        (["--json", "nowhere/x"], "--json must name a file in an existing folder, not nowhere/x"),
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"model.fuzz: {line}\n"
