"""Saves, loads, inspects, verifies and signs one checkpoint: `save`, `load` and the others."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.inspection import describe
from penstock.checkpoint.loading.load import LoadRequest, check_expected, read, restore_into
from penstock.checkpoint.loading.path_kind import check_no_store, describing_contents
from penstock.checkpoint.saver import Saver
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.steps.scrub import verify_files
from penstock.common.progress import shown
from penstock.errors import PenstockWarning
from penstock.reports import SignResult
from penstock.sealing.unsealing import Unsealing
from penstock.signing import Signers, SigningKeys
from penstock.tensors.arguments import check_patterns, decode_path, to_native
from penstock.tensors.gc_paused import gc_paused

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from torch.distributed import ProcessGroup

    from penstock.checkpoint.saving.groups import Files
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.reports import CheckpointInfo, LoadReport, SaveReport, VerifyResult
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey


def save(
    path: str | os.PathLike[str] | bytes,
    state: Any,
    *,
    overwrite: bool = False,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    options: Options | None = None,
    progress: bool | Progress = False,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    groups: Mapping[str, str] | None = None,
    files: Files | None = None,
    sealing: Sealing | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
) -> SaveReport:
    """Saves a state durably: after the return, no crash or power cut can lose it.

    The state is any nesting of dicts, lists, tuples and sets over tensors, NumPy arrays, objects
    with DLPack or the buffer protocol, and plain values: None, bool, int of any size, float (nan
    and inf included), complex, str, bytes, NumPy scalars and dtypes, `torch.Size`, `torch.dtype`,
    `torch.device`, deques, dates and times, paths, `Decimal`, `UUID`. Sparse and nested tensors,
    and subclasses that PyTorch can decompose, such as torchao's quantized tensors, are stored as
    the tensors that they consist of. Values of other classes, enums and dataclasses among them,
    need `register_type`. Types, the order of dictionaries, keys that are not text, and ties between
    tensors are restored as they were. A value that could not be restored unchanged is refused.
    There are three deliberate exceptions: a tensor keeps its elements, dtype and shape, but not its
    device, ``requires_grad`` or attributes, and keeps strides only as a view whose base is also
    saved; a `torch.nn.Parameter` is restored as a tensor; and tensors that share elements are tied
    if one of them is contiguous and contains the others in its dtype. Otherwise they are restored
    as independent tensors, and `SaveReport.fallbacks` names them.

    Tensors in host memory are read in place: they must not change during the call. If another
    thread changes one nevertheless, it is stored torn, partly old and partly new; the checkpoint is
    not damaged by that, and other tensors are not concerned. Tensors that an
    optimizer of `penstock.offload` keeps in files are not read: the files are hard-linked into the
    checkpoint, which takes no space and no time.

    If `torch.distributed` is initialized, all ranks call this with the same arguments and write one
    checkpoint together, on a file system that they share. Each rank writes its part of every
    `DTensor`; parts that several ranks hold are written once, and so is a plain tensor whose
    elements are all equal on several ranks. Other plain tensors and everything in `PerRank` are
    stored for each rank, as are all other values (arrays, byte strings, plain values) and vectors
    of up to 64 KiB of ``uint8``, which are states of random generators. Either all ranks return or
    all raise. A rank that waits for other ranks warns after some seconds (`PenstockWarning`) and
    names them.

    Args:
        path: The checkpoint's directory; created if missing, with its parents.
        state: What to save: a state, or a `Training`.
        overwrite: Replace a complete checkpoint at the path. The old one stays loadable until the
            new one is committed.
        step: The training step, stored with the state.
        metadata: A note of plain JSON, returned by `penstock.inspect`.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.
        process_group: The ranks that save together; None for all ranks, if there are any.
        no_dist: Save without other ranks: as the only rank that saves, or each rank to its own
            path.
        groups: Tensors that readers of models shall find, such as ``{"model": ""}``: the tensors
            below that name (as shown by `penstock.inspect`) are stored in separate shards, under
            the names that the model gives them (the prefix ``module.`` and ``_orig_mod`` are
            removed where nothing else is stored beside them). The group ``""`` gets an index beside
            the shards, with which ``from_pretrained`` and other readers load the directory. Other
            groups are for `penstock.export`. If ranks hold parts of the group's tensors, there is
            no index, and `SaveReport.fallbacks` says so.
        files: Small files stored beside the shards, and verified and deleted with them: contents or
            paths by name, or a directory, from which all files but the weights are taken
            (``config.json``, the tokenizer's files). Among many ranks, the first rank's files are
            stored.
        sealing: Recipients for whom the checkpoint is sealed: encrypted and authenticated. Without
            an identity of a recipient nobody reads or changes names, types, shapes, values,
            ``metadata`` or tensors. Number and sizes of the files, ranks, step, time and recipients
            stay readable. All ranks pass it; the recipients of the first rank count. None for a
            clear checkpoint.
        sign: Private keys that sign the checkpoint, as `penstock.signing` describes them. Chunks
            are hashed while they are written, so nothing is read again, and loads with
            ``signed_by=`` read nothing twice. All ranks pass it; the first rank signs. None for
            none.

    Returns:
        A report of the bytes written and of how they were written.

    Raises:
        CheckpointExistsError: A complete checkpoint exists at the path and ``overwrite`` is False,
            or the directory is a store.
        RankError: Another rank failed, died, hangs, saves a different state, or holds different
            elements of a replicated `DTensor`. Or a launcher started several ranks but
            `torch.distributed` has no process group, not yet or no longer.
        UnsupportedStateError: A leaf cannot be stored, or a group has no tensors or two tensors of
            one name; the message names it.
        ValueError: Two groups have one name, or a file has a name that is not allowed there.
        StorageError: The operating system failed an operation: disk full, read-only, …
        CannotSealError: With ``sealing``, something would stay clear: groups, small files, tensors
            in files, or pieces of tensors without a mesh.
        KmsError: A key management service that wraps the key was not reachable.
        KeyFileError: With ``sign``, a text or a file is no private key that signs.
        SignatureError: With ``sign``, the directory holds something that cannot be signed, such as
            a symbolic link.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> report = penstock.save(path, {"w": np.zeros((2, 3), "float32"), "lr": 0.1})
        >>> report.tensor_bytes
        24
        >>> penstock.load(path)["lr"]
        0.1
    """
    where = decode_path(path)
    saver = Saver(options=options, process_group=process_group, no_dist=no_dist)
    destination = Destination.of(
        where,
        step=step,
        metadata=metadata,
        overwrite=overwrite,
        groups=groups,
        files=files,
        sealing=sealing,
        signing=SigningKeys.resolve(sign),
    )
    check_no_store(where)
    return saver._save(destination, state, progress)


def load(
    path: str | os.PathLike[str] | bytes,
    *,
    into: Any = None,
    keys: str | Iterable[str] | None = None,
    device: Any = None,
    options: Options | None = None,
    allow_partial: bool = False,
    progress: bool | Progress = False,
    report: Callable[[LoadReport], object] | None = None,
    rank: int | None = None,
    plain: bool = False,
    identities: Identities | Key | Iterable[Key] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
    expect: str | None = None,
) -> Any:
    """Loads a state; every returned byte has been checked against its digest.

    New tensors in host memory are windows over a few large shared buffers, and no new tensor has
    ``requires_grad``; see the result below. Each rank loads by itself, and any number of ranks may
    load the checkpoint of any number of ranks. A `DTensor` in ``into`` is filled with this rank's
    part, and only that part is read, whatever the layout of the tensor when it was saved. Without
    ``into``, every tensor is loaded whole. A rank loads its own values of those stored for each
    rank; a rank beyond the number that saved loads those of its number modulo theirs.

    Args:
        path: The checkpoint's directory.
        into: A `Training` to restore, or a state of the same structure whose tensors and arrays are
            filled in place and whose plain values are replaced. Data for tensors that are kept in
            files goes into new files. Everything is compared before anything is written: tensors
            that share memory in ``into`` have to be tied in the checkpoint (in a `Training`, equal
            is enough). Tensors that are tied only in the checkpoint fill separate tensors with the
            same elements. If reading fails half-way (`CorruptCheckpointError`, `StorageError`), the
            contents of a state's targets are undefined, while a `Training` is unchanged.
        keys: Names of the leaves to load as `penstock.inspect` shows them, or patterns of `fnmatch`
            over names, such as ``"model.*"`` (``*`` also matches dots). A name is the leaf's path
            joined by dots; characters of a key that have a meaning in patterns are escaped by a
            backslash. Only the bytes of these leaves are read. The result keeps the structure:
            containers without any loaded leaf are dropped, lists and tuples close up. With
            ``into``, only these leaves are changed. If the state is a single leaf and no container,
            its name is ``"value"``.
        device: The device of new tensors, as for `torch.Tensor.to`; None for the host. Arrays stay
            on the host. For a CUDA device, tensors are allocated there first and verified bytes are
            copied to them, after all work queued in the current stream; for other devices the state
            is read to the host and PyTorch copies it.
        options: How bytes move; None for ``Options()``.
        allow_partial: Load the available leaves of a checkpoint that `penstock.salvage` made;
            missing leaves are left out as with ``keys``, and left unchanged in ``into``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.
        report: Called with the `LoadReport` when the state is complete; ``reports.append`` of a
            list keeps it, ``print`` shows it.
        rank: The rank whose state is loaded, exactly as it saved it; None for this process's rank
            if `torch.distributed` is initialized, and else rank 0. With None, values that only
            other ranks saved, such as the layers of other pipeline stages, are added if ``into``
            holds or ``keys`` names them, or if one process loads the whole state. A
            `PenstockWarning` says where ranks had values of their own under the same keys.
        plain: Load values of registered classes (`register_type`), and tensors that consist of
            others, as dictionaries of their stored members, without the classes; the member
            ``"(type)"`` names the class. ``keys`` may then name their leaves.
        identities: Keys that open a sealed checkpoint, as `penstock.sealing` lists them: files,
            strings, callables. A clear checkpoint is then refused. None for the file that the
            environment variable ``PENSTOCK_IDENTITIES`` names, if any, which refuses none.
        signed_by: Public keys of which one must have signed the checkpoint, as `penstock.signing`
            describes them: every byte that is handed out is hashed after it was read, and compared
            with the signature. Files whose chunk hashes the checkpoint lacks, as those signed by
            `sign` after the save, are read whole once before. None to look at no signature.
        expect: The id of the checkpoint, as `SaveReport.checkpoint_id` and `penstock.inspect` show
            it: every other one is refused, also an older one of the same writer. Anybody who writes
            to the storage can forge the id of a clear checkpoint, so combine this with
            ``identities`` or ``signed_by``. None to accept any.

    Returns:
        The state, or ``into`` (rebuilt where it is a tuple). New tensors and arrays in host memory
        are windows over a few large buffers, and each keeps its whole buffer alive: clone a tensor
        that shall outlive the others. Without PyTorch installed, tensors are returned as NumPy
        arrays if NumPy has their dtype.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        IncompleteCheckpointError: The save there never finished.
        PartialCheckpointError: The checkpoint was salvaged, lacks a requested leaf, and
            ``allow_partial`` is False.
        CorruptCheckpointError: The checkpoint is damaged, or makes no sense.
        TamperedError: Somebody without the key has changed a sealed checkpoint.
        SealedError: The checkpoint is sealed, and there are no identities.
        NotSealedError: ``identities`` are given and the checkpoint is clear.
        WrongKeyError: None of the identities opens the checkpoint.
        SignatureError: None of ``signed_by`` has signed the checkpoint, or a file is not the signed
            one. `NotSignedError` if it has no signature.
        OtherCheckpointError: The checkpoint's id is not ``expect``.
        FormatVersionError: A newer Penstock wrote it.
        StateMismatchError: A key matches nothing, ``into`` does not fit, or the ranks' states form
            no single state, for example because pipeline stages use the same keys.
        MissingDependencyError: The state holds values of a package that is not installed, or whose
            installed version lacks them, such as a dtype; or of a class that is not registered in
            this process.
        DeviceError: A GPU or its driver failed; the GPU's current stream is being captured into a
            graph; or this process is a fork of one that has used CUDA.
        ValueError: ``device`` cannot be used, ``device`` or ``plain`` is given with ``into``, or
            ``expect`` is no id.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"model": {"w": np.ones(3)}, "step": 7})
        >>> penstock.load(path, keys="model.*")
        {'model': {'w': array([1., 1., 1.])}}
        >>> w = np.zeros(3)
        >>> penstock.load(path, into={"model": {"w": w}, "step": 0})["step"]
        7
        >>> w
        array([1., 1., 1.])
        >>> reports = []
        >>> state = penstock.load(path, report=reports.append)
        >>> reports[0].verified
        True
    """
    request = LoadRequest(
        into=into,
        keys=check_patterns(keys),
        device=device,
        progress=progress,
        allow_partial=bool(allow_partial),
        rank=rank,
        is_plain=bool(plain),
        unsealing=Unsealing.of(identities, signed_by=signed_by),
        expect=check_expected(expect),
    )
    loaded = read(decode_path(path), request, options)
    state = restore_into(loaded, request)
    for message in loaded.warnings:
        warnings.warn(message, PenstockWarning, stacklevel=2)
    if report is not None:
        report(loaded.report)
    return state


def inspect(
    path: str | os.PathLike[str] | bytes,
    *,
    identities: Identities | Key | Iterable[Key] | None = None,
) -> CheckpointInfo:
    """Describes the contents of a checkpoint, without reading tensor data.

    Args:
        path: The checkpoint's directory.
        identities: Keys that open a sealed checkpoint; see `load`. Without them it shows its files
            and its recipients, and no tensors.

    Returns:
        The checkpoint's tensors, files, step and metadata.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: The checkpoint is damaged, or not a Penstock checkpoint.
        FormatVersionError: A newer Penstock wrote it.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"w": np.zeros((2, 3), "float32")}, metadata={"run": "a"})
        >>> info = penstock.inspect(path)
        >>> [(tensor.name, tensor.dtype, tensor.shape) for tensor in info.tensors]
        [('w', 'float32', (2, 3))]
        >>> info.metadata
        {'run': 'a'}
    """
    where = decode_path(path)
    with gc_paused():
        unsealing = Unsealing.of(identities)
        with describing_contents(where):
            opened = _native.open(
                where, unsealing.native, demanded=unsealing.is_demanded, sealed_ok=True
            )
        return describe(opened, where)


def verify(
    path: str | os.PathLike[str] | bytes,
    *,
    options: Options | None = None,
    progress: bool | Progress = False,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> VerifyResult:
    """Reads every byte of a checkpoint and compares it with its digest.

    Damage is part of the result and raises no exception. With ``signed_by``, so are files that are
    not the signed ones, and files in the directory that the signature does not cover.

    Args:
        path: The checkpoint's directory; for a step of a store, see `CheckpointStore.verify`.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.
        signed_by: Compare every file with a signature by one of these public keys too, as
            `penstock.signing` describes them; None to look at no signature.

    Raises:
        CheckpointNotFoundError: Nothing is stored at the path.
        SignatureError: None of ``signed_by`` has signed the manifest; `NotSignedError` if there is
            no signature.
        FormatVersionError: A newer Penstock wrote it.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"w": np.zeros(3)})
        >>> penstock.verify(path).ok
        True
    """
    signers = Signers.resolve(signed_by)
    native = None if signers is None else signers.native
    return verify_files(decode_path(path), to_native(options), progress, native)


def sign(
    path: str | os.PathLike[str] | bytes,
    key: SigningKeys | SignatureKey | Iterable[SignatureKey],
    *,
    options: Options | None = None,
    progress: bool | Progress = False,
) -> SignResult:
    """Signs a checkpoint: whoever has the public key can tell that these are its bytes.

    Every file is read, compared with its digest, and hashed with BLAKE3 from the same bytes. The
    statement about all files is signed and stored beside them. Whoever signs vouches for what is
    there at this moment: sign what you have just saved, or what was signed before.

    A signature covers every file in the directory, copies of small files and files of users too,
    but no subdirectories. Of a sealed checkpoint it covers everything but the list of recipients:
    `penstock.sealing.add_recipients` and its like keep it valid.

    Args:
        path: The checkpoint's directory.
        key: Private keys, as `penstock.signing` describes them. Each makes one signature; a
            signature of the same kind is replaced.
        options: How bytes move; None for ``Options()``.
        progress: True for a bar on standard error, or a function called with the bytes done and
            the bytes in all.

    Returns:
        The files and bytes that were signed, and the keys.

    Raises:
        KeyFileError: A text or a file is no private key that signs.
        CheckpointNotFoundError: Nothing is stored at the path.
        CorruptCheckpointError: The checkpoint is damaged.
        SignatureError: The directory holds something that cannot be signed, such as a symbolic
            link.
        StorageError: The operating system failed an operation.

    Example:
        >>> import numpy as np, penstock, subprocess, tempfile
        >>> home = tempfile.mkdtemp()
        >>> command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{home}/key"]
        >>> _ = subprocess.run(command, check=True)
        >>> report = penstock.save(f"{home}/ckpt", {"w": np.zeros(3)})
        >>> result = penstock.sign(f"{home}/ckpt", f"{home}/key")
        >>> penstock.verify(f"{home}/ckpt", signed_by=f"{home}/key.pub").ok
        True
    """
    where = decode_path(path)
    keys = key if isinstance(key, SigningKeys) else SigningKeys(key)
    with shown(progress, "signing") as update, describing_contents(where):
        fields = _native.sign(where, keys.native, options=to_native(options), progress=update)
    return SignResult(**{**fields, "path": where, "signers": tuple(fields["signers"])})
