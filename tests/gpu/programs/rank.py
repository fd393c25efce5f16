"""One rank that runs programs: ``python -m tests.gpu.programs.rank``; a line of JSON per program
in,
one per result out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.programs import records
from tests.gpu.programs.draw import draw
from tests.gpu.programs.memory import CpuMemory, Cuda
from tests.gpu.programs.miraccl_calls import MiracclCalls
from tests.gpu.programs.model import Model
from tests.runtime import reference as ref

NOTE_BYTES = 1024


class ProgressFile:
    """Progress of the rank, in a file that survives it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(NOTE_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NOTE_BYTES)

    def write(self, text: str) -> None:
        self._memory[:] = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b" ")


class ProgramRank:
    """One rank in one program."""

    def __init__(
        self,
        program: records.Program,
        rank: int,
        meeting: dict[str, Any],
        notes: ProgressFile | None = None,
    ) -> None:
        self._program, self._rank, self._notes = program, rank, notes
        self._note("meets the others")
        self.place = _place_of(program.device, rank, meeting)
        if program.api == "torch":
            from tests.gpu.programs.torch_calls import TorchCalls

            self.calls: Any = TorchCalls(program, rank, program.nranks, meeting, self.place)
        else:
            self.calls = MiracclCalls(program, rank, program.nranks, meeting, self.place)
        self.model = Model(program)
        self._numbered: dict[int, records.Call | records.Messages] = {}
        self._made: list[tuple[records.Call, Any]] = []
        self._replays: dict[int, Callable[[], None]] = {}
        self._random = random.Random(f"{program.seed} {rank}")

    def _note(self, text: str) -> None:
        if self._notes is not None:
            self._notes.write(text)

    def run(self) -> None:
        for buffer in self._program.buffers:
            self._note(f"allocates {buffer}")
            self.place.allocate(
                buffer,
                self._rank,
                None if buffer.window is None else self.calls.empty(buffer.window),
            )
        self.place.synchronize()
        for number, step in enumerate(self._program.steps):
            self._note(f"step {number}: {step}")
            self._step(step)
            self.model.apply(step)
            if isinstance(step, records.Check):
                self._compare(number)
        self._note("the end")
        self._replays.clear()
        self.calls.close()
        self.place.close()

    # ---- steps

    def _index(self, comm: int) -> int | None:
        """Return this rank's index in a communicator."""
        ranks = self.model.comms[comm].ranks
        return ranks.index(self._rank) if self._rank in ranks else None

    def _step(self, step: records.Step) -> None:
        self._random_delay(getattr(step, "stream", None) or 0)
        match step:
            case records.Call() | records.Messages():
                self._numbered[step.number] = step
                self._operation(step)
            case records.Batch():
                self._batch(step)
            case records.Wait():
                self._wait(step)
            case records.Fill():
                with self.place.using(step.stream, [step.buffer]):
                    self.place.fill(
                        self._program.buffers[step.buffer], step.kind, self._rank, step.salt
                    )
            case records.Copy():
                with self.place.using(step.stream, [step.source.buffer, step.target.buffer]):
                    self.place.copy(step.source, step.target, self._rank)
            case records.Barrier():
                if self._index(step.comm) is not None:
                    with self.place.using(
                        step.stream or 0, [], names_stream=step.stream is not None
                    ) as stream:
                        self.calls.barrier(step.comm, stream)
            case records.Split():
                index = self._index(step.parent)
                if index is not None:
                    self.calls.split(step, index, self._rank)
            case records.Finalize():
                if self._index(step.comm) is not None:
                    self.calls.finalize(step.comm)
            case records.Graph():
                self._replays[step.number] = self.place.capture(
                    step.stream, lambda: self._steps(step.body)
                )
            case records.Replay():
                if self.calls.leaves_behind:
                    self.place.synchronize()
                with self.place.alone(step.stream):
                    self._replays[step.graph]()
            case records.Beside():
                self._beside(step)
            case records.Check():
                self.place.synchronize()

    def _steps(self, steps: tuple[records.Step, ...]) -> None:
        for step in steps:
            self._step(step)

    def _random_delay(self, stream: int) -> None:
        """Sleep at random, so that ranks diverge."""
        chance = self._random.random()
        if chance < 0.06:
            time.sleep(self._random.random() * 0.002)
        elif chance > 0.92:
            self.place.stall(stream, self._random.random() * 1.5)

    def _operation(self, step: records.Call | records.Messages) -> None:
        index = self._index(step.comm)
        if index is None:
            return
        with self.place.using(
            step.stream, [view.buffer for view in step.views], names_stream=step.names_stream
        ) as stream:
            if isinstance(step, records.Messages):
                self.calls.messages(step, index, stream)
                return
            made = self.calls.call(step, index, stream)
        if made is not None:
            self._made.append((step, made))

    def _batch(self, batch: records.Batch) -> None:
        parts = [step for step in batch.steps if self._index(step.comm) is not None]
        if not parts:
            return
        index = self._index(parts[0].comm)
        assert index is not None
        names_streams = self._program.api == "own" and (
            batch.number % 2 == 0 or self._program.device == "emulated"
        )
        with contextlib.ExitStack() as memory:
            actions = []
            for step in parts:
                stream = step.stream if names_streams else parts[0].stream
                buffers = [view.buffer for view in step.views]
                names = names_streams and self._program.buffers[buffers[0]].on_gpu
                named = memory.enter_context(self.place.using(stream, buffers, names_stream=names))
                actions.append(functools.partial(self._part, step, named))
            self.calls.together(actions, parts[0], index)

    def _part(self, step: records.Call | records.Messages, stream: Any) -> None:
        index = self._index(step.comm)
        assert index is not None
        (self.calls.messages if isinstance(step, records.Messages) else self.calls.call)(
            step, index, stream
        )

    def _wait(self, wait: records.Wait) -> None:
        step = self._numbered[wait.number]
        if self._index(step.comm) is None:
            return
        with self.place.using(
            wait.stream, [view.buffer for view in step.views], names_stream=wait.names_stream
        ) as stream:
            result = self.calls.wait(wait.number, wait.on_host, stream)
        if isinstance(step, records.Call) and step.makes and result is not None:
            self._made.append((step, result))

    def _beside(self, beside: records.Beside) -> None:
        errors: list[BaseException] = []

        def run(body: tuple[records.Step, ...]) -> None:
            try:
                self.place.enter_thread()
                self._steps(body)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(body,)) for body in beside.bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    # ---- results

    def _compare(self, number: int) -> None:
        self.calls.check()
        for buffer, memory in self.place.memory.items():
            want = self.model.memory[buffer][self._rank]
            self._alike(
                self.place.read(memory.bits),
                want,
                f"buffer {buffer}, touched by {self._who(buffer, number)}",
            )
        for call, got in self._made:
            index = self._index(call.comm)
            assert index is not None
            self._alike(
                self.place.read(got), self.model.made[call.number][index], f"what {call} made"
            )
        self._made.clear()

    def _who(self, buffer: int, before: int) -> list[str]:
        near = range(max(0, before - 25), before)
        return [
            f"{i}: {self._program.steps[i]}"
            for i in near
            if buffer in touched([self._program.steps[i]])
        ][-6:]

    def _alike(self, bits: Any, want: Any, what: str) -> None:
        if bits.size != want.size:
            raise AssertionError(f"{what}: {bits.size} elements, not {want.size}")
        got = bits.view(want.dtype)
        wrong = ref.differing(got, want, zeros_alike=True)
        if wrong.size:
            first = int(wrong[0])
            text = (
                f"{wrong.size} of {want.size} are wrong, from {first} to {int(wrong[-1])}, "
                f"the first {got[first]!r}, not {want[first]!r}"
            )
            raise AssertionError(f"{text}: {what}")


