"""Pin the models of an API with `models.canary`: its replicas serve the versions that exist when it is deployed.

Newer versions get revisions of their own (`operator/canary/model_versions.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from cortex.config.schema import Api, PinnedModel
from cortex.errors import InputError, StorageError
from cortex.models.source import model_source
from cortex.models.spec import Catalogue, Model, ModelSource

#: Time in which all locations must be listed.
TIMEOUT_S = 30.0


async def pin_models(api: Api, before: Api | None, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Api:
    """Return the API with pinned models, if it has `models.canary`.

    Models keep the versions that they have in `before`, the newest revision, unless their location has changed.

    Raises: InputError if versions can't be listed, or a model has none.
    """
    models, source = api.handler.models, model_source(api, None)
    if models is None or source is None or not models.canary:
        return api
    kept = _kept(source, before)
    names = [path.name for path in source.paths]
    if any(name not in kept for name in names):
        try:
            async with asyncio.timeout(timeout_s):
                found = (await _list(source, environ)).by_name
        except TimeoutError:
            raise InputError(f"the models of {api.name} can't be listed in {timeout_s:g} s, or still change") from None
        except StorageError as error:
            raise InputError(f"the models of {api.name} can't be listed: {error}") from error
        if missing := [path.url for path in source.paths if path.name not in {*kept, *found}]:
            raise InputError(f"{', '.join(missing)} has no complete version of a model")
        kept = {name: kept.get(name) or pin_of(found[name]) for name in names}
    return with_pins(api, [kept[name] for name in names])


def with_pins(api: Api, pins: Iterable[PinnedModel]) -> Api:
    """Return a copy of an API with these versions of its models."""
    assert api.handler.models is not None
    models = api.handler.models.model_copy(update={"pinned": list(pins)})
    return api.model_copy(update={"handler": api.handler.model_copy(update={"models": models})})


def pins_of(api: Api | None) -> Sequence[PinnedModel]:
    """Return the versions that the models of an API are pinned to; empty if they are not."""
    return api.handler.models.pinned if api is not None and api.handler.models is not None else ()


def pin_of(model: Model, number: str = "") -> PinnedModel:
    """Return a version of a model as a pin; without `number`, its latest one."""
    version = next((each for each in model.versions if each.number == number), model.latest)
    return PinnedModel(
        model=model.name,
        number=version.number,
        digest=version.digest,
        size_bytes=version.size_bytes,
        modified_at=version.modified_at,
    )


def _kept(source: ModelSource, before: Api | None) -> dict[str, PinnedModel]:
    """Return the pins, by model, of the models that have not moved."""
    known = model_source(before, None) if before is not None else None
    if known is None:
        return {}
    urls = {path.name: path.url for path in known.paths}
    stays = {path.name for path in source.paths if urls.get(path.name) == path.url}
    return {pin.model: pin for pin in pins_of(before) if pin.model in stays}


async def _list(source: ModelSource, environ: Mapping[str, str]) -> Catalogue:
    """List the versions whose files have been uploaded completely. Raises: StorageError."""
    from cortex.models.agent.listing import list_models, prefixes  # noqa: PLC0415 - obstore takes 6 MB, which few operators need
    from cortex.models.agent.source_monitor import SourceState, debounce, relist_delay_s  # noqa: PLC0415 - as above

    state = SourceState()
    while state.confirmed is None:
        await asyncio.sleep(relist_delay_s(state, source) or 0.0)
        listings = await asyncio.gather(*(list_models(prefix, environ) for prefix in prefixes(source)))
        state = debounce(state, source, {listing.prefix: listing for listing in listings})
    return state.confirmed
