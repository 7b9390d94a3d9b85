# SPDX-License-Identifier: Apache-2.0
"""Texts that end an answer."""

from collections.abc import Sequence


class StopTexts:
    """Passes an answer's text on, and holds back an end that may be the beginning of a stop text.

    Args:
        stops: the stop texts; empty ones are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = ""
        """The stop text that has come; it and what follows it are dropped. Empty: none has."""

    def add(self, text: str) -> str:
        """Takes the answer's next text; returns the text that may be passed on."""
        if self.found:
            return ""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            passed, self._held = self._held[:place], ""
            return passed
        end = len(self._held) - self._possible_beginning()
        passed, self._held = self._held[:end], self._held[end:]
        return passed

    def rest(self) -> str:
        """The text that was held back; for the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self) -> int:
        """How many characters at the end of the held text may be the beginning of a stop text."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
