"""Words and request templates for chat prompts, all written for this package.

A family is a list of templates and the lists that their fields are filled from; `pool.chat` draws from the product. The
point is the variety of what is asked for (explain, compare, plan, write, play a part, extract, reason), not of facts.
"""

from __future__ import annotations


def _items(text: str) -> list[str]:
    """The parts between bars, each on one line."""
    return [" ".join(part.split()) for part in text.split("|")]


SCIENCE = _items("""
photosynthesis | plate tectonics | black holes | the immune system | entropy | the greenhouse effect | DNA replication
| natural selection | superconductivity | the water cycle | tides | vaccines | nuclear fusion | the Doppler effect |
antibiotic resistance | the periodic table | neurons | radioactive decay | chemical equilibrium | gravitational waves
| ocean acidification | enzymes | the carbon cycle | quantum tunnelling | volcanoes | soil erosion | the ozone layer |
genetic drift | semiconductors | comets | the placebo effect | fermentation | crystals | refraction | stem cells |
symbiosis
""")

TECHNOLOGY = _items("""
hash tables | public-key encryption | neural networks | databases | version control | operating systems | garbage
collection | load balancing | recursion | caching | the TCP handshake | compilers | containers | search engines |
binary search | floating-point numbers | message queues | unit testing | regular expressions | two-factor
authentication | blockchains | recommender systems | virtual memory | graph algorithms | dynamic programming | REST
interfaces | error-correcting codes | data compression | static typing | concurrency | gradient descent | web cookies
""")

SOCIETY = _items("""
inflation | supply and demand | the French Revolution | the Silk Road | the printing press | the Roman Republic |
constitutional monarchy | opportunity cost | the Industrial Revolution | the Cold War | human rights | compound
interest | the Enlightenment | urbanisation | trade unions | central banks | the Renaissance | game theory | the
welfare state | cognitive bias | public transport | the suffrage movement | copyright | taxation | globalisation |
stoicism | utilitarianism | minimum wages | jury trials | the Great Depression
""")

EVERYDAY = _items("""
sleeping better | learning to cook | saving money | running a first 10 km | moving to a new city | caring for
houseplants | public speaking | learning a language | decluttering a flat | keeping a journal | adopting a dog |
cycling to work | preparing for a job interview | meditation | buying a used car | baking bread | growing tomatoes |
taking better photographs | reducing food waste | hosting a dinner party | studying for exams | working from home |
making new friends | reading more books | playing the guitar | travelling alone | time management | negotiating a
salary | first aid
""")

PAIRS = _items("""
tea and coffee | trains and aeroplanes | Python and Java | renting and buying a home | cats and dogs | novels and
films | lists and tuples | mitosis and meiosis | democracy and oligarchy | stocks and bonds | solar and wind power |
stacks and queues | viruses and bacteria | weather and climate | SQL and NoSQL databases | electric and petrol cars |
socialism and liberalism | breadth-first and depth-first search | team sports and individual sports | paper books and
e-books | fission and fusion | threads and processes | running and swimming | remote and office work | mountains and
the sea | speed and velocity | asteroids and comets | supervised and unsupervised learning | painting and photography
""")

ROLES = _items("""
a ship's captain in a storm | a medieval blacksmith | a patient primary-school teacher | a detective who never sleeps
| a tour guide on Mars | a grumpy but kind librarian | a chef who has lost the sense of taste | a retired astronaut |
a talking lighthouse | a museum night guard | a travelling salesman of umbrellas | a personal trainer | a doctor in a
small village | a wise old tortoise | a film critic | a robot that wants to paint | an explorer in the Arctic | a
coach before the final | a gardener in a royal palace | a sceptical scientist | a stand-up comedian | a time traveller
from 1850
""")

QUESTIONS = _items("""
What made you choose this life? | Describe your day so far. | What is the hardest lesson you have learned? | Tell me
about something that went wrong. | What would you do with a free week? | How do you deal with fear? | Give me advice
for a young person. | What do you see out of the window? | What do people misunderstand about you? | Which small thing
makes you happy? | Explain your work to a child. | What are you most proud of?
""")

PEOPLE = _items("""
my manager | a landlord | a customer whose parcel is late | my professor | a new colleague | the city council | a
supplier | my neighbours | a hotel | the parents of my class | a former teammate | an airline | the members of our
book club | a recruiter | the technical support of a phone company | a friend who moved abroad
""")

