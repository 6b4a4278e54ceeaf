"""Files that the library writes: whole at any time, whoever writes them at once."""

import ast
import os
import threading
from pathlib import Path

import pytest

import moe_ext
from moe_ext._files import replacing

PACKAGE = Path(moe_ext.__file__).parent
# Optimizer files of the Trainer, one of each rank, and bytes in memory that Horovod's facade sends.
ELSEWHERE = {"integrations/huggingface/trainer.py", "integrations/horovod.py"}
WRITERS = ("write_text", "write_bytes", "savefig", "save_file", "save")


def writes(node):
    """True for a call that writes to a file."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if last == "open":
        return any(isinstance(arg, ast.Constant) and "w" in str(arg.value) for arg in node.args)
    return last in WRITERS and (last != "save" or name == "torch.save")


def replaced(node):
    return isinstance(node, ast.With) and any(
        ast.unparse(item.context_expr).startswith("replacing(") for item in node.items
    )


def unsafe_writes(tree):
    """Lines that write to a file outside of `with replacing(...)`."""
    safe = {id(n) for w in ast.walk(tree) if replaced(w) for n in ast.walk(w)}
    return [node.lineno for node in ast.walk(tree) if writes(node) and id(node) not in safe]


def test_every_file_is_replaced_in_one_step():
    found = {
        str(path.relative_to(PACKAGE)): unsafe_writes(ast.parse(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    }
    assert {name for name, lines in found.items() if lines} == ELSEWHERE


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Path(x).write_text('a')", [1]),
        ("with open(x, 'w') as f: f.write('a')", [1]),
        ("with replacing(x) as f:\n f.write_bytes(b'a')\nf.savefig(x)", [3]),
        ("with replacing(x) as p, p.open('w') as f: f.write('a')", []),
        ("open(x)\ntorch.save(a, x)\nlayer.save(x)", [2]),
    ],
)
def test_the_rule_sees_what_it_should(text, lines):
    assert unsafe_writes(ast.parse(text)) == lines


def test_many_write_one_file_and_a_reader_finds_it_whole(tmp_path):
    target, texts, failures = tmp_path / "a.json", [str(i) * 100_000 for i in range(4)], []
    target.write_text(texts[0])

    def write(text):
        for _ in range(50):
            try:
                with replacing(target) as file:
                    file.write_text(text)
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert target.read_text() in texts
    assert not failures
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_error_leaves_the_old_file(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(target) as file:
        file.write_text("new")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_links_stay_links_and_pipes_pipes(tmp_path):
    target, link, pipe = tmp_path / "a", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as file:
        file.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"
    os.mkfifo(pipe)
    with replacing(pipe) as file:
        assert file == pipe
