"""aleator/cli: every verb, what it refuses and in which words, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import types

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import aleator as al
from aleator import _settings, cli, defaults
from aleator.cli import _common, _road, _scores, demo
from aleator.cli import fit as fit_verb
from aleator.cli import show as show_verb

FAST = ["--method", "ensemble", "--hidden", "4", "--set", "num_steps=40", "--set", "num_members=2"]
FAST_MAP = ["--method", "map", "--hidden", "4", "--set", "num_steps=40"]


def run(*arguments, code=0):
    """Run one command in this process; its exit code must be `code`. output: what it printed on stdout, then on stderr."""
    try:
        runner = CliRunner(mix_stderr=False)  # Click before 8.2 mixes the streams unless told
    except TypeError:
        runner = CliRunner()
    result = runner.invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)
    output = result.stdout + result.stderr
    assert result.exit_code in (code if isinstance(code, set) else {code}), output
    return types.SimpleNamespace(stdout=result.stdout, stderr=result.stderr, output=output)


# `python -m aleator.cli`, but listening to Ctrl-C: a suite started in the background ignores it, and its children inherit that.
PROGRAM = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('aleator.cli', run_name='__main__', alter_sys=True)"
)


def process(*arguments, **options):
    """The same as a program of its own."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def flat_table(num_rows=80):
    """Numbers with gaps, booleans, text, a constant and an identifier."""
    generator = np.random.Generator(np.random.Philox(1))
    size = generator.normal(50.0, 10.0, num_rows)
    colour = generator.choice(["red", "green", "blue"], num_rows)
    new = generator.random(num_rows) < 0.5
    age = generator.integers(1, 30, num_rows).astype(float)
    age[3:9] = np.nan
    price = 2.0 * size + 15.0 * (colour == "red") - 5.0 * new + generator.normal(0.0, 4.0, num_rows)
    table = {
        "size": size,
        "colour": colour,
        "new": new,
        "age": age,
        "country": "NL",
        "reference": [f"r{i:04d}" for i in range(num_rows)],
        "price": price,
    }
    return pd.DataFrame(table)


@pytest.fixture(scope="module")
def flats(tmp_path_factory):
    """A directory with a table and a regression fitted to it by the command line."""
    place = tmp_path_factory.mktemp("flats")
    flat_table().to_csv(place / "flats.csv", index=False)
    output = run("fit", place / "flats.csv", "--target", "price", "--out", place / "fit", *FAST).output
    return place, output


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """Twenty classes with text labels in a Parquet file, and a fit."""
    place = tmp_path_factory.mktemp("animals")
    generator = np.random.Generator(np.random.Philox(2))
    kind = np.repeat(np.arange(20), 10)
    table = pd.DataFrame({"weight": kind + generator.normal(size=200), "legs": (kind % 4) * 2.0, "animal": [f"kind {k:02d}" for k in kind]})
    table.to_parquet(place / "animals.parquet")
    output = run("fit", place / "animals.parquet", "--target", "animal", "--out", place / "fit", *FAST_MAP).output
    return place, output, table


# ---- the program ------------------------------------------------------------------------------------------------------------------


def test_help_names_every_verb_and_imports_nothing_heavy():
    output = run("--help").output
    assert all(verb in output for verb in ("fit", "predict", "compare", "label", "audit", "methods", "show", "demo"))
    heavy = "{'pandas', 'sklearn', 'matplotlib', 'numpyro', 'pyarrow', 'arviz'}"
    code = f"import sys, aleator.cli; print(sorted({heavy} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["fit", "predict", "compare", "label", "audit", "methods", "show", "demo"])
def test_every_verb_has_help(verb):
    assert "--json" in run(verb, "--help").output


def test_version_and_no_arguments():
    assert al.__version__ in run("--version").output
    assert "Usage" in run(code={0, 2}).output  # Click before 8.2 calls this a success


def test_usage_errors_have_code_2(tmp_path):
    run("fit", "t.csv", code=2)
    run("unheard-of", code=2)
    for option, value in (
        ("--hidden", "5,x"),
        ("--hidden", "0"),
        ("--set", "num_steps"),
        ("--set", "=3"),
        ("--task", "guessing"),
        ("--seed", "-1"),
    ):
        run("fit", "t.csv", "--target", "y", "--out", tmp_path / "o", option, value, code=2)
    run("predict", "d", "t.csv", "--out", tmp_path / "p.csv", "--level", "90", code=2)


