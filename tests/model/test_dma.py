"""Bursts, words and beats of DMA requests, against definitions byte by byte."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.dma import MAX_BYTES, Burst, DmaConfig, bursts, refused, words, write_beats

configs = st.builds(
    DmaConfig,
    data_width=st.sampled_from([32, 64, 128, 256, 512, 1024]),
    address_width=st.integers(13, 64),
    max_burst=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
)


@st.composite
def requests(draw, longest=20_000):
    config = draw(configs)
    space = 1 << config.address_width
    size = draw(st.integers(1, min(longest, space)))
    page = draw(st.integers(0, (space - size) >> 12)) << 12
    address = draw(st.one_of(st.integers(0, space - size), st.integers(page - 70, page + 70)))
    return config, min(max(address, 0), space - size), size


@given(requests())
@settings(max_examples=300, deadline=None)
def test_bursts_cover_the_beats_of_a_request_once_in_order_and_keep_the_rules(request):
    config, address, size = request
    width = config.data_width // 8
    found = bursts(config, address, size)
    covered = [burst.address + width * n for burst in found for n in range(burst.beats)]
    assert covered == list(range(address - address % width, address + size, width))
    for burst in found:
        assert 1 <= burst.beats <= config.max_burst <= 256
        assert burst.address // 4096 == (burst.address + burst.beats * width - 1) // 4096
    # No burst could have taken the next one's beats, but for the end of a block.
    for one, after in itertools.pairwise(found):
        assert one.address + one.beats * width == after.address
        assert after.address % min(config.max_burst * width, 4096) == 0


def test_a_long_request_is_covered_too():
    config = DmaConfig(data_width=32, max_burst=256)
    found = bursts(config, 3, MAX_BYTES)
    assert found[0] == Burst(0, 256)
    assert found[-1] == Burst(MAX_BYTES, 1)
    assert sum(burst.beats for burst in found) == MAX_BYTES // 4 + 1


@given(requests(longest=600), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_beats_write_exactly_the_bytes_of_a_request(request, random):
    config, address, size = request
    data = random.randbytes(size)
    width = config.data_width // 8
    beats = list(write_beats(config, address, data))
    written = {}
    at = address - address % width
    for beat in beats:
        for lane in range(width):
            byte = beat.data >> 8 * lane & 0xFF
            if beat.strobe >> lane & 1:
                written[at + lane] = byte
            else:
                assert byte == 0
        at += width
    assert written == {address + n: byte for n, byte in enumerate(data)}
    ends = [n for n, beat in enumerate(beats, 1) if beat.last]
    lengths = [burst.beats for burst in bursts(config, address, size)]
    assert ends == [sum(lengths[:n]) for n in range(1, len(lengths) + 1)]


def test_words_are_little_endian_with_zeros_behind_the_last_byte():
    config = DmaConfig(data_width=64)
    assert words(config, bytes(range(1, 12))) == [0x0807060504030201, 0x0B0A09]
    assert words(config, bytes(8)) == [0]


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [
        (0, 0, True),
        (0, 1, False),
        (0, MAX_BYTES, False),
        (0, MAX_BYTES + 1, True),
        ((1 << 40) - 5, 5, False),
        ((1 << 40) - 5, 6, True),
    ],
)
def test_requests_outside_the_limits_are_refused_and_have_no_bursts(address, size, expected):
    assert refused(DmaConfig(), address, size) is expected
    assert bool(bursts(DmaConfig(), address, size)) is not expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"data_width": 16}, "data_width must be a power of two from 32 to 1024, not 16"),
        ({"data_width": 96}, "data_width must be a power of two from 32 to 1024, not 96"),
        ({"data_width": 2048}, "data_width must be a power of two from 32 to 1024, not 2048"),
        ({"address_width": 12}, "address_width must be from 13 to 64, not 12"),
        ({"address_width": 65}, "address_width must be from 13 to 64, not 65"),
        ({"id_width": 0}, "id_width must be from 1 to 32, not 0"),
        ({"max_burst": 24}, "max_burst must be a power of two from 1 to 256, not 24"),
        ({"max_burst": 512}, "max_burst must be a power of two from 1 to 256, not 512"),
        ({"outstanding": 0}, "outstanding must be from 1 to 64, not 0"),
    ],
)
def test_wrong_values_are_named(parameters, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        DmaConfig(**parameters)


@pytest.mark.parametrize("value", [True, 4.0, "4", None])
def test_wrong_kinds_are_named(value):
    with pytest.raises(TypeError, match=r"^outstanding must be an integer, not "):
        DmaConfig(outstanding=value)
