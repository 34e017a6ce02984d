"""``python -m sim.package``: layers of a package on the simulated accelerator, in every mode, bit for bit (docs/package.md)."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.accelerator import AcceleratorConfig, Operand
from model.autofp6 import OFFSET_BITS
from model.command import command
from model.export import read_index
from model.llm import PROJECTIONS, capture_inputs, load
from model.package import Package
from sim.accelerator import Row, checked
from sim.driver import MEMORY, MEMORY_LIMIT, Accelerator, cycle_limit
from sim.gemm import stored_products
from sim.product import NAMES, AcceleratorError, Batch, Gemm
from sim.runner import SimulationError

__all__ = ["MemoryImage", "gaussian_inputs", "main", "package_rows", "parameters"]

Float = NDArray[np.float32]


class MemoryImage:
    """Weights in a folder that `model.export` wrote, whose bytes go into the memory as they are.

    Raises
    ------
    FileNotFoundError, ValueError
        It is not there, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.matrices: dict[str, Any] = read_index(folder)["matrices"]
        self._octets = np.memmap(folder / "image.bin", np.uint8, "r")

    def run(self, accelerator: Accelerator, name: str, product: Gemm) -> Batch:
        """Run a product with the weights of the image in place of its own; raises like :meth:`Accelerator.run`."""
        image = accelerator.image()
        descriptor, output, tiles = accelerator.place(image, product)
        matrix = self.matrices[name]
        addresses, strides = [], []
        for part in ("codes", "scales", "masks", "offsets"):
            place = matrix["arrays"][part]
            size = matrix["n"] * place["stride"] or place["bytes"]
            addresses.append(image.place(self._octets[place["offset"] :][:size].tobytes()))
            strides.append(place["stride"])
        placed = (dataclasses.replace(descriptor, w=Operand(*addresses, *strides)), output, tiles)
        limit = cycle_limit([tiles], accelerator.timing)
        run, records, cycles = accelerator.play(image, [placed[0]], [output], limit)
        return Batch(accelerator.results(image, [product], [placed], records), cycles, run.read_beats, run.write_beats)


def parameters(package: Package) -> dict[str, str | int]:
    """Return the parameters that an accelerator must have to run a package.

    Raises
    ------
    ValueError
        No accelerator runs it.
    """
    if package.bits != OFFSET_BITS:
        raise ValueError(f"bits of the package must be {OFFSET_BITS}, as in hardware, not {package.bits}")
    return {"step": package.step, "slots_per_block": max(package.slots, AcceleratorConfig().slots_per_block)}


