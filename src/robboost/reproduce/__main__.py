"""`python -m robboost.reproduce WHAT ...`: the command `robboost reproduce` where only torch, numpy and scipy are."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path

from robboost.errors import RobBoostError, SoundnessError
from robboost.reproduce.commands import COMMANDS, reproduce
from robboost.reproduce.request import Request


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a contradiction to a proof, 2 wrong usage or input."""
    parser = argparse.ArgumentParser(prog="python -m robboost.reproduce", description=__doc__)
    parser.add_argument("what", help=", ".join(COMMANDS))
    parser.add_argument("paths", nargs="*", type=Path, help="zoo: trained pools; figure2: runs of boosting")
    kinds = {"int": int, "int | None": int, "float | None": float, "Path": Path, "Path | None": Path}
    for field in fields(Request):
        flag = "--" + field.name.replace("_", "-")
        if str(field.type) == "bool":
            parser.add_argument(flag, action="store_true")
        elif field.name == "settings":
            parser.add_argument(flag, default="", help="names with commas between them; default: all")
        else:
            parser.add_argument(flag, type=kinds.get(str(field.type), str), default=field.default)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    values = vars(parser.parse_args(arguments))
    what, paths, as_json = values.pop("what"), values.pop("paths"), values.pop("json")
    values["settings"] = tuple(name for name in values["settings"].split(",") if name)
    try:
        outcome = reproduce(what, paths, Request(**values), _Teller())
    except SoundnessError as error:
        sys.stderr.write(f"robboost: INTERNAL CONTRADICTION: {error}\n")
        return 1
    except RobBoostError as error:
        sys.stderr.write(f"robboost: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write((json.dumps(outcome.values) if as_json else outcome.text) + "\n")
    return 0


class _Teller:
    """One line on stderr at the start of each stage, and one every ten seconds."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.last = 0.0
        self.what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self.what or now - self.last > 10:
            self.what, self.last = what, now
            sys.stderr.write(f"{now - self.begun:7.1f} s  {what}: {done} of {total}\n")
            sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
