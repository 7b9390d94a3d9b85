# SPDX-License-Identifier: Apache-2.0
"""Says of huggingface_hub's errors what was expected and what to do."""

import errno

from httpx2 import HTTPError
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)

from flownpu.errors import FlowNPUError
from flownpu.hub.reference import Reference, hint

# Those of a broken connection are httpx2's own.
FAILURES = (HTTPError, OSError, EntryNotFoundError, HFValidationError, RevisionResolutionError, XetDownloadError)


def explain(error: Exception, reference: Reference) -> FlowNPUError:
    """The error that a user sees for one of FAILURES."""
    page = f"{constants.ENDPOINT}/{reference.repository}"
    login = "log in by `hf auth login`, or set HF_TOKEN"
    # A gated repository's error is a case of one that is not found.
    answers: dict[type[Exception], str] = {
        GatedRepoError: f"{page} is gated: accept its terms on that page, then {login}",
        RepositoryNotFoundError: (
            f"{reference.repository}: no such folder, and no such repository at {page}; if it is private, {login}"
            f"{hint(reference.repository)}"
        ),
        RevisionNotFoundError: f"{page} has no revision {reference.revision}",
    }
    for kind, answer in answers.items():
        if isinstance(error, kind):
            return FlowNPUError(answer)
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return FlowNPUError(f"{page} refuses access ({error.response.status_code}): {login}")
    if constants.is_offline_mode():
        return FlowNPUError(
            f"{reference} is not, or not as a whole, in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it, "
            "or download the model elsewhere and copy that folder"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FlowNPUError(f"{reference}: the disk of {constants.HF_HUB_CACHE} became full; make room")
    if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM):
        return FlowNPUError(
            f"{reference}: {constants.HF_HUB_CACHE} cannot be written ({error}): lift that limit, or choose another "
            "folder by HF_HOME"
        )
    # Its own reason, if an error of the connection is behind it.
    reason = error.__cause__ or error
    return FlowNPUError(
        f"{reference}: {constants.ENDPOINT} cannot be reached, or broke off ({type(reason).__name__}: {reason}). Run "
        "the command again: it keeps what was downloaded"
    )