def gaussian_inputs(package: Package, names: Sequence[str], tokens: int, seed: int) -> dict[str, Float]:
    """Return activations [tokens, K] for matrices, normally distributed."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((tokens, package.entries[name].shape[1])).astype(np.float32) for name in names}


def package_rows(
    accelerator: Accelerator,
    package: Package,
    inputs: Mapping[str, Float],
    modes: Sequence[str] = tuple(NAMES.values()),
    image: MemoryImage | None = None,
) -> Iterator[Row]:
    """Load matrices of a package into the memory and multiply activations by them.

    Parameters
    ----------
    accelerator : Accelerator
    package : Package
    inputs : mapping of str to ndarray of float32, shape (tokens, K)
        Activations by the name of the matrix.
    modes : sequence of {"AutoFP2", "NVFP4", "AutoFP6"}
    image : MemoryImage, optional
        Its weights are loaded instead; they must give what those of the package do.

    Yields
    ------
    Row
        For each matrix and mode; its outputs are the model's, bit for bit, and the sums are the product of the dequantised tensors.

    Raises
    ------
    ValueError
        The package is damaged, or a matrix does not fit the activations or the accelerator.
    AcceleratorError
        A result is another.
    """
    for name, x in inputs.items():
        tensor = package.read(name)
        if x.shape[1] != tensor.base.length:
            raise ValueError(f"activations of {name} must have K = {tensor.base.length}, not {x.shape[1]}")
        run = None if image is None else partial(image.run, accelerator, name)
        for product in stored_products(accelerator.config, tensor, x, modes):
            yield checked(accelerator, name, product, run=run)


def _inputs(package: Package, options: argparse.Namespace) -> dict[str, Float]:
    names = [f"{options.layer}.{projection}" for projection in options.projections]
    missing = [name for name in names if name not in package.entries]
    if missing:
        raise ValueError(f"the package must have matrix {missing[0]}, it has {', '.join(package.names[:4])}, ...")
    if options.gaussian is not None:
        return gaussian_inputs(package, names, options.tokens, options.gaussian)
    model = load(options.checkpoint)
    found = capture_inputs(model, wanted=[(options.layer, projection) for projection in options.projections])
    inputs = {f"{layer}.{projection}": x[: options.tokens] for (layer, projection), x in found.items()}
    for name, x in inputs.items():
        if x.shape[1] != package.entries[name].shape[1]:
            k = package.entries[name].shape[1]
            raise ValueError(f"--checkpoint must be that of the package, with K = {k} for {name}, not {x.shape[1]}")
    return inputs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.package",
        description="Matrices of a package on the simulated accelerator, compared with the model bit for bit.",
    )
    add = parser.add_argument
    add("package", type=Path)
    add("--layer", type=int, default=11, help="decoder layer (default: 11, where activations of SmolLM2 spike)")
    add("--projections", nargs="+", default=list(PROJECTIONS), choices=PROJECTIONS, help="matrices (default: all four)")
    add("--modes", nargs="+", default=list(NAMES.values()), choices=NAMES.values(), help="modes (default: all three)")
    add("--tokens", type=int, default=8, help="rows of activations (default: 8)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--checkpoint", help="model whose activations are taken (default: SmolLM2-135M)")
    what.add_argument("--gaussian", type=int, metavar="SEED", help="random activations instead")
    add("--image", type=Path, metavar="FOLDER", help="load the weights from this memory image of the package")
    add("--rows", type=int, default=2, help="rows of the array (default: 2)")
    add("--columns", type=int, default=2, help="columns of the array (default: 2)")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON as well")
    return parser


@command(prefix="sim.package", status=2)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every output is right, 1 if not, 2 for wrong arguments or a damaged package."""
    options = _parser().parse_args(arguments)
    sizes = {"rows": options.rows, "columns": options.columns}
    try:
        if options.tokens < 1:
            raise ValueError(f"--tokens must be at least 1, not {options.tokens}")
        if options.json is not None and not options.json.parent.is_dir():
            raise ValueError(f"--json must be in a folder that exists, not {options.json}")
        package = Package(options.package)
        given = parameters(package) | sizes
        AcceleratorConfig(**given)
        inputs = _inputs(package, options)
        image = MemoryImage(options.image) if options.image else None
        if image and (wrong := [name for name in inputs if name not in image.matrices]):
            raise ValueError(f"--image must be that of the package, with matrix {wrong[0]}")
        # Of the largest matrix, twice with an image, and of its activations and outputs.
        most = max(n * (2 * k + options.tokens * 8) for n, k in (package.entries[name].shape for name in inputs))
        if most > MEMORY_LIMIT:
            raise ValueError(f"a matrix must fit {MEMORY_LIMIT} bytes of memory, not {most}")
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"sim.package: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    try:
        accelerator = Accelerator(memory=max(MEMORY, 1 << (most - 1).bit_length()), **given)
        print(Row.HEAD, flush=True)
        for row in package_rows(accelerator, package, inputs, options.modes, image):
            print(row, flush=True)
            rows.append(row)
    except ValueError as error:
        print(f"sim.package: {error}", file=sys.stderr)
        return 2
    except (AcceleratorError, SimulationError, OSError) as error:
        print(f"sim.package: {error}", file=sys.stderr)
        return 1
    compared = sum(row.compared for row in rows)
    print(f"{len(rows)} products, {compared} outputs, all equal to the model's")
    if options.json is not None:
        table = {**given, "tokens": options.tokens, "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(main())
