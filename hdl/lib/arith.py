"""Integer sums that synthesis can turn into carry-save trees."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Mux, Value

__all__ = ["gated", "selected", "shallow_sum", "signed_sum_width", "signed_terms", "tree_sum"]


def gated(value: Value, enable: Value) -> Value:
    """Return ``value`` while ``enable`` is set and 0 otherwise, of the same shape."""
    bits = value.as_unsigned() & enable.replicate(len(value))
    return bits.as_signed() if value.shape().signed else bits


def selected(parts: Sequence[Value], index: Value) -> Value:
    """Return ``parts[index]`` by multiplexers, a level for each bit of ``index``; any of them for an index beyond the last.

    Raises
    ------
    ValueError
        ``parts`` is empty.
    """
    level = list(parts)
    if not level:
        raise ValueError("parts must hold at least one value, not 0")
    for bit in range(len(index)):
        if len(level) == 1:
            break
        level = [
            Mux(index[bit], level[i + 1], level[i]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)
        ]
    return level[0]


def tree_sum(terms: Sequence[Value], width: int | None = None) -> Value:
    """Add ``terms`` as a balanced tree, so that n terms of w bits give w + ceil(log2 n) bits.

    With ``width`` every partial sum is cut to that many bits, and the result is signed: right whenever the true sum fits.

    ``sum()`` would be a chain and one bit wider for every term. Synthesis merges the tree into one carry-save compressor.

    Raises
    ------
    ValueError
        ``terms`` is empty.
    """
    level = list(terms)
    if not level:
        raise ValueError("terms must hold at least one value, not 0")
    while len(level) > 1:
        pairs = [a + b for a, b in zip(level[::2], level[1::2], strict=False)]
        if width is not None:
            pairs = [pair[:width].as_signed() if len(pair) > width else pair for pair in pairs]
        level = pairs + level[len(level) & ~1 :]
    return level[0]


def signed_terms(magnitudes: Sequence[Value], signs: Sequence[Value]) -> list[Value]:
    """Turn sign-magnitude numbers into terms whose plain sum is ``Σ (-1)**sign * magnitude``.

    A negative w-bit magnitude m is ``~m + 1 - 2**w``. The inverted bits go in as they are; the ``1 - 2**w`` of all n negative terms
    together is one word, ``{1, ~n, n} + 2**w`` with n padded to w bits, so no term needs sign bits or a carry in the tree.

    Parameters
    ----------
    magnitudes : sequence of Value
        Unsigned, all of one width w.
    signs : sequence of Value
        1 bit each; a set sign on a zero magnitude adds nothing.

    Returns
    -------
    list of Value
        The terms, two more than there are magnitudes; the sum never exceeds the range of the true sum, so it may be cut to that.

    Raises
    ------
    ValueError
        So many terms that their count does not fit w bits, and the word would overlap itself.
    """
    width = len(magnitudes[0])
    count = tree_sum(signs)
    if len(count) > width:
        raise ValueError(f"magnitudes must be at least as wide as the count of signs, {len(count)} bits, not {width}")
    word = Cat(count, Const(0, width - len(count)), ~count, Const(1, 1)).as_signed()
    return [m ^ s.replicate(width) for m, s in zip(magnitudes, signs, strict=True)] + [word, Const(1 << width)]


def shallow_sum(magnitudes: Sequence[Value], signs: Sequence[Value], width: int) -> Value:
    """Return ``Σ (-1)**sign * magnitude`` of sign-magnitude numbers as ``width`` bits, signed, which must hold it; faster and larger than a tree.

    As :func:`signed_terms`, but signs are counted four at a time: a count of all comes later than the products, and all of the tree is behind it.
    Everything is unsigned and modulo ``2**width``, so that synthesis finds one compressor with one adder behind it. Counts go first, because
    Yosys puts first terms into the first adders and they come as early as products.

    Raises
    ------
    ValueError
        Magnitudes are too narrow for a count of four.
    """
    narrow = len(magnitudes[0])
    counts = [tree_sum(signs[i : i + 4]) for i in range(0, len(signs), 4)]
    if len(counts[0]) > narrow:
        raise ValueError(f"magnitudes must be at least as wide as a count, {len(counts[0])} bits, not {narrow}")
    words = [Cat(n, Const(0, narrow - len(n)), ~n)[:width] for n in counts]
    # What the inverted counts are short of is a constant above the first magnitude.
    missing = sum(1 - (1 << len(n)) for n in counts) % (1 << width - narrow)
    first, *others = (m ^ s.replicate(narrow) for m, s in zip(magnitudes, signs, strict=True))
    return tree_sum([*words, Cat(first, Const(missing, width - narrow)), *others])[:width].as_signed()


def signed_sum_width(terms: int, width: int) -> int:
    """Return the bits of ``tree_sum(signed_terms(…))`` for so many magnitudes of ``width`` bits; more than the true sum needs."""
    return len(tree_sum(signed_terms([Const(0, width)] * terms, [Const(0, 1)] * terms)))
