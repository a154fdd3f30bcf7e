"""PyTorch's own suite passes on backend "iroh": no failure, nothing lost against the ledger, a reason for the rest.

`make test-peer` adds world 4 (PEER_WORLDS="3 4"). One test alone: see distributed_suite.py. After an intended change:
``python tests/peer/outcomes.py --world 3 --record``, then ``python scripts/compatibility.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outcomes import counts, ledger, run_suite

WORLDS = [int(world) for world in os.environ.get("PEER_WORLDS", "3").split()]
AT_LEAST = {3: 99, 4: 99}  # gloo, with torch's own gates: 90 and 93
pytest.importorskip("expecttest", reason="torch's test classes need expecttest")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
def test_distributed_test_of_torch_passes(world):
    outcomes = run_suite(world)
    failures = [f"{name}\n{one.text}" for name, one in sorted(outcomes.items()) if one.state == "failed"]
    assert not failures, f"world {world}: {counts(outcomes)}\n" + "\n\n".join(failures)
    assert counts(outcomes)["passed"] >= AT_LEAST[world]
    known = ledger(world)
    if torch.__version__.split(".")[:2] != known["torch"].split(".")[:2]:
        return  # another torch has other tests; what counts is that none fails
    passed = {name for name, one in outcomes.items() if one.state == "passed"}
    assert set(known["passed"]) - passed == set(), "tests that passed before and are not run now"
    unexplained = {
        name: one.text for name, one in outcomes.items() if name not in passed and name not in known["not run"]
    }
    assert unexplained == {}, "tests that are not run and not in the ledger"


@pytest.mark.parametrize("world", [3, 4])
def test_ledger_gives_a_reason_for_every_test_that_is_not_run(world):
    known = ledger(world)
    assert known["failed"] == []
    assert set(known["passed"]).isdisjoint(known["not run"])
    assert [name for name, reason in known["not run"].items() if not reason] == []


def test_compatibility_page_is_fresh():
    if not torch.__version__.startswith(ledger(3)["torch"].rpartition(".")[0]):
        pytest.skip("the page is about another torch")
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "scripts" / "compatibility.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
