"""Accelerator: configuration, descriptors, error codes and registers (paper, section 6.1 and figure 9; docs/accelerator.md)."""

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

from model.activation import Function
from model.block_scaled import PAD
from model.dma import DmaConfig
from model.pe import OFFSET_BYTES
from model.policy import LEVEL_BITS, PolicyConfig, PolicyFormat, PolicySettings
from model.ppu import PpuConfig
from model.registers import REGISTER_BYTES, Enumerator, Field, Member, Register, RegisterMap, Structure
from model.tile_engine import EngineConfig

__all__ = [
    "ALIGNMENT",
    "CHUNK",
    "DESCRIPTOR",
    "DESCRIPTOR_BYTES",
    "MAX_ROWS",
    "PITCH",
    "POST",
    "POST_ARRAYS",
    "POST_BYTES",
    "PPU_REGISTERS",
    "RECORD",
    "RECORD_OFFSET",
    "REGISTERS",
    "AcceleratorConfig",
    "Descriptor",
    "ErrorCode",
    "Event",
    "Format",
    "Mode",
    "Operand",
    "PostBlock",
    "Record",
    "check",
    "check_post",
    "descriptor_of",
    "mode_of",
    "policy_words",
    "registers_of",
]

PITCH = 256
"""Bytes from a descriptor to the next, and their alignment."""
DESCRIPTOR_BYTES = 192
"""Bytes of a descriptor that the accelerator reads."""
RECORD_OFFSET = 192
"""Where in the same 256 bytes the accelerator writes how it went."""
RECORD_BYTES = 16
ALIGNMENT = 16
"""Of every address and stride, in bytes."""
MAX_ROWS = (1 << 24) - 1
"""Most rows of activations, and of weights."""
CHUNK = 32
"""Most vectors of a row that are requested together."""
MAGIC = 0x4D455541


POST_BYTES = 128
"""Bytes of a post block."""
_POST, _FENCE, _POLICY = 1, 2, 4
"""Bits of the word of flags."""


class Mode(IntEnum):
    """Precision of a product."""

    AUTOFP2 = 0
    NVFP4 = 1
    AUTOFP6 = 2


class Format(IntEnum):
    """Format of results in memory."""

    RAW = 0
    FP32 = 1


class ErrorCode(IntEnum):
    """How a descriptor ended. Of several faults of a descriptor the lowest code is reported; ``BUS_…`` errors come while it runs.

    Names that end in ``BEYOND``, ``SLVERR`` or ``DECERR`` say which access failed, and how: beyond the address space, by SLVERR, or by DECERR.
    """

    OK = 0
    RESERVED = 1
    MODE = 2
    FORMAT = 3
    SCALE = 4
    SIZE_ZERO = 5
    SIZE_LIMIT = 6
    K_MULTIPLE = 7
    TILE = 8
    ALIGNMENT = 9
    ADDRESS = 10
    POLICY = 11
    POST_FORMAT = 12
    DESCRIPTOR_BEYOND = 17
    DESCRIPTOR_SLVERR = 18
    DESCRIPTOR_DECERR = 19
    READ_BEYOND = 21
    READ_SLVERR = 22
    READ_DECERR = 23
    WRITE_BEYOND = 25
    WRITE_SLVERR = 26
    WRITE_DECERR = 27
    RECORD_BEYOND = 29
    RECORD_SLVERR = 30
    RECORD_DECERR = 31
    POST_BEYOND = 33
    POST_SLVERR = 34
    POST_DECERR = 35
    POST_RESERVED = 36
    POST_FLAGS = 37
    POST_SCALE = 38
    POST_TILE = 39
    POST_ALIGNMENT = 40
    POST_ADDRESS = 41


