"""Products with post-processing on the simulated accelerator: numbers, groups and reports, chains, the policy in the loop, and all that can go wrong."""

import dataclasses
import re
import struct

import numpy as np
import pytest

import model.post_output
from model import autofp6, block_scaled, signals
from model.accelerator import POST_ARRAYS, AcceleratorConfig, ErrorCode, Event, Mode, check, check_post, registers_of
from model.activation import Function
from model.llm import Llama, load
from model.policy import PolicyConfig
from model.sample_text import TEXT
from sim.axi_memory import Command, ErrorRange, Timing
from sim.driver import Accelerator, _step_words
from sim.expected import models, verify
from sim.product import AcceleratorError, Batch, Gemm, GroupsOf, Post, Step
from sim.random_products import CAMPAIGN, SMALL_MEMORY, random_gemm, random_timing

PARAMETERS = {**CAMPAIGN[0], "ppu": True}
MASKS = np.array([0, 0, 0, 1, 2, 4, 8, 3, 5, 15], np.uint8)


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(memory=SMALL_MEMORY, **PARAMETERS)


def random_post(rng, m, n):
    """Draw what is done with M × N outputs."""

    def numbers():
        return rng.standard_normal((m, n)).astype(np.float32) * np.float32(rng.choice([1, 30]))

    groups = bool(rng.random() < 0.75)
    refine = groups and rng.random() < 0.6
    return Post(
        Function(int(rng.integers(4))),
        numbers() if rng.random() < 0.5 else None,
        numbers() if rng.random() < 0.5 else None,
        numbers=not groups or bool(rng.random() < 0.5),
        groups=groups,
        tensor_scale=float(rng.choice([1, 0.3, 0.01, 7])),
        shared=groups and bool(rng.random() < 0.3),
        weight_masks=rng.choice(MASKS, -(-n // 32) * 2) if refine else None,
        threshold=float(rng.choice([0, 0.01, 1, 100])),
        begin=bool(rng.random() < 0.6),
        report=bool(rng.random() < 0.6),
    )


def random_product(rng, config, number):
    m, n, kv = (int(rng.integers(1, rng.choice(most))) for most in ((4, 20), (5, 40, 150), (3, 20)))
    product = random_gemm(rng, config, m, n, kv, Mode(number % 3), "fp32")
    if rng.random() < 0.25:
        return product
    scale = float(rng.choice([1 / 64, 1, 1e-3, 2.0**60]))
    return dataclasses.replace(product, scale=scale, tiles=None, post=random_post(rng, m, n))


def test_random_products_are_those_of_the_model(accelerator, seed):
    config, seen, status = accelerator.config, set(), 0
    for number in range(8):
        rng = np.random.default_rng((seed, number))
        products = [random_product(rng, config, i) for i in range(12)]
        timing = random_timing(rng) if number else Timing()
        batch = accelerator.run(products, rng=rng, timing=timing)
        assert verify(config, products, batch) > 1000
        for product, result in zip(products, batch, strict=True):
            post = product.post
            status |= result.status
            if post is not None:
                seen.add((product.mode, post.groups, post.weight_masks is not None, post.shared))
                seen |= {post.function, (post.numbers, post.report), (post.residual is None, post.previous is None)}
    assert set(Function) <= seen
    assert {(mode, True, True, False) for mode in Mode} <= seen
    assert {(numbers, report) for numbers in (False, True) for report in (False, True)} <= seen
    assert status & 32


def chain(rng, mode, fence=True, **changes):
    """Two products: the groups of the first are the activations of the second."""
    m, n, k, last = 9, 70, 96, 40
    x, w, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k), (last, n)))
    masks = rng.choice(np.array([0, 1, 2, 4, 8, 3], np.uint8), 6)
    post = Post(tensor_scale=0.01, shared=True, weight_masks=masks, threshold=0.05)
    first = Gemm(block_scaled.quantize(x), block_scaled.quantize(w), Mode.NVFP4, "fp32", post=post)
    second = Gemm(GroupsOf(0), block_scaled.quantize(v), mode, "fp32", fence=fence)
    return [first, dataclasses.replace(second, **changes)], x @ w.T @ v.T


