"""Members taking turns on one device; on a GPU a step is one launch of a recorded graph, on one of several streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from robboost.training.member import Member

__all__ = ["Turns"]

# Real steps before the recording: in those, libraries choose their algorithms and kernels are compiled.
_WARM_UP = 3


class Turns:
    """Runs members' steps in the order in which they are asked for, members on different streams at the same time.

    A member always works on the stream on which it was recorded: libraries keep one workspace for each stream, and two
    graphs recorded on one stream but replayed side by side would write over each other's.
    """

    def __init__(self, members: Sequence[Member], *, streams: int, capture: bool) -> None:
        self.device = members[0].flat.device
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._marks: list[list[torch.cuda.Event]] = []
        if self.device.type != "cuda":
            return
        shared = [torch.cuda.Stream(self.device) for _ in range(min(streams, len(members)))]
        self._streams = {id(member): shared[i % len(shared)] for i, member in enumerate(members)}
        self.synchronize()
        for member in members if capture else []:
            self._record(member)

    def begin_epoch(self, member: Member, epoch: int) -> None:
        with torch.cuda.stream(self._streams.get(id(member))):
            member.begin_epoch(epoch)

    def step(self, member: Member) -> None:
        graph = self._graphs.get(id(member))
        with torch.cuda.stream(self._streams.get(id(member))):
            if graph is None:
                member.step()
            else:
                graph.replay()

    def end_epoch(self) -> None:
        """Waits until the epoch before the one just queued is done, so that the host is never far ahead."""
        if self.device.type != "cuda":
            return
        self._marks.append([stream.record_event() for stream in set(self._streams.values())])
        if len(self._marks) > 1:
            for event in self._marks.pop(0):
                event.synchronize()

    def synchronize(self) -> None:
        """Waits until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _record(self, member: Member) -> None:
        """Records the member's step; what the warm-up moved is put back."""
        before = {name: tensor.clone() for name, tensor in member.state().items()}
        self.begin_epoch(member, 0)
        for _ in range(_WARM_UP):
            # A resumed run may stand at its last step: the table of the schedule has no more.
            with torch.cuda.stream(self._streams[id(member)]):
                member.step_count.zero_()
            self.step(member)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._streams[id(member)]):
            member.step()
        self.synchronize()
        member.restore(before)
        self.synchronize()
        self._graphs[id(member)] = graph