MEANINGS = {
    ErrorCode.OK: "no error",
    ErrorCode.RESERVED: "bits without a meaning are not 0",
    ErrorCode.MODE: "there is no such mode, or no hardware for it",
    ErrorCode.FORMAT: "there is no such output format",
    ErrorCode.SCALE: "out_scale is infinite or not a number, and the output format is FP32",
    ErrorCode.SIZE_ZERO: "m, n or k is 0",
    ErrorCode.SIZE_LIMIT: "m or n is above 2^24 - 1, or k above what sums can hold",
    ErrorCode.K_MULTIPLE: "k is not a multiple of the lanes",
    ErrorCode.TILE: "tile_m, tile_n or segment is 0 or does not fit elements and banks",
    ErrorCode.ALIGNMENT: "an address or stride is not a multiple of 16 bytes",
    ErrorCode.ADDRESS: "an address is beyond the address space",
    ErrorCode.DESCRIPTOR_BEYOND: "the descriptor is beyond the address space",
    ErrorCode.DESCRIPTOR_SLVERR: "reading the descriptor ended with SLVERR",
    ErrorCode.DESCRIPTOR_DECERR: "reading the descriptor ended with DECERR",
    ErrorCode.READ_BEYOND: "an operand reaches beyond the address space",
    ErrorCode.READ_SLVERR: "reading an operand ended with SLVERR",
    ErrorCode.READ_DECERR: "reading an operand ended with DECERR",
    ErrorCode.WRITE_BEYOND: "the output reaches beyond the address space",
    ErrorCode.WRITE_SLVERR: "writing the output ended with SLVERR",
    ErrorCode.WRITE_DECERR: "writing the output ended with DECERR",
    ErrorCode.RECORD_BEYOND: "the record is beyond the address space",
    ErrorCode.RECORD_SLVERR: "writing the record ended with SLVERR",
    ErrorCode.RECORD_DECERR: "writing the record ended with DECERR",
    ErrorCode.POLICY: "the mode is to come from the policy unit, which has begun no step",
    ErrorCode.POST_FORMAT: "there is a post block, and the output format is not FP32",
    ErrorCode.POST_BEYOND: "the post block is beyond the address space",
    ErrorCode.POST_SLVERR: "reading the post block ended with SLVERR",
    ErrorCode.POST_DECERR: "reading the post block ended with DECERR",
    ErrorCode.POST_RESERVED: "bits of the post block without a meaning are not 0, or there is no such function",
    ErrorCode.POST_FLAGS: "the post block wants neither numbers nor groups, or shares or refines without groups, or observes without measure and report",
    ErrorCode.POST_SCALE: "group_scale or threshold of the post block is infinite or not a number",
    ErrorCode.POST_TILE: "groups are wanted, and a tile is neither a multiple of 32 outputs wide nor covers all",
    ErrorCode.POST_ALIGNMENT: "an address or stride of the post block is not a multiple of 16 bytes",
    ErrorCode.POST_ADDRESS: "an address of the post block is beyond the address space",
}
"""What each code says."""


class Event(IntEnum):
    """Bits of the register ``events``."""

    DONE = 1
    ERROR = 2
    EMPTY = 4


@dataclass(frozen=True)
class AcceleratorConfig(EngineConfig):
    """Parameters of the accelerator: those of its tile engine and of its bus.

    By default a panel of activations has two thirds of the global buffer: with 16 × 16 elements, 2 MB in all, as the paper has it.

    Attributes
    ----------
    activation_depth, weight_depth : int
        See :class:`model.tile_engine.EngineConfig`.
    data_width : int
        Bits of the AXI4 data bus: a power of two from 64 to 1024, at least twice the lanes.
    address_width : int
        Bits of a byte address, 13 to 64.
    id_width : int
        Bits of the transaction identifiers, 1 to 32.
    max_burst : int
        Most beats of a burst: a power of two from 1 to 256.
    outstanding : int
        Most bursts of each direction that are on their way at a time, 1 to 64.
    ppu : bool
        There is a post-processing unit, as wide as there are columns, and a policy unit; then there are at most 32 columns.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range; here lanes must be a power of two, and there are at most 255 rows and columns.
    """

    activation_depth: int = 4096
    weight_depth: int = 512
    data_width: int = 128
    address_width: int = 40
    id_width: int = 1
    max_burst: int = 16
    outstanding: int = 32
    ppu: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ppu, bool):
            raise TypeError(f"ppu must be True or False, not {self.ppu!r}")
        if self.ppu and self.columns > PAD:
            raise ValueError(f"columns must be at most {PAD} with a post-processing unit, not {self.columns}")
        _ = self.dma
        if self.lanes & (self.lanes - 1):
            raise ValueError(f"lanes of an accelerator must be a power of two, not {self.lanes}")
        least = max(64, 2 * self.lanes)
        if self.data_width < least:
            raise ValueError(f"data_width must be at least {least} for {self.lanes} lanes, not {self.data_width}")
        for name in ("rows", "columns"):
            if getattr(self, name) > 255:
                raise ValueError(f"{name} of an accelerator must be at most 255, not {getattr(self, name)}")

    @property
    def dma(self) -> DmaConfig:
        """Parameters of the DMA engines."""
        return DmaConfig(self.data_width, self.address_width, self.id_width, self.max_burst, self.outstanding)

    @property
    def post(self) -> PpuConfig:
        """Parameters of the post-processing unit: what it refines, the elements of this accelerator can use."""
        slots = self.slots_per_block if self.refinement == "slots" else OFFSET_BYTES
        return PpuConfig(self.columns, min(slots, OFFSET_BYTES), self.step)

    @property
    def engine(self) -> EngineConfig:
        """Parameters of the tile engine."""
        return EngineConfig(**{name: getattr(self, name) for name in EngineConfig.__dataclass_fields__})


