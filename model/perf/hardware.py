"""Accelerators that are compared: size, clock and memory, and how each datapath runs a layer of some precision."""

from dataclasses import dataclass, field

from model.accelerator import AcceleratorConfig, Mode
from model.perf.constants import constant

__all__ = ["DATAPATHS", "PAPER", "PRECISIONS", "REFERENCE", "SCHEDULES", "Datapath", "Execution", "Hardware"]

PRECISIONS = (2, 4, 6)
"""Bits that a layer asks for."""
SCHEDULES = ("array", "rtl")
"""``rtl``: the accelerator as it is generated, whose loader brings one vector per cycle.
``array``: elements never wait for operands, and what memory brings takes bytes by bandwidth (the paper, appendix G)."""


@dataclass(frozen=True)
class Execution:
    """How a datapath runs the products of a layer.

    Attributes
    ----------
    mode : Mode
        What the elements do, one vector operation per cycle; in AutoFP2 for two rows of weights.
    length : float
        K that is run, by the K of the product.
    stored : float
        Bytes of operands, by those of NVFP4.
    energy : float
        fJ of a vector operation.
    """

    mode: Mode
    length: float
    stored: float
    energy: float


@dataclass(frozen=True)
class Datapath:
    """A datapath.

    Attributes
    ----------
    name, title : str
    energies : dict of Mode to str
        Constants that say what a vector operation takes.
    idle, area : str
        Constants for an element without work, and for its vector MAC.
    refines : bool
        Operands have masks and offsets.
    uniform : bool
        Every layer runs at 6 bits.
    """

    name: str
    title: str
    energies: dict[Mode, str]
    idle: str
    area: str
    refines: bool = False
    uniform: bool = False


_AUTOEMATIC = {Mode.AUTOFP2: "vmac_autofp2_fj", Mode.NVFP4: "vmac_nvfp4_fj", Mode.AUTOFP6: "vmac_autofp6_fj"}
DATAPATHS = {
    each.name: each
    for each in (
        Datapath("autoematic", "AutoEMatic", _AUTOEMATIC, "vmac_idle_fj", "vmac_ge", refines=True),
        Datapath("nvfp4", "NVFP4-only", {Mode.NVFP4: "nvfp4_only_fj"}, "nvfp4_only_idle_fj", "nvfp4_only_ge"),
        Datapath(
            "autofp2", "AutoFP2-only", {Mode.AUTOFP2: "autofp2_only_fj"}, "autofp2_only_idle_fj", "autofp2_only_ge"
        ),
        Datapath(
            "uniform", "AutoFP6 in every layer", _AUTOEMATIC, "vmac_idle_fj", "vmac_ge", refines=True, uniform=True
        ),
    )
}
"""Datapaths by name; ``uniform`` is what FP6g in every layer comes to on this hardware."""


