"""The English text that quantisation is calibrated on unless the user names another, written for this project.

About 2,300 tokens of prose, dialogue, instructions, code, numbers and some other languages; no sentence of the parity
text, which judges the result.
"""

CALIBRATION_TEXT = """\
The weather in spring is often mild, and the roads dry early. A small bakery opened on the corner in March, \
and by noon the line reached the square. "Where is the nearest station?" she asked. He said it was two \
streets away, past the bank, and that the trains were late.

def add(values):
    total = 0
    for value in values:
        total += value
    return total

In 1912 the ship left Southampton for New York. Water boils at 100 degrees Celsius at sea level. The theory \
of evolution explains the diversity of life; the theory of relativity explains gravity. La vie est belle. \
12, 15, 18, 21 and 24 are multiples of three. Please write a short letter to your landlord about the broken \
heater.

Dear Mr. Hoffmann,

I am writing about the heater in the living room of flat 14, which stopped working on Tuesday evening. The \
temperature has not risen above 15 degrees since, and my daughter has a cold. Could you please send someone \
before the weekend? I am at home every day after four o'clock, and the neighbour below has a key. I would \
also be grateful if the window in the kitchen, which I mentioned in October, could be repaired during the \
same visit.

Yours sincerely,
Marta Lindqvist

Question: What is the capital of Australia?
Answer: The capital of Australia is Canberra. Many people think that it is Sydney, which is the largest \
city, but Canberra was chosen in 1908 as a compromise between Sydney and Melbourne.

Question: How many legs do three spiders and two ants have together?
Answer: A spider has eight legs and an ant has six. Three spiders have 3 x 8 = 24 legs, two ants have 2 x 6 \
= 12 legs, and together they have 24 + 12 = 36 legs.

Question: Why is the sky blue?
Answer: Sunlight is a mixture of all colours. The molecules of the air scatter short waves, which we see as \
blue, much more strongly than long ones, which we see as red. When we look at the sky away from the sun, the \
scattered blue light reaches our eyes from every direction. In the evening the light has travelled through \
more air, most of the blue has been scattered out of its path, and what remains is orange and red.

## Potato soup for four people

Ingredients:
- 800 g of potatoes
- 2 carrots and 1 leek
- 1 litre of vegetable stock
- 100 ml of cream
- salt, pepper, nutmeg

1. Peel the potatoes and carrots and cut them into small cubes. Wash the leek and slice it into rings.
2. Melt a spoonful of butter in a large pot, add the vegetables, and stir for five minutes over a medium heat.
3. Pour in the stock, bring it to the boil, cover the pot, and let it simmer for 20 minutes.
4. Take out a cup of the cubes, blend the rest until it is smooth, and put the cubes back.
5. Stir in the cream, season to taste, and serve with dark bread.

The committee met for the third time on Thursday to discuss the budget of the coming year. According to the \
treasurer, income from tickets fell by 7.4 percent to 1.28 million euros, while the cost of electricity rose \
by nearly a third. "We cannot go on like this," said the chairwoman, who has led the museum since 2009. \
"Either the city pays for the roof, or we close the east wing." A spokesman for the mayor declined to \
comment. The next meeting is planned for 14 May.

    class Stack:
        \"\"\"Last in, first out.\"\"\"

        def __init__(self):
            self.items = []

        def push(self, item):
            self.items.append(item)

        def pop(self):
            if not self.items:
                raise IndexError("pop from an empty stack")
            return self.items.pop()

The function above raises an error when the stack is empty, because returning None would hide a mistake of \
the caller. A user who expects an empty stack can test its length first. Here is the same idea in another \
language:

    int pop(struct stack *s, int *out) {
        if (s->count == 0) return -1;
        *out = s->items[--s->count];
        return 0;
    }

    {"name": "pump-7", "status": "running", "pressure": 3.82, "errors": [], "next_service": "2025-11-03"}

    SELECT city, COUNT(*) AS visitors FROM tickets WHERE year >= 2020 GROUP BY city ORDER BY visitors DESC LIMIT 10;

Photosynthesis takes place in two stages. In the first, pigments in the membranes of the chloroplast absorb \
light and use its energy to split water into oxygen, protons and electrons; the oxygen leaves the leaf, and \
the electrons pass along a chain of proteins that stores their energy in ATP and NADPH. In the second stage, \
known as the Calvin cycle, these two molecules drive the conversion of carbon dioxide into sugar. Neither \
stage can continue for long without the other. Plants that live in hot, dry places separate them, in space \
or in time, so that they can keep their pores closed during the day.

Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. When he died, the eldest \
took the mill, the second took the donkey, and nothing was left for the youngest but the cat. "What shall I \
do with a cat?" he said to himself. "I can have a pair of gloves made of its fur, and then it is all over \
with me." The cat, who had understood every word, sat up and replied: "Have a pair of boots made for me, so \
that I can go out and be seen among people, and you shall soon be helped."

The old man walked down to the harbour before sunrise, as he had done every day for forty years. The boats \
were still dark, and the gulls slept with their heads under their wings. He untied the rope, pushed off with \
one foot, and let the tide carry him past the breakwater. Far out, where the water changed its colour, he \
stopped the motor and listened. There was no sound except the small waves against the wood. It seemed to him \
that he had been waiting for this silence all his life, and that he had been too busy to notice it.

Der Zug nach Hamburg hat heute leider zwanzig Minuten Verspätung. Wir bitten um Ihr Verständnis. Le chat \
dort sur le fauteuil pendant que la pluie tombe sur les toits de la ville. El mercado abre a las ocho de la \
mañana y cierra a las dos de la tarde. Il treno parte dal binario quattro.

User: Can you explain what a prime number is?
Assistant: Of course. A prime number is a whole number greater than 1 that can be divided without a \
remainder only by 1 and by itself. The first ones are 2, 3, 5, 7, 11 and 13. The number 9 is not prime, \
because 3 times 3 is 9. Would you like to see how to test whether a number is prime?
User: Yes, but keep it short.
Assistant: Try to divide the number by every prime up to its square root. If none of them divides it, the \
number is prime. For 97 you need only 2, 3, 5 and 7: none divides it, so 97 is prime.

The seller shall deliver the goods to the address named in the order within thirty days. If delivery is \
delayed for reasons for which the seller is not responsible, the period is extended accordingly; the buyer \
shall be informed without undue delay. Payment is due fourteen days after receipt of the invoice. Claims for \
damages are excluded unless they are based on intent or gross negligence. Should any provision of this \
agreement be or become invalid, the remaining provisions shall not be affected.

Mount Kilimanjaro, with its three volcanic cones, is the highest mountain in Africa: its summit lies 5,895 \
metres above sea level. The first people known to have reached it were Hans Meyer and Ludwig Purtscheller, \
in October 1889. The mountain belongs to a national park and is one of the most visited places in Tanzania. \
Its glaciers have shrunk by more than 80 percent since the beginning of the twentieth century, and most \
scientists expect them to disappear within a few decades.

Let f be a continuous function on the interval [a, b] with f(a) < 0 < f(b). Then there is a point c between \
a and b such that f(c) = 0. To prove it, consider the set of all x in [a, b] for which f(x) <= 0. The set is \
not empty, since it contains a, and it is bounded above by b; let c be its least upper bound. If f(c) were \
positive, then f would be positive in a neighbourhood of c, and a smaller upper bound would exist. If f(c) \
were negative, then f would be negative at some points to the right of c, which contradicts the choice of c. \
Hence f(c) = 0.

| month | rain (mm) | sun (h) |
|-------|-----------|---------|
| April |        41 |     168 |
| May   |        57 |     204 |
| June  |        63 |     221 |

"I don't think he's coming," Anna whispered. "It's half past nine, and he said eight."
"He'll come," said her brother. "He always does. Remember the concert?"
"That was different. There was snow." She looked at the clock again, then at the two cups, and finally \
poured the tea. "If he isn't here in ten minutes, I'm going without him."

Good habits matter more than good intentions. Go to bed at the same time every evening, even on weekends. \
Put your phone in another room. Walk for half an hour a day; if you can't, walk for ten minutes. Write down \
three things that went well. None of this is new, and all of it works, but only if you do it when you don't \
feel like it.

To install the program, download the archive, unpack it into a folder of your choice, and run the setup \
script. On Windows you may be asked to confirm that you trust the publisher. If an error such as "permission \
denied" appears, open the terminal as an administrator and try again. The configuration is stored in a file \
called settings.toml; see https://example.org/docs/settings for a list of all options. Version 2.1 fixes a \
crash that occurred when a file name contained a space.

Music began to change in the second half of the eighteenth century. The heavy bass lines of the Baroque gave \
way to clear melodies with a simple accompaniment, and composers such as Haydn and Mozart wrote for a public \
that bought tickets instead of for a court that paid wages. The orchestra grew: clarinets joined the oboes, \
and later trombones, which had been heard mainly in churches, appeared in the symphony. Beethoven, who \
admired both men and outlived them, made every one of these forms longer, louder and stranger.
"""