@dataclass(frozen=True)
class Operand:
    """Where the rows of an operand lie in memory, addresses and strides in bytes; see docs/accelerator.md for the arrays.

    A stride is the distance from a row to the next; 0 gives all rows the same.

    Attributes
    ----------
    codes, scales, masks, offsets : int
        Addresses. The last two count in AutoFP6 mode alone.
    codes_stride, scales_stride, masks_stride, offsets_stride : int
    """

    codes: int
    scales: int
    masks: int = 0
    offsets: int = 0
    codes_stride: int = 0
    scales_stride: int = 0
    masks_stride: int = 0
    offsets_stride: int = 0


@dataclass(frozen=True)
class Descriptor:
    """One product ``out[M, N] = a[M, K] · w[N, K]ᵀ``; nothing is checked here, see :func:`check`.

    Attributes
    ----------
    mode, format : int
        See :class:`Mode` and :class:`Format`.
    m, n, k : int
        Rows of activations, rows of weights, elements of a row.
    tile_m, tile_n : int
        Vectors of activations and of weights that an element multiplies in a tile; in AutoFP2 mode a weight vector is a pair of rows.
    segment : int
        K-vectors of weights that are loaded at a time.
    out_scale : int
        Bits of an FP32 number that results are multiplied by, for :attr:`Format.FP32`.
    a, w : Operand
    out : int
        Address of the output, row by row.
    out_stride : int
    fence : bool
        Nothing of its operands is read before all products before it have ended and their records are written.
    post : int or None
        Address of a :class:`PostBlock`. This and ``policy`` need a configuration with ``ppu``.
    policy : bool
        The mode is that of the policy unit's precision, see :func:`mode_of`; it waits like behind a fence.
    out_scale_low : int
        ``out_scale`` of a product whose mode becomes AutoFP2 by ``policy``, where sums have another unit.
    """

    mode: int
    format: int
    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    segment: int
    a: Operand
    w: Operand
    out: int
    out_stride: int
    out_scale: int = 0x3F800000
    fence: bool = False
    post: int | None = None
    policy: bool = False
    out_scale_low: int = 0

    _WORDS = struct.Struct("<IIIIHHIII9Q9IIQ10I")

    def pack(self) -> bytes:
        """Return the descriptor's 192 bytes.

        Raises
        ------
        struct.error
            A value does not fit its field.
        """
        a, w = self.a, self.w
        return self._WORDS.pack(
            self.mode | self.format << 4,
            self.m,
            self.n,
            self.k,
            self.tile_m,
            self.tile_n,
            self.segment,
            self.out_scale,
            self.out_scale_low,
            *(a.codes, a.scales, a.masks, a.offsets, w.codes, w.scales, w.masks, w.offsets, self.out),
            *(a.codes_stride, a.scales_stride, a.masks_stride, a.offsets_stride),
            *(w.codes_stride, w.scales_stride, w.masks_stride, w.offsets_stride),
            self.out_stride,
            _POST * (self.post is not None) | _FENCE * self.fence | _POLICY * self.policy,
            self.post or 0,
            *[0] * 10,
        )


@dataclass(frozen=True)
class Record:
    """What the accelerator writes when a descriptor has ended.

    Attributes
    ----------
    code : ErrorCode
    status : int
        Status bits that the descriptor raised: saturated 1, nan_scale 2, overlap 4, dropped 8; of post-processing nonfinite 16, clipped 32.
    number : int
        Descriptors that ended before it since the queue was started, modulo 2¹⁶.
    cycles : int
        Clock cycles from when it was fetched to when its last output was written, modulo 2³².
    activity, energy : int
        What the post-processing unit reported of a product that ended well, as binary32 patterns; otherwise 0.
    mode : int
        With ``ppu``, the mode in which it ended well; otherwise 0.
    """

    code: ErrorCode
    status: int
    number: int
    cycles: int
    activity: int = 0
    energy: int = 0
    mode: int = 0

    @classmethod
    def unpack(cls, octets: bytes) -> "Record":
        """Read a record's 16 bytes."""
        code, status, number, cycles, activity, energy = struct.unpack("<BBHIII", octets)
        return cls(ErrorCode(code), status & 0x3F, number, cycles, activity, energy, status >> 6)


