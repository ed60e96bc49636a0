"""One rank of a comparison with faults: it trains one scheme with `sparsync_elastic`, and tells the program that started it each step.

Nothing here is collective but the steps: what the ranks have told is put together in `merged`, whichever of them are left.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import sparsync_elastic as elastic
from sparsync_lab import workloads
from sparsync_lab.compare.one_rank import (
    Training,
    compute_times,
    described,
    digest_of,
    interface_sent,
    take_step,
    training_of,
)
from sparsync_lab.compare.settings import settings_from_json
from sparsync_lab.workers.process import Emit, Place
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, bare
from sparsync_lab.workloads.job_errors import naming


def train(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:  # Any: JSON
    """Train with the scheme and the seed of `spec`, from the start or from where the others are; the task of every rank.

    A rank beyond the number of ranks that began takes the share of one of these in a batch of another seed.
    """
    settings, seed = settings_from_json(dict(spec["settings"])), spec["seed"]
    choice = next(each for each in settings.schemes if each.label == spec["scheme"])
    workload = workloads.get(settings.workload, **settings.options)
    with elastic.Run(place.store, ranks=place.ranks, timeout_s=place.timeout_s, wait_s=spec["wait_s"]) as run:
        run.leave_on(signal.SIGTERM)
        run.on_change = lambda run: emit({"kind": "meeting", **_where(run), "step": run.step})
        with naming(workload.job_class(), "model"):
            model = workload.model(seed)
        if place.rank < place.ranks:  # one that joins loses no time
            alone_s, _ = compute_times(workload, model, seed, settings.steps, place, emit)
            emit({"kind": "alone", "seconds": alone_s, "config": described(choice, workload)})
        training = training_of(workload, model, choice, settings, place)
        run.add(training.model, training.handle, training.optimizer, training.schedule)
        counted = interface_sent(place)
        for step in run.steps(settings.steps):
            last, done = step + 1 == settings.steps, None
            here = replace(place, rank=run.rank % place.ranks)
            data = seed + run.rank // place.ranks
            with run.attempt():
                exchange = last and choice.leaves_rest(settings.steps)
                done = take_step(workload, training, data, step, here, exchange)
            if done is None:  # others are lost, and the step comes again unless it counts
                continue
            before, counted = counted, interface_sent(place)
            measured = asdict(replace(done, interface_bytes=counted - before))
            emit({"kind": "step", **_where(run), "step": step + 1, **measured})
            if run.rank == 0 and not last and (step + 1) % settings.eval_every == 0:
                _evaluate(workload, training, run, emit)
        if run.left:
            return
        if run.rank == 0:
            _evaluate(workload, training, run, emit)
        with training.common_weights():
            digest = digest_of(bare(training.model).parameters()).hex()
        exchanged = {} if training.local is None else one_process.exchanged(training.local)
        emit({"kind": "finished", "digest": digest, **exchanged})


def _where(run: elastic.Run) -> dict[str, float]:
    """Return when it is, by a clock that all processes of the machine share, and who is there."""
    return {"t": time.monotonic(), "epoch": run.epoch.number, "place": run.rank, "ranks": run.size}


def _evaluate(workload: Workload, training: Training, run: elastic.Run, emit: Emit) -> None:
    """Evaluate the common weights on this rank alone, while the others wait in their next step."""
    began = _where(run)
    emit({"kind": "evaluates", **began})
    computed = time.thread_time()
    with training.common_weights(), naming(workload.job_class(), "evaluate"):
        # Bare: DistributedDataParallel would send buffers.
        value = workload.quality(*workload.evaluate(bare(training.model), 0, 1))
    emit({"kind": "quality", **began, "until": time.monotonic(), "step": run.step, "value": value})
    if run.size > 1 and (took_s := time.thread_time() - computed) > run.timeout_s:
        raise RuntimeError(
            f"evaluating takes {took_s:.1f} s on one rank, and the others wait {run.timeout_s:g} s before it counts as lost; give "
            "--timeout more seconds, or the job less to evaluate"
        )
