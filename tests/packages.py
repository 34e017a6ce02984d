"""Packages for tests."""

import numpy as np

from model import autofp6, block_scaled
from model.package import Entry, Writer


def refined_matrix(rng, rows, k, bits=2, step="fixed", slots=2, density=0.25):
    x = rng.normal(size=(rows, k)).astype(np.float32)
    base = block_scaled.quantize(x)
    mask = autofp6.select_weights(autofp6.subgroup_gains(x, base, bits=bits, step=step), density, slots)
    return autofp6.refine(x, base, mask, bits=bits, step=step)


def write_package(path, tensors, **options):
    entries = [Entry(name, (len(t.base.codes), t.base.length), int(t.mask.sum())) for name, t in tensors.items()]
    with Writer(path, entries, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return path
