"""Driver of the simulated accelerator: products into memory, descriptors into the queue, results out (docs/driver.md)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from model.accelerator import (
    MAGIC,
    MEANINGS,
    PITCH,
    PPU_REGISTERS,
    RECORD_BYTES,
    RECORD_OFFSET,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Event,
    Format,
    Mode,
    Operand,
    PostBlock,
    Record,
    policy_words,
    registers_of,
)
from model.memory import pack_nibbles
from model.policy import PolicyFormat
from model.tiling import Plan, plan
from model.vmac import GROUP
from sim.axi_memory import BusError, Command, MemoryHarness, Run, Timing
from sim.design import config_of, generated
from sim.expected import scale_of, unit
from sim.image import Image, Output
from sim.product import (
    AcceleratorError,
    Batch,
    Gemm,
    GroupsOf,
    NumbersOf,
    Post,
    Result,
    Step,
    Steps,
    by_place,
    pattern_of,
    processing,
    source_of,
)

__all__ = ["BASE", "MEMORY", "MEMORY_LIMIT", "PATIENCE", "Accelerator", "cycle_limit"]

MEMORY = 1 << 25
"""Bytes of the simulated memory."""


MEMORY_LIMIT = 1 << 28
"""Most bytes of the memory of ``--product``, which grows with the product."""


BASE = 0x8000_0000
"""Address of its first byte."""


PATIENCE = 100_000
"""Cycles that a queue may take beyond four times its estimate."""


_LARGE = 64
"""Most elements that are compiled one by one."""


class Accelerator:
    """Runs products on a simulated accelerator.

    Parameters
    ----------
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    memory : int
        Bytes of memory.
    stalls : int or mapping of str to int
        Chances of stalls, see :class:`sim.axi_memory.Timing`.
    latency : int or (int, int)
        Cycles that reads and writes take longer in memory.
    seed : int
        Of the stalls.
    waves : bool
        Record waveforms.
    **parameters
        Of the block ``accelerator``.

    Attributes
    ----------
    config : AcceleratorConfig
    timing : Timing
        May be replaced between runs.

    Raises
    ------
    ValueError, TypeError
        A parameter is outside its range.
    SimulationError
        The simulator is missing.

    Examples
    --------
    ``Accelerator(rows=2, columns=2).run([Gemm(a, w, Mode.NVFP4)])[0].output`` with ``a`` and ``w`` from :func:`model.block_scaled.quantize`.
    """

    def __init__(
        self,
        simulator: str = "verilator",
        *,
        memory: int = MEMORY,
        stalls: int | dict[str, int] = 0,
        latency: int | tuple[int, int] = 0,
        seed: int = 1,
        waves: bool = False,
        **parameters: Any,
    ) -> None:
        known = [field.name for field in dataclasses.fields(AcceleratorConfig)]
        for name in parameters:
            if name not in known:
                raise TypeError(f"{name} is no parameter; those of the accelerator are {', '.join(known)}")
        self.config: AcceleratorConfig = config_of("accelerator", **parameters)
        read, write = (latency, latency) if isinstance(latency, int) else latency
        self.timing = Timing(read, write, stalls, seed)
        design = generated("accelerator", **parameters)
        # Elements of large arrays are compiled once, which makes the build minutes instead of hours and the run slower.
        large = self.config.rows * self.config.columns > _LARGE and simulator == "verilator" and not waves
        units = ("pe",) if large else ()
        self.harness = MemoryHarness({"accelerator.v": design.verilog}, design.sidecar, simulator, memory, waves, units)
        # Addresses that are too narrow for the usual base leave memory at the bottom.
        self.base = BASE if BASE + memory <= 1 << self.config.address_width else 0

    def image(self, rng: np.random.Generator | None = None) -> Image:
        """Return an empty image of the memory; with ``rng`` it is scattered and filled at random, see :class:`sim.image.Image`."""
        return Image(self.base, max(64, self.config.data_width // 8), rng)

    def place(
        self, image: Image, product: Gemm, earlier: Sequence[Output] = (), scale: float | None = None
    ) -> tuple[Descriptor, Output, Plan]:
        """Place a product's operands and room for its output, and return what describes it.

        Parameters
        ----------
        image : Image
        product : Gemm
        earlier : sequence of Output
            Of the products before it in the queue, whose groups and numbers it may take.
        scale : float, optional
            What results are multiplied by beside the unit of the sums; :attr:`Gemm.tensor_scale` by default.

        Raises
        ------
        ValueError, TypeError
            Operands are not as :meth:`Gemm.check` says, sizes do not fit each other, K does not fit the banks, tiles do not fit a descriptor,
            or the configuration cannot do what is wanted.
        """
        config = self.config
        if (product.post is not None or product.policy) and not config.ppu:
            raise ValueError("post and policy must have a configuration with ppu")
        for name, wanted in (("post", product.post is not None), ("policy", product.policy)):
            if wanted and product.out != "fp32":
                raise ValueError(f"out must be fp32 with {name}, not {product.out!r}")
        product.check(config)
        source = source_of("a", product.a, product, earlier) if isinstance(product.a, GroupsOf) else None
        stored = product
        if product.policy and config.refinement != "none":
            # All that any mode reads.
            stored = dataclasses.replace(product, mode=Mode.AUTOFP6)
        if isinstance(product.a, GroupsOf):
            self._check_source(product, source)
            a, m, kv = None, source.m if source else 0, -(-source.n // config.lanes) if source else 0
            w = stored.weights(config.lanes)
        else:
            a, w = stored.stored(config.lanes)
            m, kv = a.codes.shape[:2]
        n = len(w.codes)
        if w.codes.shape[1] != kv:
            raise ValueError(f"a and w must have the same number of K-vectors, not {kv} and {w.codes.shape[1]}")
        for name, operand in (("a", a), ("w", w)):
            if operand is not None and not len(operand.codes):
                raise ValueError(f"{name} must have at least one row, not shape {operand.codes.shape}")
        if product.out not in ("raw", "fp32"):
            raise ValueError(f"out must be raw or fp32, not {product.out!r}")
        mode, kind = Mode(product.mode), Format.RAW if product.out == "raw" else Format.FP32
        if mode == Mode.AUTOFP6 and config.refinement == "none":
            raise ValueError("mode must be one that the configuration has, not AUTOFP6")
        post, anything = product.post, product.policy
        found = plan(config, mode, m, n, kv * config.lanes, any_mode=anything, post=processing(post, None))
        if product.tiles is not None:
            if not (
                isinstance(product.tiles, Sequence)
                and len(product.tiles) == 3
                and all(isinstance(size, int | np.integer) for size in product.tiles)
            ):
                raise ValueError(f"tiles must be three integers, not {product.tiles}")
            # What a descriptor can say, the hardware checks.
            for name, size in zip(("tile_m", "tile_n", "segment"), product.tiles, strict=True):
                if not 0 <= size <= 0xFFFF:
                    raise ValueError(f"{name} of tiles must be from 0 to 65535, not {size}")
            tile_m, tile_n, segment = product.tiles
            found = dataclasses.replace(found, tile_m=tile_m, tile_n=tile_n, segment=segment)
        factor = product.tensor_scale if scale is None else scale
        usual, low = (pattern_of(factor * unit(config, m)) for m in (Mode.NVFP4 if anything else mode, Mode.AUTOFP2))
        for bits in (usual, low) if anything else (usual,):
            if kind == Format.FP32 and bits >> 23 & 0xFF == 0xFF:
                raise ValueError(f"scale must be finite in FP32 with the unit of the sums, not {factor}")
        refined = mode == Mode.AUTOFP6 or (anything and config.refinement != "none")
        a_place = image.store_operand(a, refined) if a is not None else source.groups if source else Operand(0, 0)
        descriptor = Descriptor(
            Mode.NVFP4 if anything else mode,
            kind,
            *(m, n, kv * config.lanes, found.tile_m, found.tile_n, found.segment),
            a_place or Operand(0, 0),
            image.store_operand(w, refined),
            *(0, 0),
            usual if kind == Format.FP32 else 0,
            product.fence,
            policy=anything,
            out_scale_low=low if anything and kind == Format.FP32 else 0,
        )
        if post is None:
            output = image.reserve_output(m, n, mode, kind)
        else:
            output, block = self._place_post(image, product, post, m, n, earlier)
            address = image.allocate(len(block))
            image.write(address, block)
            descriptor = dataclasses.replace(descriptor, post=address)
        return dataclasses.replace(descriptor, out=output.address, out_stride=output.stride), output, found

    def _check_source(self, product: Gemm, source: Output | None) -> None:
        """Refuse groups that the product cannot read."""
        if source is None or source.groups is None:
            raise ValueError("a must be the groups of an earlier product that writes them")
        refines = product.mode == Mode.AUTOFP6 or (product.policy and self.config.refinement != "none")
        if refines and not source.refined:
            raise ValueError("a must have refinements for a product in AutoFP6 mode")
        if (product.mode == Mode.AUTOFP2 or product.policy) and self.config.scaling == "pair" and not source.shared:
            raise ValueError("a must have scales of 32 elements for a product in AutoFP2 mode")

    def _place_post(
        self, image: Image, product: Gemm, post: Post, m: int, n: int, earlier: Sequence[Output]
    ) -> tuple[Output, bytes]:
        """Place what post-processing reads, and room for what it writes; return where, and the post block."""
        job = post.job(0)
        for name, bits in (("tensor_scale", job.group_scale), ("threshold", job.threshold)):
            if bits >> 23 & 0xFF == 0xFF:
                raise ValueError(
                    f"{name} of post must be finite in FP32, and so its reciprocal, not {getattr(post, name)}"
                )
        output = Output(0, 0, m, n, Mode.NVFP4, Format.FP32)
        if post.numbers:
            output = image.reserve_output(m, n, Mode.NVFP4, Format.FP32)
        places: dict[str, int] = {}
        if post.groups:
            where = image.reserve_groups(m, n, self.config.lanes, job.refine)
            output = dataclasses.replace(output, groups=where, refined=job.refine, shared=job.shared)
            places |= dataclasses.asdict(where)
        output = dataclasses.replace(output, plain=post.numbers)
        for name in ("residual", "previous"):
            numbers = getattr(post, name)
            if isinstance(numbers, NumbersOf):
                made = source_of(name, numbers, product, earlier)
                if not made.plain or made.format != Format.FP32 or (made.m, made.n) != (m, n):
                    raise ValueError(
                        f"{name} must be FP32 numbers of shape {(m, n)}, which product {numbers.product} does not write"
                    )
                places[name], places[f"{name}_stride"] = made.address, made.stride
            elif numbers is not None:
                if numbers.shape != (m, n):
                    raise ValueError(f"{name} of post must have shape {(m, n)}, not {numbers.shape}")
                places[name], places[f"{name}_stride"] = image.store_numbers(numbers)
        if post.weight_masks is not None:
            groups = -(-n // (2 * GROUP)) * 2
            if post.weight_masks.shape != (groups,):
                raise ValueError(f"weight_masks of post must have shape {(groups,)}, not {post.weight_masks.shape}")
            places["next_mask"], _ = image.rows(pack_nibbles(post.weight_masks[None]))
        block = PostBlock(
            function=job.function,
            adds=job.residual,
            numbers=job.numbers,
            groups=job.groups,
            shared=job.shared,
            refine=job.refine,
            measure=job.measure,
            begin=job.begin,
            report=job.report,
            observe=post.observe,
            group_scale=job.group_scale,
            threshold=job.threshold,
            **places,
        )
        return output, block.pack()

    def play(
        self,
        image: Image,
        descriptors: Sequence[Descriptor | bytes],
        outputs: Sequence[Output],
        limit: int,
        timing: Timing | None = None,
        rounds: int = 1,
        step: Steps = None,
    ) -> tuple[Run, list[Record | None], int]:
        """Run a queue once or several times around, wait for the interrupt, and update the image.

        Parameters
        ----------
        image : Image
        descriptors : sequence of Descriptor or bytes
        outputs : sequence of Output
            All that may be written beside records.
        limit : int
            Most cycles until the interrupt; of several steps each.
        timing : Timing, optional
            :attr:`timing` by default.
        rounds : int
            How often the ring is run through; all rounds together have at most 65535 descriptors, as many as can be submitted at once.
        step : Step or mapping of int to Step, optional
            Begins before the queue starts, or each before the product with its number is submitted, when all before have ended.

        Returns
        -------
        run : Run
        records : list of Record or None
            Of every place.
        cycles : int
            From the start to the interrupt.

        Raises
        ------
        ValueError
            No round, or too many, several steps with several rounds, or the memory is too small.
        AcceleratorError
            The interrupt did not come, a register has not the value that it must have, or something else was written.
        """
        most = 0xFFFF // max(len(descriptors), 1)
        if not 1 <= rounds <= most:
            raise ValueError(f"rounds must be from 1 to {most} for {len(descriptors)} descriptors, not {rounds}")
        steps = by_place(step, len(descriptors))
        if len(steps) > 1 and rounds > 1:
            raise ValueError(f"rounds must be 1 with several steps, not {rounds}")
        queue = image.queue(descriptors)
        if len(image) > self.harness.size:
            raise ValueError(f"memory must be at least {len(image)} bytes for these products, not {self.harness.size}")
        count = len(descriptors) * rounds
        offset = {register.name: register.offset for register in registers_of(self.config).registers}
        write, read = Command.write, Command.read
        commands = [
            read(offset["id"]),
            write(offset["queue_low"], queue & 0xFFFFFFFF),
            write(offset["queue_high"], queue >> 32),
            write(offset["queue_length"], len(descriptors) - 1),
            write(offset["interrupt"], Event.EMPTY),
        ]
        quiet = [write(offset["events"], Event.DONE | Event.ERROR | Event.EMPTY), Command.interrupt(100, 0)]
        begins = [0, *(place for place in steps if place)]
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            if begin:
                commands += quiet
            words = _step_words(steps[begin], begin == min(steps)) if begin in steps else {}
            commands += [write(offset[name], word) for name, word in words.items()]
            commands.append(write(offset["submitted"], end))
            if not begin:
                commands.append(write(offset["control"], 1))
            commands.append(Command.interrupt(limit))
        commands += [
            Command.dump(),
            read(offset["completed"]),
            read(offset["state"]),
            read(offset["events"]),
            *quiet,
        ]
        before = image.contents.copy()
        try:
            run = self.harness.run(before, commands, timing or self.timing, self.base)
        except BusError as error:
            raise AcceleratorError(str(error)) from error
        image.update(run.memory)
        reads = [event for event in run.events if event.operation == 2]
        identity, completed, state, _ = (event.data for event in reads)
        if identity != MAGIC or completed != count or state or any(event.response for event in run.events):
            raise AcceleratorError(
                f"registers must have id {MAGIC:#x}, completed {count}, not busy, "
                f"not {identity:#x}, {completed}, state {state}"
            )
        changed = run.memory != before
        for output in outputs:
            changed[image.written(output)] = False
        for place in range(len(descriptors)):
            start = queue - self.base + place * PITCH + RECORD_OFFSET
            changed[start : start + RECORD_BYTES] = False
        if changed.any():
            at = self.base + int(np.argmax(changed))
            raise AcceleratorError(f"{int(changed.sum())} bytes beside the outputs were written, first {at:#x}")
        started = next(event.cycle for event in run.events if (event.operation, event.x) == (1, offset["control"]))
        # The last but one: after it the interrupt falls.
        ended = [event.cycle for event in run.events if event.operation == 3][-2]
        return run, image.records(queue, len(descriptors)), ended - started

    def run(
        self,
        products: Sequence[Gemm],
        *,
        rng: np.random.Generator | None = None,
        timing: Timing | None = None,
        check: bool = True,
        step: Steps = None,
    ) -> Batch:
        """Run products one behind the other from one queue.

        Parameters
        ----------
        products : sequence of Gemm
        rng : numpy.random.Generator, optional
            Scatter the memory, see :meth:`image`.
        timing : Timing, optional
            :attr:`timing` by default.
        check : bool
            Raise if a product ends with an error.
        step : Step or mapping of int to Step, optional
            Of the policy, for products whose mode the policy unit picks: before all products, or each before the product with its number.

        Raises
        ------
        TypeError
            What is given are no products, or a product's operand is no tensor.
        ValueError
            No products, they are not as :meth:`Gemm.check` says, or their sizes do not fit each other, the banks or the memory.
        AcceleratorError
            The hardware failed.
        """
        if isinstance(products, Gemm):
            raise TypeError("products must be a sequence of Gemm, not one: [product]")
        for product in products:
            if not isinstance(product, Gemm):
                raise TypeError(f"products must be a sequence of Gemm, not one with a {type(product).__name__}")
        if not products:
            raise ValueError("products must be at least one")
        image = self.image(rng)
        placed = self.place_all(image, products)
        descriptors, outputs, found = zip(*placed, strict=True)
        timing = timing or self.timing
        run, records, cycles = self.play(image, descriptors, outputs, cycle_limit(found, timing), timing, step=step)
        results = self.results(image, products, placed, records)
        for number, result in enumerate(results):
            if check and result.code != ErrorCode.OK:
                raise AcceleratorError(
                    f"product {number} ended with code {int(result.code)}, {result.code.name}: {MEANINGS[result.code]}"
                )
        return Batch(results, cycles, run.read_beats, run.write_beats)

    def place_all(self, image: Image, products: Sequence[Gemm]) -> list[tuple[Descriptor, Output, Plan]]:
        """Place products of a queue, whose activations may be groups of earlier ones; raises like :meth:`place`."""
        placed: list[tuple[Descriptor, Output, Plan]] = []
        written: list[Output] = []
        for number, product in enumerate(products):
            scale = None
            if isinstance(product.a, GroupsOf) and 0 <= product.a.product < number:
                scale = scale_of(products, product)
            placed.append(self.place(image, product, written, scale))
            written.append(placed[-1][1])
        return placed

    def results(
        self,
        image: Image,
        products: Sequence[Gemm],
        placed: Sequence[tuple[Descriptor, Output, Plan]],
        records: Sequence[Record | None],
    ) -> list[Result]:
        """Read from memory what came of a queue's products.

        Raises
        ------
        AcceleratorError
            A record is missing, or that of another product.
        """
        results = []
        for number, (product, (descriptor, output, tiles), record) in enumerate(
            zip(products, placed, records, strict=True)
        ):
            if record is None:
                raise AcceleratorError(f"product {number} has no record")
            if record.number != number & 0xFFFF:
                raise AcceleratorError(f"product {number} has the record of number {record.number}")
            mode = Mode(record.mode) if self.config.ppu else Mode(descriptor.mode)
            vectors = -(-descriptor.n // 2) if mode == Mode.AUTOFP2 else descriptor.n
            useful = descriptor.m * vectors * (descriptor.k // self.config.lanes)
            empty = np.zeros((descriptor.m, 0), np.float32)
            groups = None
            if product.post is not None and output.groups is not None and record.code == ErrorCode.OK:
                groups = image.read_groups(output, product.post.tensor_scale, self.config.step)
            results.append(
                Result(
                    image.read_output(output) if output.plain else empty,
                    record.code,
                    record.status,
                    record.cycles,
                    useful,
                    tiles,
                    groups,
                    record.activity,
                    record.energy,
                    mode if self.config.ppu else None,
                )
            )
        return results


def cycle_limit(found: Sequence[Plan], timing: Timing) -> int:
    """Return how many cycles a queue of products may take with these latencies and stalls."""
    slow = 256 / (256 - max(timing.chances.values(), default=0))
    estimate = sum(p.cycles + 1000 + 20 * p.tiles * (timing.read_latency + timing.write_latency) for p in found)
    return int(PATIENCE + 4 * slow**2 * estimate)


def _step_words(step: Step, first: bool) -> dict[str, int]:
    """Return the words that begin a step of the policy, by register; a request's first one sets the parameters too."""
    entropy = int((step.entropy or 0) * 2 ** PolicyFormat().fraction_bits)
    register = PPU_REGISTERS["policy_step"]
    begin = register.pack(entropy=entropy, decode=int(step.phase == "decode"), begin=1, clear=int(first))
    return {**(policy_words(step.config) if first else {}), "policy_step": begin}
