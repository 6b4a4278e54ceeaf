"""README and docs: few words, short sentences that have a subject, and say yes or no.

tests/test_architecture.py asks the same of docstrings. `make lint` runs this file alone.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Figures and estimates. Tables that a command writes are left out of the other pages, too.
MEASUREMENTS = {"benchmarks.md", "gpu.md", "planner_accuracy.md"}
README_WORDS = 900
PAGE_WORDS = 45_000
SENTENCE_WORDS, CELL_WORDS = 30, 35
RIDDLE = re.compile(r"(What|Whether|Those|Of which|Of those) ")
HEDGE = re.compile(
    r"\b(very|quite|basically|simply|just|easily|actually|really|rather(?! than)|of course"
    r"|obviously|clearly|essentially|somewhat|mostly|perhaps)\b",
    re.IGNORECASE,
)
DENIED_TWICE = re.compile(
    r"\b(not un(?!til|der|less|its?\b)\w+|(not|never|nothing) without|cannot but)\b",
    re.IGNORECASE,
)
GENERATED = re.compile(r"<!-- (?!end of)\w+[^>]*-->.*?<!-- end of \w+ -->", re.DOTALL)


def pages():
    found = {"README.md": (ROOT / "README.md").read_text()}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name not in MEASUREMENTS:
            found[f"docs/{path.name}"] = path.read_text()
    return found


def sentences(text):
    """Each sentence of prose or of a table, with the most words that it may have."""
    text = re.sub(
        r"^( *)```.*?^ *```$", "\n", GENERATED.sub("", text), flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    # The line before a list ends in a colon; an item is a sentence of its own.
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", text):
        if block.lstrip().startswith("#") or block.startswith("    "):
            continue
        table = block.startswith("|")
        for part in block.split("|") if table else [block.lstrip("-* ")]:
            for sentence in re.split(r"(?<=[.:?!])\s+(?=[\w*\"(])", part):
                if words := re.findall(r"[\w'-]*\w[\w'-]*", sentence):
                    yield sentence.strip(), len(words), CELL_WORDS if table else SENTENCE_WORDS


def to_mend(text):
    return [
        sentence
        for sentence, words, most in sentences(text)
        if words > most
        or (RIDDLE.match(sentence) and "?" not in sentence)
        or HEDGE.search(sentence)
        or DENIED_TWICE.search(sentence)
    ]


def prose(docstring):
    """Sentences and parts of lists; names of arguments, code and sources are left out."""
    text = re.sub(r"\n *References?:.*|\n *\.\. math::.*?(?=\n\n\S|\Z)", "", docstring, flags=re.S)
    text = re.sub(r"::\n\n.*?(?=\n\n\S|\Z)", "", text, flags=re.S)
    text = re.sub(r"^ *=+ +=+$.*^ *=+ +=+$", "", text, flags=re.M | re.S)
    lines = [line.strip() for line in text.splitlines()]
    text = "\n".join(line for line in lines if not line.startswith((">>>", "...")))
    text = re.sub(r"^(Args|Returns|Raises|Yields|Attributes):$", "\n", text, flags=re.M)
    text = re.sub(r"^\*{0,2}\w+( \([^)]*\))?: *", "\n", text, flags=re.M)
    return re.sub(r";\s", "\n\n", re.sub(r":\w+:`|``", "`", text))


def test_the_readme_is_a_screen_and_the_pages_can_be_read():
    words = {name: len(GENERATED.sub("", text).split()) for name, text in pages().items()}
    assert words.pop("README.md") <= README_WORDS
    assert sum(words.values()) <= PAGE_WORDS, words


def test_sentences_are_short_and_name_their_subject():
    for name, text in pages().items():
        found = to_mend(text)
        assert not found, (name, len(found), found)


def test_long_sentences_and_riddles_are_found():
    long = " ".join(["word"] * 31)
    assert to_mend(f"Short. {long}. Short.") == [f"{long}."]
    assert to_mend(f"| {long} | {long} {long} |") == [f"{long} {long}"]
    assert to_mend("What it costs is little.") and not to_mend("What does it cost? Little.")
    assert not to_mend(f"```\n{long}\n```\n\n- One.\n- `{long}`")
    assert to_mend("It is very small.") and to_mend("It is not unknown.")
    assert not to_mend("Sums rather than means, and not until all are there.")


def test_long_sentences_of_docstrings_are_found():
    long = " ".join(["word"] * 31)
    assert to_mend(prose(f"Sum.\n\nArgs:\n    x (Tensor): {long}.\n")) == [f"{long}."]
    assert to_mend(prose(f"Sum.\n\nRaises:\n    ValueError: {long.replace(' ', '; ', 1)}.")) == []
    assert not to_mend(prose(f"Sum, as in::\n\n    {long}\n\nReference:\n    {long}.\n"))
