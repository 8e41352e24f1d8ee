"""`drafttrain swap`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.values import AnyText, Name

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def swap(
    *,
    server: AnyText,
    drafter: Name | Path = "",
    api_key_env: str | None = None,
) -> Json:
    """Put another head in the place of the one that a vLLM or SGLang server drafts with.

    ```
    drafttrain swap --server http://127.0.0.1:8000 --drafter runs/drafter-adapted/current
    drafttrain swap --server http://127.0.0.1:8000 --drafter heads/b --api-key-env VLLM_API_KEY
    drafttrain swap --server http://127.0.0.1:8000      # which head serves
    ```

    The server goes on serving: no request is lost and no text changes, for a head only proposes.
    vLLM reads the head from a folder below its root, checks tensors, settings, target ids and digest
    against the head that serves, and loads it between two steps; `drafttrain export --swap-root DIR`
    prints how to start such a server. SGLang gets the head over its own routes, and the checks are
    made here. What does not fit is refused in one line, and the old head serves on.

    Args:
        server: http://HOST:PORT, with or without /v1
        drafter: an export below the server's root (SGLang: the folder around the head that it was
            started with), or its name there; a trained drafter's folder is exported into the root
            first (default: only say which head serves)
        api_key_env: environment variable with the server's API key, if it wants one
    """
    return result_of("serving.swap_command", locals())
