"""From the core's sends to messages on links: announcements, rounds and waves.

Owns what is serialised once for several daemons. Knows links, but neither opens nor closes any; a daemon without one
is being joined or gone, and the core will hear of it. Called by `shell` for each such action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from wavepp_controller.core.events import AnnounceRequest, SendRound, SendWave
from wavepp_controller.core.riding import may_ride
from wavepp_controller.runtime.daemon_link import DaemonLink
from wavepp_controller.runtime.request_spans import RequestSpans
from wavepp_proto import convert
from wavepp_proto.terms import DaemonKey


class Dispatch:
    """Sends over the links of one shell."""

    def __init__(self, links: Mapping[DaemonKey, DaemonLink], spans: RequestSpans) -> None:
        """`links` changes as daemons come and go."""
        self._links = links
        self._spans = spans
        self._last_round: tuple[tuple[object, ...], bytes] = ((), b"")
        """What was asked last, and its body."""

    def announce(self, action: AnnounceRequest) -> bool:
        """True if it rides in front of the next round, as a short one does; False if it has gone its own way."""
        links = [self._links.get(key) for key, *_ in action.targets]
        rides = may_ride(action, [link.riding if link is not None else None for link in links])
        parts: dict[bool, list[bytes]] = {}
        for link, (*_, with_tokens) in zip(links, action.targets, strict=True):
            if link is None:
                continue
            if with_tokens not in parts:
                parts[with_tokens] = self._announce_parts(action, with_tokens)
            if rides:
                link.take_along(action.key, parts[with_tokens][0])
            else:
                link.announce(parts[with_tokens])
        return rides

    def send_round(self, action: SendRound) -> None:
        """Its body is serialised once for daemons that are asked the same, one after the other."""
        link, asked = self._links.get(action.key), action.round
        if link is None:
            return
        said = (asked.deadline_ms, asked.releases, asked.revises, asked.prepares)
        if self._last_round[0] != said:
            self._last_round = (said, convert.round_body(asked))
        link.send_round(asked, self._last_round[1])

    def send_wave(self, action: SendWave) -> None:
        """Rows are serialised once: only the fence is each daemon's own."""
        body = convert.wave_body(action.rows, action.limit_ms)
        for key, fence in action.targets:
            if (link := self._links.get(key)) is not None:
                link.send_wave(convert.wave_message(replace(fence, ordinal=action.ordinal), body))

    def _announce_parts(self, action: AnnounceRequest, with_tokens: bool) -> list[bytes]:
        """The same bytes for every daemon: only the fence, left out, is each one's own."""
        request = action.request
        frames = convert.announce_frames(
            action.targets[0][1],
            action.key,
            request.prompt_tokens,
            action.block_hashes,
            request.token_ids if with_tokens else b"",
            request.sampling,
            self._spans.context_of(request.request_id),
        )
        return [convert.announce_part(frame) for frame in frames]
