"""Runs distributed_suite.py and keeps the ledger: which of its tests pass here, and why each other one is not run.

    python tests/peer/outcomes.py --world 3 [--backend gloo] [--record] [-k NAME]

`--record` writes world3.json anew (for iroh; for gloo only its counts there). docs/compatibility.md is made of these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SUITE = HERE / "distributed_suite.py"
RUN_SECONDS = 840  # 140 s at world 3 on two idle cores


@dataclass(frozen=True)
class Outcome:
    """What became of one test: "passed", "skipped" or "failed"; the reason, or the failure's text."""

    state: str
    text: str = ""


def run_suite(world: int, backend: str = "iroh", *options: str) -> dict[str, Outcome]:
    """Run the suite in a process of its own and return each test's outcome; kills what it has started at the end."""
    with tempfile.TemporaryDirectory(prefix="torch-iroh-outcomes-") as folder:
        report = Path(folder) / "report.xml"
        log = Path(folder) / "log.txt"
        command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "BACKEND": backend, "WORLD_SIZE": str(world)},
            )
            try:
                process.wait(RUN_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not report.exists():
            raise AssertionError(f"{' '.join(command)}\nexit {process.returncode}\n{log.read_text()[-6000:]}")
        return _read_report(report)


def _read_report(report: Path) -> dict[str, Outcome]:
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        outcomes[name] = Outcome("passed")
        for result in case:
            if result.tag == "skipped":
                outcomes[name] = Outcome("skipped", (result.get("message") or "").strip())
            elif result.tag in ("failure", "error"):
                outcomes[name] = Outcome("failed", (result.text or "")[-4000:])
    return outcomes


def counts(outcomes: dict[str, Outcome]) -> dict[str, int]:
    """How many tests passed, were skipped and failed."""
    found = Counter(outcome.state for outcome in outcomes.values())
    return {state: found[state] for state in ("passed", "skipped", "failed")}


def ledger_path(world: int) -> Path:
    """Where the ledger of this world is kept."""
    return HERE / f"world{world}.json"


def ledger(world: int) -> dict[str, Any]:
    """The ledger of this world: torch's version, gloo's counts, names that pass, and the others with their reason."""
    loaded: dict[str, Any] = json.loads(ledger_path(world).read_text())
    return loaded


def record(world: int, backend: str, outcomes: dict[str, Outcome]) -> None:
    """Write what was found into the ledger."""
    import torch

    path = ledger_path(world)
    known = ledger(world) if path.exists() else {}
    if backend == "iroh":
        known["torch"] = torch.__version__.split("+")[0]
        known["passed"] = sorted(name for name, one in outcomes.items() if one.state == "passed")
        known["failed"] = sorted(name for name, one in outcomes.items() if one.state == "failed")
        known["not run"] = {name: one.text for name, one in sorted(outcomes.items()) if one.state == "skipped"}
    else:
        known[backend] = counts(outcomes)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--backend", default="iroh")
    parser.add_argument("--record", action="store_true", help="write the ledger anew")
    parser.add_argument("-k", dest="name", help="only tests whose names match")
    arguments = parser.parse_args()
    if arguments.record and arguments.name:
        parser.error("--record needs the whole suite, without -k")
    outcomes = run_suite(arguments.world, arguments.backend, *(["-k", arguments.name] if arguments.name else []))
    for name, outcome in sorted(outcomes.items()):
        if outcome.state == "failed":
            print(f"FAILED {name}\n{outcome.text}\n")
    print(", ".join(f"{count} {state}" for state, count in counts(outcomes).items()))
    if arguments.record:
        record(arguments.world, arguments.backend, outcomes)
    sys.exit(1 if counts(outcomes)["failed"] else 0)


if __name__ == "__main__":
    main()
