"""Images per second of CROWN margin bounds: this engine against a plain dense backward implementation, in one run.

    python benchmarks/bounds.py [--device cuda] [--threads 1] [--nets A,E,J,L,wk-small] [--shapes mnist,cifar] [--quick]
    python benchmarks/bounds.py --checkpoint net.safetensors --data mnist --eps 0.1

First the engine on the device in float32 is compared with the CPU in float64, and the plain implementation with both.
Then each case is timed at growing batches. The floor of a case is the larger of its arithmetic at the rate of a large
matrix product and its traffic (every coefficient written once and read once) at the rate of a large copy, both measured
in the same run; the figures of auto_LiRPA 0.7.1 are those of docs/bounds.md.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import robboost as rb
from robboost.bounds import backward
from robboost.bounds.arithmetic import full_precision
from robboost.bounds.intervals import Interval, interval_rule
from robboost.bounds.network import Network
from robboost.models.architectures import build
from robboost.models.graph import trace

SHAPES = {"mnist": (1, 28, 28), "cifar": (3, 32, 32)}
EPS = {"mnist": 0.1, "cifar": 2 / 255}
# Images per second of auto_LiRPA 0.7.1 (full CROWN, float32 without TF32, the best batch that fitted; random weights).
AUTO_LIRPA = {
    ("cuda", "mnist", "A"): 13334,
    ("cuda", "mnist", "E"): 1367,
    ("cuda", "mnist", "J"): 353,
    ("cuda", "mnist", "L"): 102,
    ("cuda", "mnist", "wk-small"): 5641,
    ("cuda", "cifar", "A"): 6244,
    ("cuda", "cifar", "E"): 1642,
    ("cuda", "cifar", "J"): 295,
    ("cuda", "cifar", "L"): 134,
    ("cuda", "cifar", "wk-small"): 1575,
    ("cpu", "mnist", "A"): 53,
    ("cpu", "mnist", "E"): 5.0,
    ("cpu", "mnist", "J"): 0.84,
    ("cpu", "mnist", "L"): 0.36,
    ("cpu", "cifar", "A"): 28,
    ("cpu", "cifar", "E"): 4.9,
    ("cpu", "cifar", "J"): 1.03,
    ("cpu", "cifar", "L"): 0.36,
}


# The plain implementation: every neuron, one-hot rows, full maps, library calls -------------------------------------


def dense_bounds(model: nn.Module, x: Tensor, y: Tensor, eps: float, elements: int) -> Tensor:
    """Lower bounds of the margins by CROWN with intervals, for networks of conv, linear, relu and additions."""
    network = Network.build(trace(model, tuple(x.shape[1:])), model, x.dtype)
    nodes, lines = network.nodes, {}
    intervals: list[Interval] = []
    for index, node in enumerate(nodes):
        if node.kind == "input":
            intervals.append(Interval(x - eps, x + eps))
            continue
        interval = interval_rule(node, [intervals[source] for source in node.inputs])
        if any(index in other.inputs and other.kind == "relu" for other in nodes) and not node.affine:
            size = math.prod(node.shape)
            step = max(1, elements // (2 * len(x) * max(math.prod(other.shape) for other in nodes[: index + 1])))
            found = []
            for start in range(0, size, step):
                rows = torch.eye(size, dtype=x.dtype, device=x.device)[start : start + step]
                rows = torch.cat([rows, -rows]).view(-1, *node.shape).expand(len(x), -1, *node.shape)
                lower, upper = dense_pass(nodes, index, rows, lines, x, eps).chunk(2, 1)
                found.append(torch.stack([lower, -upper]))
            lower, upper = torch.cat(found, 2).view(2, len(x), *node.shape)
            interval = Interval(torch.maximum(lower, interval.lower), torch.minimum(upper, interval.upper))
        intervals.append(interval)
        if node.kind == "relu":
            lower, upper = intervals[node.inputs[0]]
            lo, hi = lower.clamp(max=0), upper.clamp(min=0)
            chord = torch.where(hi - lo > 0, hi / (hi - lo).clamp(min=1e-30), 0.0)
            lines[index] = (((upper > -lower) | (lower >= 0)).to(x.dtype), chord, -chord * lo)
    eye = torch.eye(nodes[-1].shape[0], dtype=x.dtype, device=x.device)
    others = torch.arange(len(eye) - 1, device=x.device).expand(len(x), -1)
    rows = eye[y].unsqueeze(1) - eye[others + (others >= y.unsqueeze(1))]
    return dense_pass(nodes, len(nodes) - 1, rows, lines, x, eps)


def dense_pass(nodes, start, rows, lines, x, eps) -> Tensor:
    waiting, bias = {start: rows}, torch.zeros(rows.shape[:2], dtype=x.dtype, device=x.device)
    for index in range(start, 0, -1):
        if index not in waiting:
            continue
        node, held = nodes[index], waiting.pop(index)
        lead = held.shape[:2]
        if node.kind == "relu":
            below, chord, intercept = (part.unsqueeze(1) for part in lines[index])
            negative = held.clamp(max=0)
            bias = bias + (negative * intercept).flatten(2).sum(2)
            parts = [held.clamp(min=0) * below + negative * chord]
        elif node.kind == "linear":
            bias = bias + held @ node.bias
            parts = [held @ node.weight]
        elif node.kind == "conv":
            a, shape = node.attributes, nodes[node.inputs[0]].shape
            bias = bias + held.sum((3, 4)) @ node.bias
            natural = [(held.shape[3 + i] - 1) * a["stride"][i] + a["kernel"][i] - 2 * a["padding"][i] for i in (0, 1)]
            extra = [shape[1 + i] - natural[i] for i in (0, 1)]
            flat = F.conv_transpose2d(held.flatten(0, 1), node.weight, None, a["stride"], a["padding"], extra)
            parts = [flat.unflatten(0, lead)]
        elif node.kind == "reshape":
            parts = [held.reshape(*lead, *nodes[node.inputs[0]].shape)]
        else:
            parts = [held, held]
        for source, part in zip(node.inputs, parts, strict=True):
            waiting[source] = waiting[source] + part if source in waiting else part
    slope = waiting[0].flatten(2)
    return bias + (slope @ x.flatten(1).unsqueeze(2)).squeeze(2) - eps * slope.abs().sum(2)


# Floors ------------------------------------------------------------------------------------------------------------


class Counter:
    """Arithmetic (two per multiply-add) and traffic of the coefficients while it is active."""

    def __init__(self) -> None:
        self.flops = self.bytes = 0

    def __enter__(self) -> Counter:
        self.kept = (backward._transposed, backward._TRANSPOSED["linear"])
        conv, linear = self.kept

        def count(before, after):
            for piece in (before, after):
                if piece is not None:
                    self.bytes += piece.values.numel() * piece.values.element_size()

        def counted_conv(job, node, piece, weight, shape):
            found = conv(job, node, piece, weight, shape)
            self.flops += 2 * piece.values.numel() * weight[0].numel()
            count(piece, found[0])
            return found

        def counted_linear(job, node, piece, shapes):
            found = linear(job, node, piece, shapes)
            self.flops += 2 * piece.values.numel() * node.weight.shape[1]
            count(piece, found[0])
            return found

        backward._transposed, backward._TRANSPOSED["linear"] = counted_conv, counted_linear
        return self

    def __exit__(self, *_: object) -> None:
        backward._transposed, backward._TRANSPOSED["linear"] = self.kept


def rates(device: torch.device) -> tuple[float, float]:
    """(FLOP/s of a large float32 matrix product, bytes/s of a large copy) as measured now."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
    with full_precision():
        product = seconds(lambda: a @ b, device, 0.3)
    big = torch.rand(2**28 if device.type == "cuda" else 2**25, device=device)
    out = torch.empty_like(big)
    copy = seconds(lambda: out.copy_(big), device, 0.3)
    return 2 * side**3 / product, 2 * big.numel() * 4 / copy


