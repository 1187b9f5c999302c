"""Build the documentation by running it: Markdown pages in, HTML in docs/_build out, nothing from the network.

Every fenced "```python" block of a page runs, in order, in one namespace, in a process and an empty folder of its own. What a block prints,
the value of its last expression and the figures it leaves open appear below it; a figure's title, or else its labels, becomes the alt text.
"```python no-run" is only shown; what "```python markdown" prints is Markdown and stands in its place; "```sh run" runs in bash, with this environment's commands on the path. An exception, a warning, a figure
without words or a link that leads nowhere fails the build with page:line. A page that can do with smaller sizes reads the variable
ALEATOR_DOCS_FAST, set by --fast and by the tests.

    python docs/build.py [--fast] [--force] [PAGE ...]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import hashlib
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
BUILD = DOCS / "_build"
FIRST = ("index", "start", "choose_a_method", "howto", "plots", "faq", "notation", "extend", "api", "lectures", "methods", "decisions")


class DocsError(Exception):
    """A page cannot be built; the message starts with page:line."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: `line` is the 1-based line of its first line of code, `end` that of its closing fence."""

    line: int
    end: int
    language: str
    flags: tuple[str, ...]
    code: str

    @property
    def runs(self) -> bool:
        return (self.language == "python" and "no-run" not in self.flags) or (self.language == "sh" and "run" in self.flags)


def pages() -> list[Path]:
    """All pages in reading order: the named ones first, then by name; a folder's index comes before its pages."""

    def order(page: Path) -> tuple[Any, ...]:
        parts = page.relative_to(DOCS).with_suffix("").parts
        rank = FIRST.index(parts[0]) if parts[0] in FIRST else len(FIRST)
        return (rank, *("" if part == "index" else part for part in parts))

    return sorted((p for p in DOCS.rglob("*.md") if BUILD not in p.parents), key=order)


def name_of(page: Path) -> str:
    """The page as written in messages: its path from the root of the project."""
    return page.resolve().relative_to(ROOT).as_posix() if page.resolve().is_relative_to(ROOT) else page.name


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, opened, fence = [], None, ""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if opened is None:
            if match := re.match(r"(`{3,})\s*(\S*)\s*(.*)$", line):
                fence, opened = match[1], (number + 1, match[2], tuple(match[3].split()))
        elif line.rstrip() == fence:
            first, language, flags = opened
            known = {"python": {"no-run", "markdown"}, "sh": {"run", "ci"}}.get(language, set(flags))
            if unknown := set(flags) - known:
                raise DocsError(f"{name_of(page)}:{first - 1}: unknown mark {sorted(unknown)}; a {language} block may have {sorted(known)}")
            found.append(Block(first, number, language, flags, "\n".join(lines[first - 1 : number - 1])))
            opened = None
    if opened is not None:
        raise DocsError(f"{name_of(page)}:{opened[0] - 1}: this block is never closed")
    return found


# ---------------------------------------------------------------------------------------------------- running a page


def run_page(page: Path, figures: Path) -> list[dict[str, Any]]:
    """Run every block of a page in this process; one result per block that runs. Called in a fresh process by `execute`."""
    strict_warnings()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    results = []
    for block in blocks(page):
        if block.runs:
            run = run_python if block.language == "python" else run_shell
            text = run(block, page, namespace)
            results.append({"line": block.line, "text": text, "figures": save_figures(block, page, figures)})
    return results


