"""aleator/report: what it says is right, it says it for every kind of fit, and the page holds in a browser."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import aleator as al
from aleator import cli, data, report
from aleator._auto import Entry
from aleator.decide.calibration import Reliability
from aleator.report import facts, held, html, relevance, sections, strange
from aleator.report.document import Document, Picture, Points, Section, Table, Text, cell, number
from aleator.report.markdown import markdown
from aleator.tables import Preprocessor

NASTY = "<script>alert(1)</script>"
SLOPE, NOISE = 3.0, 2.0


def houses(rows=160, seed=0):
    """size drives the price, the text column has markup in it, age has gaps and nothing to say."""
    generator = np.random.default_rng(seed)
    size = generator.normal(50.0, 10.0, rows)
    age = generator.normal(20.0, 5.0, rows)
    age[:: max(2, rows // 9)] = np.nan
    kind = generator.choice(["a & b", "<i>c</i>"], rows)
    price = SLOPE * size + NOISE * generator.normal(size=rows)
    return pd.DataFrame({"size": size, NASTY: kind, "age $x$": age, "price": price})


def linear(frame, target="price"):
    preprocessor, x, y = Preprocessor.fit(frame, target, None)
    noise = al.Gaussian(al.InverseGamma(1.0, 1e-5))
    fit = al.fit(0, al.LinearModel(al.features.Identity(), noise, al.Normal(10.0), scaled_by_noise=True), (x, y), al.Exact())
    return dataclasses.replace(fit, preprocessor=preprocessor)


def network(frame, target, members=2):
    preprocessor, x, y = Preprocessor.fit(frame, target, None)
    net = al.networks.MLP(x.shape[1], (4,), len(preprocessor.labels))
    model = al.BNN(net, al.Categorical(len(preprocessor.labels)), al.Normal(1.0))
    fit = al.fit(0, model, (x, y), al.Ensemble(al.MAP(num_steps=60, learning_rate=0.05), members))
    return dataclasses.replace(fit, preprocessor=preprocessor)


@pytest.fixture(scope="module")
def table():
    return houses()


@pytest.fixture(scope="module")
def straight(table):
    return linear(table.iloc[:100])


@pytest.fixture(scope="module")
def found(straight, table):
    return facts.collect(0, straight, table, "houses")


@pytest.fixture(scope="module")
def many():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(200, 2))
    kind = np.concatenate([np.arange(20), (4 * np.clip(x[20:, 0] + 2.5, 0, 4.9).astype(int) + np.clip(x[20:, 1] + 2, 0, 3.9).astype(int))])
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "kind": [f"k{i:02d}" for i in kind]})


@pytest.fixture(scope="module")
def cases(table, straight, many):
    """(fit, data) of every kind."""
    sold = table.assign(sold=np.where(table["price"] > table["price"].median(), "yes <u>", "no")).drop(columns="price")
    binary = network(sold.iloc[:100], "sold")
    entries = (Entry("one", -1.0, 0.1, 0.5, 1.0, 0.7, "", "RMSE", 2.0, 0.1, 0.9, 0.03), Entry("two", note="left out"))
    other = linear(table.iloc[:80])
    stack = al.Auto(
        {"one": straight, "two": dataclasses.replace(other, preprocessor=straight.preprocessor)},
        {"one": 0.7, "two": 0.3},
        entries,
        (-1.0, 0.1),
        2.0,
    )
    x = np.random.default_rng(2).normal(size=(60, 2))
    y = x @ [1.0, -1.0] + 0.1 * np.random.default_rng(3).normal(size=60)
    arrays = al.fit(0, al.LinearModel(al.features.Identity(), al.Gaussian(0.1), al.Normal(1.0)), (x[:30], y[:30]), al.Exact())
    coin = al.fit(0, al.BNN(al.networks.MLP(2, (3,), 1), al.Bernoulli()), (x[:30], y[:30] > 0), al.MAP(num_steps=40))
    return {
        "regression": (straight, table),
        "binary": (binary, sold),
        "20 classes": (network(many, "kind", 1), many),
        "stack": (stack, table),
        "arrays": (arrays, (x, y)),
        "coin": (coin, (x, y > 0)),
        "no data": (straight, None),
        "few rows": (straight, table.iloc[100:112]),
    }


@pytest.fixture(scope="module")
def documents(cases, found):
    return {name: report.document(0, fit, rows, f"{name} & {NASTY}") for name, (fit, rows) in cases.items() if name != "regression"} | {
        "regression": report.describe(dataclasses.replace(found, name=f"regression & {NASTY}"))
    }


NAMES = ["regression", "binary", "20 classes", "stack", "arrays", "coin", "no data", "few rows"]


# ---- facts -----------------------------------------------------------------------------------------------------------------------


def test_rows_seen_in_training_are_left_out(table, straight):
    found = held.hold(0, straight, table)
    assert found.numbers.tolist() == list(range(101, 161))
    assert found.seen == 0.0
    assert "62 % of the rows were in training" in found.notes[0]
    # All of it was seen: then it is judged by that, and said.
    assert held.hold(0, straight, table.iloc[:50]).seen == 1.0


def test_a_full_sketch_tells_only_the_rows_it_would_hold():
    x = np.random.default_rng(0).normal(size=(2000, 3))
    rows = data.Data(x, x[:, 0])
    known = data.sketch(data.Data(x[:1500], x[:1500, 0]))
    new = data.unseen(known, rows)
    assert not new[:1500].any()
    assert 0 < new[1500:].sum() < 500
    assert not data.unseen(None, rows).any()


def test_relevance_is_what_the_closed_form_says():
    """log p loses (β²/2σ²)·E[(x − x′)²] = β² var(x)/σ² when x is another row's; within four standard errors (1 in 16,000 by chance)."""
    generator = np.random.default_rng(4)
    x = generator.normal(size=(1000, 2))
    y = SLOPE * x[:, 0] + NOISE * generator.normal(size=1000)
    fit = al.fit(0, al.LinearModel(al.features.Identity(), al.Gaussian(NOISE), al.Normal(10.0)), (x[200:], y[200:]), al.Exact())
    first, second = relevance.importances(0, fit, held.hold(1, fit, (x[:200], y[:200])))
    assert (first.name, second.name) == ("x0", "x1")
    assert abs(first.value - SLOPE**2 * x[:200, 0].var() / NOISE**2) < 4 * first.stderr < 1.5
    assert abs(second.value) < 4 * second.stderr


