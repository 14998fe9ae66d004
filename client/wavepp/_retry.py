"""When trying again is safe, how long to wait before it, and when to stop.

Owns the retry policy, the budget that all requests of a client share, and the one loop that applies
both. Safe means: the controller cannot have accepted the request, or can only have lost it with its
stream. The caller guarantees that by running nothing but the way to the FIRST answer inside
`Retrier.run`; once an event came back, no error is retried. A request without events (one call) has
one answer: what fails before it, a broken connection included, may be tried again.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from wavepp_proto import limits
from wavepp_proto.errors import (
    ControllerUnavailable,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    PipelineUnavailable,
    QueueFull,
    WaveppError,
)

T = TypeVar("T")

REFUSED: Final = (QueueFull, Draining, PipelineUnavailable, ControllerUnavailable)
"""Errors that say: not accepted, and later may be better."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a client repeats requests that were not accepted. `RetryPolicy(attempts=1)` never does."""

    attempts: int | None = None
    """Most tries of one request, the first included; >= 1. None: as many as `patience` has room for."""
    patience: float = limits.CONTROLLER_ABSENCE_MS / 1000
    """Seconds from the first failure in which another try may begin: a killed controller is replaced within them."""
    first_delay: float = 0.1
    """Seconds before the second try; doubled for each further one, then jittered to 50..100 %."""
    longest_delay: float = 2.0
    """Cap of that delay (seconds). A longer `retry_after_ms` from the controller wins over it."""
    budget: float = 100.0
    """Retries of a full queue that all requests of the client together may spend: overload must not feed itself. An
    absent controller or pipeline costs none: every request waits for it, at most `patience`."""
    refund: float = 0.5
    """What one accepted request puts back, up to `budget`."""

    def __post_init__(self) -> None:
        leasts = {"attempts": 1, "patience": 0, "first_delay": 0, "longest_delay": 0, "budget": 0, "refund": 0}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InvalidRequest(
                    f"retry {name} must be >= {least}, got {value}", field=name, value=value, limit=least
                )

    def delay(self, tried: int, error: WaveppError, chance: float) -> float:
        """Seconds to wait after `tried` tries ended in `error`; `chance` in [0, 1) is the jitter."""
        # The exponent is bounded so that a policy of many attempts cannot overflow a float.
        backoff = min(self.longest_delay, self.first_delay * 2.0 ** min(tried - 1, 64))
        return max(backoff * (0.5 + chance / 2), (error.retry_after_ms or 0) / 1000)


class Retrier:
    """The policy of one client with what is left of its budget."""

    def __init__(
        self,
        policy: RetryPolicy,
        chance: Callable[[], float] = random.random,
        now: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`now` and `sleep` are those of the running loop unless time is virtual."""
        self.policy = policy
        self.remaining = policy.budget
        self._chance = chance
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep

    async def run(self, attempt: Callable[[], Awaitable[T]], give_up_at: float) -> T:
        """First success of `attempt`, else the last error.

        `give_up_at` is a time of the running loop: a wait that would reach it is not begun.
        """
        tried, lost, until = 0, False, give_up_at
        while True:
            tried += 1
            try:
                answer = await attempt()
            except WaveppError as error:
                # A stream that broke may outlive us on the controller for a moment: then our own
                # request id is still live there, and the duplicate is ourselves.
                if not (isinstance(error, REFUSED) or (lost and isinstance(error, DuplicateRequest))):
                    raise
                lost = lost or isinstance(error, ControllerUnavailable)
                if tried == 1:
                    until = min(give_up_at, self._now() + self.policy.patience)
                delay = self.policy.delay(tried, error, self._chance())
                if not self._may_retry(tried, error, delay, until):
                    raise
            else:
                self.remaining = min(self.policy.budget, self.remaining + self.policy.refund)
                return answer
            await self._sleep(delay)

    def _may_retry(self, tried: int, error: WaveppError, delay: float, until: float) -> bool:
        if self.policy.attempts is not None and tried >= self.policy.attempts:
            return False
        if self._now() + delay >= until:
            return False
        if isinstance(error, QueueFull):
            if self.remaining < 1:
                return False
            self.remaining -= 1
        return True
