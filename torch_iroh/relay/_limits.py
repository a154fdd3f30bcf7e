"""How fast one client may send: a bucket that fills with the time. No clock of its own."""

from __future__ import annotations

# At least what one read of a socket gives, else a client that obeys would be made to wait for its size.
_LEAST_BURST = 256 * 1024
_BURST_SECONDS = 0.1


class TokenBucket:
    """Allows `rate` bytes per second on average, and a tenth of a second's worth (or 256 KiB) at once."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = max(_LEAST_BURST, rate * _BURST_SECONDS)
        self._left = self._burst
        self._at = now

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes that have come; return the seconds for which no more may come."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._left / self._rate)