def test_effects_are_slopes_for_one_standard_deviation(straight, found):
    found = {one.name: one for one in found.judged.effects}
    scale = straight.preprocessor.columns[0].scale
    assert found["size"].lower < SLOPE * scale < found["size"].upper
    assert found["size"].upper - found["size"].lower < 0.1 * SLOPE * scale
    assert found["size"].positive == 1.0


def test_strange_rows_and_moved_columns_are_named(table, straight, found):
    calm = found
    odd = table.iloc[100:].copy()
    odd.iloc[3, 0] = 500.0
    odd[NASTY] = odd[NASTY].astype(object)
    odd.iloc[5, 1] = "never met"
    odd["age $x$"] = odd["age $x$"].fillna(20.0) + 8.0
    found = facts.collect(0, straight, odd).judged.strange
    why = {one.place: one.why for one in found.rows}
    assert "training sd from its mean" in why[3]
    assert "level unseen in training" in why[5]
    assert {one.place for one in found.rows[:2]} == {3, 5}
    assert found.moved[0].name == "age $x$"
    column = straight.preprocessor.columns[2]
    assert found.moved[0].shift == pytest.approx((odd["age $x$"].mean() - column.loc) / column.scale, rel=1e-5)
    assert calm.judged.strange.moved == ()


def test_a_point_has_no_detector(cases):
    fit, rows = cases["coin"]
    found = facts.collect(0, fit, rows)
    assert found.judged.split.share == 0.0
    assert found.judged.strange.score == ""
    assert any("no epistemic part" in line for line in sections.advice(found))


@pytest.mark.parametrize(
    ("observed", "words"),
    [
        (lambda u: 0.5 + (u - 0.5) * 0.6, "too sure"),
        (lambda u: np.clip(0.5 + (u - 0.5) * 1.3, 0, 1), "not sure enough"),
        (lambda u: u**0.4, "too high"),
        (lambda u: u**2.5, "too low"),
    ],
)
def test_the_direction_of_miscalibration(observed, words):
    u = np.arange(1, 20) / 20
    curve = Reliability(u, observed(u), np.full(19, 50), u, u, 0.95)

    class Judged:
        held = type("Held", (), {"classes": False})

    Judged.curve = curve
    assert words in sections.direction(Judged)


def test_what_to_do_next_follows_from_what_was_found(table, straight, found):
    assert not any("not clearly better" in line for line in sections.advice(found))
    noise = table.iloc[100:].assign(price=np.random.default_rng(5).normal(150, 1, 60))
    said = sections.advice(facts.collect(0, straight, noise))
    assert any("not clearly better" in line for line in said)
    assert any("not calibrated" in line for line in said)
    sick = dataclasses.replace(found, members=(found.members[0]._replace(light="red", status="It diverged."),))
    assert "It diverged. Do not act" in sections.advice(sick)[0]
    assert sections.worst_light(sick) == "red"


