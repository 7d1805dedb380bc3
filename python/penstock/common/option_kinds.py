"""What an option may be, and how the environment spells it: a word, a number, or yes and no."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """What an option may be: one of some words."""

    words: tuple[str, ...]

    def parse(self, text: str) -> str:
        """The value that a variable of the environment gives."""
        return text

    def check(self, name: str, value: object) -> None:
        """Refuses what it may not be.

        Raises:
            TypeError: It is no text.
            ValueError: It is none of the words.
        """
        if type(value) is not str:
            raise TypeError(f"{name}={value!r}: must be one of {', '.join(map(repr, self.words))}")
        if value not in self.words:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, self.words))}")


@dataclass(frozen=True, slots=True)
class Number:
    """What an option may be: a whole number.

    Attributes:
        least: The smallest.
        most: The largest.
        unit: What it counts.
        multiple_of: What has to divide it.
        is_open: Whether it may be None, and so left to Penstock.
    """

    least: int
    most: int
    unit: str
    multiple_of: int = 1
    is_open: bool = True

    def parse(self, text: str) -> int:
        """The value that a variable of the environment gives."""
        try:
            return int(text)
        except ValueError:
            raise ValueError("not a whole number") from None

    def check(self, name: str, value: object) -> None:
        """Refuses what it may not be.

        Raises:
            TypeError: It is no int.
            ValueError: It is out of range.
        """
        if value is None and self.is_open:
            return
        if type(value) is not int:
            raise TypeError(f"{name}={value!r}: must be an int{' or None' if self.is_open else ''}")
        if not self.least <= value <= self.most:
            raise ValueError(f"{name}={value}: must be between {self.least} and {self.most}")
        if value % self.multiple_of:
            raise ValueError(f"{name}={value}: must be a multiple of {self.multiple_of}")

    def whole(self, name: str, value: Any) -> int:
        """The same of whatever stands for an integer, such as one of NumPy.

        Raises:
            TypeError: It is no integer.
            ValueError: It is out of range.
        """
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}={value!r:.80}: must be an int") from None
        self.check(name, number)
        return number


@dataclass(frozen=True, slots=True)
class Flag:
    """What an option may be: yes or no."""

    def parse(self, text: str) -> bool:
        """The value that a variable of the environment gives."""
        words = {"1": True, "true": True, "yes": True, "on": True}
        words |= {"0": False, "false": False, "no": False, "off": False}
        try:
            return words[text.lower()]
        except KeyError:
            raise ValueError("not one of 1, true, yes, on, 0, false, no, off") from None

    def check(self, name: str, value: object) -> None:
        """Refuses what it may not be.

        Raises:
            TypeError: It is no bool.
        """
        if type(value) is not bool:
            raise TypeError(f"{name}={value!r}: must be True or False")
