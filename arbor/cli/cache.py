"""Models in the Hugging Face cache, listed without torch."""

from __future__ import annotations

from arbor.errors import ArborError, ModelError
from arbor.support.texts import human_bytes

MOST_NAMED = 8


def cached_models() -> list[tuple[str, str]]:
    """Name and size of every cached model, by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda r: r.repo_id)
    return [(repo.repo_id, human_bytes(repo.size_on_disk)) for repo in models]


def with_models(error: ArborError) -> ArborError:
    """The same error, with the cached models."""
    names = [name for name, _ in cached_models()]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    cached = ", ".join(names[:MOST_NAMED]) + more if names else "none"
    hint = f"{error.hint} Cached models: {cached}."
    return ModelError(error.code, error.message, hint, **error.data, cached=names)
