"""`<target>.partial`: the folder next to the target in which an export is written.

When the export is complete and durable, one rename turns it into the target. A journal in the folder lists the bytes
that were written and their digests, so that a repeated export can continue.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ckpt.core.format.manifest import canonical
from ckpt.core.format.regular_file import LOST, open_regular, read_regular, write_regular
from ckpt.errors import FullError, StoreError, UnreadableError, UsageError
from ckpt.failpoints import point
from ckpt.store import UNLOCKABLE
from ckpt.tools.convert.output import OutFile, Output
from ckpt.tools.convert.source_files import cannot_read


def check_target(target: Path, *, single: bool = False) -> None:
    """Raise UsageError if the target exists or cannot be created."""
    if os.path.ismount(target):
        raise UsageError(f"{target} is a mount point: give a name inside it")
    if single and target.is_dir():
        raise UsageError(f"{target} is a folder, but the output is a file: give another name")
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target} exists and is never replaced: remove it, or choose another name")


def partial_of(target: Path) -> Path:
    """Return the path of the folder in which an export is written until it is complete."""
    return target.with_name(f"{target.name}.partial")


class Workshop:
    """The folder `<target>.partial`, with its lock, plan and journal. One process at a time may use it."""

    def __init__(self, target: Path, plan: str) -> None:
        self.target, self.plan = target, plan
        self.folder = partial_of(target)
        self.out = self.folder / "out"
        self.noted: dict[tuple[str, int, int], str] = {}
        self._lock = -1

    def __enter__(self) -> Workshop:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_regular(self.folder / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"another process is writing {self.target} now") from None
        except OSError as error:
            if self._lock < 0 or error.errno not in UNLOCKABLE:
                if self._lock >= 0:
                    os.close(self._lock)
                raise StoreError(f"cannot write {self.folder}: {error.strerror}", advice="") from None
        try:
            self._adopt()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):
                raise failed(error, self) from None
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._lock)

    def _adopt(self) -> None:
        """Continue an interrupted export if it has the same plan. Raise UsageError if the folder has other contents."""
        about = self.folder / "plan.json"
        try:
            begun = json.loads(read_regular(about))["plan"]
        except FileNotFoundError:
            if any(path.name not in ("lock", "plan.new") for path in self.folder.iterdir()):
                raise UsageError(f"{self.folder} is not from an export: remove it, or choose another target") from None
            deferred = self.folder / "plan.new"
            write_regular(deferred, canonical({"plan": self.plan}))
            deferred.rename(about)
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError) and error.errno not in LOST:
                raise cannot_read(about, error) from None
            begun = None
        if begun != self.plan:
            raise UsageError(
                f"{self.folder} contains an unfinished export from another source or with other options: remove it, or "
                "choose another target"
            )
        with contextlib.suppress(FileNotFoundError):
            for line in read_regular(self.folder / "journal").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # an interruption may have truncated the last line
                    name, start, stop, digest = json.loads(line)
                    self.noted[name, start, stop] = digest

    @property
    def stays(self) -> str:
        return f"Nothing was written to the target; intact data stays in {self.folder} for the next call"

    def path(self, file: OutFile, output: Output) -> Path:
        if output.staged:
            return output.staged_path(self.out, file)
        return self.out if output.single else self.out / file.name

    def prepare(self, output: Output) -> None:
        """Create all files at their full size, so that a full disk is detected before anything is written."""
        need = sum(file.size for file in output.files)
        try:
            for file in output.files:
                _reserve(self.path(file, output), file.size)
            if output.staged:  # the final output is about as large, and is not kept after an interruption
                _remove(self.out)
                if shutil.disk_usage(self.folder).free < need:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not output.single:
                self.out.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreError(f"cannot write {self.folder}: {error.strerror}", advice="") from None
            shutil.rmtree(self.folder, ignore_errors=True)
            free, need = shutil.disk_usage(self.target.parent).free, need * (1 + output.staged)
            raise FullError(
                f"{self.target} needs {need >> 20} MiB, and {free >> 20} MiB are free ({error.strerror}): "
                "nothing was written. Free some space, or choose another location",
                advice="",
            ) from None

    def note(self, done: Sequence[tuple[str, int, int, str]]) -> None:
        """Record in the journal, durably, that these ranges are on the disk."""
        fd = open_regular(self.folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, b"".join(b"\n" + json.dumps(one).encode() for one in done) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def appear(self) -> None:
        """Rename the complete output to the target. Raise UsageError if the target exists now."""
        _sync_tree(self.out)
        check_target(self.target)
        try:
            if self.out.is_dir():
                os.rename(self.out, self.target)
            else:
                _rename_new(self.out, self.target)
        except OSError as error:
            raise UsageError(
                f"{self.target} exists now or cannot be created ({error.strerror}). The complete export "
                f"is in {self.out}"
            ) from None
        _sync(self.target.parent)
        point("export.appeared")
        shutil.rmtree(self.folder, ignore_errors=True)


def _reserve(path: Path, size: int) -> None:
    """Create a file of this size, and allocate its space. Keep an existing file if it has this size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, 0)
            if size:
                _allocate(fd, size)
    finally:
        os.close(fd)


def _allocate(fd: int, size: int) -> None:
    """Allocate the space of a file. If the file system cannot allocate in advance, only set the file's size."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.ftruncate(fd, size)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _rename_new(path: Path, target: Path) -> None:
    """Rename a file or folder. Raise OSError if the target exists."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        check_target(target)  # not atomic, for file systems without hard links
        os.rename(path, target)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    except OSError as error:  # some file systems do not support fsync of a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _sync_tree(path: Path) -> None:
    """Sync all files and the folders that contain them."""
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                _sync(Path(folder) / name)
            _sync(Path(folder))
    else:
        _sync(path)
    _sync(path.parent)


def failed(error: OSError, workshop: Workshop) -> StoreError:
    stays = f"The data exported so far stays in {workshop.folder}: repeat the command to continue from there"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"no space left for {workshop.target}. {stays}", advice="")
    read = error.filename and workshop.folder not in Path(error.filename).parents
    if read and error.errno not in LOST:
        return UnreadableError(f"{error.filename} cannot be read now: {error.strerror or error}. {stays}")
    what = f"cannot read {error.filename}" if read else f"cannot write {workshop.target}"
    return StoreError(f"{what}: {error.strerror or error}. {stays}", advice="")
