"""Says which folders have too many entries and which modules too many lines.

    python scripts/check_tree.py

`tree.toml` beside this script has the limits, and what may exceed them, each
with the reason. Only files that git tracks count.
"""

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath

UNIT_TESTS = re.compile(r"^#\[cfg\(test\)\]\nmod \w+ \{.*", re.MULTILINE | re.DOTALL)


def tracked() -> list[PurePosixPath]:
    """Returns the files that git tracks and that exist."""
    found = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout
    return [PurePosixPath(path) for path in found.splitlines() if Path(path).is_file()]


def widths(files: list[PurePosixPath]) -> dict[str, int]:
    """Returns how many entries each folder has; `a.rs` and `a/` are one, `__init__.py` none."""
    entries = defaultdict(set)
    for file in files:
        if file.name in ("__init__.py", "__main__.py", "py.typed", "mod.rs", "lib.rs"):
            continue
        for folder, entry in zip(file.parents, [file, *file.parents], strict=False):
            entries[str(folder)].add(entry.stem)
    return {folder: len(names) for folder, names in entries.items()}


def lengths(files: list[PurePosixPath]) -> dict[str, int]:
    """Returns how many lines each module has, without the unit tests at the end of Rust's."""
    modules = [file for file in files if file.suffix in (".py", ".rs")]
    texts = {str(file): UNIT_TESTS.sub("", Path(file).read_text()) for file in modules}
    return {path: len(text.splitlines()) for path, text in texts.items()}


def exceeded(found: dict[str, int], rules: dict, unit: str) -> list[str]:
    """Returns a message for each path over its limit, and for each exception without need."""
    messages = []
    exceptions = {one["path"]: one["max"] for one in rules.get("exceptions", [])}
    skipped = tuple(rules.get("skipped", []))
    for path, count in sorted(found.items()):
        limit = exceptions.get(path, rules["max"])
        if not path.startswith(skipped) and count > limit:
            messages.append(f"{path}: {count} {unit}, at most {limit}")
    needless = [path for path in exceptions if found.get(path, 0) <= rules["max"]]
    return messages + [f"{path}: needs no exception in scripts/tree.toml" for path in needless]


def main() -> int:
    """Prints what is too large, and returns the exit status."""
    rules = tomllib.loads((Path(__file__).parent / "tree.toml").read_text())
    files = tracked()
    messages = exceeded(widths(files), rules["entries"], "entries")
    messages += exceeded(lengths(files), rules["lines"], "lines")
    for message in messages:
        print(message, file=sys.stderr)
    return min(len(messages), 1)


if __name__ == "__main__":
    sys.exit(main())