MATTERS = _items("""
asking to move a meeting to next week | apologising for a missed deadline | asking for a refund | thanking for their
help | reporting a broken heater | proposing a joint project | asking for a letter of reference | declining an
invitation politely | announcing a small party | asking for feedback on a draft | complaining about noise at night |
confirming an appointment | asking for two days off | explaining a change of plan
""")

TONES = _items("""
short and friendly | formal | warm and personal | polite but firm | in at most 100 words | with a clear list of next
steps
""")

TEXTS = _items("""
a poem | a short story | the opening of a novel | a fairy tale | a blog post | a product description | a speech | a
song lyric | a diary entry | a dialogue between two strangers | a newspaper article | a haiku and a comment on it | a
letter from the future | a movie scene | a radio advertisement | a fable with a moral
""")

SUBJECTS = _items("""
a lost key | the last train home | a city under the sea | an old bicycle | the first snow | a clock that runs
backwards | two rival bakeries | a letter that arrives late | an island without shadows | a robot's birthday | a
forgotten song | the longest night of the year | a market at dawn | a broken bridge | a cat that knows the future |
the smell of rain | a door in the forest | a chess game by post | a town where nobody lies | a garden on a roof
""")

STYLES = _items("""
in a humorous tone | for children | with a surprising ending | in simple language | in the first person | full of
suspense | in about 150 words | in three paragraphs
""")

PROJECTS = _items("""
a weekend trip to Lisbon | a small vegetable garden | a birthday party for ten children | a reading group | a home
library | a month of healthy meals | a charity run | learning to program in three months | a school play | the
renovation of a kitchen | a podcast | a camping trip with friends | a family budget | a science fair | an online shop
for handmade candles | a neighbourhood festival | a marathon in half a year | a photo exhibition
""")

LIMITS = _items("""
on a small budget | in four weeks | for a beginner | with a checklist | as a table of days and tasks | and name the
three main risks | with very little free time | for a group of five
""")

NAMES = _items("""
Anna | Ben | Carla | Deniz | Emma | Farid | Grace | Hugo | Ines | Jonas | Keiko | Luca | Mira | Noah | Olga | Pablo
""")

THINGS = _items("""
apples | books | marbles | stamps | tickets | shells | pencils | coins | eggs | postcards | beads | bottles
""")

SMALL = _items("3 | 4 | 5 | 6 | 7 | 8 | 9 | 11 | 12 | 14 | 15 | 18")

LARGE = _items("20 | 24 | 30 | 36 | 45 | 48 | 60 | 72 | 84 | 96 | 120 | 150")

NOTES = _items("""
The library opens at nine and closes at six, but on Fridays it stays open until eight. Members may borrow ten books
for three weeks; students may borrow fifteen. | Our new kettle boils a litre in four minutes, weighs 900 grams and
costs 35 euros. The older model needed six minutes and cost 29 euros. | The committee met on Monday. It agreed to
plant forty trees, to repair the fountain by May, and to ask the school for volunteers. The cost is about 12,000
euros. | Flight LX 318 leaves Zurich at 07:15 and lands in London at 08:05 local time. Flight BA 709 leaves at 09:40
and lands at 10:35. | Maria Lopez, 34, joined the company in 2016 as an engineer, became team leader in 2019, and now
runs the office in Porto with 48 people. | The soup needs two onions, a litre of stock, 500 grams of carrots and a
spoon of ginger. Cook it for 25 minutes and serve it hot with bread. | Sales rose from 2.1 million in spring to 2.6
million in summer, fell to 2.3 million in autumn, and reached 3.0 million in winter. | The hotel was clean and the
staff were kind, but the room was small, the street was loud, and breakfast cost extra. | Mount Aria is 2,914 metres
high. It was first climbed in 1871 by two sisters, and today about 4,000 people reach the top each year. | The museum
bought the painting in 1954, lent it to Madrid in 1988, and found in 2011 that it had been painted over an older
picture.
""")

