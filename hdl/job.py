"""What the loader's parts tell each other of a product: layouts of jobs, chunks, pieces and tokens, and places in memory (docs/accelerator.md)."""

from amaranth.hdl import Cat, Module, Signal, Value
from amaranth.lib import data

from hdl.lib.fp32 import Float
from hdl.tile_engine import tile_layout
from model.accelerator import CHUNK, MAX_ROWS, POST_ARRAYS, AcceleratorConfig
from model.activation import Function
from model.vmac import GROUP, SUBGROUPS

__all__ = [
    "ARRAYS",
    "CHUNKS",
    "PIECES",
    "address_bits",
    "advanced",
    "arrays_of",
    "chunk_fields",
    "chunk_layout",
    "index_bits",
    "job_layout",
    "mask_request_layout",
    "output_layout",
    "piece_layout",
    "place_bits",
    "post_layout",
    "row_bits",
    "token_layout",
    "vector_bytes",
    "word_bits",
]

ARRAYS = ("codes", "scales", "masks", "offsets")
"""Arrays of an operand in memory."""
CHUNKS, PIECES = 8, 8
"""Chunks whose masks are fetched ahead, and chunks that wait for their words."""


def arrays_of(config: AcceleratorConfig) -> tuple[str, ...]:
    """Return the arrays that the configuration reads."""
    return ARRAYS[: 2 if config.refinement == "none" else 4]