def mode_of(precision: int) -> Mode:
    """Return the mode of a product whose precision the policy unit picks.

    Examples
    --------
    >>> [mode_of(precision).name for precision in (2, 4, 6, 8)]
    ['AUTOFP2', 'NVFP4', 'AUTOFP6', 'AUTOFP6']
    """
    if precision < 4:
        return Mode.AUTOFP2
    return Mode.NVFP4 if precision < 6 else Mode.AUTOFP6


def check(config: AcceleratorConfig, octets: bytes, precision: int | None = None) -> ErrorCode:
    """Return what the accelerator says of a descriptor's 192 bytes before it runs it.

    ``precision`` is that of the policy unit, None if it has begun no step. What is said of a post block, see :func:`check_post`.

    Raises
    ------
    ValueError
        Not 192 bytes.
    """
    if len(octets) != DESCRIPTOR_BYTES:
        raise ValueError(f"octets must be {DESCRIPTOR_BYTES}, not {len(octets)}")
    control, m, n, k, tile_m, tile_n, segment, scale, scale_low, *rest = Descriptor._WORDS.unpack(octets)
    addresses, strides, flags, post, spare = rest[:9], rest[9:18], rest[18], rest[19], rest[20:]
    mode, kind = control & 3, control >> 4 & 3
    has_post, has_policy = flags & _POST, flags & _POLICY
    if control >> 6 or control >> 2 & 3 or segment >> 16 or any(spare) or flags & ~(_POST | _FENCE | _POLICY):
        return ErrorCode.RESERVED
    if ((has_post or has_policy) and not config.ppu) or (post and not has_post) or (scale_low and not has_policy):
        return ErrorCode.RESERVED
    if mode == 3 or (mode == Mode.AUTOFP6 and config.refinement == "none"):
        return ErrorCode.MODE
    if has_policy and precision is not None:
        mode = mode_of(precision)
        if mode == Mode.AUTOFP2:
            scale = scale_low
        if mode == Mode.AUTOFP6 and config.refinement == "none":
            return ErrorCode.MODE
    if kind > Format.FP32:
        return ErrorCode.FORMAT
    if kind == Format.FP32 and scale >> 23 & 0xFF == 0xFF:
        return ErrorCode.SCALE
    if not (m and n and k):
        return ErrorCode.SIZE_ZERO
    kv = k // config.lanes
    if m > MAX_ROWS or n > MAX_ROWS or kv > config.max_kv:
        return ErrorCode.SIZE_LIMIT
    if k % config.lanes:
        return ErrorCode.K_MULTIPLE
    pairs = tile_n if mode == Mode.AUTOFP2 else (tile_n + 1) // 2
    if (
        not (tile_m and tile_n and segment)
        or tile_m > config.max_m
        or tile_m * tile_n > config.max_words
        or tile_m * kv > config.activation_depth
        or pairs * segment > config.weight_depth // 2
    ):
        return ErrorCode.TILE
    if any(value % ALIGNMENT for value in (*addresses, *strides, post)):
        return ErrorCode.ALIGNMENT
    if any(address >> config.address_width for address in (*addresses, post)):
        return ErrorCode.ADDRESS
    if has_policy and precision is None:
        return ErrorCode.POLICY
    if has_post and kind != Format.FP32:
        return ErrorCode.POST_FORMAT
    return ErrorCode.OK


POST_ARRAYS = ("codes", "scales", "masks", "offsets", "residual", "previous")
"""Arrays of a post block that have rows."""
_FLAGS = ("residual", "numbers", "groups", "shared", "refine", "measure", "begin", "report", "observe")


@dataclass(frozen=True)
class PostBlock:
    """What is done with a product's outputs; nothing is checked here, see :func:`check_post`.

    Attributes
    ----------
    function : int
        See :class:`model.activation.Function`.
    adds : bool
        A residual is added after the function.
    numbers, groups : bool
        Outputs are written as FP32 numbers, to the descriptor's ``out``; as rows of NVFP4 groups, to the arrays below.
    shared, refine : bool
        Two groups share a scale; refinements are chosen, with the weight masks of the next layer.
    measure, begin, report, observe : bool
        Compare with the numbers before the layer; the sums start at 0 with this product; they go into its record; the policy unit gets the
        activity.
    group_scale, threshold : int
        Bits of FP32 numbers, see :class:`model.ppu.Job`.
    codes, scales, masks, offsets, residual, previous, next_mask : int
        Addresses.
    codes_stride, scales_stride, masks_stride, offsets_stride, residual_stride, previous_stride : int
        Bytes from a row to the next.
    """

    function: int = Function.IDENTITY
    adds: bool = False
    numbers: bool = False
    groups: bool = False
    shared: bool = False
    refine: bool = False
    measure: bool = False
    begin: bool = False
    report: bool = False
    observe: bool = False
    group_scale: int = 0x3F800000
    threshold: int = 0
    codes: int = 0
    scales: int = 0
    masks: int = 0
    offsets: int = 0
    residual: int = 0
    previous: int = 0
    next_mask: int = 0
    codes_stride: int = 0
    scales_stride: int = 0
    masks_stride: int = 0
    offsets_stride: int = 0
    residual_stride: int = 0
    previous_stride: int = 0

    _WORDS = struct.Struct("<4I7Q6I8I")

    def pack(self) -> bytes:
        """Return the block's 128 bytes.

        Raises
        ------
        struct.error
            A value does not fit its field.
        """
        flags = [self.adds, *(getattr(self, name) for name in _FLAGS[1:])]
        return self._WORDS.pack(
            self.function | sum(1 << 8 + i for i, flag in enumerate(flags) if flag),
            self.group_scale,
            self.threshold,
            0,
            *(getattr(self, name) for name in POST_ARRAYS),
            self.next_mask,
            *(getattr(self, f"{name}_stride") for name in POST_ARRAYS),
            *[0] * 8,
        )