# family: (share of the prompts, templates, {field: list})
FAMILIES = {
    "explain": (
        5,
        [
            "Explain {topic} to a ten-year-old.",
            "What is {topic} and why does it matter?",
            "Give me a short overview of {topic}, with one example from daily life.",
            "List five common misconceptions about {topic} and correct them.",
            "How would you teach {topic} in a single lesson? Outline the lesson.",
            "Describe {topic} in three paragraphs for a curious adult.",
            "Which open questions are there about {topic}?",
            "I have an exam on {topic} tomorrow. What should I know?",
            "Write five quiz questions about {topic} with their answers.",
        ],
        {"topic": SCIENCE + TECHNOLOGY + SOCIETY},
    ),
    "compare": (
        2,
        [
            "What are the main differences between {pair}?",
            "Compare {pair} in a table with four rows.",
            "Give arguments for each side in a debate about {pair}.",
            "Somebody has to choose between {pair}. What should they think about?",
            "Explain what {pair} have in common and where they differ, with examples.",
        ],
        {"pair": PAIRS},
    ),
    "advise": (
        2,
        [
            "Give me seven practical tips for {matter}.",
            "What are the most common mistakes in {matter}, and how can I avoid them?",
            "I am new to {matter}. Where do I begin?",
            "Write a step-by-step guide to {matter}.",
            "Why do so many people find {matter} difficult, and what helps?",
        ],
        {"matter": EVERYDAY},
    ),
    "letter": (
        3,
        [
            "Write an email to {person}, {matter}. Keep it {tone}.",
            "Draft a message to {person}, {matter}; it should be {tone}.",
            "Help me with a letter to {person}, {matter}. The letter should be {tone}.",
        ],
        {"person": PEOPLE, "matter": MATTERS, "tone": TONES},
    ),
    "write": (
        4,
        [
            "Write {text} about {subject}, {style}.",
            "Please write {text} {style}. The subject is {subject}.",
            "I need {text} about {subject}. Write it {style}.",
        ],
        {"text": TEXTS, "subject": SUBJECTS, "style": STYLES},
    ),
    "plan": (
        2,
        [
            "Help me plan {project} {limit}.",
            "Make a plan for {project} {limit}.",
            "What do I need for {project}? Please answer {limit}.",
        ],
        {"project": PROJECTS, "limit": LIMITS},
    ),
    "play": (
        3,
        [
            "You are {role}. {question}",
            "Pretend to be {role} and answer in character: {question}",
            "Answer as {role} would. {question}",
            "I would like to interview {role}. You play the part. {question}",
        ],
        {"role": ROLES, "question": QUESTIONS},
    ),
    "reason": (
        4,
        [
            "{name} has {large} {thing} and gives {small} of them to each of 2 friends. How many are left?",
            "{name} is {small} years older than {other}. Together they are {large} years old. How old is each?",
            "A train covers {large} km in {small} hours. How far does it get in 10 hours at the same speed?",
            "If {small} people pack {large} boxes of {thing} in a day, how many do 20 people pack? Show your steps.",
            "{name} is taller than {other}. {other} is taller than Sam. Is Sam taller than {name}? Explain why.",
            "A shop sells {small} {thing} for {large} cents. What do 100 cost? Think step by step.",
            "{name} runs past the person in third place of a race. Which place is {name} in now, and why?",
            "A box holds {small} red and {large} blue {thing}. What is the chance of drawing a red one? Simplify it.",
            "{name} says that all {thing} in the box are old. {other} finds a new one. Who is right, and why?",
        ],
        {"name": NAMES, "other": NAMES[8:] + NAMES[:8], "thing": THINGS, "small": SMALL, "large": LARGE},
    ),
    "extract": (
        1,
        [
            "Summarise the following text in one sentence.\n\n{note}",
            "List every number in this text and say what it stands for.\n\n{note}",
            "Rewrite the following text in a more formal style.\n\n{note}",
            "Turn this text into a JSON object with suitable keys.\n\n{note}",
            "Write three questions that this text answers, with their answers.\n\n{note}",
            "Is the tone of this text positive, negative or neutral? Give a reason.\n\n{note}",
            "Rewrite this text as a list of bullet points.\n\n{note}",
            "Translate the following text into Spanish.\n\n{note}",
            "Write a short reply to the author of this text.\n\n{note}",
            "Continue this text with two more sentences.\n\n{note}",
        ],
        {"note": NOTES},
    ),
    "code": (
        3,
        [
            "Explain {topic} with a short Python example.",
            "Write a small Python program that demonstrates {topic}, with comments.",
            "What should a junior programmer know about {topic}?",
            "Describe a bug that is typical of {topic} and how to find it.",
            "When would you not use {topic}? Give two examples.",
            "How does {topic} work inside? Go step by step.",
        ],
        {"topic": TECHNOLOGY},
    ),
}
