"""Looks at the built site in a browser: `make docs-look`, after `make docs`.

The report of `make compare` is one of the pages, if there is one in results/compare.

Opens each of `PAGES` in headless Chromium, in light and dark, on a phone and on a wide screen, and
writes screenshots to build/look. Fails for an error or a warning in the console, a request that
leaves the machine or fails, a picture that does not load, a page that is wider than the screen, and
a link to a page or a heading that does not exist, on any page of the site.
"""

import argparse
import functools
import html.parser
import http.server
import shutil
import sys
import threading
import urllib.parse
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SITE, SHOTS = ROOT / "build" / "site", ROOT / "build" / "look"
REPORT = ROOT / "results" / "compare" / "report.html"
PAGES = (
    "index",
    "drawn",
    "choose",
    "cheat_sheet",
    "errors",
    "schemes",
    "explorer",
    "reference/T5",
    "reference/RoPE",
    "reference/YaRN",
    "reference/attention",
    "reference/module_nnx",
    "reference/index",
    "reference/family_rotary",
    "reference/gallery",
    "study",
    "study_catalogue",
    "faults",
    "serving",
    "models",
    "recipes/bonsai_qwen3",
    "recipes/flex_attention",
    "coming_from/x_transformers",
    "upstream/README",
    "search",
)
"""Pages that are opened; a page that is a program gets its function in `MOVES`."""


def move_the_explorer(page: Page) -> None:
    """Chooses YaRN and moves the factor; the summary has to follow."""
    before = page.inner_text("#summary")
    page.select_option("#scaling", label="YaRN")
    page.focus("#factor")
    page.keyboard.press("ArrowRight")
    if page.inner_text("#summary") == before:
        raise RuntimeError("explorer: the summary does not follow the sliders")


MOVES = {"explorer": move_the_explorer}
"""Functions of a Playwright page that use it, by the name of the page."""
WIDTHS = (390, 1400)
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN = "[...document.images].filter(x => !x.complete || !x.naturalWidth).map(x => x.src)"
LOAD = "document.querySelectorAll('img').forEach(x => x.loading = 'eager')"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *arguments) -> None:
        """Prints nothing."""


class Links(html.parser.HTMLParser):
    """The links of a page and the names that links can lead to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        """Collects one element."""
        values = dict(attrs)
        self.names |= {values[key] for key in ("id", "name") if values.get(key)}
        self.links += [values[key] for key in ("href", "src") if values.get(key)]


def broken_links(site: Path) -> list[str]:
    """Returns a line for each link of the site to a file or a name that does not exist."""
    files = (path for path in site.rglob("*.html") if "_static" not in path.parts)
    pages = {path: Links(path.read_text()) for path in files}
    faults = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            target = target if parts.path else path
            name = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                faults.append(f"{path.relative_to(site)}: no file {link}")
            elif name and target in pages and name not in pages[target].names:
                faults.append(f"{path.relative_to(site)}: no heading {link}")
    return faults


def look(browser: Browser, address: str, name: str, width: int, scheme: str) -> list[str]:
    """Opens a page and takes its picture; returns a line for each fault."""
    size = {"width": width, "height": 844 if width < 500 else 1000}
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(f"no answer from {request.url}"))
    page.on("request", lambda r: r.url.startswith((address, "data:")) or faults.append(r.url))
    page.goto(f"{address}/{name}.html", wait_until="load")
    page.evaluate(LOAD)
    page.wait_for_load_state("networkidle")
    if name in MOVES:
        MOVES[name](page)
    faults += [f"picture {source} does not load" for source in page.evaluate(BROKEN)]
    if (over := page.evaluate(OVERFLOW)) > 0:
        faults.append(f"{over} pixels wider than the screen")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name.replace('/', '-')}-{width}-{scheme}.png")
    context.close()
    return [f"{name}, {width} pixels, {scheme}: {fault}" for fault in faults]


def main() -> int:
    """Looks at all pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="default: all in the table")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="path of the browser")
    options = parser.parse_args()
    if not options.chromium:
        parser.error("no chromium: install it (Debian: apt-get install chromium), or --chromium")
    if not (SITE / "index.html").exists():
        parser.error("build/site is empty: make docs")
    faults, pages = broken_links(SITE), list(options.pages)
    report = SITE / "report_of_compare.html"
    if REPORT.exists() and options.pages is PAGES:
        # A browser requests an icon from a server, and none for a file.
        icon = '<head>\n<link rel="icon" href="data:,">'
        report.write_text(REPORT.read_text().replace("<head>", icon, 1))
        pages.append(report.stem)
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=OPTIONS)
        for name in pages:
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    faults += look(browser, address, name, width, scheme)
        browser.close()
    server.shutdown()
    report.unlink(missing_ok=True)
    print(*faults, f"{len(pages)} pages, {len(faults)} faults; pictures in {SHOTS}", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
