"""``python -m sim.post_campaign``: queues of random products with post-processing and policy, some of which fail, against the model (docs/driver.md)."""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.accelerator import (
    POST,
    POST_ARRAYS,
    POST_BYTES,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Mode,
    check,
    check_post,
)
from model.activation import Function
from model.autofp6 import Refined
from model.policy import PolicyConfig
from sim.axi_memory import ErrorRange
from sim.driver import Accelerator, cycle_limit
from sim.expected import verify
from sim.image import Image, Output, output_bytes
from sim.product import AcceleratorError, Batch, Gemm, GroupsOf, Post, Step
from sim.random_products import CAMPAIGN, SMALL_MEMORY, random_gemm, random_operands, random_timing
from sim.runner import SimulationError

__all__ = ["CONFIGURATIONS", "Fault", "Tally", "main", "random_fault", "random_post", "random_products", "run_queue"]

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {**CAMPAIGN[0], "ppu": True},
    {**CAMPAIGN[1], "ppu": True},
    {**CAMPAIGN[2], "ppu": True, "weight_depth": 64},
    {
        "rows": 2,
        "columns": 5,
        "refinement": "none",
        "data_width": 512,
        "activation_depth": 32,
        "weight_depth": 128,
        "address_width": 32,
        "max_burst": 2,
        "outstanding": 1,
        "ppu": True,
    },
)
"""Small banks, so that small products need many tiles; words narrower and wider than beats; every kind of refinement."""
TOGETHER = 20
"""Products of a queue."""
ATTEMPTS = 40
_MASKS = np.array([0, 0, 0, 1, 2, 4, 8, 3, 5, 15], np.uint8)
_WORDS = (0, 1, 8, 16, 1 << 24, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF)
"""What takes the place of words of descriptors and blocks."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong with a product.

    Attributes
    ----------
    name : str
    codes : frozenset of ErrorCode
        One of which it must end with.
    descriptor : bytes
    block : bytes, optional
        In place of its post block.
    errors : tuple of ErrorRange
    """

    name: str
    codes: frozenset[ErrorCode]
    descriptor: bytes
    block: bytes | None = None
    errors: tuple[ErrorRange, ...] = ()


