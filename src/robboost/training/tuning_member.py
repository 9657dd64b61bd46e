"""All members of an ensemble over one flat vector: a step of theirs is one graph, like that of a single member."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from robboost.data import Dataset
from robboost.errors import InputError
from robboost.models import Ensemble
from robboost.threat import Threat
from robboost.training.boosting_bounds import concrete_margins
from robboost.training.boosting_certificate import HeldOut, ensemble_of
from robboost.training.boosting_member import Objective, estimated_margins, lines_of
from robboost.training.config import TrainConfig
from robboost.training.losses import ESTIMATING, Situation
from robboost.training.member import DeviceData, Member
from robboost.training.network import Network
from robboost.training.propagation import Norms, box

__all__ = ["JointMember", "JointNetwork", "Reweighting"]


class JointNetwork(Network):
    """The programs of finished members; its flat vector is theirs, one after another."""

    def __init__(self, members: Sequence[nn.Module], shape: Sequence[int], classes: int) -> None:
        super().__init__("", tuple(shape), classes, False, None)
        self.members = [copy.deepcopy(member).cpu() for member in members]
        self.parts = [Network.of_module(member, shape) for member in self.members]
        self.sizes = [part.size for part in self.parts]
        if any(part.num_classes != classes for part in self.parts):
            raise InputError(f"members give {[p.num_classes for p in self.parts]} classes: expected {classes}")

    def initial(self, init: str, seed: int) -> Tensor:
        """The members' own parameters, whatever `init` and `seed` say."""
        del init, seed
        pairs = zip(self.parts, self.members, strict=True)
        return torch.cat([part.flat_of(member) for part, member in pairs])

    def weights(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(self.parts, flat.split(self.sizes), strict=True)
        return [weight for part, piece in pieces for weight in part.weights(piece)]

    def split(self, weights: Sequence[Tensor]) -> list[tuple[Network, Sequence[Tensor]]]:
        """Each member's program with its own part of `weights`."""
        ends = [0, *accumulate(len(part.shapes) for part in self.parts)]
        return [(part, weights[i:j]) for part, (i, j) in zip(self.parts, pairwise(ends), strict=True)]

    def is_weight(self) -> Tensor:
        return torch.cat([part.is_weight() for part in self.parts])

    def networks(self, flat: Tensor) -> list[nn.Module]:
        """The members with the parameters of `flat`, on the CPU."""
        found = []
        for part, member, piece in zip(self.parts, self.members, flat.detach().cpu().split(self.sizes), strict=True):
            network = copy.deepcopy(member)
            with torch.no_grad():
                for target, value in zip(network.parameters(), part.weights(piece), strict=True):
                    target.copy_(value)
            found.append(network.eval().requires_grad_(False))
        return found

    def to(self, device: torch.device) -> JointNetwork:
        """Moves the members' pixel masks."""
        for part in self.parts:
            part.mask = None if part.mask is None else part.mask.to(device)
        return self


@dataclass(frozen=True)
class Reweighting:
    """Every `every` epochs the coefficients become damping * old + (1 - damping) * exact ones."""

    heldout: Dataset
    threat: Threat
    method: str
    every: int
    damping: float

    def apply(self, networks: Sequence[nn.Module], coefficients: Tensor) -> Tensor:
        """New coefficients [T] of the same sum of sizes: sum_t coefficient_t Z_t stays."""
        device = coefficients.device
        held = HeldOut(self.heldout, self.threat, self.method, device)
        for network in networks:
            held.add(copy.deepcopy(network).to(device))
        weights, scales = (part.to(coefficients) for part in held.exact_weights())
        size = (coefficients * scales).sum()
        return torch.lerp(size * weights / scales, coefficients, self.damping)


class JointMember(Member):
    """Members in training together; M = sum_t a_t c_t - <radius, |sum_t a_t L_t|> carries gradients to all of them."""

    net: JointNetwork

    def __init__(
        self,
        config: TrainConfig,
        data: DeviceData,
        *,
        members: Sequence[nn.Module],
        coefficients: Sequence[float],
        objective: Objective,
        reweighting: Reweighting | None,
    ) -> None:
        device = data.images.device
        super().__init__(config, data, net=JointNetwork(members, data.input_shape, data.classes).to(device))
        self.coefficients = torch.tensor(coefficients, device=device)
        self.objective = objective
        self.reweighting = reweighting

    def loss(self, situation: Situation) -> tuple[Tensor, Tensor]:
        batch = situation.batch
        members = [
            (replace(situation, net=net, weights=weights, norms=Norms(), running=Norms()), self.coefficients[t])
            for t, (net, weights) in enumerate(self.net.split(situation.weights))
        ]
        if self.config.method in ESTIMATING:
            margins = estimated_margins(members, None)
        else:
            parts = [lines_of(one, self.config.method).scaled(coefficient) for one, coefficient in members]
            margins = concrete_margins(parts, batch.x, box(batch.x, batch.eps, None))
        loss = self.objective(margins)
        if situation.settings.mixed:
            points = torch.stack([coefficient * one.margins_at(batch.x) for one, coefficient in members]).sum(0)
            loss = torch.lerp(self.objective(points), loss, batch.mixture)
        return loss, margins

    def begin_epoch(self, epoch: int) -> None:
        """Fits the weights where it is their turn: from the averaged parameters, so that a resumed run repeats it."""
        if self.reweighting is not None and epoch and epoch % self.reweighting.every == 0:
            networks = self.net.networks(self.average)
            self.coefficients.copy_(self.reweighting.apply(networks, self.coefficients))
        super().begin_epoch(epoch)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"coefficients": self.coefficients}

    def network(self) -> Ensemble:
        """The mix as it is: what the trainer's files hold while the run goes on."""
        return self.ensemble([str(t) for t in range(len(self.net.parts))])

    def ensemble(self, names: Sequence[str]) -> Ensemble:
        """The members as they are, mixed by the coefficients as they are."""
        return ensemble_of(self.net.networks(self.average), self.coefficients.double().tolist(), names)
