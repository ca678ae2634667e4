"""A plain English text, written for this project, on which exported models are compared with eager PyTorch.

About 1,000 tokens of prose, dialogue, numbers and a little code, so that attention, positions and rare tokens matter.
"""

PARITY_TEXT = """\
The lighthouse at the northern end of the island had been automatic for thirty years before anyone asked what \
had become of its keeper. He had left on the last supply boat of the season, carrying two suitcases and a clock, \
and had told the captain that he would be back in spring to collect the rest of his things. Spring came, and \
then another, and the rest of his things stayed where they were: a shelf of books about weather, a row of glass \
jars, and a notebook in which every storm since 1954 was described in the same careful hand.

"You should read it," said the woman who ran the post office, when the young engineer came to replace the \
batteries. "Not all of it. Begin in the middle, where he starts to disagree with the barometer."

The engineer, whose name was Ilse, had planned to stay for two hours. She stayed for four days. On the first \
evening she learned that the keeper had measured the height of the waves with a painted pole, and that he had \
distrusted the pole as much as the barometer. On the second she found a page with nothing on it but a table of \
figures: wind speed in knots, pressure in hectopascals, temperature in degrees, and in the last column a single \
word, either "yes" or "no". There was no heading over that column. She copied the table into her laptop and \
looked at it for a long time.

   wind   pressure   temperature   ?
     12       1013            14   no
     31        998             9   yes
     28       1002            11   no
     44        981             6   yes
     19       1009            12   no

It is a curious fact that people will look for a rule in any list of numbers, even when they have been told that \
the numbers are random. The mind is a machine for finding reasons. Show it three points and it draws a line; \
show it a line and it imagines the rest of the map. This habit has served us well, on the whole. It gave us \
calendars, navigation, medicine and the theory of heat. It also gave us astrology, lucky shirts, and the \
certainty that the other queue always moves faster. The difference between the two lists is not that the people \
who made the first were more clever. It is that they wrote down what they expected before they looked.

On the third day the wind rose from the south-west and the telephone stopped working. Ilse made soup from what \
the post office could sell her, which was onions, lentils and a tin of tomatoes, and carried the notebook to the \
window. If the pressure fell by more than four hectopascals in three hours, she reasoned, and the wind was above \
thirty knots, then the answer should be "yes". She wrote a few lines to test it:

    def answer(wind, pressure, earlier_pressure):
        falling = earlier_pressure - pressure > 4.0
        return "yes" if falling and wind > 30 else "no"

It was right for forty-one of the forty-six rows. She was pleased for about a minute. Then she went through the \
five that were wrong, one by one, because an explanation that is right nine times out of ten has usually \
understood something else. All five fell on a Sunday.

"Of course they did," said the woman at the post office, when the storm had passed and the telephone worked \
again. "On Sundays my mother brought him lunch. She would have seen the flag from the road."

"Which flag?"

"The red one. He raised it when he thought that no boat should leave the harbour. That is your column: whether \
he put up the flag. It was not about the weather alone. It was about the weather and whether there was anybody \
he was worried about."

Ilse thought about this on the boat home. She had been asked to write a report of one page on the state of the \
batteries, and she wrote it, and it said that the batteries were in good order and would last until 2031. Then, \
because there was room at the bottom of the page, she added a recommendation that the museum in the town should \
be given the notebook, together with the painted pole, the barometer, and a red flag which could be found, \
folded and quite dry, in the third drawer on the left. She did not mention the table. A table without a heading \
is a private thing, and he had been a private man.

Some years later the museum put the notebook in a glass case, open at the page with the figures. Visitors stop \
in front of it more often than in front of the stuffed seal or the model of the herring fleet. Children in \
particular like to guess. The commonest guesses are whether it rained, whether he saw a ship, and whether he was \
happy. There is a small card beside the case which gives the answer, but it is placed so low, and printed in \
such modest letters, that almost nobody reads it; and the curator, when she is asked, says that this was decided \
on purpose.
"""
