"""Regions of inputs, split in warm-up until proposals region by region are accepted often enough."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sklearn.cluster import KMeans
from torch import Tensor

_MOST_ROUNDS = 20
_SHORTEST_ROUND = 5  # iterations


class Partition(NamedTuple):
    """Regions, and how often proposals in them have been accepted since they were made."""

    labels: Tensor  # (N,), the region of each input, from 0
    accepted: Tensor  # (N,), sums over iterations of mean acceptance, one a region
    num_seen: Tensor  # (), iterations


def start_partition(inputs: Tensor, num_regions: int) -> Partition:
    """The clusters that k-means finds."""
    labels = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
    while int(labels.max()) + 1 < num_regions:
        labels = _split(inputs, labels, int(labels.bincount().argmax()))
    return Partition(labels, inputs.new_zeros(len(inputs)), inputs.new_zeros(()))


def _split(inputs: Tensor, labels: Tensor, region: int) -> Tensor:
    """Labels with one region of at least two inputs made two, the second of them with a new label."""
    members = (labels == region).nonzero().squeeze(-1)
    points = inputs[members]
    second = torch.arange(len(members), device=inputs.device) >= len(members) // 2
    if len(torch.unique(points, dim=0)) > 1:
        found = KMeans(2, n_init=4, random_state=0).fit(points.double().cpu().numpy()).labels_
        second = torch.as_tensor(found, device=inputs.device) > 0
    return labels.index_put((members[second],), labels.max() + 1)


class Refinement(NamedTuple):
    """Splits, round after round, the regions that accept too rarely (paper C, section 1.4.2); acceptance is pooled over chains.

    Args:
        steps: iterations of warm-up.
        inputs: of the latents ``(N, D)``.
        num_regions: to begin with.
        target_acceptance: below which a region is split in two by k-means on its inputs.
    """

    steps: int
    inputs: Tensor
    num_regions: int
    target_acceptance: float

    def start(self, position: Tensor, covariance: Tensor | None, generator: torch.Generator) -> Partition:
        """The first regions."""
        return start_partition(self.inputs, self.num_regions)

    def update(self, tuning: Partition, iteration: int, state: Any, info: Any, generator: torch.Generator) -> Partition:
        """From the Info of :func:`torchgpmc.samplers.local_regions`."""
        rates = info.regions.acceptance.mean(0)
        accepted = tuning.accepted.clone()
        accepted[: len(rates)] += rates
        partition = Partition(tuning.labels, accepted, tuning.num_seen + 1)
        return self._refined(partition) if self.restarts(iteration) else partition

    def _refined(self, partition: Partition) -> Partition:
        labels = partition.labels
        sizes = labels.bincount()
        low = partition.accepted[: len(sizes)] < self.target_acceptance * partition.num_seen
        for region in (low & (sizes > 1)).nonzero().squeeze(-1).tolist():
            labels = _split(self.inputs, labels, region)
        return Partition(labels, torch.zeros_like(partition.accepted), torch.zeros_like(partition.num_seen))

    def restarts(self, iteration: int) -> bool:
        """After each round: regions have directions of their own."""
        return iteration % max(_SHORTEST_ROUND, self.steps // _MOST_ROUNDS) == 0

    def statistics(self, tuning: Partition) -> dict[str, Tensor]:
        """How many regions there are."""
        return {"num_regions": (tuning.labels.max() + 1).to(tuning.accepted)}
