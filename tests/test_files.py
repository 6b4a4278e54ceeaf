"""Files that the library writes: whole at any time, whoever writes them at once."""

import os
import threading

import pytest

from moe_ext._files import replacing


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
