"""Run several scripts one after the other in the ranks of one torchrun, each in a fork of a process that knows torch.

    torchrun --nproc-per-node=2 tests/features/pattern_runner.py BACKEND PORT:SCRIPT...

Spares each script the start of three interpreters. Every script finds what torchrun would give it, with a port of its
own; rank 0 prints the name of a script before its output. Exits 1 if any script fails.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn


def die_with_parent() -> None:
    """No rank outlives a test that was killed: torchrun's workers are not in its process group."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def leave(code: int) -> NoReturn:
    """End the child."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(backend: str, port: str, script: str) -> int:
    """One script in a forked child; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    die_with_parent()
    code = 1
    try:
        if backend == "gloo":
            # After this the script only returns, and there gloo 2.13 may hang: the destructor of a group that DDP's
            # reducer owned joins gloo's thread while it holds the GIL for which that thread waits.
            import torch.distributed as dist

            destroy = dist.destroy_process_group

            def destroy_and_leave(*arguments: Any) -> NoReturn:
                destroy(*arguments)
                leave(0)

            dist.destroy_process_group = destroy_and_leave
        os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
        sys.argv = [script, "--backend", backend]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    leave(code)


def main() -> None:
    """See the module's docstring."""
    die_with_parent()
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
