"""Several ranks run the same plans, found by one of them; what differs is an error before anything waits for it."""

from __future__ import annotations

from tilewise.comm.agreement import RankMismatch, agree, gather, receive, send, several_ranks

__all__ = ["RankMismatch", "agree", "gather", "receive", "send", "several_ranks"]