@pytest.mark.parametrize("mode", Mode)
def test_the_groups_of_a_product_are_the_activations_of_the_next(mode, accelerator, seed):
    rng = np.random.default_rng(seed)
    products, exact = chain(rng, mode)
    batch = accelerator.run(products, rng=rng, timing=Timing(10, 70, 60))
    assert verify(accelerator.config, products, batch) == 9 * 96 + 9 * 40
    error = np.abs(batch[1].output - exact).mean() / np.abs(exact).mean()
    assert error < {Mode.AUTOFP2: 0.6, Mode.NVFP4: 0.25, Mode.AUTOFP6: 0.25}[mode]


LAYERS = 12


def layers(rng):
    """Layers that change what they are added to more and less; all but the first run as the policy says."""
    before = rng.standard_normal((7, 64)).astype(np.float32)
    products = []
    for layer in range(LAYERS):
        x, w = rng.standard_normal((7, 96)), rng.standard_normal((64, 96)) * 0.01 * (1 + layer % 5)
        post = Post(residual=before, previous=before, numbers=True, groups=False, report=True, observe=True)
        a, b = (block_scaled.quantize(tensor.astype(np.float32), shared_groups=2) for tensor in (x, w))
        products.append(Gemm(a, b, Mode.NVFP4, "fp32", post=post, policy=layer > 0))
    return products


