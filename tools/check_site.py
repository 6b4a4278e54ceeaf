"""Looks at a built site: links and anchors of all pages, and four pages as a browser lays them out.

    python tools/check_site.py build/docs [folder for pictures]

The browser is Debian's chromium, driven through two pipes; without one, only links are looked at.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

PAGES = ("index.html", "tour.html", "hugging_face.html", "api/moe_ext.html")
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
ANSWER_SECONDS = 60
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Wider than the window, or text of less contrast than WCAG's AA (3 for large text).
LOOK = """
(() => {
  const found = [], seen = new Set();
  const add = (text) => { if (!seen.has(text)) { seen.add(text); found.push(text); } };
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) add(`is ${wide} wide in a window of ${innerWidth}`);
  const rgba = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const background = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, background(element.parentElement));
  };
  const light = (color) => {
    const [r, g, b] = color.map((c) => {
      c /= 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    const shown = { visibilityProperty: true, opacityProperty: true };
    if (!text || !element.checkVisibility(shown) || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), below = background(element);
    const [a, b] = [light(over(rgba(style.color), below)), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize), bold = style.fontWeight >= 700;
    const least = size >= 24 || (size >= 18.66 && bold) ? 3 : 4.5;
    const colors = `has ${style.color} on ${below.map(Math.round)}, contrast ${ratio.toFixed(2)}`;
    if (ratio < least) add(`${colors}: ${text.slice(0, 40)}`);
  }
  return found;
})()
"""


class Page(HTMLParser):
    """The names that a page defines, and the addresses that it links."""

    def __init__(self, path):
        super().__init__()
        self.names, self.links = {"", "top"}, []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        """Note the names and links of a tag; the parser calls this for each one."""
        for key, value in attrs:
            if key == "id" or (key == "name" and tag == "a"):
                self.names.add(value)
            elif key in ("href", "src") and value:
                self.links.append(value)


def broken_links(site):
    """A line for each link of a page whose file or anchor is missing."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            address, anchor = urldefrag(link)
            if urlparse(link).scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(urlparse(address).path)).resolve() if address else path
            if not target.is_file():
                yield f"{path.name}: {link} is no file"
            elif target in pages and unquote(anchor) not in pages[target].names:
                yield f"{path.name}: {link} has no such anchor"


class Browser:
    """A headless chromium that answers over pipes; close it with `with`."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self.send = os.pipe()
        self.receive, back = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage"
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{there} 4>&{back}', program, *flags.split()]
            + ["--remote-debugging-pipe", "--hide-scrollbars"]
            + [f"--user-data-dir={self.profile.name}"],
            pass_fds=(there, back),
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self.numbers, self.rest, self.session = itertools.count(1), b"", {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": found["sessionId"]}
        self.call("Page.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.profile.cleanup()

    def message(self):
        """The next message of the browser."""
        while b"\0" not in self.rest:
            if not select.select([self.receive], [], [], ANSWER_SECONDS)[0]:
                raise RuntimeError(f"check_site: no answer in {ANSWER_SECONDS} seconds")
            if not (read := os.read(self.receive, 1 << 16)):
                raise RuntimeError("check_site: the browser ended")
            self.rest += read
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def call(self, method, event=None, **params):
        """The answer to a command, after the event that it leads to."""
        number = next(self.numbers)
        command = {"id": number, "method": method, "params": params, **self.session}
        os.write(self.send, json.dumps(command).encode() + b"\0")
        result = None
        while result is None or event:
            message = self.message()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"check_site: {method}: {message['error']['message']}")
                result = message["result"]
            elif message.get("method") == event:
                event = None
        return result

    def look(self, url, width, scheme, picture=None):
        """Faults of a page in a window of this width, in light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", event="Page.loadEventFired", url=url)
        found = self.call("Runtime.evaluate", expression=LOOK, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"check_site: {found['exceptionDetails']}")
        if picture:
            data = self.call("Page.captureScreenshot")["data"]
            picture.write_bytes(base64.b64decode(data))
        return found["result"]["value"]


def looks(site, pages, program, pictures=None):
    """A line for each thing that is wrong with how pages are laid out."""
    with Browser(program) as browser:
        for page, width, scheme in itertools.product(pages, WIDTHS, SCHEMES):
            name = f"{page.replace('/', '-')}-{width}-{scheme}.png"
            picture = pictures / name if pictures else None
            for wrong in browser.look((site / page).resolve().as_uri(), width, scheme, picture):
                yield f"{page}, {width} pixels, {scheme}: {wrong}"


def browser():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def main(site, pictures=None):
    """Print what is wrong; the status is 1 where anything is."""
    wrong = list(broken_links(Path(site)))
    if program := browser():
        pictures = Path(pictures) if pictures else None
        wrong += looks(Path(site), PAGES, program, pictures)
    else:
        print("check_site: no chromium: only links were looked at")
    print(*wrong, sep="\n" if wrong else "", end="\n" if wrong else "")
    print(f"check_site: {len(wrong)} faults in {site}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
