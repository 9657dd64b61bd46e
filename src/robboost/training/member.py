"""One member in training: its tensors, and the step that moves them without ever asking the host.

Whatever a step needs is a tensor that lies still in memory: the data, the order of the epoch, the noise, a table of the
schedule, a step counter. So the same `step` runs as it stands on a CPU and, recorded once as a CUDA graph, on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.training.adam import AdamState, adam_step
from robboost.training.config import TrainConfig
from robboost.training.dual import source_sizes
from robboost.training.losses import LOSSES, Batch, LossSettings, Situation
from robboost.training.network import Network, pixel_mask
from robboost.training.precision import full_float32
from robboost.training.propagation import Norms, box, intervals, points
from robboost.training.schedule import table

__all__ = ["LOG", "DeviceData", "Member"]

# What a step adds to its epoch's row of the log.
LOG = ("loss", "robust", "gradient")
_NORM_MOMENTUM = 0.1
_NORM_IMAGES = 4096
_ATTACKING = ("adversarial", "mtl-ibp", "cc-ibp", "sabr")
_POINTWISE = ("natural", "adversarial", "wong-kolter")
# Cauchy numbers reach to infinity; beyond this they would only lose the others to rounding.
_FARTHEST = 1e6
# The bank of random numbers holds as many as this many steps take; a step reads it from a place of its own.
_BANK_STEPS = 2
_BANK_STRIDE = 1_000_003


@dataclass(frozen=True)
class DeviceData:
    """Training images on the device as [N, H + 2 pad, W + 2 pad, C] (zeros around them), and labels."""

    images: Tensor
    labels: Tensor
    pad: int
    classes: int

    @classmethod
    def of(cls, images: Tensor, labels: Tensor, *, pad: int, classes: int, device: torch.device) -> DeviceData:
        stored = F.pad(images.to(device).permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad)).contiguous()
        return cls(stored, labels.to(device), pad, classes)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        _, height, width, channels = self.images.shape
        return channels, height - 2 * self.pad, width - 2 * self.pad


class Member:
    """Parameters, Adam's moments, weight average, running statistics, and the buffers of the current epoch."""

    def __init__(self, config: TrainConfig, data: DeviceData, *, net: Network | None = None) -> None:
        """`net`: the program that the parameters belong to; None: that of the configured architecture."""
        count = len(data.images)
        if count < config.batch:
            raise InputError(f"batch={config.batch}: larger than the {count} training images; expected at most {count}")
        self.config = config
        self.data = data
        device = data.images.device
        shape = data.input_shape
        mask = None if config.pixel_share == 1 else pixel_mask(shape, config.pixel_share, config.seed).to(device)
        self.net = net or Network.of(
            config.architecture, shape, num_classes=data.classes, batch_norm=config.batch_norm, mask=mask
        )
        self.flat = self.net.initial(config.init, config.seed).to(device).requires_grad_(True)
        self.first_moment = torch.zeros_like(self.flat, requires_grad=False)
        self.second_moment = torch.zeros_like(self.first_moment)
        self.average = self.flat.detach().clone()
        channels = self.net.norm_channels
        self.means = torch.zeros(channels, device=device)
        self.variances = torch.ones(channels, device=device)
        self.step_count = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps_per_epoch = count // config.batch
        self.table = table(config, self.steps_per_epoch).to(device)
        self.log = torch.zeros(config.epochs, len(LOG), device=device)
        self.order = torch.zeros(self.steps_per_epoch, config.batch, dtype=torch.int64, device=device)
        self.moves = torch.zeros(self.steps_per_epoch, config.batch, 3, dtype=torch.int64, device=device)
        self._attacks = config.method in _ATTACKING
        self.noise = torch.zeros(
            (self.steps_per_epoch, config.batch, *shape) if self._attacks else (0,), dtype=torch.uint8, device=device
        )
        sources = sum(source_sizes(self.net)) if config.projections else 0
        self.bank = torch.zeros(_BANK_STEPS * config.projections * sources, device=device)
        self._places = torch.arange(config.projections * sources, device=device)
        self._decayed = self.net.is_weight().to(device) * config.l1 if config.l1 else None
        self._rows = torch.arange(shape[1], device=device)
        self._columns = torch.arange(shape[2], device=device)
        self._settings = LossSettings(
            config.attack_steps,
            config.attack_scale,
            config.small_box,
            mixed=min(config.mixture, 1.0 if config.mixture_start is None else config.mixture_start) < 1,
            crowned=config.crown_share == 1,
            projections=config.projections,
        )

    def shorten(self, epochs: int) -> None:
        """Makes the run `epochs` long (not longer than it was made for): the schedule keeps its shape."""
        self.config = self.config.with_epochs(epochs)
        self.table[: epochs * self.steps_per_epoch].copy_(table(self.config, self.steps_per_epoch))

    def begin_epoch(self, epoch: int) -> None:
        """Draws the epoch's order, moves and noise from the seed and the epoch alone: a resumed run repeats them."""
        generator = torch.Generator(self.flat.device).manual_seed(self.config.seed * 100_003 + epoch)
        device = self.flat.device
        order = torch.randperm(len(self.data.images), generator=generator, device=device)
        self.order.copy_(order[: self.order.numel()].view_as(self.order))
        if self._augments:
            reach = 2 * self.config.shift + 1
            self.moves[..., :2].random_(0, reach, generator=generator)
            self.moves[..., 2].random_(0, 2, generator=generator)
        if self._attacks:
            self.noise.random_(0, 256, generator=generator)
        if self.config.projections:
            self.bank.cauchy_(generator=generator).clamp_(-_FARTHEST, _FARTHEST)

    def loss(self, situation: Situation) -> tuple[Tensor, Tensor]:
        """Mean loss of a batch, and margins [N, C-1] whose sign counts as "robust" in the log."""
        return LOSSES[self.config.method](situation)

    def step(self) -> None:
        """One step of Adam on the configured loss; everything happens on the device."""
        with torch.enable_grad():
            weights = self.net.weights(self.flat)
            batch = self._batch()
            norms, running = Norms(), Norms()
            if self.net.num_norms and self._attacks:
                fixed = [w.detach() for w in weights]
                running = Norms.running(self.net, fixed, self.means, self.variances)
            situation = Situation(self.net, weights, batch, norms, running, self._settings)
            loss, margins = self.loss(situation)
            (gradient,) = torch.autograd.grad(loss, self.flat)
        with torch.no_grad():
            if self.net.num_norms:
                means, variances = norms.statistics()
                self.means.lerp_(means, _NORM_MOMENTUM)
                self.variances.lerp_(variances, _NORM_MOMENTUM)
            length = self._update(gradient)
            robust = (margins > 0).all(1).float().mean()
            row = torch.stack([loss.detach(), robust, length]).view(1, -1)
            self.log.index_add_(0, self.step_count // self.steps_per_epoch, row)
            self.step_count.add_(1)

    def state(self) -> dict[str, Tensor]:
        """All that a resumed run needs, as live tensors."""
        return {
            "flat": self.flat.detach(),
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
            "average": self.average,
            "means": self.means,
            "variances": self.variances,
            "step_count": self.step_count,
            "log": self.log,
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Copies a state of `state()` back into the tensors that the step reads."""
        for name, tensor in self.state().items():
            tensor[: len(state[name])].copy_(state[name])

    @torch.no_grad()
    def final_norms(self) -> Norms:
        """Normalisations of the averaged weights, from one large batch of training images.

        The average has never seen a batch itself, so statistics gathered along the way would not be its own.
        """
        norms = Norms()
        if self.net.num_norms == 0:
            return norms
        chosen = slice(0, _NORM_IMAGES)
        pad, (_, height, width) = self.data.pad, self.data.input_shape
        x = self.data.images[chosen, pad : pad + height, pad : pad + width].permute(0, 3, 1, 2)
        weights = self.net.weights(self.average)
        with full_float32():
            if self.config.method in _POINTWISE:
                points(self.net, weights, x, norms)
            else:
                share = self.config.small_box if self.config.method == "sabr" else 1.0
                eps = torch.tensor(self.config.final_eps * share, device=x.device)
                intervals(self.net, weights, *box(x, eps, self.net.mask), norms, traced=False)
        return norms

    def network(self) -> nn.Module:
        """What the run comes to: the averaged weights, normalisation folded, on the CPU."""
        return self.net.module(self.average, self.final_norms().in_order())

    @property
    def _augments(self) -> bool:
        return self.config.shift > 0 or self.config.flip

    def _batch(self) -> Batch:
        position = self.step_count % self.steps_per_epoch
        scalars = self.table.index_select(0, self.step_count).view(-1)
        self._scalars = scalars[3:6]
        chosen = self.order.index_select(0, position).view(-1)
        x = self._images(chosen, position).permute(0, 3, 1, 2)
        noise = x
        if self._attacks:
            noise = self.noise.index_select(0, position).view(x.shape).to(x.dtype) * (2 / 255) - 1
        if self.config.projections:
            places = (self._places + position * _BANK_STRIDE) % len(self.bank)
            noise = self.bank.index_select(0, places).view(self.config.projections, -1)
        y = self.data.labels.index_select(0, chosen)
        return Batch(x, y, chosen, noise, eps=scalars[0], mixture=scalars[1], crown_share=scalars[2])

    def _images(self, chosen: Tensor, position: Tensor) -> Tensor:
        pad = self.data.pad
        if not self._augments:
            whole = self.data.images.index_select(0, chosen)
            return whole if pad == 0 else whole[:, pad:-pad, pad:-pad]
        down, right, mirrored = self.moves.index_select(0, position).squeeze(0).unbind(1)
        spare = pad - self.config.shift
        rows = self._rows + (down + spare).unsqueeze(1)
        columns = self._columns.expand(len(chosen), -1)
        if self.config.flip:
            columns = torch.where(mirrored.unsqueeze(1) == 1, columns.flip(1), columns)
        columns = columns + (right + spare).unsqueeze(1)
        return self.data.images[chosen.view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]

    def _update(self, gradient: Tensor) -> Tensor:
        """L1, clipping, Adam, averaging; returns the gradient's length before it was clipped."""
        if self._decayed is not None:
            gradient = gradient + self._decayed * self.flat.sign()
        length = gradient.norm()
        state = AdamState(self.flat, self.average, self.first_moment, self.second_moment)
        adam_step(state, gradient, length, self._scalars, clip_norm=self.config.clip_norm)
        return length
