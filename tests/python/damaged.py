"""Ways to damage steps of a store."""

import os

import penstock


def file_of(store, step, kind):
    name = next(name for name in os.listdir(store.path(step)) if name.startswith(kind))
    return os.path.join(store.path(step), name)


def damage(store, step, tensor="b"):
    info = next(t for t in penstock.inspect(store.path(step)).tensors if t.name == tensor)
    with open(os.path.join(store.path(step), info.file), "r+b") as file:
        file.seek(info.end - 1)
        file.write(b"\xee")
