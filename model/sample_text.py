"""Texts of our own, read by language-model measurements when no other is given."""

__all__ = ["LONG_TEXT", "TEXT"]

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

LONG_TEXT = f"""\
{TEXT}
The following spring the town council asked a different question: what should the lighthouse be used for? Ships no \
longer needed it. Every boat in the harbour carried a receiver that showed its position to within a few metres, and \
the larger ones had two of them. The treasurer thought that the tower could be rented to a telephone company, which \
would hang its antennas where the gallery had been. A hotel owner from the next valley offered to turn the keeper's \
house into a restaurant with eight tables. A retired engineer named Tomas proposed something that nobody had \
expected. He wanted to measure the weather.

"We live from the sea," he said at the meeting, "and we know almost nothing about it. The nearest station is sixty \
kilometres away, behind a mountain. When they promise us sunshine, it rains here; when they warn of a storm, it \
often passes to the north. Give me the top room, a little electricity and two helpers, and in a year I will be able \
to tell you more about the wind in this bay than anybody has known in a hundred years." There was some laughter, but \
the vote was clear: nineteen hands for the weather, six for the restaurant, and three for the telephone company.

Measuring the wind turned out to be harder than it looks. The first instrument had three small cups on a vertical \
axis, and counted how often they turned in a minute. It worked well for a week. Then a gull decided that it was a \
good place to sit, and afterwards one of the arms was bent. Tomas replaced it with a device that has no moving \
parts: four small loudspeakers that send short clicks to one another, once in each direction. A click that travels \
with the wind arrives a little earlier than a click that travels against it. From the two times you can calculate \
both the speed of the air and the speed of sound, and because the speed of sound depends on temperature, you get a \
thermometer for free. The difference is tiny, a few millionths of a second, but a cheap electronic clock can measure \
it without trouble.

For temperature and humidity he built a white box with slats on all sides, so that air could pass and sunlight could \
not. For rain he used a funnel above a small seesaw made of plastic: each time one half was full, it tipped over, \
closed a contact and began to fill the other half. Two tips meant one tenth of a millimetre. The pressure of the air \
was measured inside the house, beside the stove, since pressure is the same on both sides of a wall. All of these \
numbers went once a minute into a notebook, and later, when Maria from the fourth class had written a program for \
it, into a computer that drew curves.

The program deserves a few words of its own. Maria had never written one before, and her first version was a single \
page that read the numbers, added them up, and printed the average of the day. It was correct as long as nothing \
went wrong. But things did go wrong. One night the cable to the roof broke, and the program happily added minus \
ninety-nine degrees to its sum for seven hours. Another time the clock was set back by an hour in autumn, and two \
different measurements claimed to belong to the same minute. Maria learned that most of a program is not about what \
it does, but about what it does when the world is not as expected. She made a list of rules. A value that cannot be \
true is left out and counted. A time that comes twice is kept twice, with a note. Whatever is thrown away has to be \
written down somewhere, because one day somebody will ask for it.

By the second winter there was enough to look for patterns. The class printed the curves of thirty storms, cut them \
out, and laid them next to one another on the floor of the gymnasium. It was a strange picture: thirty lines that \
had nothing in common except that they went up and came down. Then a boy called Jonas noticed something. If you \
shifted the curves so that the lowest pressure was always at the same place, the strongest wind did not come there. \
It came three to four hours later, when the pressure was already rising again. Every fisherman who heard about it \
nodded and said that his grandfather had told him so. "The tail of the storm bites harder than the head," they said. \
Still, it was one thing to have heard it and another to see it thirty times on the floor.

What is the reason? Air flows from places where the pressure is high to places where it is low, but it does not flow \
straight. Because the earth turns, a moving parcel of air is pushed sideways, to the right in the northern half of \
the world and to the left in the southern half. Around a region of low pressure the winds therefore go in a circle. \
Friction with the ground slows them down and lets them drift inwards, so that air collects in the middle, rises, \
cools, and loses its water as rain. Behind the centre, colder and heavier air rushes in. It meets less resistance \
over the open sea than over the hills, and so the bay, which is open to the west, receives the blow when the centre \
has already passed to the east. In front of it, the hills had been a shelter.

Anna used the storm curves for a lesson about chance as well. She asked each student to guess, from the pressure at \
noon, how strong the wind would be in the evening. Some of them drew a straight line through the points and read off \
the answer. Others looked for the day in the past that was most similar. A girl who did not like mathematics simply \
said "the same as yesterday" every time. After two months they compared the errors. The straight line was off by 2.1 \
metres per second on average, the similar day by 2.4, and yesterday's wind by 2.9. "So the line is better," said the \
class. "Is it?" asked Anna. "How sure can you be, after sixty days?" They put the sixty differences on sixty pieces \
of paper, mixed them in a hat, and drew them again and again. In about one of twelve cases the order was the other \
way round. It was the first time that many of them understood that a result may be right and still not be certain.

In March a letter arrived from the weather service in the capital. Somebody there had seen the curves on the page of \
the school and wanted to know whether the data could be used. They asked for the exact height of the instruments \
above the ground, the distance from the nearest building, the date of each repair, and a description of the method \
by which missing values were treated. Maria answered the last question with a copy of her list. Two weeks later \
there was a second letter. It said, in the careful language of such offices, that the list was better than the one \
they had themselves, and that they would like to take it over with two small changes.

Tomas hung the letter on the wall of the top room, between the map of the bay and a photograph of the first \
instrument with the gull on it. He was seventy-four by then, and the stairs had become long. On calm days he still \
climbed them, sat down by the window, and watched the lamp turn. It had been lit again, after all, although no ship \
needed it; the council had decided that a lighthouse without a light looked like a mistake. At dusk the beam crossed \
the water once every ten seconds. He liked to count along with it, he said, in order to check that the clock was \
right.

Visitors often ask what the whole thing has cost. The answer is written on a board beside the door. Glass and brass \
for the lens: 11,400. Iron stairs, paint and tiles: 8,250. Instruments, the second time: 960. A new cable, twice: \
74. Cakes, sold: minus 3,120. Below this, in a child's handwriting, there is one more line, which nobody has ever \
wanted to wipe off. "Stories by the mayor," it says. "Free, but very long."

Last year a storm came that was worse than all those in the notebooks. The pressure fell by thirty-one units between \
breakfast and supper, and at four in the afternoon the harbour master telephoned the tower. There were still two \
boats outside, he said; should he tell them to run for home at once, or to wait behind the island until the centre \
had gone by? Jonas, who was now studying in the city and had come back for the holidays, looked at the screen and \
thought of thirty strips of paper on a floor. "At once," he said. "They have three hours. If they wait for the wind \
to drop, it will drop, and then the tail will catch them in the open." The boats tied up at twenty to seven. At half \
past seven the first gust tore the flag from the roof of the station, and by nine nobody in the town could stand \
upright on the quay. The instrument without moving parts recorded 47 metres per second before the cable broke for \
the third time.
"""
"""That text and its continuation, some 2 500 tokens, written for this project."""
