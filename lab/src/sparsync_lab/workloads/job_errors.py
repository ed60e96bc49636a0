"""Report errors of a job's methods with the class, the method, the step and rank, and the line of the job's file."""

import inspect
from pathlib import Path
from traceback import FrameSummary, extract_tb


class JobError(RuntimeError):
    """A method of a job failed. The message names class and method, step and rank, the error and the line in the job's file."""


class naming:  # noqa: N801  # reads like a function; no generator, because contextlib undoes `raise ... from StopIteration`
    """Turn an exception of the block, including SystemExit, into a JobError that names `method` of the class `job`.

    A JobError passes unchanged. So does an error of torch's communication, such as DDP's broadcast of buffers before a forward pass,
    which the job does not cause.
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
    """Format the last executed line of the job's file, in brackets; "" if none was."""
    try:
        file = inspect.getfile(job)
    except (OSError, TypeError):  # an interactively defined class
        return ""
    own = [frame for frame in frames if frame.filename == file]
    return f" ({file}, line {own[-1].lineno})" if own else ""