def test_a_refusal_is_one_paragraph_on_stderr_without_traceback(tmp_path):
    child = process("fit", tmp_path / "absent.csv", "--target", "y", "--out", tmp_path / "o")
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 1
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("Error: There is no file")
    assert "Traceback" not in errors


def test_a_second_fit_of_the_same_shapes_compiles_nothing(monkeypatch, tmp_path):
    """In a process of its own: every program it asks for is in the cache of the first, though rows and seed are others."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    kept = []
    for seed in (0, 1):
        table = pd.DataFrame(np.random.default_rng(seed).normal(size=(30, 3)), columns=["a", "b", "y"])
        table.to_csv(tmp_path / "t.csv", index=False)
        words = ["fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / f"fit{seed}", "--seed", seed, *FAST_MAP]
        with process(*words) as started:
            assert started.wait() == 0, started.stderr.read()
        kept.append({path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith("-atime")})
    assert len(kept[0]) > 5
    assert kept[1] == kept[0]


def test_the_cache_of_compiled_programs_goes_where_the_user_says(monkeypatch, tmp_path):
    import jax

    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        _common.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "aleator" / "jax")
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
        _common.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


# ---- fit --------------------------------------------------------------------------------------------------------------------------


def test_fit_says_what_it_inferred_and_how_good_it_is(flats):
    place, output = flats
    assert "flats.csv: regression of 'price'" in output
    assert "numeric: 2 columns: size, age" in output
    assert "categorical: 1 column: colour" in output
    assert "boolean: 1 column: new" in output
    assert "column 'country' is constant ('NL'): dropped" in output
    assert "column 'reference' looks like an identifier" in output
    assert "64 rows to fit, 16 held out" in output
    for score, unit, better in (
        ("log score", "nats per row", "higher"),
        ("RMSE", "units of price", "lower"),
        ("90 % interval coverage", "% of rows", "near 90 %"),
    ):
        line = next(line for line in output.splitlines() if score in line)
        assert unit in line
        assert better in line
        assert "±" in line
    fit = al.load(place / "fit")
    assert type(fit.method) is al.Ensemble
    assert type(fit.model.likelihood) is al.HeteroscedasticGaussian
    assert fit.manifest["table"]["rows_held_out"] == 16


def test_exact_agrees_with_least_squares_and_gives_its_evidence(tmp_path):
    generator = np.random.Generator(np.random.Philox(5))
    x = generator.normal(size=(200, 2))
    table = pd.DataFrame(x, columns=["a", "b"]).assign(y=3.0 + x @ [2.0, -1.0] + 0.01 * generator.normal(size=200))
    table.to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    output = run("fit", tmp_path / "t.tsv", "--target", "y", "--method", "exact", "--no-holdout", "--out", tmp_path / "fit").output
    assert "log evidence" in output
    assert "none held out" in output
    run("predict", tmp_path / "fit", tmp_path / "t.tsv", "--out", tmp_path / "p.tsv")
    predicted = pd.read_csv(tmp_path / "p.tsv", sep="\t")
    design = np.column_stack([np.ones(200), x])
    expected = design @ np.linalg.lstsq(design, table["y"], rcond=None)[0]
    np.testing.assert_allclose(predicted["mean"], expected, atol=2e-3)
    # Clean data look clean: neither the prior of the noise nor that of the weights adds to it.
    np.testing.assert_allclose(predicted["aleatoric_std"], 0.01, rtol=0.2)


def test_prior_scale_is_chosen_by_evidence_or_by_the_user():
    candidates = defaults.models(al.Exact(), "regression", 3, 0, (4,), None)
    assert [model.prior.scale for model in candidates] == list(defaults.LINEAR_SCALES)
    generator = np.random.Generator(np.random.Philox(6))
    x, y = generator.normal(size=(40, 3)), generator.normal(size=40)
    best = _road.fit(0, candidates, x, y, al.Exact())
    every = [al.fit(0, model, (x, y), al.Exact()).log_evidence.value for model in candidates]
    assert best.log_evidence.value == max(every)
    assert best.model.prior.scale == 0.1  # pure noise: small weights
    assert [m.prior.scale for m in defaults.models(al.Exact(), "regression", 3, 0, (4,), 2.5)] == [2.5]
    assert defaults.models(al.MAP(), "regression", 3, 0, (4,), 2.5)[0].prior == al.Normal(2.5, scaling="fan_in")


def test_models_by_method_and_task():
    assert type(defaults.models(al.MAP(), "regression", 3, 0, (4, 5), None)[0].likelihood) is al.Gaussian
    assert type(defaults.models(al.Ensemble(), "regression", 3, 0, (4,), None)[0].likelihood) is al.HeteroscedasticGaussian
    model = defaults.models(al.Ensemble(), "classification", 3, 7, (4, 5), None)[0]
    assert model.likelihood == al.Categorical(7)
    assert (model.network.in_size, model.network.hidden, model.network.out_size) == (3, (4, 5), 7)
    with pytest.raises(al.MethodError, match=r"no closed form for classes.*--method ensemble"):
        defaults.models(al.Exact(), "classification", 3, 7, (4,), None)


def test_defaults_grow_with_the_table():
    small, medium, large = (defaults.defaults(n)[al.MAP] for n in (30, 500, 100_000))
    assert (small["holdout"], small["batch_size"]) == (0.0, None)
    assert (medium["holdout"], medium["batch_size"]) == (0.1, None)
    assert large["batch_size"] == defaults.BATCH
    assert medium["num_steps"] < large["num_steps"] <= 20_000


def test_split_holds_out_a_fifth_and_every_class_stays_in_training():
    train, held = _road.split(3, 100, None)
    assert (len(train), len(held)) == (80, 20)
    assert sorted([*train, *held]) == list(range(100))
    labels = np.array([0] * 50 + [1] * 30 + [2] * 2 + [3])
    train, held = _road.split(3, len(labels), labels)
    assert np.bincount(labels[train]).tolist() == [40, 24, 2, 1]
    assert sorted([*train, *held]) == list(range(len(labels)))


def test_json_output_is_json_and_nothing_else(tmp_path):
    flat_table(30).to_csv(tmp_path / "t.csv", index=False)
    result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "fit", *FAST_MAP, "--json")
    document = json.loads(result.stdout)
    assert document["task"] == "regression"
    assert document["rows"] == 24
    assert document["columns"]["boolean"] == ["new"]
    assert document["dropped"] == ["country", "reference"] or "country" in document["dropped"]
    assert document["scores"]["RMSE"]["better"] == "lower"
    assert document["scores"]["RMSE"]["stderr"] > 0


def test_few_rows_are_all_used_and_said_so(tmp_path):
    flat_table(12)[["size", "price"]].to_csv(tmp_path / "t.csv", index=False)
    output = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "fit", *FAST_MAP).output
    assert "too few to hold any out" in output
    assert "12 rows to fit, none held out" in output
    assert "RMSE" not in output


def test_rows_without_a_target_are_dropped_by_number(tmp_path):
    table = flat_table(30)[["size", "price"]]
    table.loc[[2, 5, 7], "price"] = np.nan
    table.to_csv(tmp_path / "t.csv", index=False)
    output = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "fit", *FAST_MAP).output
    assert "3 of 30 rows have no value of 'price': dropped" in output
    assert "22 rows to fit, 5 held out" in output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.assign(price=np.nan), "The target 'price' has no values"),
        (lambda table: table.assign(price=7.5), "The target 'price' is constant"),
        (lambda table: table.assign(price="same"), "The target 'price' has a single class"),
        (
            lambda table: table.drop(columns="price").rename(columns={"size": "prize"}),
            "There is no column 'price' to predict.*did you mean 'prize'",
        ),
        (lambda table: table[["price"]], "No column is left to predict from"),
        (lambda table: table.assign(size=np.inf), "Column 'size'"),
        (lambda table: table.iloc[:0], "no rows"),
    ],
)
def test_fit_refuses_tables_it_cannot_use(tmp_path, change, words):
    change(flat_table(30)[["size", "price"]]).to_csv(tmp_path / "t.csv", index=False)
    result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "fit", *FAST_MAP, code=1)
    assert pd.Series([result.output.replace("\n", " ")]).str.contains(words).all(), result.output
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "ensembel"], "no method of this name. Got: 'ensembel' (did you mean 'ensemble'?)"),
        (["--set", "num_step=5"], "did you mean 'num_steps'?"),
        (["--set", "base.num_step=5"], "did you mean 'num_steps'?"),
        (["--set", "num_steps=many"], "MAP.num_steps cannot be read. Got: 'many'. Expected: a whole number"),
        (["--set", "num_steps=1.5"], "a whole number"),
        (["--set", "num_steps=inf"], "a whole number"),
        (["--set", "num_steps=-3"], "MAP.num_steps cannot be used"),
        (["--set", "learning_rate=nan"], "MAP.learning_rate cannot be used"),
        (["--set", "bootstrap=perhaps"], "true or false"),
        (["--set", "optimizer=adamm"], "Unknown optimiser"),
        (["--set", "base=exacd"], "did you mean 'exact'?"),
        (["--task", "classification", "--method", "exact"], "Exact has no closed form for classes"),
        (["--set", "batch_size=1000"], "The batches are larger than the data"),
        (["--prior-scale", "-1"], "scale"),
    ],
)
def test_fit_refuses_settings_it_cannot_use(tmp_path, options, words):
    flat_table(30)[["size", "price"]].round({"price": -1}).to_csv(tmp_path / "t.csv", index=False)
    result = run("fit", tmp_path / "t.csv", "--target", "price", "--out", tmp_path / "fit", "--method", "ensemble", *options, code=1)
    assert words in result.output


def test_existing_output_is_refused_before_any_work_and_replaced_by_force(tmp_path, flats):
    place, _ = flats
    arguments = ["fit", place / "flats.csv", "--target", "price", *FAST_MAP]
    (tmp_path / "file").write_text("mine")
    assert "is a file" in run(*arguments, "--out", tmp_path / "file", code=1).output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert "holds something else" in run(*arguments, "--out", tmp_path / "other", "--force", code=1).output
    before = (place / "fit" / "fit.json").read_bytes()
    assert "There is a fit already" in run(*arguments, "--out", place / "fit", code=1).output
    assert (place / "fit" / "fit.json").read_bytes() == before
    run(*arguments, "--out", tmp_path / "new")
    run(*arguments, "--out", tmp_path / "new", "--force", "--seed", "5")
    assert al.load(tmp_path / "new").manifest["key"] != al.load(place / "fit").manifest["key"]


def test_an_interrupted_run_says_how_to_continue_and_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    from aleator import loop

    flat_table(30)[["size", "age", "price"]].to_csv(tmp_path / "t.csv", index=False)
    arguments = [
        "fit",
        tmp_path / "t.csv",
        "--target",
        "price",
        "--method",
        "map",
        "--hidden",
        "4",
        "--set",
        "num_steps=300",
        "--set",
        "clip=none",
    ]
    run(*arguments, "--out", tmp_path / "whole")
    monkeypatch.setattr(fit_verb, "CHECKPOINT_SECONDS", 0.0)
    advance, calls = loop._Job.advance, []

    def interrupted(job, feed):
        calls.append(job.step)
        if len(calls) == 3:
            raise KeyboardInterrupt
        advance(job, feed)

    monkeypatch.setattr(loop._Job, "advance", interrupted)
    monkeypatch.setattr(loop, "MAX_CHUNK", 64)
    monkeypatch.setattr(sys, "argv", ["aleator", *map(str, arguments), "--out", str(tmp_path / "cut"), "--checkpoint"])
    output = run(*arguments, "--out", tmp_path / "cut", "--checkpoint", code=130).output
    assert "Continue with: aleator fit" in output
    assert output.strip().endswith("--checkpoint --resume")
    assert not (tmp_path / "cut").exists()
    assert list((tmp_path / "cut.checkpoint").iterdir())
    run(*arguments, "--out", tmp_path / "cut", "--resume")
    assert calls[3] == calls[2] > 0  # it went on from there
    assert not (tmp_path / "cut.checkpoint").exists()
    table = pd.read_csv(tmp_path / "t.csv")
    first, second = (al.load(tmp_path / name).predict(0, table).mean for name in ("whole", "cut"))
    np.testing.assert_array_equal(first, second)


def test_ctrl_c_has_code_130(tmp_path):
    flat_table().to_csv(tmp_path / "t.csv", index=False)
    child = process(
        "fit",
        tmp_path / "t.csv",
        "--target",
        "price",
        "--out",
        tmp_path / "fit",
        "--method",
        "map",
        "--set",
        "num_steps=100000000",
        "--set",
        "holdout=0",
        "--no-checkpoint",
    )
    try:
        while "rows to fit" not in child.stdout.readline():
            assert child.poll() is None, child.stderr.read()
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "Stopped. Nothing was saved. Without --no-checkpoint" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "fit").exists()


# ---- predict ----------------------------------------------------------------------------------------------------------------------


def predict(place, table, *options, name="predictions.csv", code=0):
    """Write `table`, predict it, and return (predictions, output)."""
    source = place / f"new_{name}"
    table.to_parquet(source) if source.suffix == ".parquet" else table.to_csv(
        source, index=False, sep="\t" if source.suffix == ".tsv" else ","
    )
    result = run("predict", place / "fit", source, "--out", place / name, "--force", *options, code=code)
    if code:
        return None, result.output
    read = {".csv": pd.read_csv, ".tsv": lambda path: pd.read_csv(path, sep="\t"), ".parquet": pd.read_parquet}[source.suffix]
    return read(place / name), result.output


def test_predict_writes_the_split_and_agrees_with_python(flats):
    place, _ = flats
    table = flat_table()
    predicted, output = predict(place, table.drop(columns="price"), "--level", "0.8")
    assert list(predicted.columns) == ["mean", "std", "aleatoric_std", "epistemic_std", "lower", "upper"]
    assert len(predicted) == len(table)
    assert "RMSE" not in output
    np.testing.assert_allclose(predicted["std"] ** 2, predicted["aleatoric_std"] ** 2 + predicted["epistemic_std"] ** 2)
    expected = al.load(place / "fit").predict(0, table.drop(columns="price"))
    np.testing.assert_allclose(predicted["mean"], expected.mean, rtol=1e-12)
    np.testing.assert_allclose(predicted[["lower", "upper"]].T, expected.interval(0.8), rtol=1e-9)


def test_predict_scores_when_the_target_is_there(flats):
    place, _ = flats
    table = flat_table()
    table.loc[:9, "price"] = np.nan
    _, output = predict(place, table)
    assert "scores on 70 rows" in output
    assert "RMSE" in output
    _, output = predict(place, table.assign(price="unknown"))
    assert "no scores: " in output


@pytest.mark.parametrize("name", ["predictions.tsv", "predictions.parquet"])
def test_predict_writes_by_extension(flats, name):
    place, _ = flats
    table = flat_table(20).drop(columns="price")
    expected, _ = predict(place, table)
    predicted, _ = predict(place, table, name=name)
    pd.testing.assert_frame_equal(predicted, expected)


def test_columns_are_found_by_name(flats):
    place, _ = flats
    table = flat_table(20).drop(columns="price")
    expected, _ = predict(place, table)
    shuffled, output = predict(place, table[table.columns[::-1]].assign(weather="fine"))
    pd.testing.assert_frame_equal(shuffled, expected)
    assert "ignored, not there in training: 'weather'" in output
    one, _ = predict(place, table.iloc[[4]])
    np.testing.assert_allclose(one, expected.iloc[[4]], rtol=1e-5)
    without_dropped, _ = predict(place, table.drop(columns=["country", "reference"]))
    pd.testing.assert_frame_equal(without_dropped, expected)


def test_predict_refuses_or_notes_what_differs_from_training(flats):
    place, _ = flats
    table = flat_table(20).drop(columns="price")
    _, output = predict(place, table.drop(columns="size"), code=1)
    assert "The table lacks 'size'" in output
    _, output = predict(place, table.assign(size="large"), code=1)
    assert "'size' has another type than in training" in output
    predicted, output = predict(place, table.assign(colour="mauve"))
    assert "column 'colour': unseen in training: 'mauve' (20)" in output
    assert predicted.notna().all(axis=None)


def test_predict_keeps_an_existing_file_and_knows_its_formats(flats, tmp_path):
    place, _ = flats
    (tmp_path / "p.csv").write_text("mine")
    assert "The output file exists" in run("predict", place / "fit", place / "flats.csv", "--out", tmp_path / "p.csv", code=1).output
    assert (tmp_path / "p.csv").read_text() == "mine"
    assert "ending in '.xlsx'" in run("predict", place / "fit", place / "flats.csv", "--out", tmp_path / "p.xlsx", code=1).output
    assert "is a directory" in run("predict", place / "fit", place / "flats.csv", "--out", _directory(tmp_path / "p.tsv"), code=1).output
    assert "There is no saved fit" in run("predict", tmp_path, place / "flats.csv", "--out", tmp_path / "q.csv", code=1).output
    document = json.loads(run("predict", place / "fit", place / "flats.csv", "--out", tmp_path / "deep" / "q.csv", "--json").stdout)
    assert document["rows"] == 80
    assert "RMSE" in document["scores"]


def _directory(path):
    path.mkdir()
    return path


def test_predict_needs_a_fit_made_from_a_table(tmp_path, flats):
    x = np.linspace(-1.0, 1.0, 10)
    model = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.5), al.Normal(1.0))
    al.fit(0, model, (x, x), al.Exact()).save(tmp_path / "arrays")
    assert "made from arrays" in run("predict", tmp_path / "arrays", flats[0] / "flats.csv", "--out", tmp_path / "p.csv", code=1).output


# ---- classification ---------------------------------------------------------------------------------------------------------------


def test_twenty_classes_from_parquet(animals):
    place, output, table = animals
    assert "classification of 'animal', 20 classes: kind 00, kind 01" in output
    assert all(score in output for score in ("log score", "accuracy", "Brier score"))
    predicted, output = predict(place, table, name="predictions.parquet")
    probabilities = predicted[[f"probability_kind {k:02d}" for k in range(20)]]
    assert list(predicted.columns) == ["label", *probabilities.columns, "entropy", "mutual_information"]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    assert predicted["label"].tolist() == [f"kind {k:02d}" for k in probabilities.to_numpy().argmax(axis=1)]
    np.testing.assert_allclose(predicted["entropy"], -(probabilities * np.log(probabilities)).sum(axis=1), atol=1e-8)
    assert "accuracy" in output
    assert type(al.load(place / "fit").model.likelihood) is al.Categorical


def test_unknown_labels_are_predicted_but_not_scored(animals):
    place, _, table = animals
    predicted, output = predict(place, table.head(5).assign(animal="unicorn"))
    assert len(predicted) == 5
    assert "no scores: The target 'animal' has a label unseen in training" in output
    assert "accuracy" not in output


@pytest.mark.parametrize("labels", [(3, 7), (False, True), ("0", "00")])
def test_labels_come_back_as_they_were(tmp_path, labels):
    values = np.linspace(-2.0, 2.0, 40)
    pd.DataFrame({"x": values, "y": [labels[int(v > 0)] for v in values]}).to_parquet(tmp_path / "t.parquet")
    output = run("fit", tmp_path / "t.parquet", "--target", "y", "--out", tmp_path / "fit", *FAST_MAP, "--set", "learning_rate=0.1").output
    assert "classification" in output
    assert ("--task regression overrules" in output) == (labels == (3, 7))
    predicted, _ = predict(tmp_path, pd.DataFrame({"x": [-2.0, 2.0]}), name="p.parquet")
    assert predicted["label"].tolist() == list(labels)


def test_text_that_looks_like_numbers_stays_text(tmp_path):
    """Beside "xx" the codes "01" and "02" were text when fitted; alone in a table they would be read as numbers."""
    codes = np.array(["01", "02", "xx"] * 10)
    pd.DataFrame({"code": codes, "y": (codes == "01") + np.linspace(0.0, 0.1, 30)}).to_csv(tmp_path / "t.csv", index=False)
    run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "fit", "--method", "exact")
    predicted, output = predict(tmp_path, pd.DataFrame({"code": ["01", "02"]}))
    assert "unseen" not in output
    assert predicted["mean"][0] - predicted["mean"][1] > 0.8


def test_task_overrules_what_the_target_looks_like(tmp_path):
    pd.DataFrame({"x": np.linspace(-2.0, 2.0, 40), "y": [1, 2] * 20}).to_csv(tmp_path / "t.csv", index=False)
    output = run("fit", tmp_path / "t.csv", "--target", "y", "--task", "regression", "--out", tmp_path / "fit", *FAST_MAP).output
    assert "regression of 'y'" in output


# ---- methods, show ----------------------------------------------------------------------------------------------------------------


def test_auto_fits_saves_and_predicts(tmp_path):
    flat_table().to_csv(tmp_path / "flats.csv", index=False)
    out = tmp_path / "several"
    told = run("fit", tmp_path / "flats.csv", "--target", "price", "--out", out, "--method", "auto", "--budget", "1s").output
    assert "linear" in told
    assert "left out: the budget is used" in told  # the first method is run whatever it takes
    assert "Stacked linear 1.00" in told
    run("predict", out, tmp_path / "flats.csv", "--out", tmp_path / "p.csv")
    predicted = pd.read_csv(tmp_path / "p.csv")
    loaded = al.load(out)
    np.testing.assert_allclose(loaded.predict(0, flat_table()).mean, predicted["mean"], rtol=1e-6)
    assert "log score" in run("show", out).output
    assert json.loads(run("show", out, "--json").stdout)["names"] == ["linear"]
    run("fit", tmp_path / "flats.csv", "--target", "price", "--out", out, "--method", "auto", code=1)  # there is a fit already
    for options, words in ((["--set", "num_steps=5"], "chooses its own settings"), (["--budget", "soon"], "no budget of time")):
        refused = run("fit", tmp_path / "flats.csv", "--target", "price", "--out", tmp_path / "new", "--method", "auto", *options, code=1)
        assert words in refused.output
    (out / "auto.json").write_text("{}")
    with pytest.raises(al.StoreError, match="cannot be understood"):
        al.load(out)


def test_methods_lists_every_card():
    output = run("methods").output
    assert all(name in output for name in al.METHODS)
    document = json.loads(run("methods", "--json").stdout)
    assert set(document) == set(al.METHODS)
    assert document["map"]["hyper_parameters"]["num_steps"] == {"type": "int", "default": 2000}


@pytest.mark.parametrize("name", ["exact", "MAP", "ensemble"])
def test_methods_shows_one_card(name):
    output = run("methods", name).output
    card = al.METHODS[name.lower()].card
    assert card.summary[:40] in output
    assert "batch_size" in output or "base" in output
    assert "did you mean 'map'" in run("methods", "mapp", code=1).output


def test_show_tells_what_is_in_a_fit(flats):
    place, _ = flats
    output = run("show", place / "fit").output
    for words in (
        "Ensemble(base=MAP(",
        "HeteroscedasticGaussian",
        "regression of 'price'",
        "numeric: size, age",
        "log score",
        "jax",
        "steps",
    ):
        assert words in output
    document = json.loads(run("show", place / "fit", "--json").stdout)
    assert document["data"]["num_data"] == 58  # 64 rows less a tenth for early stopping
    assert document["log_evidence"] is None
    assert "There is no saved fit" in run("show", place, code=1).output


def test_show_works_for_networks_of_the_users_own_and_for_evidence(tmp_path):
    import jax.numpy as jnp

    x = np.linspace(-1.0, 1.0, 10)[:, None]
    model = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.5), al.Normal(1.0))
    al.fit(0, model, (x, x[:, 0]), al.Exact()).save(tmp_path / "exact")
    assert "nats (exact; higher is better)" in run("show", tmp_path / "exact").output
    own = al.BNN((lambda params, x: x @ params["w"], {"w": jnp.ones((1, 1))}), al.Gaussian(0.5), al.Normal(1.0))
    al.fit(0, own, (x, x[:, 0]), al.MAP(num_steps=5), temperature=0.5).save(tmp_path / "own")
    output = run("show", tmp_path / "own").output
    assert "<your own" in output
    assert "not the Bayesian posterior" in output
    assert show_verb.describe({"tuple": [1, {"dict": {"a": {"array": "path"}}}]}) == "(1, {'a': <array path>})"


# ---- parts ------------------------------------------------------------------------------------------------------------------------


def test_settings_reach_the_right_method():
    method = _settings.build(
        "Ensemble", ["num_members=3", "num_steps=1e3", "base.batch_size=16", "clip=none", "bootstrap=yes", "optimizer=sgd"]
    )
    assert method == al.Ensemble(al.MAP(num_steps=1000, batch_size=16, clip=None, optimizer="sgd"), 3, True)
    assert _settings.build("ensemble", ["base=exact", "batch_size=8"]) == al.Ensemble(al.Exact(batch_size=8))
    assert _settings.build("map", ["patience=3"], {al.MAP: {"num_steps": 7, "patience": 9}}) == al.MAP(num_steps=7, patience=3)
    assert _settings.build("ensemble", [], {al.MAP: {"num_steps": 7}}).base.num_steps == 7


def test_values_are_read_by_their_type():
    assert _settings.parse("m.f", "3", float) == 3.0
    assert [_settings.parse("m.f", text, bool) for text in ("yes", "TRUE", "0", "off")] == [True, True, False, False]
    assert _settings.parse("m.f", "1,2, 3", tuple[int, ...]) == (1, 2, 3)
    assert _settings.parse("m.f", "null", int | None) is None
    assert _settings.parse("m.f", '{"a": 1}', dict) == {"a": 1}
    assert _settings.parse("m.f", "none", str) == "none"
    with pytest.raises(al.MethodError, match="a number or none"):
        _settings.parse("m.f", "x", float | None)
    with pytest.raises(al.MethodError, match="wrong form"):
        _settings.build("map", ["num_steps"])


def test_scores_match_their_formulas():
    from aleator.predictive import Outputs, Predictive

    mean, y = np.array([0.0, 1.0, 2.0]), np.array([0.5, 0.0, 2.0])
    predictive = Predictive(Outputs(draws=mean[None, :, None], extra={"scale": np.ones(1)}), al.Gaussian(1.0), squeeze=True)
    log_score, rmse, coverage = _scores.scores(predictive, y, "regression", "y", 0.5)
    rows = -0.5 * (mean - y) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose((log_score.value, log_score.stderr), (rows.mean(), rows.std(ddof=1) / np.sqrt(3)), rtol=1e-6)
    np.testing.assert_allclose(rmse.value, np.sqrt(1.25 / 3), rtol=1e-6)
    assert (coverage.name, round(coverage.value, 6), coverage.better) == ("50 % interval coverage", round(200 / 3, 6), "near 50 %")
    assert _scores.as_json([coverage._replace(stderr=float("nan"))])["50 % interval coverage"]["stderr"] is None
    assert _scores.as_text(1.0, 0.0) == "1.000 ± 0.000"


# ---- demo -------------------------------------------------------------------------------------------------------------------------


def test_demo_writes_its_table_picture_and_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PICTURE_STEPS", 30)
    monkeypatch.setattr(demo, "PICTURE_MEMBERS", 2)
    out = tmp_path / "demo"
    output = run("demo", "--out", out, "--folds", "2", "--set", "num_steps=30", "--set", "num_members=2").output
    for words in ("exact", "map", "ensemble", "log-likelihood", "RMSE", "90 % interval coverage", "seconds", str(out / "demo.png")):
        assert words in output
    results = json.loads((out / "demo.json").read_text())
    exact = results["results"][0]
    assert [row["method"] for row in results["results"]] == ["exact", "map", "ensemble"]
    folds = np.array(exact["rmse"]["folds"])
    np.testing.assert_allclose((exact["rmse"]["mean"], exact["rmse"]["stderr"]), (folds.mean(), folds.std(ddof=1) / np.sqrt(2)))
    assert 50 < exact["rmse"]["mean"] < 60  # linear regression on these data: 54 to 55 units
    assert 80 < exact["coverage_90"]["mean"] < 97
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert al.load(out / "diabetes_fit").preprocessor.target == "progression"
    run("predict", out / "diabetes_fit", out / "diabetes.csv", "--out", out / "predictions.csv")


def test_the_picture_has_a_region_where_only_the_epistemic_part_grows(monkeypatch):
    """In the gap the exact fit's epistemic standard deviation is several times that at the data; its noise is the same everywhere."""
    monkeypatch.setattr(demo, "PICTURE_STEPS", 2)
    monkeypatch.setattr(demo, "PICTURE_MEMBERS", 1)
    x, y = demo.picture_data()
    assert not ((x > demo.GAP[0]) & (x < demo.GAP[1])).any()
    exact = next(iter(demo.picture_fits(x, y, 0).values()))
    inside, outside = exact.predict(1, np.array([[sum(demo.GAP) / 2], [-2.0]])).epistemic ** 0.5
    assert inside > 4 * outside
    np.testing.assert_allclose(np.ptp(exact.predict(1, x).aleatoric), 0.0, atol=1e-9)
