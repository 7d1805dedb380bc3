"""Small files of a sealed checkpoint: a member of the state, as nothing lies clear beside shards.

The note of the checkpoint lists their names, so that no member of a user's state is taken for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.checkpoint.saving.groups import read_files
from penstock.checkpoint.state.tree.tree import branches

if TYPE_CHECKING:
    from penstock.checkpoint.loading.opened import OpenCheckpoint

FILES = "files"
"""The member of the state, and of a note with their names."""

IMPORT = "import"
"""The member of a checkpoint's metadata that `import_model` adds."""

_NOTES = (IMPORT, "trainer")
"""Members of a checkpoint's metadata that list the files: of imports and of transformers."""


def sealed_files(checkpoint: OpenCheckpoint, options: dict[str, Any]) -> dict[str, bytes]:
    """Returns the small files in a sealed checkpoint, by name.

    Args:
        checkpoint: The checkpoint, opened.
        options: How bytes move.

    Raises:
        ValueError: A name or a size is not that of a small file.
    """
    metadata = checkpoint.metadata()
    notes = [note for name in _NOTES if isinstance(note := metadata.get(name), dict)]
    listed = next((note[FILES] for note in notes if FILES in note), None)
    if not isinstance(listed, list):
        return {}
    with checkpoint.reading():
        checkpoint.view_as(0)
        nodes = dict(branches(dict(branches(checkpoint.root) or ()).get(FILES)) or ())
        names = [name for name in nodes if name in listed]
        found = checkpoint.values([nodes[name] for name in names], options)
        contents = dict(zip(names, found, strict=True))
    return dict(read_files({name: bytes(content) for name, content in contents.items()}))