def check_post(config: AcceleratorConfig, octets: bytes, post: bytes, precision: int | None = None) -> ErrorCode:
    """Return what the accelerator says of the 128 bytes of a post block, with a descriptor that is right otherwise.

    Raises
    ------
    ValueError
        Not 128 bytes.
    """
    if len(post) != POST_BYTES:
        raise ValueError(f"post must be {POST_BYTES} bytes, not {len(post)}")
    control, group_scale, threshold, zero, *rest = PostBlock._WORDS.unpack(post)
    addresses, strides, spare = rest[:7], rest[7:13], rest[13:]
    flags = {name: bool(control >> 8 + i & 1) for i, name in enumerate(_FLAGS)}
    if control & 15 not in list(Function) or control >> 4 & 15 or control >> 17 or zero or any(spare):
        return ErrorCode.POST_RESERVED
    if (
        not (flags["numbers"] or flags["groups"])
        or ((flags["shared"] or flags["refine"]) and not flags["groups"])
        or (flags["observe"] and not (flags["measure"] and flags["report"]))
    ):
        return ErrorCode.POST_FLAGS
    if any(scale >> 23 & 0xFF == 0xFF for scale in (group_scale, threshold)):
        return ErrorCode.POST_SCALE
    words = struct.unpack("<48I", octets)
    mode = Mode(words[0] & 3)
    if words[35] & _POLICY and precision is not None:
        mode = mode_of(precision)
    width = config.columns * (words[4] >> 16) << (mode == Mode.AUTOFP2)
    if flags["groups"] and width % PAD and width < words[2]:
        return ErrorCode.POST_TILE
    if any(value % ALIGNMENT for value in (*addresses, *strides)):
        return ErrorCode.POST_ALIGNMENT
    if any(address >> config.address_width for address in addresses):
        return ErrorCode.POST_ADDRESS
    return ErrorCode.OK


def policy_words(config: PolicyConfig) -> dict[str, int]:
    """Return the words of the registers that hold the policy's parameters, by register.

    Raises
    ------
    ValueError
        The unit cannot hold a parameter.
    """
    settings = PolicySettings.of(config, PolicyFormat())
    values = {field: getattr(settings, field) for field in PolicyFormat().settings if field != "levels"}
    values |= {f"level_{i}": level for i, level in enumerate(settings.levels)}
    return {
        name: PPU_REGISTERS[name].pack(**{field.name: values[field.name] for field in PPU_REGISTERS[name].fields})
        for name in ("policy_levels", "policy_rules", "policy_weights", "policy_tau")
    }


def _descriptor() -> Structure:
    modes = (
        Enumerator("autofp2", Mode.AUTOFP2, "two digits per weight"),
        Enumerator("nvfp4", Mode.NVFP4, "no refinement"),
        Enumerator("autofp6", Mode.AUTOFP6, "refined subgroups"),
    )
    formats = (
        Enumerator("raw", Format.RAW, "exact sums as integers"),
        Enumerator("fp32", Format.FP32, "sums rounded and multiplied by out_scale"),
    )
    # Bits, from the first word on; what is left out must be 0.
    members = [
        Member("mode", 0, 2, "precision", modes),
        Member("format", 4, 2, "format of the output", formats),
        Member("m", 32, 32, "rows of activations"),
        Member("n", 64, 32, "rows of weights"),
        Member("k", 96, 32, "elements of a row, a multiple of the lanes"),
        Member("tile_m", 128, 16, "activation vectors of an element in a tile"),
        Member("tile_n", 144, 16, "weight vectors of an element in a tile"),
        Member("segment", 160, 16, "K-vectors of weights that are loaded at a time"),
        Member("out_scale", 192, 32, "what FP32 outputs are multiplied by, an FP32 number"),
    ]
    arrays = [
        (f"{operand}_{array}", f"{array} of the {meaning}")
        for operand, meaning in (("a", "activations"), ("w", "weights"))
        for array in ("codes", "scales", "masks", "offsets")
    ]
    arrays.append(("out", "the output"))
    members += [Member(name, 256 + 64 * i, 64, f"address of {text}") for i, (name, text) in enumerate(arrays)]
    members += [
        Member(f"{name}_stride", 832 + 32 * i, 32, f"bytes from a row to the next, {text}")
        for i, (name, text) in enumerate(arrays)
    ]
    members.append(Member("fence", 1121, 1, "begin when all products before have ended and their records are written"))
    return Structure("descriptor", 0, DESCRIPTOR_BYTES, PITCH, "one product, written by software", tuple(members))