def seconds(job, device: torch.device, least: float) -> float:
    """Mean duration after one warm-up run: on a GPU of the wall clock, on a CPU of the processor time of one thread.

    Processor time does not count what other programs on the machine do meanwhile (with several threads the wall clock).
    """
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    job()
    runs, total = 0, 0.0
    while total < least:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize()
        total += clock() - start
        runs += 1
    return total / runs


# Cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    model: nn.Module
    images: Tensor
    labels: Tensor
    eps: float


def cases(args: argparse.Namespace) -> list[Case]:
    most = max(args.batches)
    if args.checkpoint:
        model = rb.load_model(args.checkpoint).eval()
        data = rb.load_dataset(args.data, split="test")
        repeats = -(-most // len(data.images))
        images, labels = data.images.repeat(repeats, 1, 1, 1)[:most], data.labels.repeat(repeats)[:most]
        shape = "mnist" if images.shape[1] == 1 else "cifar"
        return [Case(args.checkpoint, shape, model, images, labels, args.eps or EPS[shape])]
    found = []
    for shape in args.shapes.split(","):
        for name in args.nets.split(","):
            generator = torch.Generator().manual_seed(0)
            images = torch.rand((most, *SHAPES[shape]), generator=generator)
            labels = torch.randint(10, (most,), generator=generator)
            model = build(name, SHAPES[shape], seed=1).eval()
            found.append(Case(name, shape, model, images, labels, args.eps or EPS[shape]))
    return found


def check(case: Case, device: torch.device) -> str:
    """float32 on the device against float64 on the CPU, and the plain implementation against that."""
    x, y, threat = case.images[:3], case.labels[:3], rb.Threat(case.eps)
    exact = rb.margin_bounds(case.model.cpu(), x, y, threat, precision="float64")
    found = rb.margin_bounds(case.model.to(device), x.to(device), y.to(device), threat)
    scale = float(exact.lower.abs().max())
    lower = float((found.lower.cpu() - exact.lower).abs().max()) / scale
    slope = float((found.slope.cpu() - exact.slope).abs().max() / exact.slope.abs().max())
    with torch.no_grad():
        plain = dense_bounds(case.model.double(), x[:1].to(device).double(), y[:1].to(device), case.eps, 2**24)
    case.model.float()
    gap = float((plain.cpu() - exact.lower[:1]).abs().max()) / scale
    if max(lower, slope) > 2e-4 or gap > 1e-9:
        raise SystemExit(f"{case.name} {case.shape}: WRONG: float32 {lower:.1e}, slope {slope:.1e}, plain {gap:.1e}")
    return f"relative differences: float32 {lower:.0e}, slope {slope:.0e}, plain {gap:.0e}"


def measure(case: Case, device: torch.device, args: argparse.Namespace, peak: tuple[float, float]) -> None:
    start = time.perf_counter()
    verdict = "" if args.no_check else check(case, device)
    model, threat = case.model.to(device), rb.Threat(case.eps)
    with Counter() as counter:
        rb.margin_bounds(model, case.images[:4].to(device), case.labels[:4].to(device), threat)
    ready = time.perf_counter() - start
    flops, traffic = counter.flops / 4, counter.bytes / 4
    best, best_batch = 0.0, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for batch in args.batches:
        x, y = case.images[:batch].to(device), case.labels[:batch].to(device)
        rate = batch / seconds(lambda x=x, y=y: rb.margin_bounds(model, x, y, threat), device, args.seconds)
        if rate > best:
            best, best_batch = rate, batch
        elif rate < 0.8 * best:
            break
    memory = f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    count = 8 if device.type == "cuda" else 1
    x, y = case.images[:count].to(device), case.labels[:count].to(device)
    elements = 2**27 if device.type == "cuda" else 2**21
    with torch.no_grad(), full_precision():
        plain = count / seconds(lambda: dense_bounds(model, x, y, case.eps, elements), device, 0.0 + args.seconds / 4)
    floor = max(flops / peak[0], traffic / peak[1])
    known = args.against or AUTO_LIRPA.get((device.type, case.shape, case.name))
    ratio = f"{best / known:6.2f}x of {known:g}" if known else "     -"
    print(
        f"{case.shape:6} {case.name[-20:]:9} eps {case.eps:.4f} {best:10.2f} images/s (batch {best_batch:5}{memory})"
        f"  plain {plain:9.2f} ({best / plain:6.1f}x)  auto_LiRPA {ratio}"
        f" | {flops / 1e6:8.0f} MFLOP {traffic / 1e6:7.1f} MB an image, {best * flops / 1e12:6.2f} TFLOP/s,"
        f" {best * traffic / 1e9:6.0f} GB/s, {1 / (best * floor):5.1f}x the floor | ready in {ready:4.1f} s; {verdict}",
        flush=True,
    )


def profile(case: Case, device: torch.device, batch: int) -> None:
    """Where the time goes, kernel by kernel."""
    x, y = case.images[:batch].to(device), case.labels[:batch].to(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as record:
        rb.margin_bounds(case.model, x, y, rb.Threat(case.eps))
    column = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    for event in sorted(record.key_averages(), key=lambda event: -getattr(event, column))[:14]:
        print(f"      {getattr(event, column) / 1e3:9.2f} ms {event.count:6} calls  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nets", default="wk-small,A,E,J,L")
    parser.add_argument("--shapes", default="mnist,cifar")
    parser.add_argument("--eps", type=float, default=0.0, help="0: .1 for mnist, 2/255 for cifar")
    parser.add_argument("--batches", default="")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a measurement")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--data", default="mnist-small")
    parser.add_argument("--against", type=float, default=0.0, help="images/s that a checkpoint is compared with")
    parser.add_argument("--quick", action="store_true", help="two networks, short measurements")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--profile", type=int, default=0, help="print the kernels of one call on so many images")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    if args.quick:
        args.nets, args.seconds = "A,E", 0.3
    args.batches = [int(part) for part in args.batches.split(",") if part]
    args.batches = args.batches or ([256, 1024, 4096] if device.type == "cuda" else [4, 16])
    peak = rates(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {args.threads} thread(s)"
    print(f"torch {torch.__version__}, {name}: {peak[0] / 1e12:.2f} TFLOP/s (product), {peak[1] / 1e9:.0f} GB/s (copy)")
    for case in cases(args):
        measure(case, device, args, peak)
        if args.profile:
            profile(case, device, args.profile)


if __name__ == "__main__":
    main()
