#!/usr/bin/env bash
# Sets up an environment for this checkout: uv when it is there, else venv and pip.
#
#   tools/setup_env.sh base    .venv with the package (editable) and what it needs to run
#   tools/setup_env.sh dev     the same plus the tools for tests, lint and docs
#   tools/setup_env.sh oldest  .venv-oldest with exactly the lower bounds of pyproject.toml, and the tools
#
# PYTHON=/path/to/python chooses the interpreter. The Makefile calls this and keeps stamps, so it runs only when needed.
set -euo pipefail
cd "$(dirname "$0")/.."

mode="${1:-dev}"
venv=.venv
extra="[dev]"
constraints=()
candidates=(python3.13 python3.12 python3.11 python3 python)
case "$mode" in
    base) extra="" ;;
    dev) ;;
    oldest)
        venv=.venv-oldest
        constraints=(-c requirements/oldest.txt)
        candidates=(python3.11 python3.12 python3.13 python3 python)
        ;;
    *)
        echo "tools/setup_env.sh: unknown mode '$mode'; expected base, dev or oldest" >&2
        exit 2
        ;;
esac

# Runs the candidate instead of looking it up: version managers leave shims behind that only print an error.
new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || { echo "PYTHON=$PYTHON is not a working Python 3.11 or newer." >&2; return 1; }
        echo "$PYTHON"
        return
    fi
    for name in "${candidates[@]}"; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    return 1
}

have_uv() { command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; }

if [ -e "$venv" ] && ! new_enough "$venv/bin/python"; then
    echo "$venv is broken or older than Python 3.11: making it anew."
    rm -rf "$venv"
fi

if [ ! -e "$venv" ]; then
    if python="$(find_python)"; then
        :
    elif have_uv && [ -z "${PYTHON:-}" ]; then
        python=3.12 # uv fetches it
    else
        echo "No Python 3.11 or newer found (tried: ${candidates[*]})." >&2
        echo "Install one, or uv, or say where it is: make PYTHON=/path/to/python3.12 ..." >&2
        exit 1
    fi
    echo "Making $venv with $python ..."
    if have_uv; then uv venv --quiet --python "$python" "$venv"; else "$python" -m venv "$venv"; fi
fi

started=$SECONDS
echo "Installing aleator$extra into $venv (once; a minute or so) ..."
if have_uv; then
    uv pip install --quiet --compile-bytecode --python "$venv/bin/python" ${constraints[@]+"${constraints[@]}"} -e ".$extra"
else
    # An environment made by uv has no pip of its own.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary --no-compile \
        ${constraints[@]+"${constraints[@]}"} -e ".$extra"
    # pip compiles to bytecode on one core, tests of all packages included; this takes every core and a third of the work.
    "$venv/bin/python" -m compileall -q -j 0 -x '/tests?/' "$venv/lib" >/dev/null 2>&1 || true
fi
echo "$venv is ready ($((SECONDS - started)) s)."

touch "$venv/.stamp-base"
if [ "$mode" != base ]; then touch "$venv/.stamp-dev"; fi
