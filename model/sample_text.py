"""A short text of our own that language-model measurements read when no other is given."""

__all__ = ["TEXT"]

TEXT = """\
The lighthouse at the end of the harbour had been dark for eleven years when the town decided to repair it. Nobody \
could say exactly why the old keeper had left. Some people remembered a quarrel about money, others spoke of a storm \
that had broken the lamp, and a few of the older fishermen simply shook their heads and changed the subject. What \
everyone agreed on was that the building was falling apart. The paint had come off in long strips, the iron stairs \
were rusty, and every winter the wind carried away a few more tiles from the roof of the small house beside it.

Anna, who taught physics at the school on the hill, was asked to look at the lamp. She expected to find a heap of \
broken glass. Instead she found that almost all of the lens was still there, covered with a thick layer of dust. The \
lens was made of hundreds of pieces of glass, each of them bent at a slightly different angle, so that the light of a \
single flame would leave the tower as one narrow beam. She explained to her students that the idea is simple: light \
changes direction when it passes from air into glass, and if you choose the angle of every piece carefully, all the \
rays end up parallel. "It is cheaper than one large lens," she said, "because most of the glass in a thick lens does \
nothing at all. Only the shape of the surface matters."

The students measured the distance between the rings, drew them on a large sheet of paper, and calculated where the \
lamp had to stand. They made mistakes at first. One group forgot to convert inches into centimetres, and for two days \
their drawing showed a lamp that floated outside the tower. But by the end of the month they had a plan, a list of 42 \
missing pieces, and a letter to a glass maker in the city, who answered that he would be glad to help if somebody \
paid for the material.

It took most of the spring to collect the money. There was a concert in the church, a sale of cakes and books in \
front of the station, and a long evening at which the mayor told stories about the sea until everybody had given him \
something to make him stop. In June the new pieces arrived in wooden boxes filled with straw. The smallest was not \
larger than a thumb; the largest needed two people to carry it up the stairs. On the last night of summer, shortly \
after ten o'clock, Anna turned a switch, and a white beam went out over the water, swept slowly across the fishing \
boats, and came back again. Nobody said a word for a while. Then a child asked how far away one could see it, and the \
whole class began to argue about the curvature of the earth.
"""
"""About six hundred tokens of plain English in five paragraphs of one line each, written for this project."""