@dataclasses.dataclass
class Tally:
    """What was run: products, those that failed by code, those that ran by mode and kind, outputs that were compared, and cycles."""

    products: int = 0
    outputs: int = 0
    cycles: int = 0
    codes: Counter[str] = dataclasses.field(default_factory=Counter)
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        """Add another one's counts."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def _numbers(rng: np.random.Generator, m: int, n: int) -> NDArray[np.float32]:
    """Draw FP32 numbers: usual ones, or some of any pattern at all among them."""
    numbers = rng.standard_normal((m, n)).astype(np.float32) * np.float32(rng.choice([1, 30, 1e-30, 1e30]))
    if rng.random() < 0.2:
        wild = rng.integers(0, 1 << 32, (m, n), dtype=np.uint32).view(np.float32)
        numbers = np.where(rng.random((m, n)) < 0.1, wild, numbers)
    return numbers


def random_post(rng: np.random.Generator, m: int, n: int, *, observe: bool = False) -> Post:
    """Draw what is done with M × N outputs."""
    groups = bool(rng.random() < 0.7)
    refine = groups and rng.random() < 0.6
    measures = observe or rng.random() < 0.5
    return Post(
        Function(int(rng.integers(4))),
        _numbers(rng, m, n) if rng.random() < 0.5 else None,
        _numbers(rng, m, n) if measures else None,
        numbers=not groups or bool(rng.random() < 0.5),
        groups=groups,
        tensor_scale=float(rng.choice([1, 0.3, 0.01, 7, 2.0**-100, 2.0**100])),
        shared=groups and bool(rng.random() < 0.5),
        weight_masks=rng.choice(_MASKS, -(-n // 32) * 2) if refine else None,
        threshold=float(rng.choice([0, 0.01, 1, 100, -1, 1e30, 1e-40])),
        begin=bool(rng.random() < 0.6),
        report=observe or bool(rng.random() < 0.5),
        observe=observe,
    )


def _usable(config: AcceleratorConfig, post: Post | None, mode: Mode | None) -> bool:
    """Return whether groups can be activations in a mode, None for any."""
    if post is None or not post.groups:
        return False
    refines = config.refinement != "none" and mode in (Mode.AUTOFP6, None)
    shares = config.scaling == "pair" and mode in (Mode.AUTOFP2, None)
    return (post.weight_masks is not None or not refines) and (post.shared or not shares)


def random_products(rng: np.random.Generator, config: AcceleratorConfig, count: int, step: Step | None) -> list[Gemm]:
    """Draw a queue: raw products and such with a post block, in modes of their own or the policy's, some on groups of others."""
    modes = [mode for mode in Mode if mode != Mode.AUTOFP6 or config.refinement != "none"]
    products: list[Gemm] = []
    for _ in range(count):
        m, n, kv = (int(rng.integers(1, rng.choice(most))) for most in ((3, 12), (5, 40, 100), (3, 12)))
        mode = modes[int(rng.integers(len(modes)))]
        policy = bool(rng.random() < (0.3 if step is not None else 0.05))
        plain = rng.random() < 0.2 and not policy
        product = random_gemm(rng, config, m, n, kv, mode, "raw" if plain and rng.random() < 0.5 else "fp32")
        fence = bool(rng.random() < 0.2)
        if not plain:
            scale = float(rng.choice([1 / 64, 1, -1e-3, 2.0**60, 2.0**100, 2.0**-120, 0]))
            product = dataclasses.replace(product, scale=scale, tiles=None, policy=policy)
        sources = [
            i
            for i, source in enumerate(products)
            if _usable(config, source.post, None if policy else mode)
            and _outputs(source) <= config.lanes * config.activation_depth
        ]
        if not plain and sources and rng.random() < 0.4:
            source = int(rng.choice(sources))
            m, length = _rows(products, source), _outputs(products[source])
            w = random_operands(rng, config, n, -(-length // config.lanes), (0x28, 0x60), 2, 0.3)
            product = dataclasses.replace(product, a=GroupsOf(source), w=w)
            fence = True
        if not plain and rng.random() < 0.85:
            product = dataclasses.replace(product, post=random_post(rng, m, n, observe=bool(rng.random() < 0.4)))
        products.append(dataclasses.replace(product, fence=fence))
    return products


def _outputs(product: Gemm) -> int:
    """Return the outputs of a row."""
    return len((product.w.base if isinstance(product.w, Refined) else product.w).codes)


def _rows(products: Sequence[Gemm], number: int) -> int:
    """Return the rows of a product's output."""
    a = products[number].a
    if isinstance(a, GroupsOf):
        return _rows(products, a.product)
    return len((a.base if isinstance(a, Refined) else a).codes)


def random_step(rng: np.random.Generator, config: AcceleratorConfig) -> Step | None:
    """Draw a step whose rules move soon, or none."""
    if rng.random() < 0.2:
        return None
    policy = PolicyConfig(
        levels=(2, 4, 6) if config.refinement != "none" else (2, 4),
        **{name: int(rng.integers(1, 4)) for name in ("n_p", "alpha", "beta", "first_samples")},
        sigma_factor=float(rng.choice([0.5, 1, 3])),
    )
    if rng.random() < 0.5:
        return Step("prefill", None, policy)
    return Step("decode", float(rng.random()), policy)


def _changed(rng: np.random.Generator, octets: bytes) -> bytes:
    """Flip a bit, or put another word in place of one."""
    number = int.from_bytes(octets, "little")
    if rng.random() < 0.5:
        number ^= 1 << int(rng.integers(8 * len(octets)))
    else:
        place = 32 * int(rng.integers(len(octets) // 4))
        number ^= (number >> place & 0xFFFFFFFF ^ int(rng.choice(_WORDS))) << place
    return number.to_bytes(len(octets), "little")


def _fields(block: bytes) -> dict[str, int]:
    number = int.from_bytes(block, "little")
    return {member.name: number >> member.position & (1 << member.width) - 1 for member in POST.members}


def _with(block: bytes, **values: int) -> bytes:
    number = int.from_bytes(block, "little")
    for member in POST.members:
        if member.name in values:
            mask = (1 << member.width) - 1 << member.position
            number = number & ~mask | values[member.name] << member.position
    return number.to_bytes(len(block), "little")


def _areas(
    config: AcceleratorConfig, descriptor: Descriptor, output: Output, block: bytes | None
) -> list[tuple[str, int, int, int, int]]:
    """Return what is surely accessed: name, address, stride, rows and bytes of a row."""
    m, n, k = descriptor.m, descriptor.n, descriptor.k
    a, w = descriptor.a, descriptor.w
    pairs = -(-n // 32)
    areas = [
        ("a.codes", a.codes, a.codes_stride, m, k // 2),
        ("a.scales", a.scales, a.scales_stride, m, k // 16),
        ("w.codes", w.codes, w.codes_stride, n, k // 2),
        ("w.scales", w.scales, w.scales_stride, n, k // 16),
    ]
    if output.plain:
        areas.append(("out", output.address, output.stride, m, n * output_bytes(output.mode, output.format)))
    if output.groups is not None:
        groups = output.groups
        areas += [
            ("codes", groups.codes, groups.codes_stride, m, 16 * pairs),
            ("scales", groups.scales, groups.scales_stride, m, 2 * pairs),
        ]
        if output.refined:
            areas.append(("masks", groups.masks, groups.masks_stride, m, pairs))
    if block is not None:
        fields = _fields(block)
        areas.append(("block", descriptor.post or 0, 0, 1, POST_BYTES))
        for flag, name in (("adds", "residual"), ("measure", "previous")):
            if fields[flag]:
                areas.append((name, fields[name], fields[f"{name}_stride"], m, 4 * n))
        if fields["refine"]:
            areas.append(("next_mask", fields["next_mask"], 0, 1, pairs))
    return areas


def _access(name: str) -> str:
    """Return how the codes of an array's accesses begin."""
    if name == "block":
        return "POST"
    return "WRITE" if name in ("out", *POST_ARRAYS[:4]) else "READ"


def random_fault(
    rng: np.random.Generator,
    config: AcceleratorConfig,
    descriptor: Descriptor,
    output: Output,
    block: bytes | None,
    precisions: Sequence[int | None],
    shared: bool,
) -> Fault | None:
    """Draw what is wrong with a product: its descriptor, its block, an answer of the bus, or a place beyond the address space.

    ``precisions`` are those that the policy unit may have; activations may be ``shared`` with other products. None if nothing was found whose code is known.
    """
    good = descriptor.pack()
    kind = int(rng.integers(4))
    if kind == 0 or (kind == 1 and block is not None):
        for _ in range(ATTEMPTS):
            changed = _changed(rng, good if kind == 0 or block is None else block)
            if kind == 0:
                codes = {check(config, changed, precision) for precision in precisions}
                fault = Fault("descriptor", frozenset(codes), changed)
            else:
                codes = {check_post(config, good, changed, precision) for precision in precisions}
                fault = Fault("block", frozenset(codes), good, changed)
            if ErrorCode.OK not in codes and len(codes) == 1:
                return fault
        return None
    areas = [area for area in _areas(config, descriptor, output, block) if not (shared and area[0].startswith("a."))]
    name, address, stride, rows, size = areas[int(rng.integers(len(areas)))]
    access = _access(name)
    if kind == 2 and size > 16:
        # It begins just before the end of the address space, where there is no memory either.
        either = frozenset(ErrorCode[f"{access}_{how}"] for how in ("BEYOND", "DECERR"))
        last = (1 << config.address_width) - 16
        if name == "block":
            return Fault(f"{name} beyond", either, dataclasses.replace(descriptor, post=last).pack())
        if name == "out":
            return Fault(f"{name} beyond", either, dataclasses.replace(descriptor, out=last).pack())
        if name[1] == ".":
            operand = dataclasses.replace(getattr(descriptor, name[0]), **{name[2:]: last})
            return Fault(f"{name} beyond", either, dataclasses.replace(descriptor, **{name[0]: operand}).pack())
        return Fault(f"{name} beyond", either, good, _with(block or b"", **{name: last}))
    beat = config.data_width // 8
    first = address + stride * int(rng.integers(rows)) + int(rng.integers(size)) & -beat
    response = int(rng.choice([2, 3]))
    code = ErrorCode[f"{access}_{('SLVERR', 'DECERR')[response - 2]}"]
    errors = (ErrorRange(first, first + beat, response, access != "WRITE", access == "WRITE"),)
    return Fault(name, frozenset({code}), good, errors=errors)


def run_queue(accelerator: Accelerator, rng: np.random.Generator, count: int) -> Tally:
    """Run a queue of random products, some of which fail, and compare everything with the model.

    Raises
    ------
    AcceleratorError
        Something differs, or the interrupt did not come in time.
    """
    config = accelerator.config
    step = random_step(rng, config)
    products = random_products(rng, config, count, step)
    image = accelerator.image(rng)
    placed = accelerator.place_all(image, products)
    faults = _draw_faults(rng, config, image, products, placed, step)
    octets = []
    for number, (descriptor, _, _) in enumerate(placed):
        fault = faults.get(number)
        octets.append(descriptor.pack() if fault is None else fault.descriptor)
        if fault is not None and fault.block is not None:
            image.write(descriptor.post or 0, fault.block)
    errors = tuple(error for fault in faults.values() for error in fault.errors)
    timing = dataclasses.replace(random_timing(rng), errors=errors)
    found = [tiles for _, _, tiles in placed]
    run, records, cycles = accelerator.play(
        image, octets, [output for _, output, _ in placed], cycle_limit(found, timing), timing, step=step
    )
    tally = Tally(products=count, cycles=cycles)
    results = accelerator.results(image, products, placed, records)
    for number, result in enumerate(results):
        fault = faults.get(number)
        if fault is None and result.code != ErrorCode.OK:
            raise AcceleratorError(f"product {number} ended with code {result.code.name}")
        if fault is not None:
            if result.code not in fault.codes:
                codes = " or ".join(sorted(code.name for code in fault.codes))
                raise AcceleratorError(
                    f"product {number} ({fault.name}) ended with code {result.code.name}, not {codes}"
                )
            tally.codes[result.code.name] += 1
            continue
        post = products[number].post
        kind = "plain" if post is None else "+".join(n for n in ("numbers", "groups") if getattr(post, n))
        tally.kinds[f"{Mode(result.mode or 0).name} {kind}{' by policy' * products[number].policy}"] += 1
    tally.outputs = verify(config, products, Batch(results, cycles, run.read_beats, run.write_beats), step, faults)
    return tally


def _draw_faults(
    rng: np.random.Generator,
    config: AcceleratorConfig,
    image: Image,
    products: Sequence[Gemm],
    placed: Sequence[tuple[Descriptor, Output, Any]],
    step: Step | None,
) -> dict[int, Fault]:
    """Draw faults of products whose groups nobody reads; without a step those that wait for its mode are faults themselves."""
    sources = {product.a.product for product in products if isinstance(product.a, GroupsOf)}
    share = float(rng.choice([0, 0.15, 0.5]))
    precisions = (None,) if step is None else step.config.levels
    faults: dict[int, Fault] = {}
    for number, (descriptor, output, _) in enumerate(placed):
        if step is None and descriptor.policy:
            faults[number] = Fault("no step", frozenset({ErrorCode.POLICY}), descriptor.pack())
        elif number not in sources and rng.random() < share:
            block = None if descriptor.post is None else image.read(descriptor.post, POST_BYTES)
            shared = isinstance(products[number].a, GroupsOf)
            fault = random_fault(rng, config, descriptor, output, block, precisions, shared)
            if fault is not None:
                faults[number] = fault
    # What reads the groups of a product without a mode reads nothing that is known.
    for number, product in enumerate(products):
        if isinstance(product.a, GroupsOf) and product.a.product in faults and number not in faults:
            wrong = dataclasses.replace(placed[number][0], m=0).pack()
            faults[number] = Fault("no rows", frozenset({ErrorCode.SIZE_ZERO}), wrong)
    return faults


def campaign(
    count: int, seed: int, simulator: str, chosen: Sequence[int], total: Tally, say: Callable[[str], None]
) -> None:
    """Run so many products in queues, on each chosen configuration in turn, and add up what was run.

    Raises
    ------
    AcceleratorError
        Something differs; the message has the number of the queue, which with the seed gives it back.
    """
    accelerators: dict[int, Accelerator] = {}
    started = time.monotonic()
    for number in range(-(-count // TOGETHER)):
        which = chosen[number % len(chosen)]
        if which not in accelerators:
            accelerators[which] = Accelerator(simulator, memory=SMALL_MEMORY, **CONFIGURATIONS[which])
        rng = np.random.default_rng((seed, number, which))
        try:
            total.add(run_queue(accelerators[which], rng, min(TOGETHER, count - total.products)))
        except AcceleratorError as error:
            raise AcceleratorError(f"seed {seed}, queue {number}, configuration {which}: {error}") from error
        failed = sum(total.codes.values())
        say(
            f"{total.products:>7} products, {failed:>6} failed as they must, {total.outputs:>9} outputs, "
            f"{total.cycles:>10} cycles, {time.monotonic() - started:7.1f} s"
        )


def lines(total: Tally) -> Iterator[str]:
    """Yield a table of how products ended."""
    for name, counts in (("ended with", total.codes), ("ran as", total.kinds)):
        for key in sorted(counts):
            yield f"{name:10} {key:36} {counts[key]:>7}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if all is as the model says, 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.post_campaign",
        description="Random products with post-processing and policy on the simulated accelerator, some of which fail, compared with the "
        "model bit for bit.",
    )
    add = parser.add_argument
    add("products", type=int, metavar="N", help="products to run")
    add("--seed", type=int, default=1, help="seed of everything (default: 1)")
    add(
        "--configurations",
        type=int,
        nargs="+",
        metavar="C",
        default=list(range(len(CONFIGURATIONS))),
        help=f"which of the {len(CONFIGURATIONS)}, from 0 on (default: all)",
    )
    add("--simulator", choices=("verilator", "icarus"), default="verilator")
    add("--json", type=Path, metavar="FILE", help="write what was run as JSON as well")
    options = parser.parse_args(arguments)
    try:
        if options.products < 1:
            raise ValueError(f"N must be at least 1, not {options.products}")
        if options.seed < 0:
            raise ValueError(f"--seed must not be negative, not {options.seed}")
        for which in options.configurations:
            if not 0 <= which < len(CONFIGURATIONS):
                raise ValueError(f"--configurations must be from 0 to {len(CONFIGURATIONS) - 1}, not {which}")
        if options.json is not None and not options.json.parent.is_dir():
            raise ValueError(f"--json must be in a folder that exists, not {options.json}")
    except ValueError as error:
        print(f"sim.post_campaign: {error}", file=sys.stderr)
        return 2
    print(f"seed {options.seed}", flush=True)
    total = Tally()
    try:
        campaign(
            options.products,
            options.seed,
            options.simulator,
            options.configurations,
            total,
            lambda line: print(line, flush=True),
        )
        print(*lines(total), sep="\n")
        print(f"{total.products} products, {total.outputs} outputs, all as the model says")
        if options.json is not None:
            table = {"seed": options.seed, "configurations": options.configurations, **vars(total)}
            options.json.write_text(json.dumps(table, indent=1, sort_keys=True))
    except (AcceleratorError, SimulationError, OSError) as error:
        print(f"sim.post_campaign: {error}", file=sys.stderr)
        return 1
    return 0 if total.outputs else 1


if __name__ == "__main__":
    sys.exit(main())
