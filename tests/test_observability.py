"""Log lines, spans and peak memory."""

import io
import json
import logging
import threading
import time

import numpy as np

from robboost.observability import event, log_json, profiled, resources, span


def test_events_are_json_lines_with_their_values():
    stream = io.StringIO()
    with log_json(stream):
        event("shard written", {"member": 2, "pairs": 90})
        logging.getLogger("robboost").warning("plain %s", "words")
    event("after", {})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["member"], first["pairs"]) == ("shard written", "info", 2, 90)
    assert first["time"].endswith("Z")
    assert (second["level"], second["message"]) == ("warning", "plain words")


def test_nothing_is_logged_unasked(caplog):
    event("unasked", {"a": 1})
    assert caplog.records == []


def test_spans_add_up_over_calls_and_threads():
    def work():
        with span("inner"):
            time.sleep(0.02)

    with profiled() as profile:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with span("outer"):
            work()
    work()
    assert profile.calls == {"inner": 4, "outer": 1}
    assert profile.seconds["inner"] >= 0.08
    assert profile.seconds["outer"] >= 0.02
    assert profile.wall >= 0.04
    assert profile.to_dict()["spans"]["inner"]["calls"] == 4
    text = str(profile)
    assert text.index("inner") < text.index("wall clock")


def test_a_span_counts_also_when_its_block_fails():
    with profiled() as profile:
        try:
            with span("failing"):
                raise ValueError
        except ValueError:
            pass
    assert profile.calls == {"failing": 1}


def test_peak_memory_sees_what_was_used():
    before = resources().memory
    assert before > 10**7
    block = np.ones(before // 8 + 2**22)
    assert resources().memory >= before + 2**22
    del block
    assert set(resources().to_dict()) == {"peak_memory", "peak_gpu_memory"}
