"""`python -m robboost` is the command `robboost`."""

from robboost.cli import main

main()