def test_numbers_and_cells():
    assert [number(v) for v in (0, -1234.5, 1e-9, math.inf)] == ["0", "-1234", "1.00e-09", "∞"]
    assert [cell(v) for v in (None, float("nan"), np.float64(1.23456), "a\nb", "x" * 50)] == ["–", "–", "1.235", "a b", "x" * 39 + "…"]
    assert strange.FALSE_ALARM == 0.05


# ---- pages -----------------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Every opening tag; complains about tags that do not nest."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "path", "use", "rect"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_whole_escaped_and_needs_nothing_else(documents, name):
    made = documents[name]
    page = Page(text := html.html(made))
    names = [tag for tag, _ in page.tags]
    assert "script" not in names
    assert "i" not in names
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    refers = [value for _, a in page.tags for key, value in a.items() if key in ("href", "src", "xlink:href")]
    assert all(value.startswith("#") or value == "data:," for value in refers)
    assert {value[1:] for value in refers if value.startswith("#")} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    pictures = [a for tag, a in page.tags if tag == "svg"]
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    assert len(pictures) == sum(isinstance(part, Picture) for section in made.sections for part in section.parts)
    assert NASTY in "".join(page.text)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_fit_has_its_sections(documents, name):
    titles = [section.title for section in documents[name].sections]
    assert titles[:5] == ["What to do next", "Data", "Model", "Method card", "Convergence"]
    rest = [
        "Predictions against truth",
        "Reliability",
        "Uncertainty split",
        "Most uncertain rows",
        "Most surprising rows",
        "Out of distribution",
        "Feature relevance",
    ]
    assert titles[5:] == (["Predictions"] if name == "no data" else rest)
    for section in documents[name].sections:
        for part in section.parts:
            if isinstance(part, Table):
                assert all(len(row) == len(part.head) for row in part.rows), section.title
    said = html.html(documents[name])
    assert not re.search(
        r"\bnan\b|\bNone\b(?! in training)|array\(", re.sub(r"[a-z_]+=None", "", re.sub(r"<svg.*?</svg>", "", said, flags=re.S))
    )


def test_the_stack_shows_what_was_tried_and_weights(documents):
    model = next(section for section in documents["stack"].sections if section.title == "Model")
    members, tried = (part for part in model.parts if isinstance(part, Table))
    assert [row[0] for row in members.rows] == ["one", "two"]
    assert [row[3] for row in members.rows] == ["0.70", "0.30"]
    assert [row[-1] for row in tried.rows] == ["", "left out"]


@pytest.mark.parametrize("name", ["regression", "binary"])
def test_markdown_has_its_pictures_beside_it(documents, name, tmp_path):
    parser = pytest.importorskip("markdown")
    path = report.write_document(documents[name], tmp_path / "a report.md")
    text = path.read_text(encoding="utf-8")
    shown = re.findall(r"\]\(([^)]*\.svg)\)", text)
    assert shown
    assert all((tmp_path / one.replace("%20", " ")).read_bytes().startswith(b"<?xml") for one in shown)
    assert "#0072b2" in (tmp_path / shown[0].replace("%20", " ")).read_text().lower()
    page = Page(parser.markdown(text, extensions=["tables"]))
    names = [tag for tag, _ in page.tags]
    parts = [part for section in documents[name].sections for part in section.parts]
    assert names.count("table") == sum(isinstance(part, Table) for part in parts)
    assert names.count("tr") == sum(1 + len(part.rows) for part in parts if isinstance(part, Table))
    assert "script" not in names
    assert NASTY in "".join(page.text)


def test_markdown_keeps_every_letter():
    letters = "a|b <x> *y* _z_ [l](m) `c` # & \\ $q$ ~~s~~ &lt;"
    made = Document(letters, letters, "", (Section("S", (Text(letters), Points((letters,)), Table(("h",), ((letters,),), "c"))),))
    text = "".join(Page(pytest.importorskip("markdown").markdown(markdown(made, "f"), extensions=["tables"])).text)
    assert text.count(letters) == 5


