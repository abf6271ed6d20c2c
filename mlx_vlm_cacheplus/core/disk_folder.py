"""A private folder of files that are whole or not there.

What is kept:

1. The folder belongs to this user, and nobody else can read it: 0700, its files 0600
   from the moment they exist.  A folder of somebody else's, or one that others can
   write to, is refused.
2. One process writes; the others read.  Who writes holds a lock, which the system
   takes back when the process ends, however it ends.
3. A file is written under another name, forced to the medium, and renamed; then the
   folder is forced too.  A file that has its name is complete.

Every method may raise OSError: what to do about it is the caller's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

TEMPORARY = ".part"
ENTRIES, SPOILED = "entries", "spoiled"
# Spoiled files that are kept to be looked at.
MOST_SPOILED = 8


class Refused(Exception):
    """A folder that is not used; the text says why and what to do."""


def _cannot_be_made(path: Path, why: str | None) -> str:
    return f"{path} cannot be made: {why}: name another folder"


class Folder:
    """See the module's text.

    Args:
        path: where the folder is or will be; a link is followed once, here.
        mark: name of the file by which a folder is known as one of these.
    """

    def __init__(self, path: Path, mark: str):
        self.path = Path(os.path.realpath(path))
        self.mark = mark
        self._lock: int | None = None
        self._opened: tuple[int, int] | None = None

    def open(self) -> None:
        """Create the folder, or check the one that is there.

        Raises:
            Refused: it is not a private folder of ours.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise Refused(f"{self.path} is not a folder: name another one") from None
        except OSError as fault:
            raise Refused(_cannot_be_made(self.path, fault.strerror)) from None
        reason = self._reason()
        if reason is not None:
            raise Refused(reason)
        os.chmod(self.path, 0o700)
        for name in (ENTRIES, SPOILED):
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
        self._opened = _identity(self.path)

    def reason_refused(self) -> str | None:
        """Why ``open`` would refuse it, as far as looking tells; nothing is made."""
        try:
            if self.path.is_dir():
                return self._reason()
            there = next(p for p in (self.path, *self.path.parents) if p.exists())
            if not there.is_dir():
                return f"{there} is not a folder: name another one"
            if not os.access(there, os.W_OK | os.X_OK):
                return _cannot_be_made(self.path, f"{there} cannot be written to")
        except OSError as fault:
            return _cannot_be_made(self.path, fault.strerror)
        return None

    def _reason(self) -> str | None:
        """Why the folder that is there is not used; None where it is."""
        found = os.stat(self.path)
        if found.st_uid != os.geteuid():
            return f"{self.path} belongs to user {found.st_uid}: name another"
        if stat.S_IMODE(found.st_mode) & 0o022:
            return f"others can write to {self.path}: chmod 700 {self.path}, or name another"
        names = set(os.listdir(self.path))
        if names and self.mark not in names and ENTRIES not in names:
            return f"{self.path} holds other files: name an empty folder"
        return None

    def is_there(self) -> bool:
        """Whether the folder that was opened is still in its place, and whole."""
        same = self._opened is not None and _identity(self.path) == self._opened
        return same and self.has_entries()

    def has_entries(self) -> bool:
        """Whether there is a place for files."""
        return (self.path / ENTRIES).is_dir()

    def make(self, name: str) -> Path:
        """The path of a file, which is there and private."""
        path = self.path / name
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        os.close(os.open(path, flags, 0o600))
        return path

    # -- one writer ------------------------------------------------------------------
    def take_lock(self) -> bool:
        """Become the one that writes; False where another process is."""
        if self._lock is not None:
            return True
        handle = os.open(self.make("lock"), os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._lock = handle
        return True

    def give_lock(self) -> None:
        """Let another process write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- files -----------------------------------------------------------------------
    def names(self) -> Iterator[str]:
        """Names of the whole files; those that are not whole are passed over."""
        with os.scandir(self.path / ENTRIES) as found:
            for entry in found:
                if not entry.name.endswith(TEMPORARY):
                    yield entry.name

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> int:
        """Write a file that ``finish`` gives its name; returns its bytes.

        After a fault nothing of it is left.
        """
        part = self.path / ENTRIES / (name + TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(part, flags, 0o600)
        try:
            return sum(_write_all(handle, chunk) for chunk in chunks)
        except BaseException:
            _remove(part)
            raise
        finally:
            os.close(handle)

    def finish(self, names: Iterable[str]) -> None:
        """Force files that were written to the medium, and give them their names."""
        place = self.path / ENTRIES
        for name in names:
            part = place / (name + TEMPORARY)
            handle = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                force(handle)
            finally:
                os.close(handle)
            os.rename(part, place / name)
        self.force_folder(place)

    def force_folder(self, place: Path) -> None:
        """Have the medium hold a folder's names."""
        handle = os.open(place, os.O_RDONLY)
        try:
            force(handle)
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator[PlainFile]:
        """A file to read from; links are not followed."""
        handle = os.open(self.path / ENTRIES / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{name} is not a plain file")
            yield PlainFile(file, found.st_size)

    def read(self, name: str) -> bytearray:
        """All bytes of a file; links are not followed."""
        with self.open_file(name) as file:
            content = bytearray(file.size)
            file.read_into(0, memoryview(content))
        return content

    def remove(self, name: str) -> None:
        """Remove a file and a part of it, if they are there."""
        _remove(self.path / ENTRIES / name)
        _remove(self.path / ENTRIES / (name + TEMPORARY))

    def set_aside(self, name: str) -> None:
        """Keep a spoiled file where nobody reads it; the oldest of many go."""
        place = self.path / SPOILED
        try:
            os.rename(self.path / ENTRIES / name, place / name)
        except FileNotFoundError:
            return
        spoiled = sorted(place.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in spoiled[:-MOST_SPOILED]:
            _remove(path)

    def strays(self, known: Collection[str]) -> list[str]:
        """Names of files and parts of files that are not known.

        For who holds the lock: no other writer is alive, so they are of dead ones.
        """
        with os.scandir(self.path / ENTRIES) as found:
            return [entry.name for entry in found if entry.name not in known]


class PlainFile:
    """A file that is open; ``size`` is what it had in bytes when it was opened."""

    def __init__(self, file: io.FileIO, size: int):
        self._file, self.size = file, size

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with what is in the file from byte ``start`` on."""
        self._file.seek(start)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError(f"{self._file.name} has become shorter")
            done += count


def force(handle: int) -> None:
    """Have the medium hold what was written, and not only the drive's own memory."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(handle, full)
            return
        except OSError:
            pass  # not on every file system
    os.fsync(handle)


def _write_all(handle: int, chunk: memoryview | bytes) -> int:
    view = memoryview(chunk).cast("B")
    done = 0
    while done < len(view):
        done += os.write(handle, view[done:])
    return done


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
