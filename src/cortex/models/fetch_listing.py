"""Lists what is below a prefix, and downloads one version of it as it was listed; judges nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path, PurePosixPath

from cortex.errors import StorageError
from cortex.models.listing import MAX_FILES, Listing, ListingTally, Prefix, Tally
from cortex.storage.client import download_objects, is_remote
from cortex.storage.listing import walk
from cortex.storage.objects import StoredObject, printable


async def list_models(prefix: Prefix, environ: Mapping[str, str]) -> Listing:
    """Go once over all that is below the prefix; nothing there is a listing without models.

    Raises: StorageError, also for a local folder that does not exist.
    """
    if not is_remote(prefix.url) and not await asyncio.to_thread(Path(prefix.url).exists):
        # A volume that is not mounted looks like this: not a reason to drop what is served.
        raise StorageError(f"{prefix.url} does not exist")
    tally = ListingTally(prefix, time.time())
    async with aclosing(walk(prefix.url, environ)) as batches:
        async for batch in batches:
            if not tally.add(batch):
                return tally.listing(is_cut=True)
            # Local and cached batches may come without a wait: let others run.
            await asyncio.sleep(0)
    return tally.listing(is_cut=False)


async def sample_names(url: str, environ: Mapping[str, str], limit: int = 50) -> list[str]:
    """Return the first names below a model's prefix, as a listing to show. Raises: StorageError."""
    names: list[str] = []
    async with aclosing(walk(url, environ)) as batches:
        async for batch in batches:
            names += [printable(item.name or PurePosixPath(item.key).name) for item in batch]
            if len(names) >= limit:
                break
    return sorted(names[:limit])


async def download_version(url: str, expected_digest: str, destination: Path, environ: Mapping[str, str]) -> None:
    """Download the version at `url` to the new folder `destination`: all of it, as it was listed, or nothing.

    A `url` that is a file becomes a folder with that file. Raises: StorageError, also if it isn't what was listed.
    """
    objects: list[StoredObject] = []
    tally = Tally()
    async with aclosing(walk(url, environ)) as batches:
        async for batch in batches:
            for item in batch:
                name = item.name or PurePosixPath(item.key).name
                tally.add(name, item)
                objects.append(item._replace(name=name))
            if len(objects) > MAX_FILES:
                raise StorageError(f"{url} has more than {MAX_FILES:,} files")
    if not objects:
        raise StorageError(f"{url} was removed before it was downloaded")
    if tally.content().digest != expected_digest:
        raise StorageError(f"{url} changed before it was downloaded")
    await download_objects(url, objects, destination, environ)
