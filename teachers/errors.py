"""The one error of this package, and the sizes beyond which nothing is read."""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_TEACHER_BYTES = 2**30  # of a teacher's file, and of what an archive unpacks to (a nature network has 7 to 16 MB)
MAX_REPLAY_BYTES = 16 * 2**30  # of the frames that one call of load_replay takes (a million have 7 GB)


class TeacherError(Exception):
    """A teacher or its data cannot be used: one line that names the file, what is wrong with it, and the remedy."""


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Whatever a parser raises on a damaged file leaves this block as a TeacherError that names the file."""
    try:
        yield
    except TeacherError:
        raise
    except Exception as error:  # parsers raise nearly anything: zlib.error, struct.error, TypeError, ...
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        message = f"{source}: truncated, damaged or of another format ({reason}); get the file again"
        raise TeacherError(message) from error
