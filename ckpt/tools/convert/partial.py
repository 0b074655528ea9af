"""`<target>.partial`, where an export is made: beside the target, which appears by one rename when it is whole and
durable. A journal there says what has been written, with its digest, so that the next call goes on from it.
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
    """UsageError if something is there that an export would have to replace, or that it cannot become."""
    if os.path.ismount(target):
        raise UsageError(f"{target} is where a file system is mounted: give a name inside it")
    if single and target.is_dir():
        raise UsageError(f"{target} is a folder, and a file is to be made: give another name")
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UsageError(f"{target} exists: nothing is ever replaced. Remove it, or choose another name")


def partial_of(target: Path) -> Path:
    """Where an export is made until it is whole."""
    return target.with_name(f"{target.name}.partial")


class Workshop:
    """`<target>.partial`: who works there, on what, and how far it is. One process at a time."""

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
            raise UsageError(f"another process is making {self.target} right now") from None
        except OSError as error:
            if self._lock < 0 or error.errno not in UNLOCKABLE:
                if self._lock >= 0:
                    os.close(self._lock)
                raise StoreError(f"{self.folder} cannot be written: {error.strerror}", advice="") from None
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
        """What was begun here, if it is the same."""
        about = self.folder / "plan.json"
        try:
            begun = json.loads(read_regular(about))["plan"]
        except FileNotFoundError:
            if any(path.name not in ("lock", "plan.new") for path in self.folder.iterdir()):
                raise UsageError(f"{self.folder} is not ours: remove it, or choose another target") from None
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
                f"{self.folder} holds an unfinished export of something else, or with other options: remove it, or "
                "choose another target"
            )
        with contextlib.suppress(FileNotFoundError):
            for line in read_regular(self.folder / "journal").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the last one may be cut off
                    name, start, stop, digest = json.loads(line)
                    self.noted[name, start, stop] = digest

    @property
    def stays(self) -> str:
        return f"Nothing was made; what is sound so far stays in {self.folder}, for the next call: or remove it"

    def path(self, file: OutFile, output: Output) -> Path:
        if output.staged:
            return output.staged_path(self.out, file)
        return self.out if output.single else self.out / file.name

    def prepare(self, output: Output) -> None:
        """All files at their full size: a disk that is too small is found out before anything is written."""
        need = sum(file.size for file in output.files)
        try:
            for file in output.files:
                _reserve(self.path(file, output), file.size)
            if output.staged:  # what is made of them is about as large, and made anew each time
                _remove(self.out)
                if shutil.disk_usage(self.folder).free < need:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not output.single:
                self.out.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreError(f"{self.folder} cannot be written: {error.strerror}", advice="") from None
            shutil.rmtree(self.folder, ignore_errors=True)
            free, need = shutil.disk_usage(self.target.parent).free, need * (1 + output.staged)
            raise FullError(
                f"{self.target} needs {need >> 20} MiB, and {free >> 20} MiB are free there ({error.strerror}): "
                "nothing was written. Make room, or choose another location",
                advice="",
            ) from None

    def note(self, done: Sequence[tuple[str, int, int, str]]) -> None:
        """In the journal, durably: these bytes lie on the disk."""
        fd = open_regular(self.folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, b"".join(b"\n" + json.dumps(one).encode() for one in done) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def appear(self) -> None:
        """Under the target's name, by one rename."""
        _sync_tree(self.out)
        check_target(self.target)
        try:
            if self.out.is_dir():
                os.rename(self.out, self.target)
            else:
                _rename_new(self.out, self.target)
        except OSError as error:
            raise UsageError(
                f"{self.target} appeared meanwhile, or cannot be made ({error.strerror}). What was exported is whole "
                f"and lies in {self.out}"
            ) from None
        _sync(self.target.parent)
        point("export.appeared")
        shutil.rmtree(self.folder, ignore_errors=True)


def _reserve(path: Path, size: int) -> None:
    """A file of so many bytes, which the disk has room for. One that has them stays as it is."""
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
    """Allocate the space of a file in advance, or only set its size if the file system cannot allocate."""
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
    """OSError if the target is there."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        check_target(target)  # a file system without links
        os.rename(path, target)
    else:
        path.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    except OSError as error:  # some file systems cannot fsync a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _sync_tree(path: Path) -> None:
    """Files and the folders that name them."""
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                _sync(Path(folder) / name)
            _sync(Path(folder))
    else:
        _sync(path)
    _sync(path.parent)


def failed(error: OSError, workshop: Workshop) -> StoreError:
    stays = f"What was exported so far stays in {workshop.folder}: call the same again, and it goes on from there"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"no room for {workshop.target} any more. {stays}", advice="")
    read = error.filename and workshop.folder not in Path(error.filename).parents
    if read and error.errno not in LOST:
        return UnreadableError(f"{error.filename} cannot be read now: {error.strerror or error}. {stays}")
    what = f"{error.filename} cannot be read" if read else f"{workshop.target} cannot be written"
    return StoreError(f"{what}: {error.strerror or error}. {stays}", advice="")
