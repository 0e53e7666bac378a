"""What a run writes about itself: metrics, timers, a progress bar, compilations.

`metrics.jsonl` is the record: one JSON object a line, one line a step, flushed as
it is written. JSON has no NaN, so a non-finite value is written as the string
"nan", "inf" or "-inf": every line stays valid JSON, a sick value stays visible,
and `read` turns it back into a float.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax import monitoring
from tensorboardX import SummaryWriter
from tqdm import tqdm

from lld_jax.run import storage

PROGRESS_FIELDS = {
    "reward": "reward/mean",
    "length": "rollout/length",
    "searches": "rollout/searches",
    "logp": "lld/logp_correct",
    "phase": "phase/name",
}
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class MetricsWriter:
    """Writes `workdir/metrics.jsonl` and TensorBoard events in `workdir/tensorboard`.

    Opening it for a run that goes on at `start_step` first drops what an earlier,
    killed run had written for that step and later ones, in both places, so that
    each step stands once. An inactive writer (every process but the first)
    touches nothing.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        start_step: int = 0,
        tensorboard: bool = True,
        active: bool = True,
    ):
        self._file = self._board = self._scratch = None
        self._last_step = start_step - 1
        if not active:
            return
        path = storage.folder(workdir) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate(path, start_step)
        self._file = storage.Appended(path)
        if tensorboard:
            self._events = local = path.parent / "tensorboard"
            if storage.in_bucket(path):  # tensorboardX's own way hangs if it is lost
                self._scratch = tempfile.TemporaryDirectory(prefix="lld_jax_")
                local = self._scratch.name
            self._board = SummaryWriter(str(local), purge_step=start_step)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Appends the line of `step`; values are scalars (Python, numpy, JAX) or str.

        Raises ValueError if `step` is not later than the last one written (a step
        has one line: merge its metrics first), or if a value is not a scalar.
        """
        if self._file is None:
            return
        if step <= self._last_step:
            raise ValueError(
                f"step: {step} was given after step {self._last_step}; each step "
                "is written once, in rising order"
            )
        values = {name: _scalar(name, value) for name, value in record.items()}
        line = {"step": step} | {k: _json_safe(v) for k, v in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._last_step = step
        if self._board is not None:
            for name, value in values.items():
                if not isinstance(value, str):
                    self._board.add_scalar(name, value, step)
            self._board.flush()
            self._upload()

    def close(self) -> None:
        """Closes the files; the writer can't be used afterwards."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self._upload()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _upload(self) -> None:
        """Copies the events so far into a bucket; what is still queued comes later."""
        if self._scratch is not None:
            storage.upload(Path(self._scratch.name).iterdir(), self._events)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, in order, non-finite values as floats.

    A last line cut short by a kill is left out; a broken line before it is a
    ValueError with its number.
    """
    records = []
    lines = storage.folder(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no line end after it: it was being written
                break
            raise ValueError(f"{path}, line {number}: not JSON: {line!r}") from error
        records.append({k: _restore(v) for k, v in record.items()})
    return records


def truncate(path: str | Path, step: int) -> None:
    """Drops the lines of `step` and later from a `metrics.jsonl`, atomically.

    Before and after a kill the file is either the old one or the new one, never
    half of one. A missing file stays missing.
    """
    path = storage.folder(path)
    if not path.exists():
        return
    kept = [
        {k: _json_safe(v) for k, v in record.items()}
        for record in read(path)
        if record["step"] < step
    ]
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in kept]
    storage.replace(path, "".join(lines))


def _scalar(name: str, value: Any) -> float | int | bool | str:
    if isinstance(value, bool | int | float | str):
        return value
    try:
        value = value.item()  # numpy and JAX scalars; waits for the device
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: {value!r} is not a scalar or a string") from error
    return _scalar(name, value)


def _json_safe(value):
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _restore(value):
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def progress_bar(total: int, start: int = 0, *, active: bool = True) -> tqdm:
    """A bar over steps `start`..`total` on stderr; silent where that is no terminal."""
    off = None if active else True
    return tqdm(total=total, initial=start, unit="step", disable=off)


@contextmanager
def work_bar(
    total: int, name: str, *, active: bool = True
) -> Iterator[Callable[[int], None]]:
    """A passing bar for `total` pieces of work; yields `moved(done)`."""
    off = None if active else True
    with tqdm(total=total, desc=name, leave=False, disable=off) as bar:
        yield bar.update


def show_progress(
    bar: tqdm, record: Mapping[str, Any], fields: Mapping[str, str] = PROGRESS_FIELDS
) -> None:
    """Moves the bar one step on and shows `fields`: label -> metric, where present."""
    shown = {
        label: value if isinstance(value, str) else f"{float(value):.3g}"
        for label, name in fields.items()
        if (value := record.get(name)) is not None
    }
    bar.set_postfix(shown, refresh=False)
    bar.update()


class Timers:
    """Seconds of named phases, added up until they are collected."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to `name`, also if it raises.

        JAX calls return before they are done: block on a result inside the block.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def collect(self) -> dict[str, float]:
        """`{"time/<phase>": seconds}` since the last collection; starts anew."""
        collected = {f"time/{name}": s for name, s in self._seconds.items()}
        self._seconds = {}
        return collected


class CompileCounter:
    """Counts the XLA programs built while it is open; a steady step adds none.

    A program fetched from the persistent cache counts too: it was traced anew,
    which is what a changing shape gives away.
    """

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **labels) -> None:
        del labels
        if event == _COMPILE_EVENT:
            self.count += 1
            self.seconds += duration

    def close(self) -> None:
        """Stops counting."""
        monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> "CompileCounter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