def test_writing_twice_gives_the_same_bytes(cases, tmp_path):
    fit, rows = cases["arrays"]
    first, second = (report.write(0, fit, rows, tmp_path / f"{name}.html").read_bytes() for name in "ab")
    assert first == second
    with pytest.raises(al.DataError, match=r"\.pdf.*\.html"):
        report.write(0, fit, rows, tmp_path / "report.pdf")
    with pytest.raises(al.DataError, match="too few rows"):
        report.write(0, fit, (rows[0][:5], rows[1][:5]), tmp_path / "few.html")


# ---- the verb --------------------------------------------------------------------------------------------------------------------


def run(*arguments):
    result = CliRunner().invoke(cli.app, ["report", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.output


def test_the_verb_writes_html_markdown_and_json(cases, table, straight, tmp_path):
    straight.save(tmp_path / "fit")
    table.to_csv(tmp_path / "all.csv", index=False)
    code, out, _ = run(tmp_path / "fit", "--data", tmp_path / "all.csv", "--out", tmp_path / "r.html", "--json")
    found = json.loads(out)
    assert (code, found["rows"], found["health"]) == (0, 60, "green")
    assert found["relevance"][0]["name"] == "size"
    assert (tmp_path / "r.html").read_text().count("<svg") == 6 - 1
    assert run(tmp_path / "fit", "--out", tmp_path / "r.html")[0] == 1
    code, out, _ = run(tmp_path / "fit", "--out", tmp_path / "r.html", "--markdown")
    assert code == 0
    assert "Report in" in out
    assert (tmp_path / "r.md").exists()
    assert run(tmp_path / "fit", "--out", tmp_path / "r.pdf")[0] == 1
    table.drop(columns="price").to_csv(tmp_path / "none.csv", index=False)
    code, _, said = run(tmp_path / "fit", "--data", tmp_path / "none.csv", "--out", tmp_path / "n.html")
    assert code == 1
    assert "lacks the target 'price'" in said
    cases["arrays"][0].save(tmp_path / "arrays")
    code, _, said = run(tmp_path / "arrays", "--data", tmp_path / "all.csv", "--out", tmp_path / "n.html")
    assert code == 1
    assert "made from arrays" in said


# ---- in a browser ----------------------------------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# The pages are put into frames of a given width, and asked from outside: their own policy lets no script run.
PROBE = """<!doctype html><meta charset="utf-8"><body>{frames}<pre id="answer"></pre><script>
addEventListener("load", () => {{
  const found = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, root = page.documentElement;
    const wide = [...page.querySelectorAll("body *")].filter(e => !e.closest(".table") && !e.closest("svg") && e.getBoundingClientRect().right > root.clientWidth + 1);
    return {{
      width: root.clientWidth, scroll: root.scrollWidth, wide: wide.map(e => e.tagName + "." + e.className),
      silent: [...page.querySelectorAll("img, svg, [role=img]")].filter(e => !(e.alt || e.getAttribute("aria-label"))).length,
      images: page.querySelectorAll("svg").length, requests: frame.contentWindow.performance.getEntriesByType("resource").length,
      paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor, ink: frame.contentWindow.getComputedStyle(page.body).color,
      scripts: page.scripts.length, letters: Math.min(...[...page.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height)),
    }};
  }});
  document.getElementById("answer").textContent = JSON.stringify(found);
}});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium: install it (Debian: apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_screen(documents, scheme, tmp_path):
    names = ["regression", "20 classes", "stack", "no data"]
    widths = (360, 1280)
    frame = '<iframe style="border:0;width:{}px;height:900px" srcdoc="{}"></iframe>'
    frames = "".join(frame.format(width, escape(html.html(documents[name]))) for name in names for width in widths)
    (tmp_path / "probe.html").write_text(PROBE.format(frames=frames), encoding="utf-8")
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        "--hide-scrollbars",
        "--window-size=1400,900",
        "--virtual-time-budget=10000",
        "--dump-dom",
        str(tmp_path / "probe.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    answer = re.search(r'<pre id="answer">(.+?)</pre>', done.stdout, flags=re.S)
    assert answer, done.stderr[-2000:]
    found = json.loads(answer[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert len(found) == len(names) * len(widths)
    for one, width in zip(found, widths * len(names), strict=True):
        assert one["width"] == width
        assert one["scroll"] <= width, one["wide"]
        assert one["wide"] == []
        assert one["silent"] == one["requests"] == one["scripts"] == 0
        assert one["images"] >= 0
        assert one["paper"] == ("rgb(22, 24, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
        assert one["ink"] == ("rgb(230, 230, 226)" if scheme == "dark" else "rgb(26, 26, 26)")
    assert min(one["letters"] for one in found if one["letters"] is not None and one["images"]) > 7  # pixels, on the telephone too
