"""Weights from the Hugging Face hub, or from a mirror of it, by the hub's own library."""

import os
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

import httpx2
import huggingface_hub
from huggingface_hub import errors

from tidegate_operator.weights import origin, weight_report, weight_source

TOKEN = "HF_TOKEN"
Reason = weight_report.Reason


class Hub:
    """One repository at one commit."""

    def __init__(self, source: weight_source.Source, endpoint: str | None) -> None:
        self._source = source
        self._token = os.environ.get(TOKEN, "")
        self._api = huggingface_hub.HfApi(endpoint=endpoint, token=self._token or False)
        self._commit = source.detail

    def files(self) -> Sequence[origin.RemoteFile]:
        with self._translated():
            found = self._api.model_info(self._source.location, revision=self._source.detail, files_metadata=True)
        siblings = found.siblings or []
        wanted = origin.needed(sibling.rfilename for sibling in siblings)
        self._commit = found.sha or self._commit
        return [
            origin.RemoteFile(
                path=sibling.rfilename,
                size=sibling.size or 0,
                sha256=sibling.lfs.sha256 if sibling.lfs else None,
                git_sha1=None if sibling.lfs else sibling.blob_id,
            )
            for sibling in siblings
            if sibling.rfilename in wanted
        ]

    def fetch(self, file: origin.RemoteFile, folder: pathlib.Path) -> None:
        with self._translated():
            self._api.hf_hub_download(self._source.location, file.path, revision=self._commit, local_dir=folder)

    def _missing(self) -> weight_report.WeightsError:
        return weight_report.WeightsError(
            Reason.NOT_FOUND,
            f"{self._api.endpoint} has no {self._source.uri}, or hides it from this token: correct the URI, or put a token "
            f"that may read it as {TOKEN} into the Secret of model.secretRef",
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        where, uri = self._api.endpoint, self._source.uri
        try:
            yield
        except errors.GatedRepoError as error:
            raise weight_report.WeightsError(
                Reason.REFUSED,
                f"{where} gives {uri} only to accounts that accepted its licence: accept it there, and put a token of that "
                f"account as {TOKEN} into the Secret of model.secretRef",
            ) from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
            raise self._missing() from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status == HTTPStatus.UNAUTHORIZED and not self._token:
                raise self._missing() from error  # so hubs hide what is private
            if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise weight_report.WeightsError(
                    Reason.REFUSED,
                    f"{where} refuses the token for {uri}: put a valid one as {TOKEN} into the Secret of model.secretRef",
                ) from error
            raise _unreachable(where, f"HTTP {status}") from error
        except _UNANSWERED as error:
            raise _unreachable(where, _first_line(error)) from error


_UNANSWERED = (
    httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.FileMetadataError, ConnectionError, TimeoutError, RuntimeError,
)  # fmt: skip
"""Errors of the hub's library. Its extension for Xet, from which large files come, raises the three that Python has."""


def _unreachable(where: str, why: str) -> weight_report.WeightsError:
    return weight_report.WeightsError(
        Reason.UNREACHABLE,
        f"{where} does not answer ({why}): check model.endpoint and the network of the node; the download tries again",
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