DESCRIPTOR = _descriptor()
"""Where the fields of a :class:`Descriptor` lie that every configuration has."""
_PPU_DESCRIPTOR = replace(
    DESCRIPTOR,
    members=(
        *DESCRIPTOR.members,
        Member("out_scale_low", 224, 32, "out_scale if policy makes the mode AutoFP2; 0 without policy"),
        Member("post", 1120, 1, "outputs are processed as the post block says"),
        Member("policy", 1122, 1, "the policy unit picks the mode; waits like fence"),
        Member("post_address", 1152, 64, "address of the post block; 0 without post"),
    ),
)


def _post() -> Structure:
    values = {
        Function.IDENTITY: "x as it is",
        Function.RELU: "x, or 0 below 0",
        Function.SILU: "x / (1 + exp(-x))",
        Function.GELU: "x times the normal distribution at x",
    }
    functions = tuple(Enumerator(f.name.lower(), int(f), values[f]) for f in Function)
    meanings = {
        "residual": "add the residual after the function",
        "numbers": "write FP32 numbers to the descriptor's output",
        "groups": "write NVFP4 groups, the next layer's activations",
        "shared": "pairs of groups share a scale",
        "refine": "choose refinements, and write masks and offsets",
        "measure": "compare with the numbers before the layer",
        "begin": "sums start at 0 with this product",
        "report": "activity and energy go into the record",
        "observe": "the policy unit gets the activity",
    }
    members = [Member("function", 0, 4, "activation function", functions)]
    members += [Member("adds" if n == "residual" else n, 8 + i, 1, meanings[n]) for i, n in enumerate(_FLAGS)]
    members += [
        Member("group_scale", 32, 32, "what numbers are multiplied by on their way to groups, an FP32 number"),
        Member("threshold", 64, 32, "squared error above which a subgroup is refined, an FP32 number"),
    ]
    texts = {name: f"{name} of the groups" for name in POST_ARRAYS[:4]}
    texts |= {"residual": "the residual", "previous": "the numbers before the layer"}
    members += [Member(name, 128 + 64 * i, 64, f"address of {texts[name]}") for i, name in enumerate(POST_ARRAYS)]
    members.append(Member("next_mask", 512, 64, "address of the next layer's weight masks, the same for all rows"))
    members += [
        Member(f"{name}_stride", 576 + 32 * i, 32, f"bytes from a row to the next, {texts[name]}")
        for i, name in enumerate(POST_ARRAYS)
    ]
    text = "what is done with a product's outputs, written by software anywhere at a multiple of 16"
    return Structure("post", 0, POST_BYTES, POST_BYTES, text, tuple(members))


POST = _post()
"""Where the fields of a :class:`PostBlock` lie."""


def descriptor_of(config: AcceleratorConfig) -> Structure:
    """Return where the fields of a :class:`Descriptor` lie that the configuration has."""
    return _PPU_DESCRIPTOR if config.ppu else DESCRIPTOR


RECORD = Structure(
    "record",
    RECORD_OFFSET,
    RECORD_BYTES,
    PITCH,
    "how a product ended, written by hardware behind its descriptor",
    (
        Member("code", 0, 8, "its code, as in the register error"),
        Member("saturated", 8, 1, "an AutoFP2 sum saturated"),
        Member("nan_scale", 9, 1, "a scale byte is no scale"),
        Member("overlap", 10, 1, "a subgroup is refined in weights and activations"),
        Member("dropped", 11, 1, "a group has more refined subgroups than the hardware uses"),
        Member("number", 16, 16, "descriptors ended before it since the restart, modulo 2^16"),
        Member("cycles", 32, 32, "clock cycles from its fetch to its last output, modulo 2^32"),
    ),
)
"""Where the fields of a :class:`Record` lie."""


