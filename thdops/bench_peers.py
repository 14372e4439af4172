"""`python -m thdops bench [op ...] --peers`: ops beside every installed implementation of the same thing, in one run.

A row is one contest by one provider. A provider is timed only if its result is right, and one that cannot serve the call says why.
The speed-up of a row is that of the contest's first provider over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thdops.bench import Row, difference, first_line, tensors
from thdops.progress import progress
from thdops.registry import Contest, Cost, OpSpec, Outcome, Unserved
from thdops.timing import Roofline, device_time

__all__ = ["Peers"]


@dataclass
class Peers:
    """A run of contests. `rows` may be read while it goes on; `outcomes` holds what was right and timed."""

    device: torch.device
    match: str = ""
    providers: Sequence[str] = ()
    """Only those whose name is listed; () = all."""
    roofline: Roofline | None = None
    """What times are held against; None on a CPU."""
    outcomes: list[Outcome] = field(default_factory=list)

    def rows(self, specs: Sequence[OpSpec]) -> Iterator[Row]:
        """The rows of every contest whose name holds `match`."""
        offered = [(spec.name, contest) for spec in specs if spec.contests is not None for contest in spec.contests(self.device)]
        wanted = [(op, contest) for op, contest in offered if self.match in contest.name]
        with progress(len(wanted)) as at:
            for op, contest in wanted:
                at(f"{op}: {contest.name}")
                yield from self._contest(op, contest)
                at("", done=1)

    def _contest(self, op: str, contest: Contest) -> Iterator[Row]:
        try:
            args = contest.make()
            cost = contest.cost(*args)
        except Exception as error:  # a long run must not lose what it has
            yield Row(op, contest.name, "-", note=f"FAILED: {first_line(error)}", failed=True)
            return
        leader, first = next(iter(contest.providers)), None
        for name, prepare in contest.providers.items():
            if self.providers and name not in self.providers:
                continue
            row = self._timed(Row(op, contest.name, name), contest, prepare, args)
            if row.us is not None:
                self.outcomes.append(Outcome(contest, name, row.us))
                speedup = None if first is None else row.us / first
                first = row.us if name == leader else first
                row = self._judged(replace(row, speedup=speedup), row.us, cost)
            yield row
            torch._dynamo.reset()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _judged(self, row: Row, us: float, cost: Cost) -> Row:
        """With what the time says of the device."""
        row = replace(row, rate=cost.flops / us / 1e6, unit="TFLOP/s")
        if self.roofline is None:
            return row
        floor = self.roofline.floor_us(cost)
        return replace(row, roofline=floor / us, floor_us=floor, above_floor_us=us - floor)

    def _timed(self, row: Row, contest: Contest, prepare: Callable[..., Callable[[], object]], args: tuple[object, ...]) -> Row:
        try:
            call = prepare(*args)
            results: list[Tensor] = [result.detach() for result in tensors(call())]
            wrong = difference(*contest.held_against(args, results))
            if wrong:
                return replace(row, note=f"WRONG: {wrong}", failed=True)
            del results
            time, note = device_time(lambda _: call(), 1, self.device)
        except Unserved as reason:
            return replace(row, note=str(reason))
        except Exception as error:  # a peer that fails is a result, and the table must say it
            return replace(row, note=f"FAILED: {first_line(error)}", failed=row.provider == next(iter(contest.providers)))
        return replace(row, us=time.p50, spread=time.spread, how=time.how, note=note)
