"""Teacher data in memory: single frames in the order of play. And its files, the .npz shards of this project's runs.

A shard FOLDER/replay_00000_of_00002.npz (written with np.savez_compressed) holds n rows of `Replay`:

    frames [n, 84, 84] uint8, action [n] int32, reward [n] float32, terminated, truncated, first [n] bool
    meta   [m] uint8, the UTF-8 bytes of JSON: {"format": "replay 1", "shard": 0, "shards": 2, "protocol": {...}}

The rows of a shard continue those of the shard before. A row range is read from the shards that hold it only.
"""

import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import MAX_REPLAY_BYTES, TeacherError, reading

COLUMNS = {  # type and shape of a row
    "frames": (np.uint8, (84, 84)),
    "action": (np.int32, ()),
    "reward": (np.float32, ()),
    "terminated": (np.bool_, ()),
    "truncated": (np.bool_, ()),
    "first": (np.bool_, ()),
}


@dataclass(frozen=True, eq=False)
class Replay:
    """N steps of play. Row t: the frame that came before action_t, and what the step with action_t returned.

    A state is the stack of four frames; the first frame of an episode fills it, as in EnvPool. (Dopamine fills it with
    zeros, so its data differ in three states of an episode.) Episodes whose beginning is not in the data (its first
    one, as a rule) have no row with `first`; their first three rows are no states, only history. So a row may hold the
    frame after an end, as an episode of its own that lacks its beginning. Several environments follow one another, the
    last row of each marked truncated."""

    frames: np.ndarray  # [N, 84, 84] uint8
    action: np.ndarray  # [N] int32
    reward: np.ndarray  # [N] float32; clipped to [-1, 1] where protocol["reward_clip"]
    terminated: np.ndarray  # [N] bool: the step ended the episode by the game's rules
    truncated: np.ndarray  # [N] bool: the record of the episode breaks off here, at a time limit for one
    first: np.ndarray  # [N] bool: the first frame of an episode
    protocol: dict[str, Any]  # what is known of the environment
    source: str

    @cached_property
    def begin(self) -> np.ndarray:
        """`[N]` first row of the episode that a row belongs to."""
        begins = self.first | np.concatenate([[True], (self.terminated | self.truncated)[:-1]])
        return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))

    @cached_property
    def end(self) -> np.ndarray:
        """`[N]` last row of the episode that a row belongs to."""
        ends = np.append(self.begin[1:] != self.begin[:-1], True)
        rows = np.where(ends, np.arange(len(ends)), len(ends))
        return np.minimum.accumulate(rows[::-1])[::-1]

    def usable(self, n: int) -> np.ndarray:
        """`[N]` bool: an n-step target can be computed from this row: its stack is known, and the window of n steps
        ends at a termination or before another state, crossing no truncation and not the end of the data."""
        row = np.arange(len(self.begin))
        known = self.first[self.begin] | (row >= self.begin + 3)
        return known & (self.terminated[self.end] | (row + n <= self.end))

    def stack(self, rows: np.ndarray) -> np.ndarray:
        """States `[B, 4, 84, 84]` uint8 of rows `[B]`, the oldest frame first."""
        rows = np.asarray(rows)
        return self.frames[np.maximum(rows[:, None] + np.arange(-3, 1), self.begin[rows][:, None])]


def check_replay(replay: Replay, num_actions: int) -> Replay:
    """The replay itself, if its values can be what they should be."""
    low, high = replay.action.min(), replay.action.max()
    if low < 0 or high >= num_actions:
        raise TeacherError(
            f"{replay.source}: holds actions from {low} to {high}, the game has {num_actions}; choose data of this "
            "game with the same (minimal) action set"
        )
    if not np.isfinite(replay.reward).all():
        raise TeacherError(f"{replay.source}: holds rewards that are not finite; get the file again")
    return replay


