"""Faults that tools/check_site.py finds in a site of two pages."""

import sys
from pathlib import Path

import pytest

TOOLS = str(Path(__file__).resolve().parent.parent / "tools")
PAGE = """<!doctype html><html><body style="margin:0; background:{background}">
<h1 id="top">Title</h1><p style="color:{color}">Some words.</p>
<div style="width:{width}px">Wide.</div><a href="{link}">Link</a>
<a href="https://example.org/#nowhere">Elsewhere</a></body></html>"""
GOOD = {"background": "#fff", "color": "#333", "width": 300, "link": "other.html#top"}


@pytest.fixture
def check_site(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import check_site

    yield check_site
    sys.modules.pop("check_site")


def write(folder, **changes):
    for name in ("index", "other"):
        page = PAGE.format(**GOOD | (changes if name == "index" else {}))
        (folder / f"{name}.html").write_text(page)


def test_links_without_a_file_or_an_anchor_are_found(check_site, tmp_path):
    write(tmp_path)
    assert list(check_site.broken_links(tmp_path)) == []
    write(tmp_path, link="gone.html")
    assert list(check_site.broken_links(tmp_path)) == ["index.html: gone.html is no file"]
    write(tmp_path, link="other.html#gone")
    (found,) = check_site.broken_links(tmp_path)
    assert found == "index.html: other.html#gone has no such anchor"


def test_wide_pages_and_pale_text_are_found(check_site, tmp_path):
    program = check_site.browser()
    if program is None:
        pytest.skip(f"none of {', '.join(check_site.BROWSERS)} is installed")

    def found(**changes):
        write(tmp_path, **changes)
        return list(check_site.looks(tmp_path, ["index.html"], program))

    assert found() == []
    wide = found(width=700)
    assert [text.split(": ")[1] for text in wide] == ["is 700 wide in a window of 400"] * 2
    pale = found(color="#aaa")
    assert len(pale) == 4 and all("contrast 2.32: Some words." in text for text in pale)
