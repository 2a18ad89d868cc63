"""Batches of a job's files: list them, read the JSON values in them in bounded memory, and store the batches.

Small files (of a listing of 20,000, say) are read ahead, in the order of the listing; large files piece by piece.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from cortex.errors import BusyError, ConflictError, InputError, NotFoundError, StorageError, SubmissionError
from cortex.jobs.intake.globs import Globs
from cortex.jobs.intake.items import BatchBuilder
from cortex.jobs.intake.json_stream import JsonStream
from cortex.jobs.spec import DelimitedFiles, FilePathLister, JobRecord, NewBatch, root_of
from cortex.jobs.store import JobStore
from cortex.lifecycle import JobStatus
from cortex.storage.local_files import CIRCLE
from cortex.storage.objects import StoredObject, flaw_of_name, printable

if TYPE_CHECKING:
    from cortex.storage.streams import ObjectReader

_GZIP_MAGIC = b"\x1f\x8b"
#: Maximum size of a decompressed piece: a few compressed bytes may expand to very many.
_PIECE_BYTES = 1024 * 1024
_GZIP = 16 + zlib.MAX_WBITS
#: Files up to this size are read ahead, and the number of files read ahead.
_SMALL_BYTES = 256 * 1024
_AHEAD = 16

#: A file's path, as submitted, and its entry in the listing.
_File = tuple[str, StoredObject]


async def check_output(prefix: str, environ: Mapping[str, str], folders: Sequence[str] = ()) -> None:
    """Check that results can be written below `prefix`, for `folders` see `root_of`. Raises: SubmissionError."""
    from cortex.storage.streams import check_writable  # noqa: PLC0415 - obstore takes 6 MB, which few operators need

    try:
        await check_writable(prefix, environ, root_of(prefix, folders))
    except StorageError as error:
        raise SubmissionError(f"output: {error}; fix that, or choose another location") from error


async def list_paths(
    source: FilePathLister, environ: Mapping[str, str], folders: Sequence[str] = ()
) -> AsyncGenerator[list[str], None]:
    """Yield the paths of a source's files in the order of the listing. Close the generator if you stop early.

    For `folders` see `root_of`. Raises: StorageError; SubmissionError if there are no files.
    """
    async with aclosing(_files(source, environ, folders)) as found:
        async for files in found:
            yield [path for path, _ in files]


async def located_batches(
    source: FilePathLister, environ: Mapping[str, str], max_bytes: int, folders: Sequence[str] = ()
) -> AsyncGenerator[tuple[str, list[NewBatch]], None]:
    """Yield the batches of a source, each list with the path of the file that has its last item.

    For `folders` see `root_of`.
    """
    batcher = BatchBuilder(source.batch_size, max_bytes)
    path = ""
    if isinstance(source, DelimitedFiles):
        from cortex.storage.streams import ObjectReader  # noqa: PLC0415 - as above

        reading = _Reading(ObjectReader(environ), batcher, max_bytes, folders)
        async with aclosing(_files(source, environ, folders)) as found, aclosing(reading.batches(found)) as filled:
            async for path, batches in filled:
                if batches:
                    yield path, batches
    else:
        async with aclosing(list_paths(source, environ, folders)) as listed:
            async for paths in listed:
                path = paths[-1]
                if batches := batcher.add(list(map(orjson.dumps, paths))):
                    yield path, batches
    if rest := batcher.rest():
        yield path, rest


async def _files(
    source: FilePathLister, environ: Mapping[str, str], folders: Sequence[str]
) -> AsyncGenerator[list[_File], None]:
    from cortex.storage.listing import walk_prefix  # noqa: PLC0415 - as above

    globs = Globs(source.includes, source.excludes)
    is_read = isinstance(source, DelimitedFiles)
    is_empty, passed, example = True, 0, ""
    for prefix in _distinct(source.paths):
        scheme, separator, rest = prefix.partition("://")
        root = f"{scheme}://{rest.partition('/')[0]}/" if separator else "/"
        async with aclosing(walk_prefix(prefix, environ, root_of(prefix, folders))) as listing:
            async for objects in listing:
                files = [(root + item.key, item) for item in objects]
                chosen = [(path, item) for path, item in files if _is_meant(path, item, globs, is_read)]
                if chosen:
                    is_empty = False
                    yield chosen
                elif is_empty:
                    passed, example = passed + len(files), example or files[0][0]
    if is_empty:
        kind = "files" if all(path.startswith("/") for path in source.paths) else "s3 files"
        raise SubmissionError(f"no {kind} match search criteria; {_why_none(source, passed, example)}")


def _why_none(source: FilePathLister, passed: int, example: str) -> str:
    """Return why no file was selected; `passed` files were listed and filtered out, `example` among them."""
    if passed:
        begin = "begins" if passed == 1 else "begin"
        return (
            f"{passed:,} {begin} with one of the paths, {printable(example)} for one, but includes and excludes leave"
            " none of them; they are compared with the whole path, so that **.json is each"
            " that ends in .json"
        )
    first, others = source.paths[0], len(source.paths) - 1
    rest = f" or one of the {others:,} other paths" if others > 1 else " or the other path" if others else ""
    nothing = f"none begins with {printable(first)}{rest}"
    globs = [path for path in source.paths if set(path) & set("*?{[")]
    if globs:
        return f"{nothing}; {printable(globs[0])} is taken literally: globs belong into includes"
    where = "is it on the operator's machine?" if first.startswith("/") else "correct the path, or list what is there"
    return f"{nothing}; {where}"


def _distinct(prefixes: Sequence[str]) -> list[str]:
    """Return the prefixes that do not begin with another one, so that each file is read once."""
    kept: list[str] = []
    for number, prefix in enumerate(prefixes):
        others = [other for place, other in enumerate(prefixes) if other != prefix or place < number]
        if not any(map(prefix.startswith, others)):
            kept.append(prefix)
    return kept


def _is_meant(path: str, item: StoredObject, globs: Globs, is_read: bool) -> bool:
    """Return True if a file is selected. Raises: StorageError if it is, but can't be read or its name is invalid."""
    if item.flaw is None:
        return globs.selects(path)
    if item.flaw == CIRCLE or globs.excludes(path):
        return False
    is_local = path.startswith("/")
    is_about_name = item.flaw == flaw_of_name(item.name)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise StorageError(f"{printable(path)}: its name is not UTF-8; rename it, or exclude it") from None
    if (is_local and not is_about_name) or (not is_local and is_read and globs.selects(path)):
        raise StorageError(f"{printable(path)} can't be read: {item.flaw}; exclude it, or put it elsewhere")
    return globs.selects(path)