def strict_warnings() -> None:
    """The same rules as in the tests: every warning is an error but for the exceptions listed in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for line in settings["tool"]["pytest"]["ini_options"]["filterwarnings"]:
        action, text, category, *_ = [*line.split(":"), "", "Warning"] if line.count(":") else (line, "", "Warning")
        warnings.filterwarnings(action, message=text, category=getattr(__import__("builtins"), category))  # type: ignore[arg-type]


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """What a block prints, then the value of its last expression."""
    printed = io.StringIO()
    value = None
    try:
        # Blank lines in front give every statement its line in the page, in messages and tracebacks alike.
        tree = ast.parse("\n" * (block.line - 1) + block.code, filename=str(page))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, str(page), "exec", dont_inherit=True), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), str(page), "eval", dont_inherit=True), namespace)
            if value is not None and not (text := repr(value)).lstrip("([").startswith(("<matplotlib", "Text(")):
                print(text)
    except SyntaxError as error:
        raise DocsError(f"{name_of(page)}:{error.lineno}: SyntaxError: {error.msg}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)]
        line = lines[-1] if lines else block.line
        raise DocsError(f"{name_of(page)}:{line}: {type(error).__name__}: {error}\n\n{traceback.format_exc()}") from error
    return printed.getvalue()


def run_shell(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """What the commands of a block print."""
    del namespace
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise DocsError(f"{name_of(page)}:{block.line}: the shell block ended with status {done.returncode}\n\n{done.stdout}")
    return done.stdout


def save_figures(block: Block, page: Path, folder: Path) -> list[dict[str, str]]:
    """Save and close the figures that are open after a block."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    plt = sys.modules["matplotlib.pyplot"]
    saved = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        alt = describe(figure)
        if not alt:
            raise DocsError(f"{name_of(page)}:{block.line}: a figure without a title; give it one, readers who cannot see it need it")
        name = f"{slug(page)}-{block.line}-{number}.png"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        except Warning as error:
            raise DocsError(f"{name_of(page)}:{block.line}: {type(error).__name__} while drawing: {error}") from error
        saved.append({"file": name, "alt": alt})
        plt.close(figure)
    return saved


def describe(figure: Any) -> str:
    """The titles of a figure and its panels; where there are none, what is drawn against what."""
    titles = (axes.get_title(loc=side) for axes in figure.axes for side in ("left", "center", "right"))
    alt = " · ".join(filter(None, [figure.get_suptitle(), *titles]))
    if not alt:
        up, along = (
            ", ".join(dict.fromkeys(filter(None, (getattr(a, get)() for a in figure.axes)))) for get in ("get_ylabel", "get_xlabel")
        )
        alt = f"{up} against {along}" if up and along else ""
    return alt


def slug(page: Path) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(name_of(page)).with_suffix("").as_posix().removeprefix("docs/").lower())


def execute(page: Path, fast: bool = False, reuse: bool = False) -> list[dict[str, Any]]:
    """Run a page in a fresh process and an empty folder; keep the result, and reuse a kept one when nothing it depends on has changed."""
    page = page.resolve()
    store = BUILD / ".executed" / f"{slug(page)}{'-fast' if fast else ''}.json"
    stamp = hashlib.sha256(f"{fingerprint()} {fast} {page.read_text(encoding='utf-8')}".encode()).hexdigest()
    if reuse and store.exists():
        kept = json.loads(store.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp and all((BUILD / "figures" / f["file"]).exists() for r in kept["results"] for f in r["figures"]):
            return kept["results"]
    results: list[dict[str, Any]] = []
    if any(block.runs for block in blocks(page)):
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            work = Path(folder) / "work"
            work.mkdir()
            environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0", "COLUMNS": "100"}
            environment.pop("ALEATOR_DOCS_FAST", None)
            if fast:
                environment["ALEATOR_DOCS_FAST"] = "1"
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--run", str(page), str(answer)],
                cwd=work,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if not answer.exists():
                raise DocsError(f"{name_of(page)}:1: the page's process ended with status {done.returncode}\n\n{done.stdout}")
            outcome = json.loads(answer.read_text(encoding="utf-8"))
        if "error" in outcome:
            raise DocsError(outcome["error"])
        results = outcome["results"]
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps({"stamp": stamp, "results": results}), encoding="utf-8")
    return results


