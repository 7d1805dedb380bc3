"""Options of commands that take keys, and what they print of recipients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock.cli.paths import check_directory, is_store
from penstock.common.console import console, print_json, table
from penstock.common.secret_texts import may_hold_secret
from penstock.sealing import Identities, Sealing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.sealing import Recipient

    _Text = click.ParamType[str]
else:
    # `ParamType` is generic for the type checker only: older releases of click lack it.
    _Text = click.ParamType

JSON_KEYS = """\b
JSON: path, checkpoints: a list of path, recipients: a list of kind
  (age, key-file, passphrase, kms), name (in public).
"""


class KeyType(_Text):
    """A key by its file, its URI or its public text: other processes see command lines."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the value, unless it is a secret."""
        if may_hold_secret(value):
            self.fail("other processes can see command lines: give the secret's file", param, ctx)
        return str(value)


identity_option = click.option(
    "--identity",
    "identities",
    type=KeyType(),
    metavar="FILE",
    multiple=True,
    help="Open a sealed checkpoint with the keys in FILE, or with a key management service: "
    "aws-kms://; may be given more than once. [default: the file named by PENSTOCK_IDENTITIES]",
)

unseal_option = click.option(
    "--unseal",
    is_flag=True,
    help="Write what is sealed in the clear; also takes --identity.",
)

recipient_option, optional_recipient_option = (
    click.option(
        "--recipient",
        "recipients",
        type=KeyType(),
        metavar="KEY",
        multiple=True,
        required=is_required,
        help="A public key (age1…, ssh-ed25519 …), a URI of a key (aws-kms://…), a file of keys; "
        "may be given more than once.",
    )
    for is_required in (True, False)
)


def opened_by(identities: tuple[str, ...]) -> Identities | None:
    """The identities of the option, else those of the environment."""
    return Identities.resolve(identities or None)


def sealed_for(recipients: tuple[str, ...]) -> Sealing | None:
    """The sealing of the option; None without recipients."""
    return Sealing(recipients) if recipients else None


def change(path: str, as_json: bool, changed: Callable[[str], Iterable[Recipient]]) -> int:
    """Calls a function for the checkpoint, or for each of a store, and prints the recipients."""
    check_directory(path)
    places = [path]
    if is_store(path):
        store = penstock.CheckpointStore(path)
        places = [store.path(step) for step in store.steps()]
        if not places:
            raise penstock.errors.CheckpointNotFoundError(
                f"{path}: none of the steps of this store is complete; see penstock ls {path}",
                path=path,
            )
    done = {place: list(changed(place)) for place in places}
    if as_json:
        entries = [
            {"path": place, "recipients": [recipient._asdict() for recipient in recipients]}
            for place, recipients in done.items()
        ]
        print_json({"path": path, "checkpoints": entries})
        return 0
    out = console()
    for place, recipients in done.items():
        rows = table("kind", "recipient", folded=["recipient"])
        for recipient in recipients:
            rows.add_row(recipient.kind, recipient.name)
        out.print(place)
        out.print(rows)
    return 0
