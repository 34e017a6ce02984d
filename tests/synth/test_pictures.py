"""Pictures: areas that fill and do not overlap, the same bytes each time, what is written in them."""

import pytest

from model.pictures import bars, stacks, write_picture
from synth.pictures import scatter, squarify, treemap


def test_squares_of_the_published_example():
    # Bruls, Huizing and van Wijk, figure 4: 6 × 4 divided into 6, 6, 4, 3, 2, 2, 1.
    placed = squarify([6, 6, 4, 3, 2, 2, 1], (0, 0, 6, 4))
    expected = [
        *((0, 0, 3, 2), (0, 2, 3, 2), (3, 0, 12 / 7, 7 / 3), (3 + 12 / 7, 0, 9 / 7, 7 / 3)),
        *((3, 7 / 3, 6 / 5, 5 / 3), (4.2, 7 / 3, 6 / 5, 5 / 3), (5.4, 7 / 3, 0.6, 5 / 3)),
    ]
    assert placed == [pytest.approx(each) for each in expected]


@pytest.mark.parametrize("areas", [[], [5.0], [100, 1, 1, 0.01], [3] * 17])
def test_parts_fill_the_rectangle(areas):
    placed = squarify(areas, (1, 2, 3, 5))
    assert len(placed) == len(areas)
    for (x, y, width, height), area in zip(placed, areas, strict=True):
        assert width * height == pytest.approx(15 * area / sum(areas))
        assert min(x - 1, y - 2, 4 - x - width, 7 - y - height) > -1e-9


ROWS = [{"area": 1, "error": 2, "step": "fixed"}, {"area": 2, "error": 1, "step": "exponent"}]
PICTURES = {
    "treemap": (
        lambda: treemap({"a": {"tree": 3, "lanes": 1, "none": 0}, "b": {"x": 4}}, "where"),
        "tree 37.5 % b where",
    ),
    "bars": (
        lambda: bars({"vmac": {"ge": 1.38, "x": 1.2}, "none": {"ge": 1.1}}, "ratios", "to one", 1),
        "1.38 none ratios",
    ),
    "scatter": (lambda: scatter({"all": ROWS}, {"all": ROWS}, "area", "error", ["step"]), "exponent fixed area error"),
}


@pytest.mark.parametrize("kind", ["svg", "png"])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_the_same_each_time(name, kind, tmp_path):
    draw, words = PICTURES[name]
    paths = [tmp_path / f"{k}.{kind}" for k in range(2)]
    for path in paths:
        write_picture(path, draw())
    data = paths[0].read_bytes()
    assert data == paths[1].read_bytes()
    if kind == "svg":
        text = data.decode()
        assert [word for word in words.split() if f">{word}" not in text and f" {word}" not in text] == []
        assert "none" not in text.replace("fill: none", "").replace('"none"', "") or name == "bars"


def test_stacks_have_pieces_and_sums(tmp_path):
    figure = stacks({"a": {"x": 1.0, "y": 2.5}, "b": {"x": 0.25}}, "title", "fJ")
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == [1.0, 0.25, 2.5, 0.0]
    assert [text.get_text() for text in figure.axes[0].texts] == ["3.5", "0.25"]
    write_picture(tmp_path / "a.svg", figure)
    assert "title" in (tmp_path / "a.svg").read_text()
