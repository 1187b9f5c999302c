"""Run the commands of CONTRIBUTING.md, so that the page cannot drift from the project.

Every line of a fenced block opened by "```sh ci" is one command. Lines given by --done have just been run and are skipped; blocks opened
by a plain "```sh" (they need hours, or change the reader's git set-up) are not run, but their make targets must exist.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commands(page: str) -> list[tuple[bool, str]]:
    """(run by CI?, command) for every line of the shell blocks of a page.

    >>> commands("text\\n```sh ci\\nmake lint  # rules\\n```\\n```sh\\nmake bench\\n```\\n")
    [(True, 'make lint'), (False, 'make bench')]
    """
    found = []
    for info, body in re.findall(r"^```sh([^\n]*)\n(.*?)^```\s*$", page, flags=re.M | re.S):
        for line in body.splitlines():
            command = line.split("  #")[0].strip()
            if command and not command.startswith("#"):
                found.append((info.strip() == "ci", command))
    return found


def targets(makefile: str) -> set[str]:
    """Names of the targets that a Makefile defines.

    >>> sorted(targets("test: env\\n\\techo\\nlint:\\n"))
    ['lint', 'test']
    """
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.M))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the commands of CONTRIBUTING.md.")
    parser.add_argument("--done", action="append", default=[], help="a command that need not run again")
    done = parser.parse_args().done
    listed = commands((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    known = targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    wrong = [c for _, c in listed if c.startswith("make ") and c.split()[1] not in known]
    if wrong or not any(run for run, _ in listed):
        print(f"CONTRIBUTING.md: no such make target: {wrong}" if wrong else "CONTRIBUTING.md: no ```sh ci block found", file=sys.stderr)
        return 1
    for run, command in listed:
        if not run or command in done:
            continue
        print(f"== {command}", flush=True)
        if subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=ROOT).returncode:
            print(f"CONTRIBUTING.md: this command failed: {command}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
