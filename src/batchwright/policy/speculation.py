"""Speculation: which rows carry guesses of their next tokens, and how many."""

from dataclasses import dataclass

from batchwright.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Speculation:
    """A row carries at most `max_drafts` guesses in a step.

    `position_cost`: what one more position in a step costs, as a fraction of what a step costs before its first.
    """

    max_drafts: int = 8
    position_cost: float = 0.05

    def __post_init__(self) -> None:
        if self.max_drafts < 1:
            raise ConfigError(f"use max_drafts={self.max_drafts}", "it must be at least 1", "leave speculation out")
        if not self.position_cost >= 0:
            raise ConfigError(
                f"use position_cost={self.position_cost}", "it is a ratio of two durations", "use 0 or more"
            )