STEPS = {
    "prefill": (Step(config=PolicyConfig(sigma_factor=1.0)), {Mode.AUTOFP6, Mode.NVFP4}),
    "decode, high entropy": (Step("decode", 0.5), {Mode.NVFP4, Mode.AUTOFP6}),
    "decode, low entropy": (Step("decode", 0.01), {Mode.NVFP4, Mode.AUTOFP2}),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_policy_unit_picks_the_modes_of_a_step(name, accelerator):
    step, modes = STEPS[name]
    rng = np.random.default_rng(5)
    products = layers(rng)
    batch = accelerator.run(products, timing=Timing(3, 3, 20), rng=rng, step=step)
    assert verify(accelerator.config, products, batch, step) == LAYERS * 7 * 64
    assert {result.mode for result in batch} == modes


def test_without_a_step_there_is_no_mode_to_pick(accelerator):
    products = layers(np.random.default_rng(5))[:3]
    batch = accelerator.run([*products, dataclasses.replace(products[0], post=None)], check=False)
    assert [result.code for result in batch] == [0, ErrorCode.POLICY, ErrorCode.POLICY, 0]
    assert [result.activity > 0 for result in batch] == [True, False, False, False]
    with pytest.raises(AcceleratorError, match="product 1 ended with code 11, POLICY"):
        accelerator.run(products)


@pytest.mark.parametrize("mode", Mode)
def test_the_mode_of_a_descriptor_counts_for_nothing_if_the_policy_unit_picks_one(mode, accelerator, seed):
    """Also where its tiles fit the banks only in the mode that is picked, and there is a post block."""
    rng = np.random.default_rng(seed)
    post = Post(numbers=True, report=True)
    plain = random_gemm(rng, accelerator.config, 5, 40, 3, Mode.NVFP4, "fp32")
    product = dataclasses.replace(plain, tiles=(1, 20, 1), scale=1e-3, post=post, policy=True)
    image = accelerator.image(rng)
    placed = [accelerator.place(image, product)]
    descriptor, output, _ = placed[0]
    changed = dataclasses.replace(descriptor, mode=mode)
    assert check(accelerator.config, changed.pack(), 2) == ErrorCode.TILE
    step = Step("decode", 0.5)
    run, records, cycles = accelerator.play(image, [changed], [output], 100_000, Timing(5, 5, 40), step=step)
    batch = Batch(accelerator.results(image, [product], placed, records), cycles, run.read_beats, run.write_beats)
    assert batch[0].code == ErrorCode.OK
    assert verify(accelerator.config, [product], batch, step) == 5 * 40 + 5 * 64


def whole_post(rng, m, n):
    """Everything at once."""
    numbers = [rng.standard_normal((m, n)).astype(np.float32) for _ in range(2)]
    masks = rng.choice(np.array([0, 1, 2], np.uint8), -(-n // 32) * 2)
    return Post(Function.SILU, *numbers, True, True, 0.1, weight_masks=masks, report=True, observe=True)


def three(accelerator, rng, image):
    """Place three products, the one in the middle with everything; returns products, and what `place` gives."""
    products = []
    for number in range(3):
        post = whole_post(rng, 9, 70) if number == 1 else None
        plain = dataclasses.replace(random_gemm(rng, accelerator.config, 9, 70, 3, Mode.NVFP4, "fp32"), scale=1e-3)
        products.append(dataclasses.replace(plain, tiles=None, post=post))
    return products, [accelerator.place(image, product) for product in products]


def outcome(accelerator, image, products, placed, timing, descriptors=None):
    """Run them; the first and the last must be right. Returns the record of the one in the middle."""
    given, outputs, found = zip(*placed, strict=True)
    _, records, _ = accelerator.play(image, descriptors or given, outputs, 200_000, timing)
    correct = list(models(accelerator.config, products, found))
    for number in (0, 2):
        assert (records[number].code, records[number].number) == (ErrorCode.OK, number)
        assert (image.read_output(outputs[number]) == correct[number].output).all()
        assert (records[number].activity, records[number].energy) == (0, 0)
    return records[1]


def word(index, value):
    def change(octets):
        return octets[: 4 * index] + struct.pack("<I", value) + octets[4 * index + 4 :]

    return change


FAULTY = {
    "function": (word(0, 0x104), ErrorCode.POST_RESERVED),
    "flag": (word(0, 0x20200), ErrorCode.POST_RESERVED),
    "spare word": (word(3, 1), ErrorCode.POST_RESERVED),
    "last word": (word(31, 1 << 31), ErrorCode.POST_RESERVED),
    "nothing": (word(0, 0x100), ErrorCode.POST_FLAGS),
    "refine without groups": (word(0, 0x1200), ErrorCode.POST_FLAGS),
    "observe without report": (word(0, 0x12200), ErrorCode.POST_FLAGS),
    "group_scale": (word(1, 0x7F800000), ErrorCode.POST_SCALE),
    "threshold": (word(2, 0x7FC00000), ErrorCode.POST_SCALE),
    "address": (word(8, 8), ErrorCode.POST_ALIGNMENT),
    "next mask": (word(16, 8), ErrorCode.POST_ALIGNMENT),
    "stride": (word(23, 24), ErrorCode.POST_ALIGNMENT),
    "high address": (word(13, 16), ErrorCode.POST_ADDRESS),
    "residual beyond": (lambda o: word(13, 15)(word(12, 0xFFFFFFF0)(o)), ErrorCode.READ_BEYOND),
    "previous beyond": (lambda o: word(15, 15)(word(14, 0xFFFFFFF0)(o)), ErrorCode.READ_BEYOND),
    # Outside the memory, though not beyond the address space.
    "masks outside": (word(9, 8), ErrorCode.WRITE_DECERR),
    "codes outside": (word(5, 8), ErrorCode.WRITE_DECERR),
    "next mask outside": (word(17, 8), ErrorCode.READ_DECERR),
}


@pytest.mark.parametrize("name", FAULTY)
def test_every_bad_block_gives_its_code_and_the_next_product_runs(name, accelerator, seed):
    change, code = FAULTY[name]
    rng = np.random.default_rng(seed)
    image = accelerator.image(rng)
    products, placed = three(accelerator, rng, image)
    descriptor = placed[1][0]
    block = change(image.read(descriptor.post, 128))
    image.write(descriptor.post, block)
    if code > ErrorCode.RECORD_DECERR:
        assert check_post(accelerator.config, descriptor.pack(), block) == code
    record = outcome(accelerator, image, products, placed, Timing(3, 3, 40))
    assert (record.code, record.activity, record.energy, record.mode) == (code, 0, 0, 0)


def test_bad_descriptors_of_blocks_give_their_codes(accelerator, seed):
    rng = np.random.default_rng(seed)
    cases = {
        ErrorCode.POST_FORMAT: {"format": 0},
        ErrorCode.ALIGNMENT: {"post": 8},
        ErrorCode.ADDRESS: {"post": 1 << 36},
        ErrorCode.POST_BEYOND: {"post": (1 << 36) - 16},
        # Outside the memory, though not beyond the address space.
        ErrorCode.POST_DECERR: {"post": 1 << 35},
        ErrorCode.POST_TILE: {"tile_n": 15},
        ErrorCode.WRITE_BEYOND: {"out": (1 << 36) - 64},
    }
    for code, values in cases.items():
        image = accelerator.image(rng)
        products, placed = three(accelerator, rng, image)
        descriptors = [place[0] for place in placed]
        descriptors[1] = dataclasses.replace(descriptors[1], **values)
        record = outcome(accelerator, image, products, placed, Timing(3, 3, 40), descriptors)
        assert (record.code, record.activity) == (code, 0)


BUS = ("block", "residual", "previous", "next_mask", "out", "codes", "scales", "masks", "offsets")


@pytest.mark.parametrize("array", BUS)
def test_every_error_of_the_bus_gives_its_code_and_the_next_product_runs(array, accelerator, seed):
    rng = np.random.default_rng(seed)
    image = accelerator.image()
    products, placed = three(accelerator, rng, image)
    descriptor, output, _ = placed[1]
    block = struct.unpack("<7Q6I", image.read(descriptor.post + 16, 80))
    places = dict(zip((*POST_ARRAYS, "next_mask"), block[:7], strict=True))
    places |= {"block": descriptor.post + 64, "out": output.address}
    group = "POST" if array == "block" else "READ" if array in ("residual", "previous", "next_mask") else "WRITE"
    for response, name in ((2, "SLVERR"), (3, "DECERR")):
        fresh = accelerator.image()
        fresh.allocate(len(image))
        fresh.update(image.contents)
        # The first beat of the array, or somewhere in its last row.
        stride = dict(zip(POST_ARRAYS, block[7:], strict=True)).get(array, 0)
        target = places[array] + (0 if response == 2 else 8 * stride)
        errors = (ErrorRange(target, target + 16, response, group != "WRITE", group == "WRITE"),)
        record = outcome(accelerator, fresh, products, placed, Timing(9, 9, 40, errors=errors))
        assert (record.code, record.number) == (ErrorCode[f"{group}_{name}"], 1)
        assert (record.activity, record.energy) == (0, 0)


def test_after_errors_a_step_goes_on_without_the_activities_of_failed_products(accelerator, seed):
    """What failed is not observed: the next precision is as if it had not been there."""
    rng = np.random.default_rng(5)
    products = layers(rng)
    step = Step("decode", 0.5)
    broken = dataclasses.replace(products[6], post=dataclasses.replace(products[6].post, tensor_scale=1.0))
    image = accelerator.image()
    kept = [*products[:6], *products[7:]]
    placed = [accelerator.place(image, product) for product in [*products[:6], broken, *products[7:]]]
    descriptors, outputs, found = zip(*placed, strict=True)
    at = descriptors[6].w.codes
    errors = (ErrorRange(at, at + 16, 2, True, False),)
    _, records, _ = accelerator.play(image, descriptors, outputs, 200_000, Timing(errors=errors), step=step)
    assert records[6].code == ErrorCode.READ_SLVERR
    correct = models(accelerator.config, kept, [*found[:6], *found[7:]], step)
    for record, expected in zip([*records[:6], *records[7:]], correct, strict=True):
        assert (record.code, record.mode, record.activity) == (ErrorCode.OK, expected.mode, expected.activity)


@pytest.mark.parametrize("delay", [0, 400, 1100, 2300, 5000])
def test_a_queue_that_is_stopped_and_a_request_that_is_cleared_in_mid_layer_leave_nothing_behind(delay, accelerator):
    """Products that were fetched run on with a policy unit that knows nothing; what comes after begins anew, as the model says."""
    products = layers(np.random.default_rng(5))
    step = Step("decode", 0.5)
    image = accelerator.image()
    placed = accelerator.place_all(image, products)
    queue = image.queue([descriptor for descriptor, _, _ in placed])
    offset = {register.name: register.offset for register in registers_of(accelerator.config).registers}

    def write(name, value):
        return Command.write(offset[name], value)

    begins = [write(name, value) for name, value in _step_words(step, first=True).items()]
    starts = [write("submitted", LAYERS), write("control", 1)]
    commands = [
        write("queue_low", queue & 0xFFFFFFFF),
        write("queue_high", queue >> 32),
        write("queue_length", LAYERS - 1),
        *(*begins, *starts, Command.idle(delay)),
        # A step begins in mid-layer, then the request ends.
        *(begins[-1], write("policy_step", 1 << 31), write("control", 0), Command.idle(5000)),
        *(Command.read(offset["completed"]), Command.read(offset["state"])),
        *(write("submitted", 0), write("control", 2), write("events", 7), write("interrupt", Event.EMPTY)),
        *(*begins, *starts, Command.interrupt(100_000), Command.dump(), Command.read(offset["completed"])),
    ]
    run = accelerator.harness.run(image.contents, commands, Timing(3, 3, 20), accelerator.base)
    completed, busy, again = (event.data for event in run.events if event.operation == 2)
    assert (completed <= LAYERS, busy, again) == (True, 0, LAYERS)
    image.update(run.memory)
    results = accelerator.results(image, products, placed, image.records(queue, LAYERS))
    batch = Batch(results, run.cycles, run.read_beats, run.write_beats)
    assert verify(accelerator.config, products, batch, step) == LAYERS * 7 * 64


@pytest.mark.parametrize("fails", [0, 1])
def test_a_layer_of_which_a_part_failed_reports_nothing_and_is_not_observed(fails, accelerator):
    """Its sums would be too small, or those of the layer before: not even a product that goes well may report them."""
    products = layers(np.random.default_rng(5))[:9]
    step = Step("decode", 0.5, PolicyConfig(first_samples=1, alpha=1, beta=1))
    # Products 3 to 5 are a layer.
    for number in range(3, 6):
        post = dataclasses.replace(products[number].post, begin=number == 3, report=number == 5, observe=number == 5)
        products[number] = dataclasses.replace(products[number], post=post)
    image = accelerator.image()
    placed = accelerator.place_all(image, products)
    descriptors, outputs, found = zip(*placed, strict=True)
    failed = 3 + fails
    at = descriptors[failed].w.codes
    # In the first product before anything is computed, in the second by its descriptor.
    wrong = [dataclasses.replace(d, m=0) if fails and n == failed else d for n, d in enumerate(descriptors)]
    errors = () if fails else (ErrorRange(at, at + 16, 2, True, False),)
    _, records, _ = accelerator.play(image, wrong, outputs, 200_000, Timing(errors=errors), step=step)
    assert records[failed].code == (ErrorCode.SIZE_ZERO if fails else ErrorCode.READ_SLVERR)
    correct = list(models(accelerator.config, products, found, step, {failed}))
    assert [record.activity > 0 for record in records] == [True] * 3 + [False] * 3 + [True] * 3
    for number, (record, expected) in enumerate(zip(records, correct, strict=True)):
        if number != failed:
            assert (record.code, record.mode, record.activity) == (ErrorCode.OK, expected.mode, expected.activity)


@pytest.fixture(scope="module")
def smollm2():
    return load()


TOKENS = 3
CHAINS = {
    "prefill before its spike": (Step(), Mode.AUTOFP6, 0.15),
    "decode without samples": (Step("decode", 0.5), Mode.NVFP4, 0.15),
    # Outliers of the first token share their scale with 31 others, and two digits are few.
    "decode of low change": (Step("decode", 0.01, PolicyConfig(first_samples=1, alpha=1, beta=1)), Mode.AUTOFP2, 1.0),
}


def projections(model, last):
    """Output projections of the first layers, each added to what came in and measured; the last one's sums are the input of gate and up.

    Those run without the norm, whose gain is in their weights and whose factors of the rows are the host's.
    """
    inputs, states = {}, {}

    class Watched(Llama):
        def finished(self, layer, before, after):
            states[layer] = before

    watched = Watched(model.config, model.weights, model.tokenizer)
    tokens = model.tokenizer.encode(TEXT)[:TOKENS]
    watched.hidden(tokens, lambda layer, name, x: inputs.update({(layer, name): x}), layers=last + 1)
    products = []
    for layer in range(last + 1):
        before = states[layer].astype(np.float32)
        a, w = (block_scaled.quantize(x) for x in (inputs[layer, "o"], model.weight(layer, "o")))
        post = Post(residual=before, previous=before, numbers=True, groups=False, report=True, observe=True)
        products.append(Gemm(a, w, Mode.NVFP4, "fp32", post=post))
    exact = states[last] + inputs[last, "o"] @ model.weight(last, "o").T
    folded = (model.weight(last, "gate_up") * model.weights[f"{last}.ffn_norm"]).astype(np.float32)
    weights = block_scaled.quantize(folded)
    chosen = autofp6.select_weights(autofp6.subgroup_errors(folded, weights), 0.2)
    refined = autofp6.refine(folded, weights, chosen)
    scale = float(np.abs(exact).max() / (6 * 448))
    square = float(np.square(exact).mean())
    masks = (chosen.reshape(-1, 4) << np.arange(4)).sum(axis=1).astype(np.uint8)
    post = dataclasses.replace(
        products[-1].post,
        groups=True,
        tensor_scale=scale,
        shared=True,
        weight_masks=masks,
        threshold=4 * 0.003 * square / scale**2,
    )
    products[-1] = dataclasses.replace(products[-1], post=post)
    return [*products, Gemm(GroupsOf(last), refined, Mode.NVFP4, "fp32", policy=True)], exact, folded


@pytest.mark.parametrize("name", CHAINS)
def test_two_projections_of_smollm2_run_without_the_host_and_the_policy_picks_the_second_ones_precision(
    name, accelerator, smollm2
):
    step, mode, most = CHAINS[name]
    products, exact, folded = projections(smollm2, 3)
    batch = accelerator.run(products, timing=Timing(5, 5, 20), step=step)
    assert verify(accelerator.config, products, batch, step) > TOKENS * 3072
    hidden, out = batch[3].output, batch[4].output
    assert np.abs(hidden - exact).mean() < 0.1 * np.abs(exact).mean()
    activity = np.uint32(batch[3].activity).view(np.float32)
    before = products[3].post.previous
    assert activity == pytest.approx(signals.layer_activity(before, hidden), rel=1e-5)
    correct = hidden @ folded.T
    assert np.square(out - correct).sum() < most * np.square(correct).sum()
    assert batch[4].mode == mode


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": "raw"}, "out must be fp32 with post, not 'raw'"),
        (
            {"post": {"tensor_scale": 0.0}},
            "tensor_scale of post must be finite in FP32, and so its reciprocal, not 0.0",
        ),
        ({"post": {"threshold": np.inf}}, "threshold of post must be finite in FP32, and so its reciprocal, not inf"),
        ({"post": {"residual": np.zeros((9, 3), np.float32)}}, "residual of post must have shape (9, 70), not (9, 3)"),
        ({"post": {"previous": np.zeros(3, np.float32)}}, "previous of post must have shape (9, 70), not (3,)"),
        ({"post": {"weight_masks": np.zeros(5, np.uint8)}}, "weight_masks of post must have shape (6,), not (5,)"),
    ],
)
def test_post_processing_that_makes_no_sense_is_refused(change, message, accelerator):
    (first, _), _ = chain(np.random.default_rng(1), Mode.NVFP4)
    if "post" in change:
        change = {"post": dataclasses.replace(first.post, **change["post"])}
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        accelerator.run([dataclasses.replace(first, **change)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fence": False}, "a must be behind a fence if an earlier product writes it"),
        ({"a": GroupsOf(1)}, "a must be the groups of an earlier product, not of 1"),
        ({"out": "raw", "policy": True}, "out must be fp32 with policy, not 'raw'"),
        ({"w": block_scaled.quantize(np.ones((4, 40), np.float32))}, "a and w must have the same number of K-vectors"),
    ],
)
def test_chains_that_make_no_sense_are_refused(change, message, accelerator):
    products, _ = chain(np.random.default_rng(1), Mode.NVFP4, **change)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        accelerator.run(products)


def test_groups_that_are_not_there_are_refused(accelerator):
    (first, second), _ = chain(np.random.default_rng(1), Mode.AUTOFP6)
    plain = dataclasses.replace(first, post=dataclasses.replace(first.post, weight_masks=None))
    with pytest.raises(ValueError, match=r"^a must have refinements for a product in AutoFP6 mode$"):
        accelerator.run([plain, second])
    single = dataclasses.replace(first, post=dataclasses.replace(first.post, shared=False))
    with pytest.raises(ValueError, match=r"^a must have scales of 32 elements for a product in AutoFP2 mode$"):
        accelerator.run([single, dataclasses.replace(second, mode=Mode.AUTOFP2)])
    with pytest.raises(ValueError, match=r"^a must be the groups of an earlier product that writes them$"):
        accelerator.run([dataclasses.replace(first, post=None), second])


def test_accelerators_without_a_unit_refuse_blocks():
    config = AcceleratorConfig()
    assert not config.ppu
    with pytest.raises(ValueError, match=r"^columns must be at most 32 with a post-processing unit, not 33$"):
        AcceleratorConfig(columns=33, ppu=True)
    with pytest.raises(TypeError, match=r"^ppu must be True or False, not 1$"):
        AcceleratorConfig(ppu=1)


WRONG = {
    "groups": ("codes", "has other groups"),
    "masks": ("masks", "has other groups"),
    "numbers": ("numbers", "outputs of 42 differ"),
    "report": ("report", "reports"),
    "status": ("status", "has status"),
}


@pytest.mark.parametrize("name", WRONG)
def test_results_that_are_not_the_models_are_noticed(name, accelerator, seed, monkeypatch):
    field, message = WRONG[name]
    rng = np.random.default_rng(seed)
    product = random_gemm(rng, accelerator.config, 3, 14, 2, Mode.NVFP4, "fp32")
    product = dataclasses.replace(product, scale=1e-3, tiles=None, post=whole_post(rng, 3, 14))
    batch = accelerator.run([product])
    assert verify(accelerator.config, [product], batch) == 42 + 3 * 32
    right = model.post_output.process

    def wrong(*arguments, **named):
        made = right(*arguments, **named)
        value = getattr(made, field)
        if field == "report":
            value = dataclasses.replace(value, energy=value.energy ^ 1)
        elif field == "status":
            value ^= 1
        else:
            value.view(np.uint8).reshape(-1)[5] ^= 1
        return dataclasses.replace(made, **{field: value})

    monkeypatch.setattr(model.post_output, "process", wrong)
    # A mask that is not the model's goes with other offsets.
    with pytest.raises((AcceleratorError, ValueError), match=f"{message}|offsets must be 0 outside"):
        verify(accelerator.config, [product], batch)
