"""TensorBoard's event files, written by TensorBoard itself, but without its thread: that tells errors too late."""

import math
import time
from collections.abc import Mapping
from pathlib import Path


class EventFile:
    """A new event file in a folder; TensorBoard drops what earlier files there say about `first_step` and later ones.

    Raises OSError, from every method.
    """

    def __init__(self, folder: Path, first_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020}"
        self._event, self._summary = Event, Summary
        self._file = open(folder / name, "xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self.flush()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a step; those that are not finite are left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if finite:
            parts = [self._summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
            self._write(step=step, summary=self._summary(value=parts))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **content) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
