"""README and docs stay short: words of pages, words of sentences, and sentences with a subject."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Figures and estimates. Tables that a command writes are left out of the other pages, too.
MEASUREMENTS = {"benchmarks.md", "gpu.md", "planner_accuracy.md"}
README_WORDS = 900
PAGE_WORDS = 45_000
SENTENCE_WORDS, CELL_WORDS = 30, 35
# Sentences of a page that are longer, or begin with a word that points at nothing: never more.
STILL_TO_MEND = {
    "docs/hugging_face.md": 13,
    "docs/planner.md": 2,
}
RIDDLE = re.compile(r"(What|Whether|Those|Of which|Of those) ")
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
    return [s for s, n, most in sentences(text) if n > most or RIDDLE.match(s) and "?" not in s]


def test_the_readme_is_a_screen_and_the_pages_can_be_read():
    words = {name: len(GENERATED.sub("", text).split()) for name, text in pages().items()}
    assert words.pop("README.md") <= README_WORDS
    assert sum(words.values()) <= PAGE_WORDS, words


def test_sentences_are_short_and_name_their_subject():
    for name, text in pages().items():
        found = to_mend(text)
        assert len(found) <= STILL_TO_MEND.get(name, 0), (name, len(found), found)


def test_long_sentences_and_riddles_are_found():
    long = " ".join(["word"] * 31)
    assert to_mend(f"Short. {long}. Short.") == [f"{long}."]
    assert to_mend(f"| {long} | {long} {long} |") == [f"{long} {long}"]
    assert to_mend("What it costs is little.") and not to_mend("What does it cost? Little.")
    assert not to_mend(f"```\n{long}\n```\n\n- One.\n- `{long}`")