def vector_bytes(config: AcceleratorConfig) -> dict[str, int]:
    """Return the bytes of a vector in the arrays that have a fixed size for it."""
    return {"codes": config.lanes // 2, "scales": config.lanes // GROUP, "masks": config.lanes // GROUP // 2}


def word_bits(config: AcceleratorConfig) -> dict[str, int]:
    """Return how much of a bus word can be needed of each array: no more than there is of a chunk."""
    chunk = {name: CHUNK * size for name, size in vector_bytes(config).items()}
    chunk["offsets"] = CHUNK * SUBGROUPS * config.vmac.blocks
    return {name: min(config.data_width, 8 * chunk[name]) for name in arrays_of(config)}


def address_bits(config: AcceleratorConfig) -> int:
    """Return the bits of an address in a bank."""
    return max(config.activation_depth, config.weight_depth).bit_length() - 1


def index_bits(config: AcceleratorConfig) -> int:
    """Return the bits of the number of an element row or a column."""
    return (max(config.rows, config.columns) - 1).bit_length()


def job_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a product that was checked: fields of its descriptor, with what follows from them.

    ``kv`` are K-vectors, ``single``: activations fill more than half a bank, ``post``: there is a post block, ``numbers``: it wants numbers.
    """
    post = {"post": 1, "numbers": 1} if config.ppu else {}
    arrays = arrays_of(config)
    operand = data.StructLayout(
        {**dict.fromkeys(arrays, config.address_width), **{f"{name}_stride": 32 for name in arrays}}
    )
    return data.StructLayout(
        {
            "fp2": 1,
            "refined": 1,
            "fp32": 1,
            "single": 1,
            "m": MAX_ROWS.bit_length(),
            "n": MAX_ROWS.bit_length(),
            "kv": config.max_kv.bit_length(),
            "tile_m": config.max_m.bit_length(),
            "tile_n": config.max_n.bit_length(),
            "segment": config.max_kv.bit_length(),
            "out_scale": 32,
            "a": operand,
            "w": operand,
            "out": config.address_width,
            "out_stride": 32,
            **post,
        }
    )


def output_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of what the output stage is told of a tile, see :class:`hdl.output.OutputStage`; ``beyond``: it has no address.

    With a post-processing unit also: ``post``: its outputs go there, ``first``: it is its panel's first, ``begin`` and ``last``: its product's,
    ``index``: of its first output in a row.
    """
    post = {"post": 1, "first": 1, "begin": 1, "last": 1, "index": MAX_ROWS.bit_length()} if config.ppu else {}
    return data.StructLayout(
        {
            "address": config.address_width,
            "stride": 32,
            "beyond": 1,
            "rows": (config.rows * config.max_m).bit_length(),
            "outputs": (2 * config.columns * config.max_n).bit_length(),
            "fp32": 1,
            "scale": 32,
            **post,
        }
    )


def post_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a post block that was checked, see :class:`model.accelerator.PostBlock`."""
    flags = ("adds", "numbers", "groups", "shared", "refine", "measure", "begin", "report", "observe")
    return data.StructLayout(
        {
            "function": Function,
            **dict.fromkeys(flags, 1),
            "group_scale": Float,
            "threshold": Float,
            **dict.fromkeys((*POST_ARRAYS, "next_mask"), config.address_width),
            **{f"{name}_stride": 32 for name in POST_ARRAYS},
        }
    )


def token_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a token: a segment that is loaded, or a product's end.

    ``starts``: the first segment of a tile; ``entries``: what it fills of a bank of weights; ``frees_activations``: no later one needs its
    activations; ``frees_panel``: nor any of its panel; ``code``: how loading ended; ``since`` and ``descriptor``: when the product began and the
    address of its descriptor.
    """
    return data.StructLayout(
        {
            "end": 1,
            "code": 8,
            "since": 32,
            "descriptor": config.address_width,
            "starts": 1,
            "frees_activations": 1,
            "frees_panel": 1,
            "entries": config.weight_depth.bit_length(),
            "tile": tile_layout(config),
            "output": output_layout(config),
        }
    )


def place_bits(config: AcceleratorConfig) -> int:
    """Return the bits of a place in memory: an address, and above it whether it is beyond the address space."""
    return config.address_width + 1


def advanced(m: Module, name: str, place: Value, amount: Value) -> Value:
    """Return a place so many bytes further on; what is beyond the address space stays there."""
    space = len(place) - 1
    total = Signal(max(space, len(amount)) + 1, name=f"{name}_further")
    m.d.comb += total.eq(place[:space] + amount)
    return Cat(total[:space], place[space] | total[space:].any())


def mask_request_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a request for the masks of a chunk."""
    return data.StructLayout({"place": place_bits(config), "count": CHUNK.bit_length()})


def chunk_fields(config: AcceleratorConfig) -> dict[str, object]:
    """Return the fields that both a chunk and its piece have, see :func:`chunk_layout`."""
    return {
        "zero": 1,
        "refined": 1,
        "weight": 1,
        "odd": 1,
        "ends": 1,
        "index": index_bits(config),
        "line": address_bits(config),
        "step": address_bits(config),
        "count": CHUNK.bit_length(),
    }


def chunk_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a chunk: up to 32 vectors of a row, where they are in memory and where they go.

    ``zero``: they are padding; ``ends``: the segment's last; ``line`` and ``step``: address of the first vector in its bank, and from one to the
    next; ``first``: the row begins; ``resumes``: the row goes on behind an earlier segment, as row ``row`` of its tile.
    """
    refinement = (
        {}
        if config.refinement == "none"
        else {"offsets": place_bits(config), "first": 1, "resumes": 1, "row": row_bits(config)}
    )
    return data.StructLayout(
        {
            **chunk_fields(config),
            "codes": place_bits(config),
            "scales": place_bits(config),
            **refinement,
        }
    )


def piece_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a chunk whose words are on their way; ``octets``: bytes of offsets."""
    octets = {} if config.refinement == "none" else {"octets": (CHUNK * SUBGROUPS * config.vmac.blocks).bit_length()}
    return data.StructLayout({**chunk_fields(config), **octets})


def row_bits(config: AcceleratorConfig) -> int:
    """Return the bits of the number of a row in its tile."""
    return (max(config.rows * config.max_m, config.columns * config.max_n) - 1).bit_length()