@functools.cache
def fingerprint() -> str:
    """What every page depends on: the library's source, the scripts here, and the versions below."""
    digest = hashlib.sha256(f"{sys.version} {version('jax')} {version('matplotlib')}".encode())
    for path in [*sorted(Path(__file__).parent.glob("*.py")), *sorted((ROOT / "aleator").rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_and_answer(page: Path, answer: Path) -> None:
    """The child's side of `execute`."""
    sys.path.insert(0, str(ROOT))
    try:
        outcome: dict[str, Any] = {"results": run_page(page, BUILD / "figures")}
    except DocsError as error:
        outcome = {"error": str(error)}
    answer.write_text(json.dumps(outcome), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- writing the HTML


def render(page: Path, results: list[dict[str, Any]]) -> tuple[str, str]:
    """(title, HTML of the body) of a page with the results of its blocks below them."""
    import markdown

    shown: list[str] = []

    def stash(piece: str) -> str:
        # Outputs must not be touched by Markdown: they go in afterwards, in place of a mark.
        shown.append(piece)
        return f"x-stash-{len(shown) - 1}-x"

    by_line = {result["line"]: result for result in results}
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)
    out, position = [], 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        out += lines[position : block.line - 2]
        if "markdown" in block.flags:
            out += ["", by_line[block.line]["text"] if block.line in by_line else "", ""]
            position = block.end
            continue
        fence = lines[block.end - 1].strip()
        out += [f"{fence}{block.language}", *lines[block.line - 1 : block.end - 1], fence, ""]
        if result := by_line.get(block.line):
            if result["text"].strip():
                out += [stash(f'<pre class="output">{html.escape(result["text"].rstrip())}</pre>'), ""]
            for figure in result["figures"]:
                out += [stash(f'<p><img src="{up}figures/{figure["file"]}" alt="{html.escape(figure["alt"])}"></p>'), ""]
        position = block.end
    out += lines[position:]

    converter = markdown.Markdown(
        extensions=["fenced_code", "codehilite", "tables", "toc", "sane_lists"],
        extension_configs={"codehilite": {"guess_lang": False, "css_class": "code"}},
    )
    body = converter.convert("\n".join(out))
    body = re.sub(r"<p>x-stash-(\d+)-x</p>", lambda m: shown[int(m[1])], body)
    title = next((line[2:].strip() for line in lines if line.startswith("# ")), None)
    if title is None:
        raise DocsError(f"{name_of(page)}:1: the page has no '# title'")
    return re.sub(r"[*`]", "", title), body


def links(page: Path, body: str, ids: dict[Path, set[str]]) -> str:
    """Check every internal link and image, and turn links to pages into links to their HTML."""
    text = page.read_text(encoding="utf-8").splitlines()

    def fix(match: re.Match[str]) -> str:
        attribute, address = match[1], html.unescape(match[2])
        if re.match(r"[a-z]+:", address) or (attribute == "src" and "figures/" in address):
            return match[0]
        path, _, anchor = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        where = f"{name_of(page)}:{next((i for i, line in enumerate(text, start=1) if address in line), 1)}"
        if not target.exists():
            raise DocsError(f"{where}: link to {address}: there is no such file")
        if target in ids:
            if anchor and anchor not in ids[target]:
                raise DocsError(f"{where}: link to {address}: no such heading; the page has {sorted(ids[target])}")
            target = html_path(target)
        elif attribute == "src":
            copied = BUILD / "files" / target.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copied)
            target = copied
        new = Path(os.path.relpath(target, html_path(page).parent)).as_posix() if path else ""
        return f'{attribute}="{html.escape(new + (f"#{anchor}" if anchor else ""))}"'

    return re.sub(r'\b(href|src)="([^"]*)"', fix, body)


def html_path(page: Path) -> Path:
    return BUILD / page.relative_to(DOCS).with_suffix(".html")


def build(chosen: list[Path], fast: bool, reuse: bool) -> None:
    """Run and write the chosen pages; links are checked against all of them. All pages that fail are named, not only the first."""
    every = pages()
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {page: pool.submit(execute, page, fast, reuse) for page in chosen}
    failed = [str(error) for run in runs.values() if isinstance(error := run.exception(), DocsError)]
    if failed:
        raise DocsError("\n\n".join(failed))
    results = {page: run.result() for page, run in runs.items()}
    rendered = {page: render(page, results.get(page, [])) for page in every}
    ids = {page: set(re.findall(r'<h\d id="([^"]*)"', body)) for page, (_, body) in rendered.items()}
    for page in chosen:
        title, body = rendered[page]
        target = html_path(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(frame(title, links(page, body, ids), navigation(target, rendered), target), encoding="utf-8")
    index = BUILD / "index.html"
    if DOCS / "index.md" not in every:
        index.write_text(frame("Aleator", "<h1>Aleator</h1>" + navigation(index, rendered), "", index), encoding="utf-8")
    (BUILD / "style.css").write_text(style(), encoding="utf-8")


def navigation(target: Path, rendered: dict[Path, tuple[str, str]]) -> str:
    """The list of all pages, by folder, with the current one marked."""
    out, folder = ["<ul>"], None
    for page, (title, _) in rendered.items():
        if page.parent != folder and page.parent != DOCS:
            out.append(f'<li class="folder">{html.escape(page.parent.name.replace("_", " "))}</li>')
        folder = page.parent
        here = ' aria-current="page"' if html_path(page) == target else ""
        out.append(f'<li><a href="{Path(os.path.relpath(html_path(page), target.parent)).as_posix()}"{here}>{html.escape(title)}</a></li>')
    return "\n".join([*out, "</ul>"])


def frame(title: str, body: str, menu: str, target: Path) -> str:
    css = Path(os.path.relpath(BUILD / "style.css", target.parent)).as_posix()
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{html.escape(title)}</title><link rel="stylesheet" href="{css}"></head>
<body>
<nav aria-label="Pages">{menu}</nav>
<main>
{body}
</main>
</body>
</html>
"""


def style() -> str:
    """One small sheet, light and dark."""
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=name).get_style_defs(".code") for name in ("default", "monokai"))
    return f"""
:root {{ --ink: #1c1c1c; --paper: #fdfdfb; --quiet: #f1f1ec; --line: #d5d5cc; --link: #0b57a4; }}
{light}
@media (prefers-color-scheme: dark) {{
:root {{ --ink: #e4e4e0; --paper: #17181a; --quiet: #222427; --line: #3b3d41; --link: #8ab8f0; }}
{dark}
main img {{ background: #fff; }}
}}
body {{ margin: 0; display: flex; gap: 2rem; color: var(--ink); background: var(--paper); font: 16px/1.55 system-ui, sans-serif; }}
nav {{ flex: 0 0 15rem; padding: 1rem; border-right: 1px solid var(--line); min-height: 100vh; box-sizing: border-box; }}
nav ul {{ list-style: none; padding: 0; margin: 0; }}
nav .folder {{ margin-top: 1rem; font-weight: 600; }}
nav a[aria-current] {{ font-weight: 600; text-decoration: none; }}
main {{ flex: 1; min-width: 0; max-width: 52rem; padding: 1rem; }}
a {{ color: var(--link); }}
pre, code {{ font: 0.88em/1.45 ui-monospace, monospace; }}
pre {{ background: var(--quiet); padding: 0.7rem 0.9rem; overflow-x: auto; border-radius: 4px; }}
.code, .code pre {{ background: var(--quiet); border-radius: 4px; }}
pre.output {{ background: none; border-left: 3px solid var(--line); border-radius: 0; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: left; }}
img {{ max-width: 100%; height: auto; }}
@media (max-width: 50rem) {{ body {{ display: block; }} nav {{ min-height: 0; border-right: 0; border-bottom: 1px solid var(--line); }} }}
"""


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        run_and_answer(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description="Run and build the documentation.")
    parser.add_argument("pages", nargs="*", type=Path, help="only these pages (default: all)")
    parser.add_argument("--fast", action="store_true", help="small sizes, as before every commit")
    parser.add_argument("--force", action="store_true", help="run pages again even if nothing has changed")
    options = parser.parse_args()
    try:
        build([page.resolve() for page in options.pages] or pages(), options.fast, reuse=not options.force)
    except DocsError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Built {BUILD.relative_to(ROOT).as_posix()}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
