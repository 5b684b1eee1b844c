"""One comparison of a program's steps under way: what is known of it, how far it is, and when it is given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewise.nn.step.blocks import COUNTED, Blocks
from tilewise.nn.step.kinds import Chosen, Observed
from tilewise.nn.step.lead import Lead, Trial, Verdict
from tilewise.nn.step.numbered import NumberedBlocks
from tilewise.nn.step.pairs import LEAST_PAIRS
from tilewise.nn.step.search import Key

__all__ = ["MOST_STEPS", "Course"]

MOST_STEPS = 400
"""Steps for one choice of passes where two of a block count. Where steps are never alike there is no decision."""


@dataclass
class Course:
    """What was seen since the last decision."""

    gains: Mapping[Key, float] = field(default_factory=dict)
    lead: Lead | None = None
    """Says what is done next; ``None`` before it begins."""
    observed: Observed = field(default_factory=Observed)
    chosen: Chosen | None = None
    """The kind of steps that is compared, once that is known."""
    trial: Trial | None = None
    """The one that is timed, or was timed last."""
    blocks: Blocks | NumberedBlocks | None = None
    """What takes the times of the trial; ``None`` where nothing is timed."""
    said: Trial | Verdict | None = None
    """What is to be done from a later step on."""
    steps: int = 0
    """Steps since something new was to be done."""
    without: int = 0
    """Steps without gradients."""
    foreign: int = 0
    """Steps in a row that are of other kinds."""

    def done(self) -> str:
        """How many pairs are done of those that are timed, and of how many."""
        if self.trial is None:
            return f"0 of {LEAST_PAIRS}"
        here = self.trial.pairs if self.blocks is None else self.blocks.done
        return f"{self.trial.before + here} of {self.trial.wanted}"

    def progress(self) -> str:
        """How far it is, after the words "still to be compared"."""
        if self.trial is not None:
            return f": {self.done()} pairs"
        return ", once all is planned" if self.chosen is None else ", once the other ranks are ready"

    def why_given_up(self) -> str:
        """Why nothing will be decided: steps are never alike, or other ranks are not heard of. Empty while it may."""
        counted = COUNTED if self.chosen is None else self.chosen.counted
        patience = 1 if self.lead is None else self.lead.patience
        if self.steps <= MOST_STEPS * patience * counted // COUNTED:
            return ""
        waiting = self.chosen is not None and self.blocks is None and self.said is None
        if waiting and self.lead is not None and self.lead.several:
            return f"{self.lead.waits_for()} for {self.steps} steps"
        return f"steps are too irregular ({self.done()} pairs after {self.steps} steps)"