def _registers() -> RegisterMap:
    def plain(name: str, offset: int, description: str, *fields: Field) -> Register:
        return Register(name, offset, description, fields)

    events = (
        ("done", "a descriptor ended without error"),
        ("error", "a descriptor ended with an error"),
        ("empty", "the last descriptor that was submitted has ended"),
    )
    codes = tuple(Enumerator(code.name.lower(), int(code), MEANINGS[code]) for code in ErrorCode)
    return RegisterMap(
        "autoematic",
        "the AutoEMatic accelerator",
        (
            plain(
                "id",
                0x00,
                "what this is",
                Field(
                    "magic",
                    0,
                    32,
                    "ro",
                    "constant",
                    enumerators=(Enumerator("autoematic", MAGIC, f"0x{MAGIC:08X}, the letters AUEM"),),
                ),
            ),
            plain(
                "array",
                0x04,
                "size of the array",
                Field("rows", 0, 8, "ro", "rows of elements"),
                Field("columns", 8, 8, "ro", "columns of elements"),
                Field("lanes", 16, 12, "ro", "lanes of an element"),
            ),
            plain(
                "memories",
                0x08,
                "logarithms of the sizes of memories",
                Field("accumulators", 0, 5, "ro", "log2 of the accumulators of an element, both halves"),
                Field("activation_entries", 5, 5, "ro", "log2 of the activation vectors that an element holds"),
                Field("activation_depth", 10, 5, "ro", "log2 of the vectors of a row's bank"),
                Field("weight_depth", 15, 5, "ro", "log2 of the pairs of vectors of a column's bank"),
                Field("data_bytes", 20, 4, "ro", "log2 of the bytes of the data bus"),
            ),
            plain(
                "features",
                0x0C,
                "what the vector MACs can do",
                Field(
                    "refinement",
                    0,
                    2,
                    "ro",
                    "kind of refinement",
                    enumerators=(
                        Enumerator("none", 0, "there is no AutoFP6 mode"),
                        Enumerator("slots", 1, "a few subgroups of a block"),
                        Enumerator("inplace", 2, "any subgroup"),
                    ),
                ),
                Field("slots", 2, 3, "ro", "refined subgroups of a block, of weights and activations together"),
                Field("exponent_step", 5, 1, "ro", "offsets are steps of the code's exponent"),
                Field("group_scaling", 6, 1, "ro", "AutoFP2 weights keep a scale per group of 16"),
                Field("window_shift", 8, 6, "ro", "log2 of an AutoFP2 sum's unit, in units of an NVFP4 sum's"),
            ),
            plain(
                "control",
                0x10,
                "start and stop",
                Field("enable", 0, 1, "rw", "fetch descriptors; what was fetched runs on when it is taken away"),
                Field(
                    "restart",
                    1,
                    1,
                    "w1p",
                    "begin again with the first place and 0 completed; before, write 0 to enable and submitted; ignored while busy",
                ),
            ),
            plain(
                "state",
                0x14,
                "what is going on",
                Field("busy", 0, 1, "ro", "a descriptor was fetched and has not ended"),
            ),
            plain(
                "queue_low",
                0x18,
                "address of the queue, low bits",
                Field("address", 8, 24, "rw", "bits 31 to 8; descriptors lie at multiples of 256"),
            ),
            plain(
                "queue_high", 0x1C, "address of the queue, high bits", Field("address", 0, 32, "rw", "bits 63 to 32")
            ),
            plain(
                "queue_length",
                0x20,
                "places of the queue, which is a ring",
                Field("last", 0, 16, "rw", "number of the last place, counted from 0"),
            ),
            plain(
                "submitted",
                0x24,
                "descriptors that may be fetched",
                Field("count", 0, 16, "rw", "descriptors submitted since the restart, modulo 2^16"),
            ),
            plain(
                "completed",
                0x28,
                "descriptors that have ended",
                Field("count", 0, 16, "ro", "descriptors ended since the restart, modulo 2^16"),
            ),
            plain("events", 0x2C, "what has happened", *(Field(n, i, 1, "w1c", d) for i, (n, d) in enumerate(events))),
            plain(
                "interrupt",
                0x30,
                "which events interrupt",
                *(Field(n, i, 1, "rw", f"interrupt when {d}") for i, (n, d) in enumerate(events)),
            ),
            plain(
                "error",
                0x34,
                "the last descriptor that ended with an error",
                Field("code", 0, 8, "ro", "its code", enumerators=codes),
                Field("number", 16, 16, "ro", "descriptors ended before it since the restart, modulo 2^16"),
            ),
            plain("cycle", 0x38, "time", Field("count", 0, 32, "ro", "clock cycles since reset, modulo 2^32")),
        ),
        (DESCRIPTOR, RECORD),
    )


