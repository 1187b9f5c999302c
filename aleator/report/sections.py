"""From facts to a document: what is said, in which order, and what to do next."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aleator.cli._scores import as_text
from aleator.report import pictures
from aleator.report.document import Document, Part, Points, Section, Table, Text, cell, number, p_text, percent, some
from aleator.report.facts import LEVEL, SHOWN, Facts, Judged, Member, row_values
from aleator.report.held import SEEN

LIGHTS = {"green": "● fine", "amber": "◐ with care", "red": "○ not to be trusted"}
SURE = 0.05  # p-value below which predictions are called not calibrated
FEW = 100  # rows below which every number here is rough
MOST_COLUMNS = 40  # in the table of columns


def document(facts: Facts, made: str) -> Document:
    """The whole report."""
    judged = facts.judged
    sections = [Section("What to do next", (Points(advice(facts)),)), _data(facts), _model(facts), _method(facts), _convergence(facts)]
    if judged is None:
        how = "Pass rows with known targets (`--data TABLE`, or data= in Python) for predictions against truth, reliability, the uncertainty split, strange rows and what columns are worth."
        sections.append(Section("Predictions", (Text(how, "note"),)))
    else:
        sections += [
            _truth(facts, judged),
            _reliability(judged),
            _split(judged),
            *_rows(judged),
            _strange(judged),
            *_columns(facts, judged),
        ]
    return Document(f"Report on {facts.name or facts.target}", summary(facts), made, tuple(sections))


def worst_light(facts: Facts) -> str:
    """That of the least healthy fit."""
    return max((member.light for member in facts.members), key=("green", "amber", "red").index)


def summary(facts: Facts) -> str:
    """The report in a paragraph."""
    kind = f"{len(facts.labels)} classes" if facts.labels else "classes" if facts.task == "classification" else "numbers"
    who = _joined([f"{m.name} ({percent(m.weight)})" if len(facts.members) > 1 else m.name for m in facts.members])
    words = [f"{facts.target!r}, {kind}, by {who}, fitted to {facts.num_data} rows.", f"Health: {LIGHTS[worst_light(facts)]}."]
    if facts.judged is not None:
        judged = facts.judged
        told = "; ".join(f"{line.name} {as_text(line.value, line.stderr)} {_unit(line)}" for line in judged.scores)
        words.append(f"On {judged.held.size} rows {_honest(judged)}: {told}.")
        words.append(f"Calibration: {calibration(judged)}.")
        if math.isfinite(judged.split.share):
            words.append(f"More rows could remove up to {percent(judged.split.share)} of the uncertainty.")
    return " ".join(words)


def _unit(line: Any) -> str:
    return "%" if line.unit.startswith("%") else "" if line.unit.startswith("0 is") else line.unit


def _honest(judged: Judged) -> str:
    return f"of which {percent(judged.held.seen)} were in training (too rosy)" if judged.held.seen > SEEN else "that it was not fitted to"


def calibration(judged: Judged) -> str:
    """A verdict with its p-value, and the direction."""
    if judged.test.p_value > SURE:
        return f"no sign of miscalibration ({p_text(judged.test.p_value)})"
    return f"{direction(judged)} ({p_text(judged.test.p_value)})"


def direction(judged: Judged) -> str:
    """Too sure, not sure enough, or shifted: from the curve."""
    from scipy.special import ndtri

    curve = judged.curve
    if judged.held.classes:
        gap = float(np.average(curve.observed - curve.stated, weights=curve.size))
        return "too sure of itself" if gap < 0 else "not sure enough of itself"
    # On the scale of normal quantiles a shift of the predictions is the height of a line, and their width its slope.
    half = 0.5 / curve.size
    slope, shift = np.polyfit(ndtri(curve.stated), ndtri(np.clip(curve.observed, half, 1 - half)), 1)
    if abs(shift) > abs(slope - 1):
        return "predictions are too low" if shift < 0 else "predictions are too high"
    return "too sure of itself" if slope < 1 else "not sure enough of itself"


# ---- what to do -------------------------------------------------------------------------------------------------------------------


def advice(facts: Facts) -> tuple[str, ...]:
    """What a careful colleague would say, the most pressing first."""
    said = [
        f"{member.name} did not end well: {member.status} Do not act on its predictions before that is mended."
        for member in facts.members
        if member.light == "red"
    ]
    said += [f"{member.name}: {member.status}" for member in facts.members if member.light == "amber"]
    said += [
        f"{member.name} was fitted at temperature {member.temperature:g}: its uncertainty is not that of the posterior."
        for member in facts.members
        if member.temperature != 1.0
    ]
    if facts.judged is None:
        return (*said, "Judge the fit by rows it has not seen: write this report again with a table of them.")
    judged = facts.judged
    held = judged.held
    if held.seen > SEEN:
        said.append(
            f"{percent(held.seen)} of these rows were in training: every score here is too good. Write the report with rows it has not seen."
        )
    if held.size < FEW:
        said.append(f"{held.size} rows to judge by are few: trust no number here beyond its error.")
    said += _useless(facts, judged)
    if judged.test.p_value <= SURE:
        said.append(f"The predictions are not calibrated ({calibration(judged)}): recalibrate on held-out rows (al.decide.recalibrate).")
    said += _more_rows(judged)
    outside = [one for one in judged.strange.rows if "training" in one.why]
    if outside:
        said.append(f"{_rows_word(len(outside))} outside of what training saw: check them by hand, and abstain on new ones like them.")
    if judged.strange.moved:
        names = some([one.name for one in judged.strange.moved], 4)
        said.append(f"The data have moved since training ({names}): fit again with newer rows before relying on it.")
    idle = [one.name for one in judged.importances if one.value <= 2 * one.stderr]
    if idle and len(idle) < len(judged.importances):
        said.append(f"Nothing measurable comes from {some(idle, 6)}: try without.")
    return tuple(said) or ("Nothing stands out: use it, and write this report again when the data change.",)


def _useless(facts: Facts, judged: Judged) -> list[str]:
    """Is it better than a constant?"""
    y = judged.held.y
    if judged.held.classes:
        most = np.unique(y.astype(str), return_counts=True)[1].max() / len(y)
        right = next(line for line in judged.scores if line.name == "accuracy")
        if right.value - 2 * right.stderr <= 100 * most:
            return [f"Always saying the most frequent class is right in {percent(most)} of these rows: the model is not clearly better."]
        return []
    spread, error = float(np.std(y)), next(line for line in judged.scores if line.name == "RMSE")
    if error.value + 2 * error.stderr >= spread:
        return [f"Always saying the mean gives an RMSE of {number(spread)} {facts.target!r}: the model is not clearly better."]
    return []


def _more_rows(judged: Judged) -> list[str]:
    share = judged.split.share
    if not math.isfinite(share):
        return []
    if share < 1e-6:
        return ["This method gives one network and no epistemic part: use an ensemble, Laplace or a sampler to know what it does not know."]
    if share > 0.25:
        return [
            f"{percent(share)} of the uncertainty is epistemic: more rows help, most of all ones like the most uncertain below (al.active)."
        ]
    if share < 0.05:
        return [f"{percent(1 - share)} of the uncertainty is noise given these columns: better or more columns help, more rows hardly."]
    return []


# ---- the fit ----------------------------------------------------------------------------------------------------------------------


def _data(facts: Facts) -> Section:
    parts: list[Part] = []
    rows = f"Fitted to {facts.num_data} rows"
    if facts.table:
        rows += f" of {facts.table.get('file', 'a table')}"
        rows += f", {facts.table['rows_held_out']} more held out" if facts.table.get("rows_held_out") else ""
    if facts.judged is not None:
        rows += f"; judged here by {facts.judged.held.size} of {facts.judged.held.given} given rows, {_honest(facts.judged)}"
    parts.append(Text(f"{rows}."))
    if facts.target_values:
        parts.append(Text(f"Target {facts.target!r}: {facts.target_values}."))
    held_notes = facts.judged.held.notes if facts.judged is not None else ()
    if facts.notes or held_notes:
        parts.append(Points(tuple(_sentence(note) for note in (*facts.notes, *held_notes))))
    if facts.columns:
        shown = facts.columns[:MOST_COLUMNS]
        left = f" The first {MOST_COLUMNS} of {len(facts.columns)}." if len(facts.columns) > MOST_COLUMNS else ""
        rows_of = tuple((cell(c.name), c.kind, c.missing, c.values) for c in shown)
        parts.append(Table(("column", "kind", "missing", "in training"), rows_of, f"Columns.{left}"))
    else:
        parts.append(Text("The fit was made from arrays: there are no column names."))
    return Section("Data", tuple(parts))


def _model(facts: Facts) -> Section:
    rows = tuple((m.name, m.model, "–" if m.num_parameters is None else f"{m.num_parameters:,}", f"{m.weight:.2f}") for m in facts.members)
    caption = "What turns inputs into outputs, and how many numbers it has to learn."
    table = Table(("fit", "model", "parameters", "weight"), rows, caption, (2, 3))
    if len(rows) == 1:
        table = Table(table.head[1:3], tuple(row[1:3] for row in rows), caption, (1,))
    parts: list[Part] = [table]
    if facts.entries:
        parts += [Text(facts.status), _tried(facts)]
    return Section("Model", tuple(parts))


def _tried(facts: Facts) -> Table:
    metric = next((entry.metric for entry in facts.entries if entry.metric), "score")
    share = 100.0 if metric == "accuracy" else 1.0
    part = lambda value, error, factor=1.0: as_text(factor * value, factor * error) if math.isfinite(value) else "–"
    rows = tuple(
        (
            e.name,
            part(e.score, e.stderr),
            part(e.second, e.second_stderr, share),
            part(e.coverage, e.coverage_stderr, 100.0),
            number(e.calibration, 2),
            f"{e.seconds:.1f}",
            f"{e.weight:.2f}",
            e.note,
        )
        for e in facts.entries
    )
    second = "accuracy [%, ↑]" if metric == "accuracy" else f"{metric} [standardised, ↓]"
    head = ("method", "log score [nats/row, ↑]", second, "90 % covers [%]", "calibrated, p", "seconds", "weight", "note")
    return Table(head, rows, "What was tried, on rows held out from each fit (± standard error).", (1, 2, 3, 4, 5, 6))


def _method(facts: Facts) -> Section:
    parts: list[Part] = []
    seen: set[str] = set()
    for member in facts.members:
        if member.card.name in seen:
            continue
        seen.add(member.card.name)
        card = member.card
        rows = (
            ("what it is", card.summary),
            ("model class", card.model_class),
            ("criterion", card.criterion),
            ("search", card.search),
            ("cost", card.cost),
            ("needs", card.needs),
            ("settings", member.method),
            ("references", "; ".join(card.references)),
        )
        parts.append(Table(("", card.name), rows, f"Card of {card.name}."))
    return Section("Method card", tuple(parts))


def _convergence(facts: Facts) -> Section:
    rows = tuple((m.name, LIGHTS[m.light], m.status, _steps(m), _evidence(m)) for m in facts.members)
    parts: list[Part] = [Table(("fit", "health", "what it says", "run", "log evidence [nats]"), rows, "How each run ended.")]
    for place, member in enumerate(facts.members):
        figures = tuple((_words(k), cell(v)) for k, v in member.numbers.items() if isinstance(v, (int, float, str)))
        if figures:
            parts.append(Table(("figure", "value"), figures, f"Behind the verdict on {member.name}.", (1,)))
        if (picture := pictures.trace(member, f"trace-{place}")) is not None:
            parts.append(picture)
    if facts.stored and facts.judged is None:
        stored = tuple(
            (name, as_text(one["value"], math.nan if one["stderr"] is None else one["stderr"]), one["unit"], one["better"])
            for name, one in facts.stored.items()
        )
        caption = "Scores on the rows held out when it was fitted (± standard error)."
        parts.append(Table(("score", "value", "unit", "better"), stored, caption, (1,)))
    return Section("Convergence", tuple(parts))


def _steps(member: Member) -> str:
    time = "" if member.seconds is None else f"{member.seconds:.1f} s"
    steps = "" if member.steps is None else f"{member.steps} steps"
    return ", ".join(filter(None, (steps, time))) or "–"


def _evidence(member: Member) -> str:
    if member.evidence is None:
        return "–"
    error = f" ± {member.evidence.stderr:.2f}" if member.evidence.stderr else ""
    return f"{member.evidence.value:.2f}{error} ({member.evidence.kind})"


# ---- the rows it is judged by ----------------------------------------------------------------------------------------------------


def _truth(facts: Facts, judged: Judged) -> Section:
    rows = tuple((line.name, as_text(line.value, line.stderr), line.unit, line.better) for line in judged.scores)
    table = Table(("score", "value ± standard error", "unit", "better"), rows, f"On {judged.held.size} rows {_honest(judged)}.", (1,))
    return Section("Predictions against truth", (table, pictures.truth(facts, judged)))


def _reliability(judged: Judged) -> Section:
    return Section("Reliability", (Text(_tested(judged)), pictures.reliability(judged)))


def _tested(judged: Judged) -> str:
    test = judged.test
    told = f"{test.name} {number(test.statistic)}, where calibrated predictions have {number(test.null)} on average and 95 % stay below {number(test.critical)}"
    return f"{_sentence(calibration(judged))} Its {told}."


def _split(judged: Judged) -> Section:
    share, error = judged.split.share, judged.split.stderr
    told = (
        f"On average {as_text(100 * share, 100 * error)} % of the uncertainty ({judged.split.unit}) is epistemic: what more rows like these would remove. The rest is noise given these columns."
        if math.isfinite(share)
        else "The variance of these predictions is not finite (heavy tails), so that it has no parts."
    )
    parts: tuple[Part, ...] = (Text(told),)
    return Section("Uncertainty split", (*parts, pictures.split(judged)) if math.isfinite(share) else parts)


def _rows(judged: Judged) -> tuple[Section, Section]:
    names = tuple(cell(name, 24) for name in judged.columns)
    left = len(judged.held.columns) - len(names)
    more = f" {left} more columns are not shown." if left > 0 else ""
    table = lambda head, rows, caption: Table(
        ("row", *head, *names), tuple((str(r.number), *r.said, *r.values) for r in rows), f"{caption}{more}", tuple(range(len(head) + 1))
    )
    interval = "the class and its probability" if judged.held.classes else f"the mean and {100 * LEVEL:g} % interval"
    unsure = table(judged.uncertain_head, judged.uncertain, f"Predicted: {interval}. Row numbers count from 1, without the header.")
    missed = table(judged.surprising_head, judged.surprising, "Look for slips of the pen, and for what the columns do not say.")
    return Section("Most uncertain rows", (unsure,)), Section("Most surprising rows", (missed,))


def _strange(judged: Judged) -> Section:
    strange, held = judged.strange, judged.held
    parts: list[Part] = []
    if strange.score:
        flagged = sum("unsure" in one.why for one in strange.rows)
        parts.append(
            Text(
                f"{_rows_word(flagged)} flagged for unusual {'mutual information' if held.classes else 'epistemic variance'}; {strange.expected:.0f} would be by chance."
            )
        )
    elif judged.split.share < 1e-6:
        parts.append(
            Text("The fit has no epistemic part to tell strange rows by; numbers and levels outside of training are still found.", "note")
        )
    else:
        parts.append(Text("There are too few rows, at least 40, to set a threshold by.", "note"))
    if strange.rows:
        rows = tuple(
            (str(held.numbers[one.place]), number(one.p_value, 2), one.why, *row_values(held, one.place)) for one in strange.rows[:SHOWN]
        )
        names = tuple(cell(name, 24) for name in judged.columns)
        left = f" {len(strange.rows) - SHOWN} more." if len(strange.rows) > SHOWN else ""
        parts.append(
            Table(
                ("row", "p", "why", *names),
                rows,
                f"Rows unlike the others, or unlike training. p: share of the other rows at least as strange.{left}",
                (0, 1),
            )
        )
    if strange.moved:
        rows = tuple((cell(one.name), f"{one.shift:+.2f}", p_text(one.p_value)) for one in strange.moved[:SHOWN])
        parts.append(Table(("column", "moved [training sd]", "test"), rows, "Columns whose mean has moved since training.", (1,)))
    return Section("Out of distribution", tuple(parts))


def _columns(facts: Facts, judged: Judged) -> tuple[Section, ...]:
    if not judged.importances:
        return ()
    parts: list[Part] = [pictures.relevance(judged)]
    if judged.effects:
        parts.append(pictures.effects(judged, facts.target))
    effects = {one.name: one for one in judged.effects}
    band = lambda name: f"{number(effects[name].value)} ({number(effects[name].lower)} … {number(effects[name].upper)})"
    rows = tuple(
        (cell(one.name), as_text(one.value, one.stderr), *((band(one.name) if one.name in effects else "–",) if effects else ()))
        for one in judged.importances[:MOST_COLUMNS]
    )
    head = ("column", "lost without it [nats/row]", *((f"effect of 1 sd more ({100 * LEVEL:g} % interval)",) if effects else ()))
    left = len(judged.held.columns) - len(rows)
    more = f" {left} more columns are not shown." if left > 0 else ""
    parts.append(Table(head, rows, f"Relevance, ± standard error.{more}", (1, 2)))
    return (Section("Feature relevance", tuple(parts)),)


FIGURES = {
    "rhat": "R-hat (1 is best)",
    "rhat_parameters": "R-hat of parameters",
    "ess_bulk": "effective draws, bulk",
    "ess_tail": "effective draws, tails",
    "ebfmi": "E-BFMI (above 0.3 is wanted)",
    "saturated": "share of trees at max_depth",
    "evaluations": "gradient evaluations",
    "judged": "judged by",
}


def _words(name: str) -> str:
    return FIGURES.get(name, name.replace("_", " "))


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?", "!")) else ".")


def _rows_word(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
