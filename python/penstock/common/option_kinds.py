"""Kinds of option values, and their spelling in environment variables."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """An option whose value is one of some words."""

    words: tuple[str, ...]

    def parse(self, text: str) -> str:
        """Parses the text of an environment variable."""
        return text

    def check(self, name: str, value: object) -> None:
        """Refuses a value that is not one of the words."""
        if type(value) is not str:
            raise TypeError(f"{name}={value!r}: must be one of {', '.join(map(repr, self.words))}")
        if value not in self.words:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, self.words))}")


@dataclass(frozen=True, slots=True)
class Number:
    """An option whose value is an integer.

    Attributes:
        least: The smallest allowed value.
        most: The largest allowed value.
        unit: The unit of the value.
        multiple_of: A required divisor.
        is_open: Whether None is allowed, which lets Penstock choose.
    """

    least: int
    most: int
    unit: str
    multiple_of: int = 1
    is_open: bool = True

    def parse(self, text: str) -> int:
        """Parses the text of an environment variable."""
        try:
            return int(text)
        except ValueError:
            raise ValueError("not a whole number") from None

    def check(self, name: str, value: object) -> None:
        """Refuses a value that is not an int within the range."""
        if value is None and self.is_open:
            return
        if type(value) is not int:
            raise TypeError(f"{name}={value!r}: must be an int{' or None' if self.is_open else ''}")
        if not self.least <= value <= self.most:
            raise ValueError(f"{name}={value}: must be between {self.least} and {self.most}")
        if value % self.multiple_of:
            raise ValueError(f"{name}={value}: must be a multiple of {self.multiple_of}")

    def whole(self, name: str, value: Any) -> int:
        """Converts an integer-like value, such as NumPy's but no bool, to an int and checks it."""
        try:
            number = value if type(value) is bool else operator.index(value)
        except TypeError:
            raise TypeError(f"{name}={value!r:.80}: must be an int") from None
        self.check(name, number)
        return number


@dataclass(frozen=True, slots=True)
class Flag:
    """An option whose value is True or False."""

    def parse(self, text: str) -> bool:
        """Parses the text of an environment variable."""
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        try:
            return words[text.lower()]
        except KeyError:
            raise ValueError("not one of 1, true, yes, on, 0, false, no, off") from None

    def check(self, name: str, value: object) -> None:
        """Refuses a value that is not a bool."""
        if type(value) is not bool:
            raise TypeError(f"{name}={value!r}: must be True or False")
