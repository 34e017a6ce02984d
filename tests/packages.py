"""Packages for tests."""

import numpy as np

from model import autofp6, block_scaled
from model.checkpoint import LlamaConfig
from model.package import Entry, Plain, Writer


def refined_matrix(rng, rows, k, bits=2, step="fixed", slots=2, density=0.25):
    x = rng.normal(size=(rows, k)).astype(np.float32)
    base = block_scaled.quantize(x)
    mask = autofp6.select_weights(autofp6.subgroup_gains(x, base, bits=bits, step=step), density, slots)
    return autofp6.refine(x, base, mask, bits=bits, step=step)


def entries_of(tensors):
    return [Entry(name, (len(t.base.codes), t.base.length), int(t.mask.sum())) for name, t in tensors.items()]


def write_package(path, tensors, **options):
    with Writer(path, entries_of(tensors), **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return path


SIZES = {"layers": 2, "width": 48, "hidden": 80, "heads": 4, "kv_heads": 2, "size": 16, "tokens": 30}
CONFIG = LlamaConfig(2, 48, 80, 4, 2, 16, 30, 16, 10000.0, 2.0**-17)


def write_model(path, rng, tied=False, **options):
    """Write the package of a tiny model; return path and contents."""
    matrices = {
        f"{layer}.{name}": refined_matrix(rng, *shape)
        for layer in range(CONFIG.layers)
        for name, shape in CONFIG.shapes.items()
    }
    plain = {"embedding": (30, 48), "norm": (48,)} | ({} if tied else {"head": (30, 48)})
    plain |= {f"{layer}.{norm}": (48,) for layer in range(2) for norm in ("attention_norm", "ffn_norm")}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in plain.items()}
    entries = [*entries_of(matrices), *(Plain(name, shape) for name, shape in plain.items())]
    with Writer(path, entries, config=CONFIG, **options) as writer:
        for name, tensor in matrices.items():
            writer.add(name, tensor)
        for name, array in arrays.items():
            writer.add_plain(name, array)
    return path, matrices, arrays
