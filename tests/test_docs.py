"""The README runs, all pages render and link; and the machine that runs pages (`make docs`) notices what is wrong with them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("markdown")

ROOT = Path(__file__).resolve().parent.parent


def _load():
    spec = importlib.util.spec_from_file_location("aleator_docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _load()


def test_the_readme_runs():
    build.execute(ROOT / "README.md", fast=True)


def test_all_pages_render_and_link():
    rendered = {page: build.render(page, []) for page in build.pages()}
    ids = {page: set(build.re.findall(r'<h\d id="([^"]*)"', body)) for page, (_, body) in rendered.items()}
    for page, (_, body) in rendered.items():
        build.links(page, body, ids)


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """An empty documentation folder; call it with a text to get a page."""
    monkeypatch.setattr(build, "DOCS", tmp_path)
    monkeypatch.setattr(build, "BUILD", tmp_path / "_build")

    def write(text, name="page.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def _run(page):
    build.warnings.resetwarnings()
    with build.warnings.catch_warnings():
        return build.run_page(page, build.BUILD / "figures")


def test_blocks_share_a_namespace_and_show_what_they_make(docs):
    page = docs("# T\n\n```python\na = 2\nprint('hé <b>')\na + 1\n```\n\ntext\n\n```python\na * 10\n```\n")
    results = _run(page)
    assert [(r["line"], r["text"]) for r in results] == [(4, "hé <b>\n3\n"), (12, "20\n")]
    title, body = build.render(page, results)
    assert title == "T"
    assert '<pre class="output">hé &lt;b&gt;\n3</pre>' in body
    assert body.index("20</pre>") > body.index("text")


def test_blocks_marked_no_run_and_plain_shell_are_only_shown(docs):
    page = docs("# T\n\n```python no-run\nraise SystemError\n```\n\n```sh\nexit 3\n```\n")
    assert _run(page) == []
    assert "SystemError" in build.render(page, [])[1]


def test_what_a_markdown_block_prints_is_part_of_the_page(docs):
    page = docs("# T\n\n```python markdown\nprint('## Made\\n\\n*so*')\n```\n\nend\n")
    body = build.render(page, _run(page))[1]
    assert '<h2 id="made">Made</h2>' in body
    assert "<em>so</em>" in body
    assert "print(" not in body


def test_the_gallery_shows_every_picture():
    from aleator import plots

    shown = set(build.re.findall(r"plots\.([a-z_]+)\(", (ROOT / "docs" / "plots.md").read_text(encoding="utf-8")))
    assert {name for name in plots.__all__ if name.islower() and name not in ("axes", "save")} <= shown


def test_a_block_may_show_fences_inside_longer_fences(docs):
    page = docs("# T\n\n````md\n```\n```python\nraise SystemError\n```\n````\n\n```python\n1 + 1\n```\n")
    assert [r["text"] for r in _run(page)] == ["2\n"]


def test_shell_blocks_marked_run_show_their_output(docs):
    assert _run(docs("# T\n```sh run\necho one; python -c 'print(1 + 1)'\n```\n"))[0]["text"] == "one\n2\n"


def test_a_figure_is_saved_with_its_title_as_alt_text(docs):
    page = docs("# T\n\n```python\nimport matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.title('A line & more')\n```\n")
    results = _run(page)
    assert results[0]["text"] == ""
    (figure,) = results[0]["figures"]
    assert (build.BUILD / "figures" / figure["file"]).stat().st_size > 1000
    assert f'src="figures/{figure["file"]}" alt="A line &amp; more"' in build.render(page, results)[1]


def test_a_figure_without_a_title_is_described_by_its_labels(docs):
    page = docs("# T\n\n```python\nimport matplotlib.pyplot as plt\nplt.plot([0, 1])\nplt.xlabel('x'); plt.ylabel('std')\n```\n")
    assert _run(page)[0]["figures"][0]["alt"] == "std against x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# T\n\n```python\na = 1\nraise KeyError('k')\n```\n", r"page.md:5: KeyError: 'k'"),
        ("# T\n\n```python\nimport warnings\nwarnings.warn('careful')\n```\n", r"page.md:5: UserWarning: careful"),
        ("# T\n\n```python\na = (\n```\n", r"page.md:4: SyntaxError"),
        ("# T\n\n```sh run\necho so\nfalse\n```\n", r"(?s)page.md:4: the shell block ended with status 1.*so"),
        ("# T\n\n```python\nimport matplotlib.pyplot as plt\nplt.plot([1])\n```\n", r"page.md:4: a figure without a title"),
        ("# T\n\n```python\n1\n", r"page.md:3: this block is never closed"),
        ("# T\n\n```python norun\n1\n```\n", r"page.md:3: unknown mark \['norun'\]"),
    ],
)
def test_a_failing_block_is_named_by_page_and_line(docs, text, message):
    import matplotlib.pyplot as plt

    try:
        with pytest.raises(build.DocsError, match=message):
            _run(docs(text))
    finally:
        plt.close("all")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no title\n", r"page.md:1: the page has no '# title'"),
        ("# T\n\n[x](missing.md)\n", r"page.md:3: link to missing.md: there is no such file"),
        ("# T\n\n## Some part\n\n[x](#other-part)\n", r"page.md:5: link to #other-part: no such heading.*some-part"),
        ("# T\n\n[x](sub/two.md#nowhere)\n", r"page.md:3: link to sub/two.md#nowhere: no such heading"),
    ],
)
def test_a_page_that_cannot_be_shown_is_named_by_page_and_line(docs, text, message):
    docs("# Two\n", "sub/two.md")
    docs(text)
    with pytest.raises(build.DocsError, match=message):
        build.build(build.pages(), fast=True, reuse=False)


def test_every_page_that_fails_is_named(docs):
    for name in ("one.md", "two.md"):
        docs("# T\n\n```python\n1 / 0\n```\n", name)
    with pytest.raises(build.DocsError, match=r"(?s)one.md:4: ZeroDivisionError.*two.md:4: ZeroDivisionError"):
        build.build(build.pages(), fast=True, reuse=False)


def test_build_writes_pages_navigation_and_an_index(docs):
    docs("# Two\n\n[back](../page.md#part)\n", "sub/two.md")
    docs("# One\n\n## Part\n\n[on](sub/two.md)\n\n```python\nimport os; os.environ.get('ALEATOR_DOCS_FAST'), os.listdir()\n```\n")
    build.build(build.pages(), fast=True, reuse=False)
    one = (build.BUILD / "page.html").read_text(encoding="utf-8")
    assert '<a href="sub/two.html">on</a>' in one
    assert "(&#x27;1&#x27;, [])" in one  # small sizes asked for, an empty folder of its own
    assert 'aria-current="page">One' in one
    assert '<a href="../page.html#part">back</a>' in (build.BUILD / "sub" / "two.html").read_text(encoding="utf-8")
    assert "sub/two.html" in (build.BUILD / "index.html").read_text(encoding="utf-8")


def test_an_unchanged_page_is_not_run_again(docs, tmp_path):
    counter = tmp_path / "runs"
    page = docs(f"# T\n```python\nwith open({str(counter)!r}, 'a') as f:\n    f.write('x')\n```\n")
    for reuse, runs in [(False, 1), (True, 1), (False, 2)]:
        build.execute(page, reuse=reuse)
        assert counter.read_text(encoding="utf-8") == "x" * runs
    page.write_text(page.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    build.execute(page, reuse=True)
    assert counter.read_text(encoding="utf-8") == "xxx"
