"""`repair`: sets Ray's list of a run's checkpoints aside if it keeps the run from starting."""

from __future__ import annotations

import json
import os
from itertools import count

from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME


def repair(directory: str | os.PathLike[str]) -> str | None:
    """Sets Ray's list of a run's checkpoints aside, if the run cannot start because of it.

    Ray refuses to continue a run whose list is torn, for instance by a crash while it was written,
    or names a directory that is gone. Without a list the run starts, and `resume` registers the
    existing checkpoints. Only the process that starts the run calls this, before ``trainer.fit()``.
    Checkpoints are not touched.

    Args:
        directory: The run's directory: ``storage_path`` and ``name`` of its `ray.train.RunConfig`.

    Returns:
        The problem with the list; None if it was left alone.
    """
    where = os.path.join(os.fspath(directory), CHECKPOINT_MANAGER_SNAPSHOT_FILENAME)
    wrong = _problem(where)
    if wrong is not None:
        aside = next(
            path for path in (f"{where}.aside-{n}" for n in count(1)) if not os.path.exists(path)
        )
        os.rename(where, aside)
    return wrong


def _problem(where: str) -> str | None:
    try:
        with open(where, encoding="utf-8") as file:
            listed = json.load(file)["checkpoint_results"]
        names = [str(one["checkpoint_dir_name"]) for one in listed]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        return f"{where} makes no sense: {error}"
    root = os.path.dirname(where)
    gone = [name for name in names if not os.path.exists(os.path.join(root, name))]
    return (
        f"{where} names {', '.join(gone)}, which {'is' if len(gone) == 1 else 'are'} gone"
        if gone
        else None
    )
