"""The words, sentences and code of the tiny models' world.

Everything a tiny model is trained on is made from these lists: records join a
key with three values, filler separates them, and the tokenizer's merges are
learned from the same text.
"""

from __future__ import annotations

KEYS: list[str] = """
amber birch cedar delta ember fjord grove heron indigo jasper kelp laurel
maple nectar olive pearl quartz raven sage tulip umber violet willow yarrow
zinnia acorn basil coral daisy elder fern garnet hazel iris jade karst lotus
mango nutmeg onyx poppy quince reed saffron thyme ultra velvet walnut xenon
yucca zephyr aspen briar clover dune ebony flint gorse holly ivory juniper
koala lichen meadow
""".split()

VALUES: list[str] = """
fox yak sun owl ant bat cat dog eel fly gnu hen ibis jay kite lynx mole newt
orca pug quail ram seal toad urchin vole wasp crab zebra ape bear cow deer elk
frog goat hare ink jug keg lamp moon nail oar pan quill rope star tent urn van
web axe bell cup drum egg fan gate horn ice jar kit lid
""".split()

SENTENCES: list[str] = """
The harbour was quiet and the boats lay on the sand until the tide came back.
Please read the whole file before you change a line of it.
A short test that fails is worth more than a long one that passes.
She opened the window, looked at the rain, and put the kettle on.
The build took nine minutes on the old machine and two on the new one.
We keep the log for a week and then remove the oldest part.
If the number is below zero the function returns an error with a message.
Nobody in the village knew who had painted the door green.
The second train leaves at half past seven from the platform on the left.
Every request carries its own position, so the order does not matter.
You are a careful assistant that answers from the notes it was given.
First list the directory, then open the file that the error names.
The river bends twice before it reaches the mill and the old bridge.
Write the result to the output folder and print how long it took.
He counted the apples again and found that three of them were missing.
There is a fault in the loop: it reads one item past the end.
The library opens at ten, but the reading room stays closed on Mondays.
Use the tool when you need the value of a key that is not in the notes.
Snow fell during the night and covered the path to the station.
The answer should be short, exact, and easy to check.
""".strip().splitlines()

CODE: list[str] = '''
def add(left: int, right: int) -> int:
    """Return the sum of both numbers."""
    return left + right


class Counter:
    def __init__(self, start=0):
        self.value = start

    def step(self, by=1):
        self.value += by
        return self.value


for index, line in enumerate(lines):
    if not line.strip():
        continue
    print(index, line)

{"name": "read_file", "arguments": {"path": "src/main.py", "limit": 40}}
{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}
FAILED tests/test_counter.py::test_step - AssertionError: assert 2 == 3
import json
import pathlib
'''.strip().splitlines()

#: Lines that the tokenizer learns its merges from, chat scaffolding included.
SCAFFOLD: list[str] = """
system
user
assistant
get:
dump
loop
look:
Notes:
You can call these tools. Each is one line of JSON.
To call one, answer with a block like this:
<tool_response>
</tool_response>
{"name": "lookup", "arguments": {"key": "amber"}}
""".strip().splitlines()


def tokenizer_corpus() -> list[str]:
    """Return the lines from which the byte-pair merges are learned."""
    return SCAFFOLD * 6 + SENTENCES * 4 + CODE * 3
