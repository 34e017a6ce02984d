"""Runs one build or test of cocotb's runner in a process of its own.

`sim.runner` starts it: a process can be killed when time is up, and keeps the runner's changes of environment, its
output and its ``SystemExit`` away from whoever asked.
"""

import json
import sys
from pathlib import Path
from typing import Any

from cocotb_tools.check_results import get_results
from cocotb_tools.runner import get_runner

__all__ = ["main"]


def main(text: str) -> int:
    """Do a job, a JSON object with ``action``, ``simulator`` and ``arguments``, and return the exit status."""
    job: dict[str, Any] = json.loads(text)
    runner = get_runner(job["simulator"])
    arguments = job["arguments"]
    if job["action"] == "build":
        arguments["timescale"] = tuple(arguments["timescale"])
        runner.build(**arguments)
        return 0
    results = runner.test(**arguments)
    tests, failed = get_results(Path(results))
    print(f"{tests} cocotb tests, {failed} failed")
    return 0 if tests and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
