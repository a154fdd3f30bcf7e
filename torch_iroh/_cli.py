"""The command `torch-iroh VERB ...`: finds the verb, which has its own file. `python -m torch_iroh` is the same."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

_VERBS = {
    "lab": ("torch_iroh.lab.command", "rehearse a run on this machine, in homes behind NATs and slow lines"),
    "relay": ("torch_iroh.relay.command", "a relay server for endpoints that cannot reach each other"),
    "run": ("torch_iroh.run", "torchrun, with workers whose backend is iroh whatever they name"),
    "topology": ("torch_iroh.topology", "what a collective of N ranks would take, on links that you describe"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    verb = given[0] if given else ""
    if verb in _VERBS:
        importlib.import_module(_VERBS[verb][0]).main(given[1:])
        return 0
    verbs = "\n".join(f"  {name:<9} {text}" for name, (_, text) in _VERBS.items())
    usage = f"usage: torch-iroh VERB ...\n\n{verbs}\n\ntorch-iroh VERB --help says more."
    if verb in ("-h", "--help"):
        print(usage)
        return 0
    if verb == "--version":
        from torch_iroh import __version__

        print(f"torch-iroh {__version__}")
        return 0
    near = difflib.get_close_matches(verb, _VERBS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    print(usage + (f"\n\ntorch-iroh: no verb {verb!r}.{hint}" if verb else ""), file=sys.stderr)
    return 2
