"""Walker of the loader: the order in which a product's operands are loaded (docs/accelerator.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from hdl.job import (
    address_bits,
    advanced,
    arrays_of,
    chunk_layout,
    job_layout,
    mask_request_layout,
    place_bits,
    row_bits,
    token_layout,
    vector_bytes,
)
from hdl.tile_engine import tile_layout
from model.accelerator import CHUNK, MAX_ROWS, AcceleratorConfig

__all__ = ["Walker"]


class Walker(wiring.Component):
    """Walk a product: panel of activations by panel, within it tile by tile of weights, within it segment by segment of K.

    Chunks come in the order in which they are to be loaded, 1 per cycle. Activations come with the segments of their panel's first tile. A panel
    that fits half of the banks begins when the other half's last use is over; one that does not follows segment by segment where the panel before
    is no longer needed. Padding and, after an error, everything else gives chunks of zeros until the tile is complete.

    Members
    -------
    job : In(job)
        Stable while ``busy``.
    start : In(1)
        Begin; ``code`` is then how the check of the descriptor ended, and if it is not 0 there is nothing but an end.
    busy : Out(1)
    failed : In(1)
        A fetch failed. No more is fetched.
    stop : In(1)
        End with this tile.
    code, since, descriptor : In
        Go into the end's token. They must hold while ``busy``.
    free_panel, free_activations : In(1)
        The oldest panel, its next segment of activations is no longer needed. A panel goes with its last segment.
    free_entries : In
        So many entries of the banks of weights are no longer needed.
    quiet : In(1)
        All chunks were assembled.
    mask : Out(stream of mask request)
        Comes with its chunk or before it.
    chunk : Out(stream of chunk)
    token : Out(stream of token)
        A segment's comes when its loading begins.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        members = {
            "job": In(job_layout(config)),
            "start": In(1),
            "busy": Out(1),
            "failed": In(1),
            "stop": In(1),
            "code": In(8),
            "since": In(32),
            "descriptor": In(config.address_width),
            "free_panel": In(1),
            "free_activations": In(1),
            "free_entries": In(config.weight_depth.bit_length()),
            "quiet": In(1),
            "chunk": Out(stream.Signature(chunk_layout(config))),
            "token": Out(stream.Signature(token_layout(config))),
        }
        if config.refinement != "none":
            members["mask"] = Out(stream.Signature(mask_request_layout(config)))
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        """Build the nested loops."""
        m = Module()
        config = self._config
        arrays = arrays_of(config)
        refinement = config.refinement != "none"
        job = self.job
        chunk, token = self.chunk.payload, self.token.payload
        # Bytes of a vector in each array.
        shift = {name: exact_log2(size) for name, size in vector_bytes(config).items()}

        # Where the next panel, the tile and the row that is loaded begin in memory.
        panel, tile, row = (
            {name: Signal(place_bits(config), name=f"{kind}_{name}") for name in arrays}
            for kind in ("panel", "tile", "row")
        )
        out_next, out_tile = (Signal(place_bits(config), name=f"out_{n}") for n in ("next", "tile"))
        a_left, w_left, row_left = (Signal(MAX_ROWS.bit_length(), name=f"{n}_left") for n in ("a", "w", "row"))
        # K-vectors of the tile before the segment, and from its begin on: what is left need not wait for a difference.
        k_start, k_left, k_row, length = (Signal(len(job.kv), name=n) for n in ("k_start", "k_left", "k_row", "length"))
        weight, odd = Signal(), Signal()
        index = Signal(range(max(config.rows, config.columns)))
        place = Signal(max(len(job.tile_m), len(job.tile_n)))
        number = Signal(row_bits(config))
        base, line = Signal(address_bits(config)), Signal(address_bits(config))
        step = Signal(address_bits(config))
        a_half, was_single = Signal(), Signal()
        a_base = Signal(tile_layout(config)["activation_base"].shape)
        panels = Signal(range(3))
        # The banks of weights are rings of segments.
        w_base = Signal(exact_log2(config.weight_depth))
        used, needs = Signal(range(config.weight_depth + 1)), Signal(range(config.weight_depth + 1))
        # Segments of the panel: which is loaded, and how many of the panel before are free.
        part, freed = Signal(len(job.kv)), Signal(len(job.kv))
        first_tile = Signal()

        # Sizes of a tile in rows of memory.
        panel_rows = Signal((config.rows * config.max_m).bit_length())
        tile_rows = Signal((2 * config.columns * config.max_n).bit_length())
        tile_bytes = Signal(len(tile_rows) + 3)
        pairs = Signal(len(job.tile_n))
        wide = Signal()
        m.d.comb += [
            panel_rows.eq(job.tile_m * config.rows),
            tile_rows.eq(Mux(job.fp2, (job.tile_n * config.columns) << 1, job.tile_n * config.columns)),
            wide.eq(~job.fp2 & ~job.fp32),
            tile_bytes.eq(Mux(wide, tile_rows << 3, tile_rows << 2)),
            pairs.eq(Mux(job.fp2, job.tile_n, job.tile_n[1:] + job.tile_n[0])),
        ]

        # Chunks.
        left = Signal(len(job.kv))
        row_ends, load_ends, real = Signal(), Signal(), Signal()
        last_place, last_index = Signal(), Signal()
        k_at = Signal(len(job.kv))
        pushes = Signal()
        at = {name: Signal(place_bits(config), name=f"at_{name}") for name in arrays if name != "offsets"}
        m.d.comb += [
            left.eq(length - k_row),
            row_ends.eq(left <= CHUNK),
            k_at.eq(k_start + k_row),
            real.eq(row_left.any() & ~self.failed),
            last_place.eq(place == Mux(weight, job.tile_n, job.tile_m) - 1),
            last_index.eq(index == Mux(weight, config.columns - 1, config.rows - 1)),
            load_ends.eq(row_ends & last_place & last_index & (odd | ~weight | ~job.fp2)),
            *(at[name].eq(advanced(m, f"at_{name}", row[name], k_at << shift[name])) for name in at),
            chunk.zero.eq(~real),
            chunk.refined.eq(job.refined),
            chunk.weight.eq(weight),
            chunk.odd.eq(weight & Mux(job.fp2, odd, place[0])),
            chunk.ends.eq(load_ends & weight),
            chunk.index.eq(index),
            chunk.line.eq(line),
            chunk.step.eq(step),
            chunk.count.eq(Mux(row_ends, left, CHUNK)),
            chunk.codes.eq(at["codes"]),
            chunk.scales.eq(at["scales"]),
        ]
        if refinement:
            m.d.comb += [
                chunk.offsets.eq(row["offsets"]),
                chunk.first.eq(~k_at.any()),
                chunk.resumes.eq(~k_row.any() & k_start.any()),
                chunk.row.eq(number),
                self.mask.payload.place.eq(at["masks"]),
                self.mask.payload.count.eq(chunk.count),
            ]

        # Segments and what follows them.
        tile_ends, panel_ends = Signal(), Signal()
        beyond: Value = out_tile[-1]
        if config.ppu:
            # Groups alone leave no outputs where the descriptor says.
            beyond &= ~job.post | job.numbers
        m.d.comb += [
            tile_ends.eq(k_left <= job.segment),
            panel_ends.eq(w_left <= tile_rows),
            token.tile.command.m.eq(job.tile_m),
            token.tile.command.n.eq(job.tile_n),
            token.tile.command.kv.eq(job.kv),
            token.tile.command.mode_nvfp4.eq(~job.fp2),
            token.tile.activation_base.eq(a_base),
            token.tile.weight_base.eq(w_base),
            token.entries.eq(needs),
            token.tile.segment.eq(Mux(tile_ends, k_left, job.segment)),
            token.output.address.eq(out_tile),
            token.output.beyond.eq(beyond),
            token.output.stride.eq(job.out_stride),
            token.output.rows.eq(Mux(beyond, 0, Mux(a_left < panel_rows, a_left, panel_rows))),
            token.output.outputs.eq(Mux(w_left < tile_rows, w_left, tile_rows)),
            token.output.fp32.eq(job.fp32),
            token.output.scale.eq(job.out_scale),
            token.starts.eq(~k_start.any()),
            token.frees_activations.eq(panel_ends | self.stop),
            token.frees_panel.eq(tile_ends & (panel_ends | self.stop)),
            token.code.eq(self.code),
            token.since.eq(self.since),
            token.descriptor.eq(self.descriptor),
        ]
        if refinement:
            m.d.comb += token.tile.command.refine_en.eq(job.refined)
        if config.ppu:
            first_panel, panel_done = Signal(name="first_panel"), Signal(name="panel_done")
            m.d.comb += [
                token.output.post.eq(job.post),
                token.output.first.eq(first_tile),
                token.output.begin.eq(first_tile & first_panel),
                token.output.last.eq(panel_ends & (a_left <= panel_rows)),
                token.output.index.eq(job.n - w_left),
            ]
            with m.If(~self.busy):
                m.d.sync += first_panel.eq(1)
            with m.Elif(panel_done):
                m.d.sync += first_panel.eq(0)

        takes_panel, takes_segment = Signal(), Signal()
        m.d.sync += [
            panels.eq(panels + takes_panel - self.free_panel),
            used.eq(used + Mux(takes_segment, needs, 0) - self.free_entries),
            freed.eq(Mux(self.free_panel, 0, freed + self.free_activations)),
        ]
        stopped = Signal()
        half = exact_log2(config.activation_depth) - 1
        m.d.comb += self.busy.eq(1)
        with m.FSM():
            with m.State("idle"):
                m.d.comb += self.busy.eq(0)
                m.d.sync += [
                    *(panel[name].eq(job.a[name]) for name in arrays),
                    out_next.eq(job.out),
                    a_left.eq(job.m),
                ]
                with m.If(self.start):
                    m.next = "first panel"
                    with m.If(self.code.any()):
                        m.next = "end"
            with m.State("first panel"), m.If(~panels.any() | ~(job.single | was_single)):
                m.next = "panel"
            with m.State("panel"):
                m.d.comb += takes_panel.eq(~panels[1])
                m.d.sync += [
                    *(tile[name].eq(job.w[name]) for name in arrays),
                    w_left.eq(job.n),
                    out_tile.eq(out_next),
                    k_start.eq(0),
                    k_left.eq(job.kv),
                    part.eq(0),
                    first_tile.eq(1),
                    a_base.eq(Cat(Const(0, half), ~a_half & ~job.single)),
                ]
                with m.If(takes_panel):
                    m.d.sync += [a_half.eq(~a_half & ~job.single), was_single.eq(job.single)]
                    m.next = "size"
            with m.State("size"):
                m.d.sync += needs.eq(pairs * token.tile.segment)
                m.next = "segment"
            with m.State("segment"):
                # Activations may take the place of the panel before.
                in_place = first_tile & job.single & panels[1]
                m.d.comb += [
                    self.token.valid.eq((used + needs <= config.weight_depth) & (~in_place | (freed > part))),
                    takes_segment.eq(self.token.valid & self.token.ready),
                ]
                m.d.sync += [
                    *(row[name].eq(Mux(first_tile, panel[name], tile[name])) for name in arrays),
                    row_left.eq(Mux(first_tile, a_left, w_left)),
                    weight.eq(~first_tile),
                    length.eq(token.tile.segment),
                    step.eq(Mux(first_tile, job.tile_m, pairs)),
                ]
                for target in (base, line):
                    m.d.sync += target.eq(Mux(first_tile, a_base, token.tile.weight_base))
                with m.If(takes_segment):
                    m.d.sync += [part.eq(part + 1), stopped.eq(tile_ends & self.stop)]
                    m.next = "rows"
            with m.State("weights"):
                m.d.sync += [
                    *(row[name].eq(tile[name]) for name in arrays),
                    row_left.eq(w_left),
                    weight.eq(1),
                    step.eq(pairs),
                ]
                for target in (base, line):
                    m.d.sync += target.eq(token.tile.weight_base)
                with m.If(tile_ends):
                    m.d.sync += [panel[name].eq(row[name]) for name in arrays]
                m.next = "rows"
            with m.State("rows"):
                if refinement:
                    wanted = Signal()
                    m.d.comb += [
                        wanted.eq(job.refined & real),
                        self.mask.valid.eq(wanted & self.chunk.ready),
                        self.chunk.valid.eq(~wanted | self.mask.ready),
                    ]
                else:
                    m.d.comb += self.chunk.valid.eq(1)
                m.d.comb += pushes.eq(self.chunk.valid & self.chunk.ready)
                with m.If(pushes):
                    m.d.sync += [k_row.eq(k_row + CHUNK), line.eq(line + (step << exact_log2(CHUNK)))]
                with m.If(pushes & row_ends):
                    following = Signal(len(place))
                    stays = Signal()
                    m.d.comb += stays.eq(weight & job.fp2 & ~odd)
                    m.d.comb += following.eq(place)
                    m.d.sync += [
                        *(
                            row[name].eq(
                                advanced(
                                    m,
                                    f"row_{name}",
                                    row[name],
                                    Mux(weight, job.w[f"{name}_stride"], job.a[f"{name}_stride"]),
                                )
                            )
                            for name in arrays
                        ),
                        row_left.eq(row_left - row_left.any()),
                        k_row.eq(0),
                        number.eq(number + 1),
                        odd.eq(stays),
                    ]
                    with m.If(~weight & ~k_start.any()):
                        m.d.sync += out_next.eq(advanced(m, "out_next", out_next, job.out_stride))
                    # Rows of activations go to one element row after the other, those of weights to each column in turn.
                    with m.If(~stays):
                        with m.If(weight):
                            m.d.sync += index.eq(Mux(last_index, 0, index + 1))
                            with m.If(last_index):
                                m.d.comb += following.eq(Mux(last_place, 0, place + 1))
                        with m.Else():
                            m.d.comb += following.eq(Mux(last_place, 0, place + 1))
                            with m.If(last_place):
                                m.d.sync += index.eq(Mux(last_index, 0, index + 1))
                    m.d.sync += place.eq(following)
                    m.d.sync += line.eq(base + Mux(weight & ~job.fp2, following >> 1, following))
                    with m.If(load_ends):
                        m.d.sync += number.eq(0)
                        m.next = "weights"
                        with m.If(weight):
                            m.next = "segment loaded"
            with m.State("segment loaded"):
                m.d.sync += [
                    k_start.eq(k_start + job.segment),
                    k_left.eq(k_left - job.segment),
                    a_base.eq(a_base + job.tile_m * job.segment),
                    w_base.eq(w_base + needs),
                ]
                m.next = "size"
                with m.If(tile_ends):
                    m.d.sync += [
                        *(tile[name].eq(row[name]) for name in arrays),
                        k_start.eq(0),
                        k_left.eq(job.kv),
                        a_base.eq(Cat(Const(0, half), a_half)),
                        first_tile.eq(0),
                        w_left.eq(w_left - tile_rows),
                        out_tile.eq(advanced(m, "out_tile", out_tile, tile_bytes)),
                    ]
                    with m.If(panel_ends):
                        if config.ppu:
                            m.d.comb += panel_done.eq(1)
                        m.d.sync += a_left.eq(a_left - panel_rows)
                        m.next = "panel"
                        with m.If(a_left <= panel_rows):
                            m.next = "end"
                    with m.If(stopped):
                        m.next = "end"
            with m.State("end"):
                m.d.comb += [self.token.valid.eq(self.quiet), token.end.eq(1)]
                with m.If(self.token.valid & self.token.ready):
                    m.next = "idle"
        return m
