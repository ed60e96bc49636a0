"""The examples run, and say that a fraction of the elements was sent."""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparsync
from helpers import distributed
from helpers.programs import output_of
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket

TESTS = Path(__file__).parent
EXAMPLES = TESTS.parent / "examples"
SENT = r"{}: \d+ of \d+ elements, \d+ bytes sent"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def printed(name: str) -> str:
    """Run an example as __main__ in the process group there is, and return what it printed."""
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    with redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return text.getvalue()


def five() -> list[str]:
    return [printed(name) for name in ("ddp.py", "fsdp2.py", "no_ddp.py", "local_steps.py", "adamw_steps.py")]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_examples_for_ddp_fsdp2_neither_and_steps_of_each_rank_send_a_fraction_of_the_bits() -> None:
    first, second = distributed.run_fresh(five, 2)
    bits = r"loss \S+ with \S+ bits per parameter per step\n"
    for text, keys, more in zip(
        first,
        (["bucket0"], ["2", "0"], ["float32"], ["float32/cpu/0"], ["float32/cpu/0"]),
        ("", "", "", bits, bits),
        strict=True,
    ):
        assert re.fullmatch("".join(f"{SENT.format(key)}\n" for key in keys) + more, text)
    assert second == [""] * 5


def with_the_two_lines(script: str) -> str:
    """Return the plain script after the diff of the quickstart."""
    quickstart = (TESTS.parent / "docs" / "quickstart.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", quickstart, re.DOTALL)
    for above, added in re.findall(r"^ (.*)\n\+(.*)$", diff, re.MULTILINE):
        assert script.count(f"\n{above}\n") == 1, (
            f"the quickstart adds a line below {above!r}; the script has none, or several"
        )
        script = script.replace(f"\n{above}\n", f"\n{above}\n{added}\n")
    assert len(script.splitlines()) == 2 + len((EXAMPLES / "plain_ddp.py").read_text().splitlines())
    return script


def losses(script: str, folder: str, steps: int) -> list[float]:
    """Run the script up to this step, in the process group there is, and return the losses that rank 0 printed."""
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    names = {"__name__": "plain_ddp"}
    exec(compile(script, "plain_ddp.py", "exec"), names)
    arguments = ["--steps", str(steps), "--width", "16", "--checkpoint", f"{folder}.pt"]
    with redirect_stdout(io.StringIO()) as text:
        names["main"](arguments)  # pyright: ignore[reportCallIssue]
    dist.barrier()  # rank 0 writes the checkpoint
    return [float(loss) for loss in re.findall(r"loss (\S+),", text.getvalue())]


def plain_and_with_two_lines(folder: str) -> list[list[float]]:
    plain = (EXAMPLES / "plain_ddp.py").read_text()
    sparse = with_the_two_lines(plain)
    os.environ["SPARSYNC_SCHEME"] = "two_shot:density=1.0:values=int4"
    found = [losses(plain, f"{folder}/plain", 40), losses(sparse, f"{folder}/sparse", 20)]
    return [*found, losses(sparse, f"{folder}/sparse", 40)]  # resumes


@pytest.mark.slow
@pytest.mark.distributed
def test_two_lines_make_a_plain_script_sparse_and_it_resumes_and_learns_as_before(tmp_path: Path) -> None:
    (plain, begun, resumed), others = distributed.run_fresh(plain_and_with_two_lines, 2, folder=str(tmp_path))
    assert others == [[], [], []]
    assert (len(plain), len(begun), len(resumed)) == (2, 1, 1)
    assert plain[0] != begun[0] == pytest.approx(plain[0], rel=0.05)
    assert resumed[0] == pytest.approx(plain[1], rel=0.25)  # other data after the resume


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("torch", [*TORCHRUN, str(EXAMPLES / "ddp.py")]),
        ("lightning", [sys.executable, str(EXAMPLES / "with_lightning.py")]),
        ("transformers", [*TORCHRUN, str(EXAMPLES / "trainer.py")]),
    ],
)
def test_the_commands_of_the_examples_work(package: str, command: list[str]) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert re.search(SENT.format("bucket0"), output_of(command))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "ranks"), [("two_lines_ddp.py", 2), ("two_lines_hsdp.py", 4)])
def test_a_script_learns_with_its_two_lines_as_it_does_without_them(name: str, ranks: int, tmp_path: Path) -> None:
    sparse, plain = EXAMPLES / name, tmp_path / "plain.py"
    lines = sparse.read_text().splitlines(keepends=True)
    ours = [line.strip() for line in lines if "sparsync" in line]
    assert ours[0] == "import sparsync"
    assert ours[1].startswith("sparsync.attach(")
    assert len(ours) == 2
    plain.write_text("".join(line for line in lines if line.strip() not in ours))
    found = [output_of([*TORCHRUN[:-1], f"--nproc-per-node={ranks}", str(script)]) for script in (plain, sparse)]
    dense, own = (set(re.findall(r"rank \d: loss (\d\.\d{6})", text)) for text in found)  # two ranks may share a line
    assert len(dense) == len(own) == 1  # all ranks evaluate the same weights
    assert float(own.pop()) < 2 * float(dense.pop()) < 0.01  # 0.1 before the training


@pytest.mark.slow
def test_the_elastic_example_runs_alone_with_a_store() -> None:
    command = [sys.executable, "-m", "sparsync_elastic", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        port = store.stdout.readline().split()[-1]
        try:
            out = output_of([sys.executable, str(EXAMPLES / "elastic.py"), f"127.0.0.1:{port}", "--steps", "40"])
        finally:
            store.kill()
    first, middle, last, end = out.splitlines()
    assert (first, end) == ("goes on at step 0 as rank 0 of 1", "done after 40 steps")
    losses = [re.fullmatch(rf"step {step}: loss (\S+) of 1 ranks", text) for step, text in ((20, middle), (40, last))]
    assert all(losses)


def test_a_scheme_of_your_own_is_the_mean_of_scaled_signs_and_counts_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from own_scheme import ScaledSign  # pyright: ignore[reportMissingImports]

    def reduce(comm: LocalComm) -> tuple[list[float], bool]:
        metered = sparsync.comm.MeteredComm(comm)
        bucket = Bucket("b", torch.tensor([1.0, -3.0]) * (comm.rank + 1), 0)
        report = ScaledSign().start().reduce(bucket, metered)
        return bucket.grad.tolist(), report.cost == metered.take()[0]

    assert LocalWorld(2).run(reduce) == [([3.0, -3.0], True)] * 2
