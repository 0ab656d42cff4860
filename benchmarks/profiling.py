"""Where the time of a training step goes, on all ranks: `make profile`.

    make profile HOSTS=node1:4,node2:4 ARGS="model=denoiser data=noise" STEPS=20
    python -m benchmarks.profiling -np 2 -H localhost:2 model.lr=0.01
    python -m benchmarks.profiling -H node1:4,node2:4 --merge logs/.../trace    of a run that was

Trains for some batches with `profiler=trace` (runs/tracing.py) and fetches the traces that other
hosts have. Into the run's folder go trace.json.gz, all ranks on one clock with Horovod's timeline,
for https://ui.perfetto.dev or chrome://tracing, and trace.png, one step of it. A table shows what
the steps were spent on. Validation is cut to one batch at the end of an epoch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import phases, traces
from benchmarks.files import whole
from benchmarks.launching import Parser, ends_in_a_line
from benchmarks.overrides import refuse_ours
from cluster.doctor import refuse_unfit
from cluster.hostfile import add_arguments, chosen, given
from cluster.hosts import Refusal
from cluster.ranks import Rank, ranks, used
from cluster.ssh import diagnose

SAID = re.compile(r"(?:\[0\]<stdout>:)?trace   (.+): \d+ steps? after \d+$")
MANY = 1_000_000  # epochs: the profiler ends the training
OURS = dict.fromkeys(
    ["profiler.stop", "train", "test", "trainer.max_epochs", "trainer.max_steps",
     "trainer.limit_val_batches"], "nothing",
) | {"profiler.steps": "STEPS="}  # fmt: skip


def job(arguments: argparse.Namespace) -> list[str]:
    """The changes to conf/ with which the job ends once it is traced.

    Raises:
        Refusal: for an override of what make profile sets itself.
    """
    for change in arguments.overrides:
        if change.startswith("profiler="):
            raise Refusal(
                f"{change}: make profile has its own; for this one: make train ARGS={change}"
            )
    if arguments.steps < 1:
        raise Refusal(f"STEPS={arguments.steps}: trace at least 1 step")
    refuse_ours(arguments.overrides, OURS, "make profile")
    return [
        "profiler=trace", *arguments.overrides, f"profiler.steps={arguments.steps}",
        "profiler.stop=true", "train=true", "test=false", f"trainer.max_epochs={MANY}",
        "trainer.max_steps=-1", "trainer.limit_val_batches=1",
    ]  # fmt: skip


def train(arguments: argparse.Namespace) -> Path:
    """Run the job and show its output; the folder that rank 0 wrote its trace to.

    Raises:
        Refusal: when there is no trace.
    """
    overrides = job(arguments)
    if subprocess.run([sys.executable, "-m", "runs.config", *overrides]).returncode:
        raise SystemExit(2)  # runs.config has said why
    refuse_unfit(used(chosen(arguments), arguments.np))
    command = [sys.executable, "-m", "cluster.horovodrun", *given(arguments)]
    command += [sys.executable, "template.py", *overrides]
    print(shlex.join(command), flush=True)
    environment = {**os.environ, "HOROVOD_TIMELINE": "DYNAMIC"}
    taken = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in taken}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        # From a terminal these reach the job too, which ends and says so.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        assert process.stdout is not None
        folder = None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if match := SAID.match(line):
                    folder = Path(match[1])
        except BaseException:  # nobody reads our output any more: make profile | head -1
            process.terminate()
            raise
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if process.returncode:
        raise Refusal(
            f"nothing to show: the job ended with {process.returncode}; its last lines tell why"
        )
    if folder is None:
        raise Refusal(
            "nothing to show: training ended before the first traced batch, as its lines above "
            "say: train longer, or lower profiler.warmup"
        )
    return folder


def fetch(folder: Path, members: list[Rank]) -> int:
    """Copy the traces that other hosts have and this one has not; the number of files copied.

    Raises:
        Refusal: when a rank's trace cannot be fetched.
    """
    count = 0
    wanted = [(member.host, f"rank-{member.rank}.json.gz", True) for member in members]
    wanted.append((members[0].host, "horovod.json.gz", False))  # none under strategy=ddp
    for host, name, needed in wanted:
        file = folder / name
        if file.exists() or host.is_here:
            continue
        path = shlex.quote(str(file.absolute()))
        script = f"echo; echo '{{}}'; cat {path}"  # below what a login shell may print
        done = subprocess.run(host.command(script), capture_output=True)
        if done.returncode == 0:
            with whole(file) as unfinished:
                unfinished.write_bytes(done.stdout.partition(b"\n{}\n")[2])
            count += 1
        elif needed:
            reason = diagnose(host, done.returncode, done.stderr.decode(errors="replace"))
            raise Refusal(f"{host.name}: {path} cannot be fetched: {reason}")
    return count


def parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.profiling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=10, help="batches traced (%(default)s)")
    parser.add_argument("--merge", type=Path, help="the trace folder of a run that has ended")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to conf/")
    return parser


@ends_in_a_line
def main() -> int:
    arguments = parser().parse_args()
    folder: Path | None = arguments.merge
    try:
        members = ranks(chosen(arguments), arguments.np)
        folder = folder or train(arguments)
        fetched = fetch(folder, members)
        rank_traces, horovod = traces.read(folder, len(members))
        files = [folder.parent / "trace.json.gz", folder.parent / "trace.png"]
        traces.write(traces.merge(rank_traces, horovod), files[0])
        phases.draw(rank_traces, horovod, files[1])
    except BrokenPipeError:  # an OSError too, but not of a file
        raise
    except OSError as error:
        raise Refusal(f"{folder or 'make profile'}: {error.strerror}") from None
    note = f" ({fetched} fetched)" if fetched else ""
    print(f"\n{phases.table(rank_traces, horovod)}")
    print(f"trace   {files[0]}{note}: open it in https://ui.perfetto.dev")
    print(f"picture {files[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