@dataclass
class _Reading:
    """Reads files and joins the values in them into batches."""

    reader: ObjectReader
    batcher: BatchBuilder
    max_bytes: int
    folders: Sequence[str]
    _ahead: deque[tuple[_File, asyncio.Task[bytes] | None]] = field(default_factory=deque)

    async def batches(self, listing: AsyncIterator[list[_File]]) -> AsyncGenerator[tuple[str, list[NewBatch]], None]:
        """Yield the batches that each piece of each file completes."""
        try:
            async for files in listing:
                for file in files:
                    self._ahead.append((file, self._begin(file)))
                    if len(self._ahead) > _AHEAD:
                        async for found in self._next():
                            yield found
            while self._ahead:
                async for found in self._next():
                    yield found
        finally:
            tasks = [task for _, task in self._ahead if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, file: _File) -> asyncio.Task[bytes] | None:
        path, item = file
        return asyncio.create_task(self._whole(path)) if item.size_bytes <= _SMALL_BYTES else None

    async def _whole(self, path: str) -> bytes:
        async with aclosing(self.reader.chunks(path, root_of(path, self.folders))) as pieces:
            return b"".join([piece async for piece in pieces])

    async def _next(self) -> AsyncIterator[tuple[str, list[NewBatch]]]:
        (path, _), task = self._ahead[0]
        stream = JsonStream(printable(path), self.max_bytes)
        if task is not None and not is_gzip(content := await task):
            self._ahead.popleft()
            yield path, self.batcher.add(stream.feed(content) + stream.end())
            return
        unpacker = GzipStream(printable(path))
        self._ahead.popleft()
        async with aclosing(self.reader.chunks(path, root_of(path, self.folders))) as pieces:
            async for piece in pieces:
                unpacked = unpacker.feed(piece)
                while plain := await asyncio.to_thread(next, unpacked, b""):
                    yield path, await asyncio.to_thread(self._fill, stream, plain)
        for plain in unpacker.end():
            yield path, self._fill(stream, plain)
        yield path, self.batcher.add(stream.end())

    def _fill(self, stream: JsonStream, piece: bytes) -> list[NewBatch]:
        return self.batcher.add(stream.feed(piece))


