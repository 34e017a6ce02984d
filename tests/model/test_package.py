"""AutoFP packages: what was written is read back bit for bit, and nothing that is damaged is."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from model import autofp6, block_scaled
from model.checkpoint import LlamaConfig
from model.package import Entry, Package, Plain, Writer
from tests.packages import refined_matrix, write_package

CONFIG = LlamaConfig(1, 40, 48, 2, 1, 20, 30, 16, 10000.0, 1e-5)


@pytest.mark.parametrize(("bits", "step", "slots"), [(2, "fixed", 2), (2, "exponent", 1), (4, "fixed", 4)])
@pytest.mark.parametrize("k", [1, 40, 64])
def test_a_matrix_comes_back_bit_for_bit(tmp_path, seed, bits, step, slots, k):
    rng = np.random.default_rng(seed)
    tensors = {f"{i}.o": refined_matrix(rng, rows, k, bits, step, slots) for i, rows in enumerate((1, 7))}
    package = Package(write_package(tmp_path / "p.safetensors", tensors, bits=bits, step=step, slots=slots))
    assert package.names == list(tensors)
    compared = 0
    for name, tensor in tensors.items():
        back = package.read(name)
        assert (back.bits, back.step, back.base.length) == (bits, step, k)
        assert back.base.tensor_scale == tensor.base.tensor_scale
        for part in ("codes", "scales"):
            np.testing.assert_array_equal(getattr(back.base, part), getattr(tensor.base, part))
        np.testing.assert_array_equal(back.mask, tensor.mask)
        np.testing.assert_array_equal(back.offsets, tensor.offsets)
        np.testing.assert_array_equal(autofp6.dequantize(back), autofp6.dequantize(tensor))
        compared += np.count_nonzero(back.offsets)
    assert compared > k / 8 or k == 1
    assert sorted(package.verify()) == sorted(tensors)


def test_other_libraries_read_the_layout_of_the_page(tmp_path, seed):
    rng = np.random.default_rng(seed)
    tensor, norm = refined_matrix(rng, 5, 64), rng.normal(size=64).astype(np.float32)
    entries = [Plain("norm", (64,)), Entry("0.o", (5, 64), int(tensor.mask.sum()))]
    path = tmp_path / "p.safetensors"
    with Writer(path, entries, metadata={"rule": "nmse"}, config=CONFIG) as writer:
        writer.add("0.o", tensor)
        writer.add_plain("norm", norm)
    package = Package(path)
    assert package.config == CONFIG
    assert package.metadata["rule"] == "nmse"
    np.testing.assert_array_equal(package.plain("norm"), norm)
    with safe_open(path, "numpy") as file:
        codes, mask, offsets = (file.get_tensor(f"0.o.{name}") for name in ("codes", "mask", "offsets"))
        matrices = json.loads(file.metadata()["matrices"])
    assert matrices == {"0.o": [5, 64]}
    # Element by element, as the page says it.
    q = tensor.base.codes
    place = {g: i for i, g in enumerate(np.flatnonzero(tensor.mask))}
    for n in range(5):
        for k in range(64):
            assert codes[n, k // 2] >> 4 * (k % 2) & 15 == q[n, k]
            assert bool(mask[k // 32] >> (k // 16 % 2 * 4 + k // 4 % 4) & 1) == (k // 4 in place)
            d = offsets[n, place[k // 4]] >> 2 * (k % 4) & 3 if k // 4 in place else 0
            assert (int(d) ^ 2) - 2 == tensor.offsets[n, k]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": "../0.o"}, "name of an entry must be words with dots between them, not '../0.o'"),
        ({"twice": True}, "entries must have different names, not '0.o' twice"),
        ({"more": 1}, r"refined of 0.o must be \d+, not \d+"),
        ({"slots": 1}, r"mask of 0.o must have at most 1 subgroups in a group, not 2"),
        ({"step": "exponent"}, "step of 0.o must be exponent, not fixed"),
        ({"k": 63}, r"shape of 0.o must be \(5, 63\), not \(5, 64\)"),
        ({"bits": 3}, "bits must be 2 or 4, not 3"),
        ({"metadata": {"checksum": "x"}}, "metadata must have names of its own, not 'checksum'"),
        ({"leave": True}, "every tensor must be written, but '0.o.codes' was not"),
    ],
)
def test_what_does_not_fit_leaves_nothing_behind(tmp_path, seed, change, message):
    tensor = refined_matrix(np.random.default_rng(seed), 5, 64, density=0.5)
    count = 4 if change.get("slots") == 1 else int(tensor.mask.sum()) - change.get("more", 0)
    entry = Entry(change.get("names", "0.o"), (5, change.get("k", 64)), count)
    given = {key: change[key] for key in ("slots", "step", "bits", "metadata") if key in change}
    if change.get("slots") == 1:
        # As many as one slot allows, but two of them in a group.
        mask = np.zeros(16, bool)
        mask[[0, 1, 4, 8]] = True
        x = np.random.default_rng(seed).normal(size=(5, 64)).astype(np.float32)
        tensor = autofp6.refine(x, block_scaled.quantize(x), mask)
    entries = [entry] * (1 + change.get("twice", 0))
    path = tmp_path / "p.safetensors"
    # Some are refused by the writer itself, some when a matrix is added, some at the end.
    with pytest.raises(ValueError, match=f"^({message})$"), Writer(path, entries, **given) as writer:  # noqa: PT012
        if not change.get("leave"):
            writer.add("0.o", tensor)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_block_keeps_an_older_file(tmp_path, seed):
    path = tmp_path / "p.safetensors"
    tensor = refined_matrix(np.random.default_rng(seed), 2, 32)
    write_package(path, {"0.o": tensor})
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), Writer(path, [Entry("0.o", (2, 32), 2)]):
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.safetensors"]
    assert path.read_bytes() == before
    write_package(path, {"0.o": tensor})
    assert path.read_bytes() == before


def test_every_flipped_byte_is_found(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = write_package(tmp_path / "p.safetensors", {"0.o": refined_matrix(rng, 2, 32)})
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^(path must be a s|tensor |matrix )"):
            list(Package(path).verify())
    path.write_bytes(whole)
    assert list(Package(path).verify()) == ["0.o"]


def test_a_package_of_another_version_is_refused(tmp_path, seed):
    path = write_package(tmp_path / "p.safetensors", {"0.o": refined_matrix(np.random.default_rng(seed), 2, 32)})
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(ValueError, match=r"format and version must be autofp-package 1, not autofp-package 2$"):
        Package(path)
    with pytest.raises(FileNotFoundError, match=r"^path must be a package, not .*absent$"):
        Package(tmp_path / "absent")