def _place_of(device: str, rank: int, meeting: dict[str, Any]) -> CpuMemory:
    if device == "emulated":
        from tests.gpu.programs.emulated import Emulated

        return Emulated(rank)
    return Cuda(meeting["ordinal"]) if device == "cuda" else CpuMemory()


def touched(steps: Any) -> set[int]:
    """Return the buffers of these steps; those of graphs only where they are replayed."""
    found: set[int] = set()
    for step in steps:
        match step:
            case records.Call() | records.Messages():
                found |= {view.buffer for view in step.views}
            case records.Batch():
                found |= touched(step.steps)
            case records.Fill():
                found.add(step.buffer)
            case records.Copy():
                found |= {step.source.buffer, step.target.buffer}
            case records.Graph():
                found |= touched(step.body)
            case records.Beside():
                found |= touched([part for body in step.bodies for part in body])
    return found


def main() -> None:
    """Read lines of seed, api, nranks, device, options of ``draw``, and rendezvous."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    notes = ProgressFile(folder / f"notes-{rank}")
    np.seterr(all="ignore")
    warnings.simplefilter("ignore", FutureWarning)  # PyTorch renames calls
    for line in sys.stdin:
        order = json.loads(line)
        os.environ.update(order["environment"])
        if order["ranks_per_host"]:
            os.environ["MIRACCL_HOSTID"] = f"host{rank // order['ranks_per_host']}"
        if order["device"] == "cuda":
            import torch

            order["meeting"]["ordinal"] = rank % torch.cuda.device_count()
        error = ""
        try:
            program = draw(
                order["seed"], order["api"], order["nranks"], order["device"], **order["options"]
            )
            ProgramRank(program, rank, order["meeting"], notes).run()
        except BaseException as problem:
            where = "" if isinstance(problem, AssertionError) else f"\n{traceback.format_exc()}"
            error = f"{type(problem).__name__}: {problem}{where}"
        print(json.dumps({"seed": order["seed"], "error": error}), flush=True)


if __name__ == "__main__":
    main()
