"""From tokens to text that is final: each step hands on what later tokens cannot change, and holds back the rest."""

from collections.abc import Sequence

from twinkle.server.backends.text_codec import TextCodec

_INCOMPLETE = "\ufffd"  # how the bytes of a character read until all of them are there
_LONGEST = 16  # tokens: what is no character by then never becomes one, and decoding more each time takes longer


class Detokenizer:
    """Text of tokens that come one by one. All that was handed out is the text of all tokens together."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._before: list[int] = []  # complete, and decoded again because some tokenizers look back one word
        self._fresh: list[int] = []
        self._shown = 0  # characters of the text of both that were handed out
        self._text = ""

    def push(self, token: int) -> str:
        self._fresh.append(token)
        text = self._codec.decode(self._before + self._fresh)
        final = text if len(self._fresh) >= _LONGEST else text.rstrip(_INCOMPLETE)
        new = final[self._shown :]
        if final == text and not new:  # a token without text
            self._fresh.pop()
            return ""
        self._shown = max(self._shown, len(final))
        self._text = text
        if final == text:
            self._before, self._fresh = self._fresh, []
            self._shown = len(self._codec.decode(self._before))
            self._text = ""
        return new

    def close(self) -> str:
        """What never became complete."""
        rest, self._text = self._text[self._shown :], ""
        return rest


class StopFilter:
    """Lets text through up to the first stop string; what may be the beginning of one waits."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        keep = min(found) if found else len(self._held) - self._possible_beginning()
        passed, self._held = self._held[:keep], self._held[keep:]
        return passed

    def close(self) -> str:
        rest, self._held = self._held, ""
        return "" if self.stopped else rest

    def _possible_beginning(self) -> int:
        """How many characters at the end may grow into a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
