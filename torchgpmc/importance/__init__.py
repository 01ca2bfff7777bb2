"""Adaptive importance sampling of densities. It knows densities, not Gaussian processes."""

from torchgpmc.importance.adaptive import (
    Adaptation,
    AdaptiveState,
    adapt,
    add_draws,
    begun_again,
    log_weights,
    start,
    truncated_log_weights,
)
from torchgpmc.importance.emulator import Emulator, empty_emulator, emulated
from torchgpmc.importance.evidence import log_evidence, own_log_weights
from torchgpmc.importance.inclusion import included, inclusion_probabilities
from torchgpmc.importance.mode_search import Mode, find_modes, further_modes, modes_from
from torchgpmc.importance.proposal import Proposal, along_axes, draw_from, from_modes, log_density_of, with_defence
from torchgpmc.importance.streams import (
    add_to_each,
    draw_from_each,
    hold_their_part,
    streamed_log_weights,
    teach_each,
    with_last_targets,
)
from torchgpmc.importance.tail_search import search_tails

__all__ = [
    "Adaptation",
    "AdaptiveState",
    "Emulator",
    "Mode",
    "Proposal",
    "adapt",
    "add_draws",
    "add_to_each",
    "along_axes",
    "begun_again",
    "draw_from",
    "draw_from_each",
    "empty_emulator",
    "emulated",
    "find_modes",
    "from_modes",
    "further_modes",
    "hold_their_part",
    "included",
    "inclusion_probabilities",
    "log_density_of",
    "log_evidence",
    "log_weights",
    "modes_from",
    "own_log_weights",
    "search_tails",
    "start",
    "streamed_log_weights",
    "teach_each",
    "truncated_log_weights",
    "with_defence",
    "with_last_targets",
]
