"""Loaders on many damaged files: only the library's own errors may come out, within a limit of memory.

    python benchmarks/fuzz_loaders.py --count 20000

Prints, for each kind of file, how many inputs still loaded, how many were refused, and everything else; returns 1 if
there was anything else. `--seed` repeats a run; an input that fails is kept under the folder that is printed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("src", "tests")]

from fuzzing import mutants, seeds  # noqa: E402

from robboost.errors import RobBoostError  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-gb", type=float, default=16.0, help="address space of this process")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    found = seeds(folder)
    limit = int(arguments.memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    total = failures = 0
    print(f"{'kind':15} {'inputs':>7} {'loaded':>7} {'refused':>8} {'other':>6} {'slowest ms':>11} {'s':>6}")
    for kind, (content, name, load) in found.items():
        loaded = refused = other = 0
        slowest, began = 0.0, time.perf_counter()
        for n, mutant in enumerate(mutants(content, arguments.count, arguments.seed)):
            file = folder / name
            file.write_bytes(mutant)
            start = time.perf_counter()
            try:
                load(file)
                loaded += 1
            except RobBoostError as error:
                refused += 1
                if "\n" in str(error):
                    other += 1
            except Exception:
                other += 1
                kept = folder / f"failure-{kind}-{n}"
                kept.write_bytes(mutant)
                print(f"{kept}: {traceback.format_exc(limit=-3)}", file=sys.stderr)
            slowest = max(slowest, time.perf_counter() - start)
        (folder / name).write_bytes(content)
        took = time.perf_counter() - began
        print(f"{kind:15} {arguments.count:7} {loaded:7} {refused:8} {other:6} {1000 * slowest:11.1f} {took:6.1f}")
        total, failures = total + arguments.count, failures + other
    print(f"{total} inputs, {failures} that gave anything but a result or a one-line error of the library")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