# --- rows of .npy streams, compressed or not --------------------------------------------------------------------------
def npy_header(stream: BinaryIO, source: str, dtype: type, row_shape: tuple[int, ...]) -> int:
    """Number of rows of an .npy stream, whose type and row shape must be these; the stream then stands at row 0."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, found = read(stream)
    if found != np.dtype(dtype) or fortran or len(shape) != 1 + len(row_shape) or shape[1:] != row_shape:
        wanted = f"{np.dtype(dtype)} [N{''.join(f', {n}' for n in row_shape)}]"
        raise TeacherError(f"{source}: holds {found} {list(shape)}, not {wanted}; choose data of 84 x 84 grey frames")
    return shape[0]


def take_range(source: str, start: int, count: int | None, known: int) -> tuple[int, int]:
    """The range of rows to read, if it is in the data and fits into memory. All that follow `start` by default, and a
    negative `start` asks for that many of the newest rows, or for all there are."""
    start = max(0, known + start) if start < 0 else start
    count = known - start if count is None else count
    if count < 1 or start + count > known:
        raise TeacherError(f"{source}: holds {known:,} rows, not {count:,} from row {start:,} on; ask for fewer")
    if count * 84 * 84 > MAX_REPLAY_BYTES:
        gigabytes = count * 84 * 84 / 1e9
        raise TeacherError(f"{source}: {count:,} frames need {gigabytes:,.0f} GB; read a part with start= and count=")
    return start, count


def read_rows(stream: BinaryIO, source: str, rows: int, parts: Iterable[tuple[int, int, int]], out: np.ndarray) -> None:
    """Fills `out` from a stream that stands at row 0 of `rows`: parts (first, number, at) go to out[at : at + number].

    Reads the stream once, in small pieces, and not beyond the last part. Where that is the stream's end, this also
    verifies its checksum."""
    row_bytes, position = out.dtype.itemsize * math.prod(out.shape[1:]), 0

    def pieces(number: int):
        left = number * row_bytes
        while left:
            piece = stream.read(min(left, 2**20))
            if not piece:
                raise TeacherError(f"{source}: truncated, its header promises {rows:,} rows; get the file again")
            yield piece
            left -= len(piece)

    for first, number, at in sorted(parts):
        for _ in pieces(first - position):
            pass
        target, done = memoryview(out[at : at + number]).cast("B") if number else b"", 0
        for piece in pieces(number):
            target[done : done + len(piece)] = piece
            done += len(piece)
        position = first + number
    if position == rows and stream.read(1):
        raise TeacherError(f"{source}: holds more than the {rows:,} rows of its header; get the file again")


# --- shards of this project's runs ------------------------------------------------------------------------------------
def save_replay(folder: str | Path, parts: Iterable[Replay], shards: int) -> None:
    """Writes `shards` parts of a replay, one shard each, into a folder that holds none yet. Of a generator's parts only
    one is in memory at a time."""
    folder = Path(folder)
    if any(folder.glob("*")):
        raise TeacherError(f"{folder}: holds replay data already; name another folder")
    half = folder.with_name(f"{folder.name}.tmp")  # a kill leaves a whole folder or none
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for shard, part in enumerate(parts):
        columns = {name: getattr(part, name).astype(dtype, copy=False) for name, (dtype, _) in COLUMNS.items()}
        meta = {"format": "replay 1", "shard": shard, "shards": shards, "protocol": part.protocol}
        columns["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        np.savez_compressed(half / f"replay_{shard:05d}_of_{shards:05d}.npz", **columns)
    os.replace(half, folder)


def read_shards(folder: Path, num_actions: int, start: int = 0, count: int | None = None) -> Replay:
    """Rows of a folder of shards, or of all of them."""
    source, shards = str(folder), []
    for path in sorted(folder.glob("*.npz")):
        with reading(str(path)), zipfile.ZipFile(path) as archive:
            with archive.open("meta.npy") as stream:
                length = npy_header(stream, str(path), np.uint8, ())
                meta = json.loads(stream.read(2**16)) if length < 2**16 else {}
            protocol = meta.setdefault("protocol", {})
            if meta.get("format") != "replay 1" or not isinstance(protocol.get("env_id", ""), str):
                raise TeacherError(f"{path}: not in the format replay 1; see teachers/replay.py")
            lengths = set()
            for name, (dtype, row_shape) in COLUMNS.items():
                with archive.open(f"{name}.npy") as stream:
                    lengths.add(npy_header(stream, f"{path}, {name}", dtype, row_shape))
            if len(lengths) != 1:
                raise TeacherError(f"{path}: its columns have different lengths, {sorted(lengths)}; get the file again")
            shards.append((path, meta, lengths.pop()))
    found = [(meta.get("shard"), meta.get("shards")) for _, meta, _ in shards]
    if found != [(shard, len(shards)) for shard in range(len(shards))]:
        raise TeacherError(f"{source}: shards are missing, or of several runs; copy all of one run's and no others")

    known = sum(rows for *_, rows in shards)
    if start < 0:  # of each shard, which is an environment, its newest rows
        parts = [(max(0, rows - -start // len(shards)), rows) for *_, rows in shards]
    else:
        start, count = take_range(source, start, count, known)
        begins = np.cumsum([0] + [rows for *_, rows in shards])
        parts = [tuple(np.clip((start - b, start + count - b), 0, rows)) for b, (*_, rows) in zip(begins, shards)]
    _, count = take_range(source, 0, sum(last - first for first, last in parts), known)
    columns, at = {name: np.empty((count, *row_shape), dtype) for name, (dtype, row_shape) in COLUMNS.items()}, 0
    for (path, _, rows), (first, last) in zip(shards, parts, strict=True):
        if first < last:
            with reading(str(path)), zipfile.ZipFile(path) as archive:
                for name, (dtype, row_shape) in COLUMNS.items():
                    with archive.open(f"{name}.npy") as stream:
                        npy_header(stream, f"{path}, {name}", dtype, row_shape)
                        part = (int(first), int(last - first), at)
                        read_rows(stream, f"{path}, {name}", rows, [part], columns[name])
            at += int(last - first)
    return check_replay(Replay(**columns, protocol=shards[0][1]["protocol"], source=source), num_actions)
