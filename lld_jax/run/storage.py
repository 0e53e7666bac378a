"""Where a run is kept: a folder, or a place in a bucket of Google Cloud Storage.

Both are paths with pathlib's methods. An object of a bucket is written whole or not at
all and cannot be appended to; a folder is there while something lies in it.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lld_jax.config import ConfigError

_BUCKETS = "gs://"


def folder(path: str | os.PathLike[str]) -> Any:
    """An absolute `pathlib.Path`, or an `epath.Path` with the same methods.

    Args:
      path: a folder, or gs://BUCKET/FOLDER, which needs the extra `gcs`.

    Raises ConfigError for another address, or without the extra.
    """
    text = os.fspath(path)
    if not re.match(r"\w+:/", text):  # also gs:/BUCKET, a slash too few
        return Path(text).expanduser().absolute()
    bucket, _, name = text.removeprefix(_BUCKETS).partition("/")
    if not text.startswith(_BUCKETS) or not bucket or not name.strip("/"):
        raise ConfigError(
            f"workdir: {text!r}; legal is a folder, or gs://BUCKET/FOLDER"
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(
            f"workdir: {text!r} needs the extra gcs: pip install 'lld_jax[gcs]'; legal "
            "without it is a folder"
        )
    import fsspec
    from etils import epath

    # Others write there too (orbax, the other processes): a list that was kept is old.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(text.rstrip("/"))


def in_bucket(path: Any) -> bool:
    """Whether a path of `folder` lies in a bucket."""
    return str(path).startswith(_BUCKETS)


def check_writable(path: Any) -> None:
    """Puts an object into a bucket and takes it away again; nothing for a file system.

    The accounts of cloud machines may often read buckets and not write them. Raises
    ConfigError with what the service said.
    """
    if not in_bucket(path):
        return
    try:
        (path / ".writable").write_text("")
        (path / ".writable").unlink()
    except Exception as error:  # of the service, the network, the credentials
        raise ConfigError(
            f"workdir: {str(path)!r} cannot be written ({type(error).__name__}: "
            f"{error}); legal is a folder in a bucket where this account may make, "
            "list and delete objects"
        ) from error


def replace(path: Any, text: str) -> None:
    """Writes a file so that a kill leaves the old one or the new one."""
    if in_bucket(path):
        path.write_text(text)
        return
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


class Appended:
    """A text file that grows line by line; others see whole lines.

    In a bucket it is written anew with each line, a few megabytes at most for the
    metrics of a run.
    """

    def __init__(self, path: Any):
        self._path, self._file, self._text = path, None, ""
        if not in_bucket(path):
            self._file = path.open("a", encoding="utf-8")
        elif path.exists():
            self._text = path.read_text()

    def write(self, line: str) -> None:
        """Appends `line`, which ends with a newline."""
        if self._file is None:
            self._text += line
            self._path.write_text(self._text)
        else:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def upload(files: Iterable[Path], path: Any) -> None:
    """Copies local files into a folder of a bucket, one after the other."""
    for file in files:
        with file.open("rb") as source, (path / file.name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)


@contextlib.contextmanager
def staged(path: Any, *, last: str, active: bool = True) -> Iterator[Path]:
    """A local folder to fill in place of `path`; a bucket gets its files at the end.

    Args:
      path: of `folder`; one on a file system is yielded as it is.
      last: name of the file without which the others are nothing: it goes last.
      active: False leaves the bucket alone (every process but the first).
    """
    if not in_bucket(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="lld_jax_") as scratch:
        local = Path(scratch) / path.name
        yield local
        if active:
            path.rmtree(missing_ok=True)  # shards of an export with other names
            upload(sorted(local.iterdir(), key=lambda file: file.name == last), path)
