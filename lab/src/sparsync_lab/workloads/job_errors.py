"""Errors of a job's own methods, told with the class, the method, the place in the training and the line of the job's file."""

import inspect
from pathlib import Path
from traceback import FrameSummary, extract_tb


class JobError(RuntimeError):
    """A method of a job failed. The message names class and method, step and rank, the job's own error and the line in its file."""


class naming:  # noqa: N801  # reads as the function it is; no generator, because contextlib undoes `raise ... from StopIteration`
    """Turn an exception of the block, SystemExit included, into a JobError that names `method` of the class `job`.

    A JobError is passed on unchanged. So is an error of torch's communication, such as DDP's broadcast of buffers before a forward pass:
    the job has nothing to do with it.
    """

    def __init__(
        self, job: type, method: str, step: int | None = None, rank: int | None = None, ranks: int = 1
    ) -> None:
        self._job, self._method = job, method
        self._place = ([] if step is None else [f"step {step}"]) + ([] if rank is None else [f"rank {rank} of {ranks}"])

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception | SystemExit) or isinstance(error, JobError):
            return
        frames = extract_tb(error.__traceback__)
        if _is_communication(frames):
            return
        where = f" ({', '.join(self._place)})" if self._place else ""
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = f"{self._job.__qualname__}.{self._method} failed{where}: {what}{_line(self._job, frames)}"
        raise JobError(text) from error


def _is_communication(frames: list[FrameSummary]) -> bool:
    innermost = Path(frames[-1].filename).as_posix() if frames else ""
    return "/torch/distributed/" in innermost or innermost.endswith("/torch/nn/parallel/distributed.py")


def _line(job: type, frames: list[FrameSummary]) -> str:
    """Return the last line of the job's file that ran, in brackets; empty where none did."""
    try:
        file = inspect.getfile(job)
    except (OSError, TypeError):  # a class that was typed in, not read from a file
        return ""
    own = [frame for frame in frames if frame.filename == file]
    return f" ({file}, line {own[-1].lineno})" if own else ""
