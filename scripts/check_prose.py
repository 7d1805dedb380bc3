"""Lists sentences that a reader has to read twice: those that begin with a relative clause.

    python scripts/check_prose.py [PATH...]

It reads the comments, docstrings and documentation of the files that git tracks. A sentence such as
"That were asked of storage." has no noun; "Bytes read from storage." has. `EXCEPTIONS` has the
sentences that may stay, each with the reason.
"""

import re
import subprocess
import sys
from pathlib import Path

CLAUSES = re.compile(
    r"(?:^|[.:;] )(?:What(?:ever)?|Whoever|Whose|That (?:were|was|is|are|has|have)|"
    r"Of (?:so|a|an|the|each|what|those|such|many)|So (?:does|do|is|are)|There (?:is|are) what|"
    r"Has (?:as|every|each|all|the|an?|its|what|those|others)|Is done|Goes on|"
    r"As (?:much|many|far|long) as|For (?:how|what|whom)|By (?:what|whom)|With what|"
    r"From (?:what|where)|To what|Until (?:what|all)) "
)
PHRASES = re.compile(
    r"\b(?:tells? of|told of|there (?:is|are) none of|(?:is|are) asked of|comes? of it|have others|"
    r"has others|had by|knows? nothing of|as there is)\b"
)
ASSIGNMENT = re.compile(r"[A-Za-z_.\[\]]+ ?[=:(\[]")
SUFFIXES = (".py", ".pyi", ".rs", ".md")

# A file, and the words that its sentence begins with or has: the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def prose(path: str, line: str) -> str | None:
    """Returns the text that people read in a line, or None if it is code."""
    text = line.strip()
    if path.endswith(".md"):
        return text.lstrip("#>*-| 0123456789.")
    if path.endswith(".rs"):
        return text.lstrip("/! ") if text.startswith("//") else None
    if text.startswith(("#", '"""')):
        return text.lstrip('#" ')
    return text if text[:1].isupper() and not ASSIGNMENT.match(text) else None


def listed(path: str) -> list[tuple[int, str]]:
    """Returns the lines of a file, each with its number, that have such a sentence."""
    found = []
    for number, line in enumerate(Path(path).read_text(errors="replace").splitlines(), 1):
        text = prose(path, line)
        if text is None or not (CLAUSES.search(text) or PHRASES.search(text)):
            continue
        if not any(path == file and words in text for file, words in EXCEPTIONS):
            found.append((number, text))
    return found


def main() -> int:
    """Prints the sentences, and returns the exit status."""
    command = ["git", "ls-files", "--", *sys.argv[1:]]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    count = 0
    for path in files:
        # This script has the words in its rules.
        if path.endswith(SUFFIXES) and Path(path).is_file() and Path(path).name != "check_prose.py":
            for number, text in listed(path):
                print(f"{path}:{number}: {text}", file=sys.stderr)
                count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
