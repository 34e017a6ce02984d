"""Draw docs/datapath.svg: ``python docs/datapath_svg.py``."""

from pathlib import Path

WIDTH, HEIGHT = 1120, 560
STYLE = "font-family='Helvetica,Arial,sans-serif' text-anchor='middle'"


def box(x: int, y: int, w: int, h: int, lines: list[str], fill: str) -> str:
    """Return a labelled box; the first line is bold."""
    middle = y + h / 2 - 9 * (len(lines) - 1) + 5
    text = "".join(
        f"<text x='{x + w / 2}' y='{middle + 18 * i}' font-size='13' font-weight='{'bold' if i == 0 else 'normal'}' {STYLE}>{line}</text>"
        for i, line in enumerate(lines)
    )
    return f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' stroke='#334'/>{text}"


def arrow(x0: int, y0: int, x1: int, y1: int, label: str = "") -> str:
    """Return an arrow with an optional label beside its middle."""
    line = f"<path d='M{x0} {y0} L{x1} {y1}' stroke='#334' stroke-width='1.6' fill='none' marker-end='url(#tip)'/>"
    text = (
        f"<text x='{(x0 + x1) / 2 + 4}' y='{(y0 + y1) / 2 - 5}' font-size='12' fill='#225' {STYLE}>{label}</text>"
        if label
        else ""
    )
    return line + text


def register(x: int, label: str) -> str:
    """Return a dashed line across the picture: a pipeline register."""
    return (
        f"<path d='M{x} 36 L{x} 508' stroke='#a33' stroke-dasharray='7 5'/>"
        f"<text x='{x}' y='526' font-size='12' fill='#a33' {STYLE}>{label}</text>"
    )


def picture() -> str:
    """Return the SVG text."""
    base, refine, mode, scale, acc = "#dbe9f6", "#fde5cf", "#e3f1dc", "#efe3f5", "#f6f1d3"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>",
        "<defs><marker id='tip' markerWidth='9' markerHeight='7' refX='8' refY='3.5' orient='auto'>"
        "<path d='M0 0 L9 3.5 L0 7 z' fill='#334'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{WIDTH / 2}' y='24' font-size='17' font-weight='bold' {STYLE}>AutoEMatic vector MAC, 32 lanes</text>",
        box(16, 60, 130, 84, ["weights", "NVFP4 → encoder", "32 × 5-bit pairs"], base),
        box(16, 210, 130, 64, ["activations", "32 × E2M1"], base),
        box(16, 330, 130, 64, ["records", "2 slots / block"], refine),
        box(16, 440, 130, 54, ["scales", "E4M3 bytes"], scale),
        register(168, "input"),
        box(196, 60, 200, 64, ["block 0, lanes 0–15", "A = Σ 2A·Q0, B = Σ 2A·Q1"], base),
        box(196, 146, 200, 64, ["block 1, lanes 16–31", "C = Σ 2A·Q0, D = Σ 2A·Q1"], base),
        box(196, 250, 200, 64, ["refinement 0, 8 lanes", "R0 = Σ 2·X·d"], refine),
        box(196, 336, 200, 64, ["refinement 1, 8 lanes", "R1 = Σ 2·X·d"], refine),
        box(424, 80, 224, 130, ["mode reduction", "NVFP4 5A+2B, 5C+2D", "AutoFP2 2(A+C), 2(B+D)", "O = 4P + R"], mode),
        register(662, "O"),
        box(684, 84, 132, 52, ["× M_W × M_A"], scale),
        box(684, 160, 132, 52, ["× M_W × M_A"], scale),
        register(836, "product"),
        box(854, 84, 112, 52, ["align", "« E_W+E_A−2"], scale),
        box(854, 160, 112, 52, ["align", "« E_W+E_A−2"], scale),
        box(860, 270, 190, 116, ["accumulate", "64-bit exact, or", "2 × 32-bit window,", "rounded, saturating"], acc),
        register(1070, "psum_o"),
        arrow(146, 96, 194, 92),
        arrow(146, 112, 194, 170),
        arrow(146, 232, 194, 112),
        arrow(146, 240, 194, 190),
        arrow(146, 252, 194, 282),
        arrow(146, 358, 194, 294),
        arrow(146, 366, 194, 366),
        arrow(396, 92, 422, 110, "10"),
        arrow(396, 178, 422, 168, "10"),
        arrow(396, 282, 500, 212),
        arrow(396, 368, 560, 212),
        arrow(648, 110, 682, 110, "15"),
        arrow(648, 186, 682, 186, "15"),
        arrow(816, 110, 854, 110, "23"),
        arrow(816, 186, 854, 186, "23"),
        "<path d='M146 467 L750 467 L750 216' stroke='#334' stroke-width='1.6' fill='none' marker-end='url(#tip)'/>",
        arrow(960, 118, 1010, 268, "51"),
        arrow(908, 212, 930, 268, "51"),
        arrow(950, 460, 950, 388),
        f"<text x='950' y='478' font-size='13' {STYLE}>psum_i, 64 bits</text>",
        arrow(1050, 328, 1104, 328),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").with_stem("datapath").write_text(picture(), encoding="utf-8", newline="\n")