REGISTERS = _registers()
"""The register map, with descriptor and record."""


def _ppu_registers() -> RegisterMap:
    form, defaults = PolicyFormat(), PolicySettings.of(PolicyConfig(), PolicyFormat())
    meanings = {
        "top": "place of the highest level",
        "prefill_first": "place of the level that a prefill begins with",
        "decode_first": "place of the level that a decode step begins with",
        "n_p": "layers that change the precision in prefill",
        "alpha": "layers that lower the precision in a decode step of high entropy, and raise it in one of low entropy",
        "beta": "layers that raise the precision in a decode step of high entropy, and lower it in one of low entropy",
        "first_samples": "samples without which nothing is decided",
        "activity_weight": "weight of the activity in decode",
        "entropy_weight": "weight of the entropy in decode",
        "sigma_factor": "eighths of a standard deviation that a spike is above the mean",
        "band": "eighths of a standard deviation that are on neither side of the mean",
        "tau": f"entropy from which on a step counts as one of high entropy, in units of 2^-{form.fraction_bits}",
    }

    def parameter(name: str, position: int) -> Field:
        return Field(name, position, form.settings[name], "rw", meanings[name], getattr(defaults, name))

    levels = tuple(
        Field(f"level_{i}", 8 * i, LEVEL_BITS, "rw", f"precision at place {i}, in bits", level)
        for i, level in enumerate(defaults.levels)
    )
    rules = {"top": 0, "prefill_first": 2, "decode_first": 4, "n_p": 8, "alpha": 12, "beta": 16, "first_samples": 20}
    weights = {"activity_weight": 0, "entropy_weight": 8, "sigma_factor": 16, "band": 24}
    step = (
        Field(
            "entropy",
            0,
            form.entropy_bits,
            "rw",
            f"entropy of the decode step before, in units of 2^-{form.fraction_bits}",
        ),
        Field("decode", 24, 1, "rw", "a decode step, not a prefill"),
        Field("begin", 30, 1, "w1p", "begin a step with entropy and decode as they are written"),
        Field("clear", 31, 1, "w1p", "forget the request"),
    )
    state = (
        Field("valid", 0, 1, "ro", "precision is that of the next layer"),
        Field("spike", 1, 1, "ro", "the spike of this prefill has been seen"),
        Field("saturated", 2, 1, "ro", "an activity was too large, since clear"),
        Field("invalid", 3, 1, "ro", "an activity was no number, since clear"),
        Field("precision", 8, LEVEL_BITS, "ro", "bits of the next layer"),
        Field("level", 16, form.index_bits, "ro", "its place in the table of levels"),
    )
    texts = {
        "policy_levels": ("levels of the policy, the lowest first", levels),
        "policy_rules": ("counts of the policy", tuple(parameter(*one) for one in rules.items())),
        "policy_weights": ("weights of the policy", tuple(parameter(*one) for one in weights.items())),
        "policy_tau": ("entropy limit of the policy", (parameter("tau", 0),)),
        "policy_step": ("begin of a step, and end of a request", step),
        "policy_state": ("what the policy says", state),
    }
    first = REGISTERS.by_offset[-1].offset + REGISTER_BYTES
    more = tuple(Register(name, first + 4 * i, text, fields) for i, (name, (text, fields)) in enumerate(texts.items()))
    has = Field("ppu", 14, 1, "ro", "there are a post-processing unit and a policy unit")
    registers = tuple(replace(r, fields=(*r.fields, has)) if r.name == "features" else r for r in REGISTERS.registers)
    numbers = (
        Member("nonfinite", 12, 1, "a group had a number that is infinite or none"),
        Member("clipped", 13, 1, "a group's scale would have been above 448"),
        Member("mode", 14, 2, "the mode that it ran in, 0 if it ended with an error"),
        Member("activity", 64, 32, "activity of the layer, an FP32 number, if it was reported"),
        Member("energy", 96, 32, "sum of squares of the numbers that made groups, an FP32 number, if it was reported"),
    )
    record = replace(RECORD, members=(*RECORD.members, *numbers))
    return replace(REGISTERS, registers=(*registers, *more), structures=(_PPU_DESCRIPTOR, record, POST))


PPU_REGISTERS = _ppu_registers()
"""The register map of configurations with ``ppu``."""


def registers_of(config: AcceleratorConfig) -> RegisterMap:
    """Return the register map of a configuration."""
    return PPU_REGISTERS if config.ppu else REGISTERS