_PORTION = 1000
_PORTION_BYTES = 2 * 1024 * 1024
_LOG_EVERY_S = 5.0


async def enqueue_files(
    store: JobStore,
    job: JobRecord,
    source: FilePathLister,
    environ: Mapping[str, str],
    max_batch_bytes: int,
    log: Callable[[str], None],
    folders: Sequence[str] = (),
    admit: Callable[[int], None] | None = None,
) -> None:
    """Store the batches of a job's files from the beginning, and make them available to workers.

    For `folders` see `root_of`. `admit` gets the size of batches before they are stored. Invalid files, and an error of
    `admit`, end the job as `enqueue_failed`. If the job was ended meanwhile, this stops.
    """
    try:
        await store.reset_batches(job.id)
        found = located_batches(source, environ, max_batch_bytes, folders)
        count = await _add(store, job.id, found, log, admit)
        finished = await store.finish_enqueuing(job.id)
        log(f"enqueued {count:,} batches" if count else f"enqueuing failed: {finished.message}")
    except (ConflictError, NotFoundError) as error:
        log(f"enqueuing ended early: {error}")
    except (StorageError, InputError, BusyError) as error:
        await store.change(job.id, JobStatus.ENQUEUE_FAILED, str(error))
        log(f"enqueuing failed: {error}")


async def _add(
    store: JobStore,
    job_id: str,
    located: AsyncGenerator[tuple[str, list[NewBatch]], None],
    log: Callable[[str], None],
    admit: Callable[[int], None] | None,
) -> int:
    waiting: list[NewBatch] = []
    size_bytes = count = 0
    logged_at = time.monotonic()
    storing: asyncio.Task[None] | None = None
    try:
        async with aclosing(located) as found:
            async for path, batches in found:
                if admit is not None:
                    admit(sum(len(batch.payload) for batch in batches))
                for batch in batches:
                    waiting.append(batch)
                    size_bytes += len(batch.payload)
                    if len(waiting) >= _PORTION or size_bytes >= _PORTION_BYTES:
                        if storing is not None:
                            await storing
                        # Stored while the next files are read.
                        storing = asyncio.create_task(store.add_batches(job_id, waiting))
                        count += len(waiting)
                        waiting, size_bytes = [], 0
                if count and time.monotonic() - logged_at >= _LOG_EVERY_S:
                    logged_at = time.monotonic()
                    log(f"enqueued {count:,} batches so far ({path})")
        if storing is not None:
            await storing
        if waiting:
            await store.add_batches(job_id, waiting)
        return count + len(waiting)
    finally:
        if storing is not None:
            # No operation continues after this function has returned.
            await asyncio.gather(storing, return_exceptions=True)


def is_gzip(data: bytes) -> bool:
    """Return True if a file that begins with `data` is gzip."""
    return data.startswith(_GZIP_MAGIC)


class GzipStream:
    """Decompresses one file piece by piece if it begins like gzip. `name` is for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = b""
        self._is_plain: bool | None = None  #: None: too few bytes to decide
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed data of the next piece. Raises: SubmissionError if it is damaged."""
        if self._is_plain is None:
            data = self._head + data
            if len(data) < len(_GZIP_MAGIC) and _GZIP_MAGIC.startswith(data):
                self._head = data
                return
            self._head, self._is_plain = b"", not is_gzip(data)
        if self._is_plain:
            yield data
        else:
            yield from self._unpack(data)

    def end(self) -> Iterator[bytes]:
        """Yield the remaining data. Raises: SubmissionError if the file is truncated."""
        if self._head:
            yield self._head
        if self._is_plain is False and not self._member.eof:
            raise SubmissionError(f"{self._name}: its gzip is cut off; store it again")

    def _unpack(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:  # a file may have several members, and zeros at its end
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._member = zlib.decompressobj(_GZIP)
            try:
                piece = self._member.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise SubmissionError(f"{self._name}: its gzip is damaged ({error}); store it again") from None
            if piece:
                yield piece
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
