"""Uploads a bundle to the Hugging Face Hub, exactly as it was compared."""

from __future__ import annotations

from pathlib import Path

from sbkit.errors import SbkitError, first_line
from sbkit.export import layout

_LOG_IN = "`hf auth login`, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)"


def push(bundle: Path, repository: str, private: bool = False) -> str:
    """Upload a bundle's files as one commit, and return its URL.

    Files that another program left in the folder aren't uploaded, and one that was changed is refused; README.md, the
    model card, may be edited. A link is refused: a bundle of others could name any file of this machine. The token is
    what huggingface_hub finds, and is never read here.

    repository : ``owner/name``, created if it doesn't exist
    private : create it as private; an existing one is not changed
    """
    config = layout.read(bundle)
    names = [layout.CONFIG, *(name for name in config.files if name != layout.CONFIG)]
    for name in names:
        if (bundle / name).is_symlink():
            raise SbkitError("link-in-bundle",
                             f"{bundle / name} is a link, and the file that it leads to may not be meant for others",
                             hint="replace the link by a copy of the file", file=bundle / name)
    for name, expected in config.files.items():
        path = bundle / name
        if not path.is_file() or (name != layout.README and not layout.is_as_written(path, expected)):
            raise SbkitError("damaged-bundle", f"{path} is not the file that was exported and compared",
                             hint="export the model again, so that what you publish is what was compared", file=path)
    from huggingface_hub import CommitOperationAdd, HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        raise SbkitError("no-network", f"{repository}: HF_HUB_OFFLINE forbids access to the hub", hint="unset it")
    try:
        api = HfApi(library_name="sbkit")
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        # By exact names: those of ``upload_folder`` are patterns, and ``*`` would upload all that lies in the folder.
        api.create_commit(url.repo_id, [CommitOperationAdd(name, bundle / name) for name in names],
                          commit_message="A bundle of sbkit")
    except errors.HFValidationError as error:
        raise SbkitError("bad-option", f"{repository} can't be a name on the hub: {first_line(error)}",
                         hint="name it owner/name, of letters, digits, '-', '_' and '.'", value=repository) from error
    except errors.LocalTokenNotFoundError as error:
        raise SbkitError("hub-access-denied", "you are not logged in to the hub", hint=_LOG_IN) from error
    except errors.HfHubHTTPError as error:
        # Without its cause: the hub's response may contain the token, which --debug would show.
        status = error.response.status_code
        if status == 401:
            raise SbkitError("hub-access-denied",
                             f"the hub doesn't accept your token, so you can't write to {repository}",
                             hint=_LOG_IN) from None
        if status == 403:
            raise SbkitError("hub-access-denied", f"you may not write to {repository} on the hub",
                             hint=f"name one of your own, or log in with another account: {_LOG_IN}",
                             value=repository) from None
        raise SbkitError("hub-error", f"{repository}: the hub reports status {status}: {first_line(error)}",
                         hint="the same command again uploads what is missing", value=repository) from None
    except Exception as error:  # of the client for HTTP, which differs by its version
        raise SbkitError("no-network", f"{repository} can't be uploaded to {constants.ENDPOINT}: {first_line(error)}",
                         hint="check the network (HTTPS_PROXY names a proxy, HF_ENDPOINT another hub); the same "
                              "command again uploads what is missing") from error
    return str(url)
