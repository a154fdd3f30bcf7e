"""Run several scripts one after the other in the ranks of one torchrun, each in a fork of a process that knows torch.

    torchrun --nproc-per-node=2 tests/features/pattern_runner.py BACKEND PORT:SCRIPT...

Spares each script the start of three interpreters. Every script finds what torchrun would give it, with a port of its
own; rank 0 prints the name of a script before its output. Exits 1 if any script fails.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback


def run(backend: str, port: str, script: str) -> int:
    """One script in a forked child; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
        sys.argv = [script, "--backend", backend]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """See the module's docstring."""
    # What the scripts import anyway; none of it starts a thread.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    failed = 0
    for task in sys.argv[2:]:
        port, script = task.split(":", 1)
        if os.environ["RANK"] == "0":
            print(f"## {os.path.basename(script)}", flush=True)
        failed |= run(sys.argv[1], port, script)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
