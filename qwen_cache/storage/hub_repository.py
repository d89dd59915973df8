"""A repository on the Hugging Face hub that is published to: what is in it, and one commit that changes it.

A commit is atomic: readers see all of it or nothing, and one that follows another commit than the one expected is
refused. Large files are uploaded before it, so after an interruption what has arrived is not sent again. The token is
that of `hf auth login` or HF_TOKEN, and only huggingface_hub reads it. Needs huggingface_hub, and the network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._validators import validate_repo_id

from qwen_cache.errors import ConfigError, QwenCacheError, first_line
from qwen_cache.extras import __version__

TRANSPORT: type[BaseException] = HfHubHTTPError.__bases__[0]
"""The errors of connections: httpx's in huggingface_hub 1, httpx2's in 2."""
TOGETHER = 8
"""Files that are uploaded at the same time: enough for one connection, and little to repeat after an interruption."""
CHANGED = (409, 412)
"""The hub's statuses for a commit whose parent is no longer the newest."""


@dataclass(frozen=True)
class Published:
    """The files of a repository before they are uploaded."""

    files: dict[str, Path | bytes]
    """By path in the repository."""
    card: str

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file."""
        return {
            name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in self.files.items()
        }


@dataclass(frozen=True)
class State:
    """The files of a branch at one commit."""

    commit: str
    files: dict[str, int]
    """Bytes by path."""


@dataclass(frozen=True)
class Repository:
    """A repository by its name, and the branch that is changed."""

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None = None

    def create(self, *, private: bool) -> None:
        """Create it and its branch, if they do not exist; with `private`, ConfigError if it exists and is public."""
        api = _api()
        with self._explained():
            api.create_repo(self.name, repo_type=self.kind, private=private or None, exist_ok=True)
            if private and not api.repo_info(self.name, repo_type=self.kind).private:
                do = "make it private on its page, name another, or leave out --private"
                raise ConfigError("this repository is public", where=self.name, expected="a private one", do=do)
            if self.revision:
                api.create_branch(self.name, repo_type=self.kind, branch=self.revision, exist_ok=True)

    def state(self) -> State:
        """The files of the branch now."""
        api = _api()
        with self._explained():
            commit = str(api.repo_info(self.name, repo_type=self.kind, revision=self.revision).sha)
            tree = api.list_repo_tree(self.name, repo_type=self.kind, revision=commit, recursive=True)
            return State(commit, {each.path: each.size for each in tree if isinstance(each, RepoFile)})

    def commit(
        self,
        files: Mapping[str, Path | bytes],
        message: str,
        *,
        remove: Collection[str] = (),
        parent: str | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> str:
        """Upload and remove files in one commit; its address. With `parent`, QwenCacheError if that is not the newest.

        `on_bytes` gets the sizes of files that have arrived.
        """
        api, operations = _api(), list[CommitOperationAdd | CommitOperationDelete]()
        names = list(files)
        with self._explained():
            for some in (names[begin : begin + TOGETHER] for begin in range(0, len(names), TOGETHER)):
                added = [_addition(name, files[name]) for name in some]
                api.preupload_lfs_files(
                    self.name, added, repo_type=self.kind, revision=self.revision, free_memory=False
                )
                operations += added
                on_bytes(sum(each.upload_info.size for each in added))
            operations += [CommitOperationDelete(path_in_repo=name) for name in sorted(remove)]
            made = api.create_commit(
                self.name,
                operations,
                commit_message=message,
                repo_type=self.kind,
                revision=self.revision,
                parent_commit=parent,
            )
            return str(made.commit_url)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the library's errors into ours."""
        try:
            yield
        except QwenCacheError:
            raise
        except HfHubHTTPError as error:
            raise self._refused(error) from None
        except (TRANSPORT, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
            do = "check the connection and HF_ENDPOINT, and run the same command again"
            found = first_line(error)
            raise QwenCacheError("the hub cannot be reached", where=self.name, found=found, do=do) from None
        except (OSError, RuntimeError, ValueError) as error:  # of a single file, with its reason as the cause
            found = first_line(error.__cause__ or error)
            do = "run the same command again: what is there is not sent again"
            raise QwenCacheError("the upload failed", where=self.name, found=found, do=do) from None

    def _refused(self, error: HfHubHTTPError) -> QwenCacheError:
        """The error that the hub's answer means."""
        code = error.response.status_code if error.response is not None else 0
        changed = (
            "somebody else has changed this repository since this command began",
            "look at what is there now, and run the same command again: what has arrived is not sent again",
        )
        what, do = {
            401: ("the hub does not know you", "log in with `hf auth login`, or set HF_TOKEN"),
            403: ("you may not write to this repository", "use a token with write access, or name another owner"),
            404: ("the hub has no such repository or revision, or hides it from you", "check the name and the token"),
            **dict.fromkeys(CHANGED, changed),
        }.get(code, ("the hub refused the upload", "run the same command again; huggingface.co/status says how it is"))
        found = f"status {code}: {first_line(error.server_message or error)}"
        return QwenCacheError(what, where=self.name, found=found, do=do)


def check_repository_name(name: str) -> str:
    """ConfigError unless the name can be that of a repository."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError("not the name of a repository", expected="OWNER/NAME", found=first_line(error)) from None
    return name


def _api() -> HfApi:
    return HfApi(library_name="qwen-cache", library_version=__version__)


def _addition(name: str, data: Path | bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path_in_repo=name, path_or_fileobj=data if isinstance(data, bytes) else str(data))
