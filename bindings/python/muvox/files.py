"""Files that appear whole or not at all: every file muvox writes goes through `atomic_write`."""

import contextlib
import io
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


class _Guarded(io.FileIO):
    """A file that remembers the first failed write and swallows it.

    HDF5 and torch.save cannot be relied on to clean up after a failing write (they may abort in a destructor), so they
    are let believe that it worked; `atomic_write` raises the error when they are done.
    """

    error: OSError | None = None

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        written = 0
        try:
            while self.error is None and written < len(view):
                written += super().write(view[written:])
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0


@contextlib.contextmanager
def atomic_write(path):
    """Yields a binary file, open for reading and writing, that becomes `path` when the block ends without an error.

    It is written beside `path` and renamed, so `path` is the old file or the complete new one, whatever happens.
    Raises OSError (its `filename` is `path`), also for a write that failed inside the block.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(None, "not a regular file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with _Guarded(fd, "r+b") as file:
            try:
                yield file
            except Exception:
                if file.error is None:
                    raise
            if file.error is None:
                os.fsync(file.fileno())
                os.replace(temporary, path)
            else:
                raise OSError(file.error.errno, file.error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM within the block wait until the function that it yields is called, or for the block's end.

    HDF5 and torch.save call back into Python to write, and an exception that a signal's handler raises there is lost or
    becomes an error of theirs; the file would be written on, or be damaged. Signals that follow, while an interrupted
    block closes its file, wait for its end too. Elsewhere than in the main thread, which alone gets signals, nothing is
    held.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    numbers = signal.SIGINT, signal.SIGTERM
    before = {number: signal.signal(number, lambda caught, _: arrived.append(caught)) for number in numbers}

    def deliver() -> None:
        while arrived:
            number = arrived.pop(0)
            if callable(before[number]):
                before[number](number, None)
            else:
                signal.signal(number, before[number])
                signal.raise_signal(number)

    try:
        yield deliver
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        deliver()