@dataclass(frozen=True)
class Hardware:
    """An accelerator and its memory.

    Attributes
    ----------
    config : AcceleratorConfig
        Rows, columns, banks, buffers, refinement.
    clock_mhz, bandwidth_gb : float
        10⁶ cycles per second; 10⁹ bytes per second of memory. In ``rtl`` the buses bring at most their width per cycle.
    schedule : {"rtl", "array"}
    overlap : bool
        With ``array``: memory brings operands while elements compute, instead of before.
    refined_share : float
        Share of the groups that an extended K has twice.
    latency : int
        With ``rtl``: cycles that memory takes to answer.
    accelerators : int
        Of this configuration, each with its own loader and buses, that share the memory and a model's products.

    Raises
    ------
    TypeError, ValueError
        A value is of another type, or out of its range.
    """

    config: AcceleratorConfig = field(
        default_factory=lambda: AcceleratorConfig(
            rows=int(constant("rows")), columns=int(constant("columns")), data_width=256
        )
    )
    clock_mhz: float = constant("clock_mhz")
    bandwidth_gb: float = constant("bandwidth_gb")
    schedule: str = "rtl"
    overlap: bool = False
    refined_share: float = constant("refined_share")
    latency: int = 0
    accelerators: int = 1

    def __post_init__(self) -> None:
        for name in ("clock_mhz", "bandwidth_gb", "refined_share"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise TypeError(f"{name} must be a number, not {getattr(self, name)!r}")
        for name, kind in (("accelerators", int), ("latency", int), ("overlap", bool)):
            if type(getattr(self, name)) is not kind:
                a = "an integer" if kind is int else "True or False"
                raise TypeError(f"{name} must be {a}, not {getattr(self, name)!r}")
        for name in ("clock_mhz", "bandwidth_gb"):
            value = getattr(self, name)
            if not 1e-6 <= value <= 1e15:
                raise ValueError(f"{name} must be from 1e-06 to 1e+15, not {value:g}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if not 0 <= self.refined_share <= 1:
            raise ValueError(f"refined_share must be from 0 to 1, not {self.refined_share:g}")
        for name, least in (("accelerators", 1), ("latency", 0)):
            if not least <= getattr(self, name) <= 2**20:
                raise ValueError(f"{name} must be from {least} to {2**20}, not {getattr(self, name)}")
        if self.schedule == "rtl" and self.overlap:
            raise ValueError("overlap must be False with schedule rtl, which overlaps as the hardware does")
        if self.schedule == "array" and self.latency:
            raise ValueError(f"latency must be 0 with schedule array, which never waits, not {self.latency}")

    @property
    def elements(self) -> int:
        """Processing elements, of all accelerators."""
        return self.config.rows * self.config.columns * self.accelerators

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.clock_mhz * 1e6

    @property
    def bandwidth(self) -> float:
        """Bytes per second from and to memory, at most."""
        memory = self.bandwidth_gb * 1e9
        # The write bus is another one.
        buses = 2 * self.config.data_width / 8 * self.clock * self.accelerators
        return min(memory, buses) if self.schedule == "rtl" else memory

    def peak(self, mode: Mode) -> float:
        """Return MACs per second, at most."""
        return self.elements * self.config.lanes * (2 if mode == Mode.AUTOFP2 else 1) * self.clock

    def execution(self, datapath: Datapath, precision: int) -> Execution:
        """Return how a datapath runs a layer of some precision.

        A datapath without a mode for it runs more vector operations into the same sums: NVFP4-only a K longer by the refined share; AutoFP2-only
        a K-vector for each of a weight's two digits, at 6 bits for those of the refined groups too. What is finer than asked for is taken where
        it is all that there is.

        Raises
        ------
        ValueError
            There is no such precision.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(map(str, PRECISIONS))}, not {precision}")
        longer = 1 + self.refined_share
        needed = 6 if datapath.uniform else precision
        native = self.config.refinement != "none"
        if datapath.name == "autofp2":
            mode, length = Mode.AUTOFP2, {2: 1.0, 4: 2.0, 6: 2 * longer}[needed]
            return Execution(mode, length, longer if needed == 6 else 1.0, constant(datapath.energies[mode]))
        if needed == 2 and Mode.AUTOFP2 in datapath.energies:
            return Execution(Mode.AUTOFP2, 1.0, 1.0, self._energy(datapath, Mode.AUTOFP2))
        if needed == 6 and datapath.refines and native:
            return Execution(Mode.AUTOFP6, 1.0, 1.0, self._energy(datapath, Mode.AUTOFP6))
        length = longer if needed == 6 else 1.0
        return Execution(Mode.NVFP4, length, length, self._energy(datapath, Mode.NVFP4))

    def _energy(self, datapath: Datapath, mode: Mode) -> float:
        """Measured fJ of the default vector MAC; of its other refinements supposed in proportion to area."""
        return constant(datapath.energies[mode]) * self._by_refinement(datapath)

    def _by_refinement(self, datapath: Datapath) -> float:
        """Return the area of the vector MAC by that with two slots."""
        if not datapath.refines or self.config.refinement == "slots":
            return 1.0
        name = "inplace_ge" if self.config.refinement == "inplace" else "no_refinement_ge"
        return constant(name) / constant("vmac_ge")

    def idle(self, datapath: Datapath) -> float:
        """Return fJ of a cycle of an element without work."""
        return constant(datapath.idle) * self._by_refinement(datapath)

    def _shared(self) -> float:
        """Return gate equivalents of what the elements of an accelerator share, encoders left out."""
        rows, columns = self.config.rows, self.config.columns
        banks = constant("banks_ge") + constant("banks_line_ge") * (rows + columns)
        banks += constant("banks_element_ge") * rows * columns
        columned = constant("post_column_ge") + constant("output_column_ge")
        return banks + constant("control_ge") + constant("post_ge") + constant("output_ge") + columned * columns

    def area(self, datapath: Datapath) -> dict[str, float]:
        """Return areas in gate equivalents: ``logic``, and ``memory`` at an assumed size of a bit.

        Examples
        --------
        >>> found = Hardware().area(DATAPATHS["autoematic"])
        >>> round(found["logic"] / 1e6, 2), round(found["memory"] / 1e6, 1)
        (5.91, 36.1)
        """
        vmac = constant(datapath.area) * self._by_refinement(datapath)
        encoders = self.config.columns * constant("encoder_ge") if datapath.name != "nvfp4" else 0.0
        shared = self.accelerators * (encoders + self._shared())
        logic = self.elements * (vmac + constant("element_rest_ge")) + shared
        refines = datapath.refines and self.config.refinement != "none"
        wide = constant("bank_bits_per_vector" if refines else "unrefined_bits_per_vector")
        bank = self.config.rows * self.config.activation_depth + 2 * self.config.columns * self.config.weight_depth
        # An element's entries have as many bits less without refinement as a bank's.
        less = constant("bank_bits_per_vector") - wide
        entries = self.config.activation_entries + self.config.weight_entries
        bits = self.elements * (constant("element_bits") - less * entries) + self.accelerators * bank * wide
        return {"logic": logic, "memory": bits * constant("bit_ge")}


REFERENCE = Hardware()
"""Of the paper's size, as it is generated: 256 elements, 2 MB, 1 GHz, 1 TB/s."""
PAPER = Hardware(schedule="array")
"""The same with the paper's schedule."""
