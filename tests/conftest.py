"""Unfinished work of commands under test does not go to the user's cache."""

import os
import tempfile

os.environ.setdefault("ROBBOOST_WORK", os.path.join(tempfile.gettempdir(), f"robboost-tests-{os.getpid()}"))
