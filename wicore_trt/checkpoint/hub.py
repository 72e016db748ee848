"""Download model files from the Hugging Face hub, with errors that say what to do.

Wraps huggingface_hub.snapshot_download, which honours HF_TOKEN, HF_HOME and HF_HUB_OFFLINE. It knows nothing of
tensors. Invariant: it is only called for a hub id, never for a path that exists.
"""

from __future__ import annotations

import re
from pathlib import Path

from wicore_trt.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]


def is_hub_id(ref: str) -> bool:
    """Return True when `ref` reads as owner/name on the hub."""
    return _HUB_ID.fullmatch(ref) is not None and not ref.endswith((".gguf", ".safetensors"))


def download_snapshot(repo_id: str, revision: str | None) -> Path:
    """Download a model; the returned directory's name is the commit of `revision` (default: main).
    Raises CheckpointError when the model is gated, unknown, or neither cached nor reachable."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{repo_id}"
    login = "set HF_TOKEN or run `hf auth login`"
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=_FILES))
    except GatedRepoError as error:
        fix = f"Accept its licence at {page}, then {login} and try again."
        raise CheckpointError(f"{repo_id} is gated.", fix=fix) from error
    except RevisionNotFoundError as error:
        fix = f"Its revisions are listed at {page}/commits/main."
        raise CheckpointError(f"{repo_id} has no revision {revision!r}.", fix=fix) from error
    except RepositoryNotFoundError as error:
        fix = f"Check the name; for a private model {login}."
        raise CheckpointError(f"The hub has no model {repo_id}, or it is private.", fix=fix) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            problem = f"{repo_id} is not in the local cache, and HF_HUB_OFFLINE is set."
            fix = f"Unset HF_HUB_OFFLINE, or run `hf download {repo_id}` on a connected machine and copy the cache."
            raise CheckpointError(problem, fix=fix) from error
        fix = "Check the connection (HTTPS_PROXY, HF_ENDPOINT), or give the path of a local copy."
        raise CheckpointError(f"The hub cannot be reached and {repo_id} is not in the local cache.", fix=fix) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"Downloading {repo_id} failed: {error}", fix="Run the command again.") from error
