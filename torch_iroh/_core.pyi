# The native core. Its users are the modules of this package, tests and benchmarks; they know its calls.
from typing import Any

def __getattr__(name: str) -> Any: ...
