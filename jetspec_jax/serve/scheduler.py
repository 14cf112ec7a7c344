"""One thread that owns the slots: requests wait in a bounded queue, are read piece by piece, and run together.

A turn of its loop starts a block of rounds and then reads the report of the block before, so that the device never
waits for the host. Between two blocks come: what was cancelled, a piece of the next prompt, a row into a free slot, a
batch of another size. A row that has ended takes part in one block more, which costs it nothing but its place.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from jetspec_jax import outcome
from jetspec_jax.engine.geometry import used
from jetspec_jax.engine.prefixes import Prefixes
from jetspec_jax.engine.slots import Reading, Sent, Slots
from jetspec_jax.loop.slots import ROUNDS, Report
from jetspec_jax.loop.state import NONFINITE, RUNNING, TEXT
from jetspec_jax.serve.job import Draft, Job, Update, settings

BLOCK_SECONDS = 0.1  # of rounds in a block: what a new request waits for, and a cancelled one still costs
WAITED_SECONDS = 0.02  # the same while requests wait: a slot that becomes free stands empty for so long
SHORTEST_PREFIX = 16  # tokens that are worth taking over


class Full(Exception):
    """The queue has no room."""


class Closed(Exception):
    """No more requests are taken."""


class Flight(NamedTuple):
    """A block that has been started: its report on the device, whose rows it had, and the nodes of its rounds.

    alone: whether the device has done nothing else since the block before.
    """

    report: Sent
    jobs: list[Job | None]
    nodes: int
    alone: bool


class Scheduler:
    """Runs jobs on slots.

    waiting: jobs in the queue, the one whose prompt is being read not among them. running: jobs in slots.
    failed: one line once the device has failed; nothing runs any more.
    """

    def __init__(
        self, slots: Slots, waiting: int = 64, kept: int = 4, watch: Callable[[str, float], None] | None = None
    ):
        """Makes a scheduler that is not running yet.

        Args:
          slots: prepared.
          waiting: jobs that may wait for a slot.
          kept: rows that are kept after their end, for requests that begin as they did.
          watch: is told what happens, by name and number, in the scheduler's thread: for metrics.
        """
        self.slots, self.most, self.failed = slots, waiting, ""
        self._watch = watch or (lambda name, value: None)
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None wakes the thread up
        self._waiting: collections.deque[Job] = collections.deque()
        self._count = 0  # jobs in inbox and queue
        self._open, self._stopping = True, False
        self._table: list[Job | None] = [None] * slots.batch
        self._ended: set[int] = set(range(slots.batch))  # slots that the next block ends
        self._reading: tuple[Job, Reading] | None = None
        self._read = False  # whether that prompt has been read, and waits for a slot
        self._flight: Flight | None = None
        self._pace = 0.0  # seconds of a round
        self._heard = 0.0  # when the last report came; 0 where the device has had nothing to do since
        self._other = False  # whether the device has been given other work since the last block
        self.nodes = slots.plan.nodes  # of the last block's rounds
        self._prefixes = Prefixes(kept)
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return self._count

    @property
    def running(self) -> int:
        """Jobs in slots."""
        return sum(job is not None for job in self._table)

    @property
    def idle(self) -> bool:
        """Whether no job is anywhere."""
        return not (self._count or self._reading or self.running)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        """Puts jobs into the queue, all or none.

        Raises:
          Full: there is no room for them.
          Closed: no more are taken.
        """
        with self._lock:
            if not self._open:
                raise Closed(self.failed or "the server is shutting down")
            if self._count + len(jobs) > self.most:
                raise Full(f"{self._count} requests wait already, and the queue has room for {self.most}")
            self._count += len(jobs)
            for job in jobs:
                self._inbox.put(job)

    def cancel(self, job: Job) -> None:
        """Ends a job at the next block; its owner is told nothing more."""
        job.cancelled = True
        self._inbox.put(None)

    def close(self) -> None:
        """Takes no more jobs; those that were taken go on."""
        with self._lock:
            self._open = False

    def stop(self, seconds: float = 5.0) -> None:
        """Ends everything now; jobs that are left are told so."""
        self.close()
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._turn():
                    self._take(self._inbox.get())
        except Exception as error:  # of the device: nothing that is on it can be trusted any more
            self.failed = outcome.line(error)
        self.close()
        self._fail(self.failed or "the server is shutting down")

    def _turn(self) -> bool:
        """Does what is to be done between two blocks, starts one, and reads the one before; False where all is idle."""
        while True:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                break
        self._cancel()
        busy = self._prompt() | self._shrink()
        before, self._flight = self._flight, self._launch()
        if before:
            self._hear(before)
        return busy or bool(before or self._flight)

    def _take(self, job: Job | None) -> None:
        if job:
            self._waiting.append(job)

    def _cancel(self) -> None:
        """Lets go of everything that nobody wants any more."""
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._gone()
            self._over(job)
        if self._reading and self._reading[0].cancelled:
            job, reading = self._reading
            self.slots.discard(reading)
            self._reading, self._read = None, False
            self._over(job)
        for job in [job for job in self._table if job and job.cancelled]:
            self._free(job)
            self._over(job)

    def _prompt(self) -> bool:
        """Reads a piece of the next prompt, or gives it a slot once it has been read; returns whether it did."""
        if self._reading is None and self._waiting:
            job = self._waiting.popleft()
            self._reading, self._read = (job, self._begin(job)), False
            self._gone()
        if self._reading is None:
            return False
        job, reading = self._reading
        worked = not self._read
        if worked:
            self._read, self._other = self.slots.read(reading), True
            self._watch("pieces", 1)
            if not self.running:
                self.slots.wait(reading)  # so that a cancelled prompt is noticed
        if self._read and (slot := self._vacancy()) is not None:
            self.slots.insert(reading, slot)
            self._ended.discard(slot)
            self._table[slot], job.slot = job, slot
            self._reading, self._other = None, True
            if self.slots.tempo:
                self.slots.tempo.admitted(1 / self.running)
            return True
        return worked

    def _begin(self, job: Job) -> Reading:
        """Opens a prompt, on a kept row where one begins as it does."""
        job.begun = time.perf_counter()
        self._watch("queue_seconds", job.begun - job.asked)
        ids = job.row.ids
        prefix, shared = self._prefixes.longest(ids)
        held = self.slots.usable(shared, len(prefix.ids), len(ids)) if prefix else 0
        if prefix is None or held < SHORTEST_PREFIX:
            return self.slots.open(job.row)
        job.reused = held
        self._watch("reused", held)
        if shared == len(prefix.ids):  # its own next turn
            self._prefixes.drop(prefix)
            return self.slots.open(job.row, prefix.state, held)
        return self.slots.open(job.row, self.slots.copy(prefix.state), held)

    def _vacancy(self) -> int | None:
        """Returns a free slot; the batch becomes larger for one, up to the plan's largest."""
        if None in self._table:
            return self._table.index(None)
        size = len(self._table)
        if size == self.slots.plan.rows:
            return None
        self._resize(2 * size)
        return size

    def _shrink(self) -> bool:
        """Makes the batch smaller where half of it will do and nobody is about to come; returns whether it did."""
        size = len(self._table)
        if size == 1 or self.running > size // 2 or self._reading or self._waiting:
            return False
        self._resize(size // 2)
        return True

    def _resize(self, batch: int) -> None:
        old = [i for i, job in enumerate(self._table) if job] if batch < len(self._table) else range(len(self._table))
        rows = [i if self._table[i] else None for i in old]
        self.slots.resize(batch, rows)
        self._other = True
        table = [self._table[i] for i in old]
        self._table = [*table, *[None] * (batch - len(table))]
        self._ended.clear()  # rows that nobody has are ended by the move
        for slot, job in enumerate(self._table):
            if job:
                job.slot = slot

    def _size(self, options: frozenset[str]) -> tuple[int, int]:
        """Returns the tree nodes of the next block, one of the sizes that it is compiled for, and its rounds.

        options: that its rows use.
        """
        tempo, seconds = self.slots.tempo, self._seconds()
        if tempo is None:
            return self.slots.plan.nodes, max(int(seconds / self._pace), 1) if self._pace else 1
        nodes = tempo.nodes(self.slots.sizes(options))
        return nodes, tempo.rounds(nodes, self.slots.batch, seconds)

    def _seconds(self) -> float:
        """Returns how long the next block should take: one round before the piece that gives a prompt its slot.

        Each block lets one piece of a prompt in. With long ones requests would come in at ten a second, however fast
        the device is, and a batch of 32 would take three seconds to fill. The earlier pieces of a long prompt share
        the device with the rows that run.
        """
        if not (self._reading or self._waiting):
            return BLOCK_SECONDS
        if self._reading:
            row, done = self._reading[1].row, self._reading[1].done
        else:
            row, done = self._waiting[0].row, 0
        last = len(row.ids) - done <= self.slots.plan.chunks[-1]
        return 0.0 if last and self.running < self.slots.plan.rows else WAITED_SECONDS

    def _launch(self) -> Flight | None:
        """Starts a block, where any row may still run."""
        live = [job for job in self._table if job]
        if not live:
            return None
        options = frozenset().union(*(used(job.row.option) for job in live))
        self.nodes, rounds = self._size(options)
        report = self.slots.launch(self.nodes, min(rounds, ROUNDS), options, self._ended)
        self._ended = set()
        flight = Flight(report, list(self._table), self.nodes, not self._other)
        self._other = False
        return flight

    def _hear(self, flight: Flight) -> None:
        """Reads the report of a block, and tells the owners of its rows."""
        report = self.slots.get(flight.report)
        now = time.perf_counter()
        rounds = 0
        for row, job in enumerate(flight.jobs):
            if job is None or job.over:
                continue
            rounds = max(rounds, int(report.rounds[row]) - len(job.log.emitted))
            self._grow(job, report, row, now)
        spent = now - self._heard if self._heard else None
        if self.slots.tempo and report.next is not None:
            self.slots.tempo.timed(flight.nodes, rounds, spent if flight.alone else None)
            self.slots.tempo.hear(flight.nodes, report.next, self._flight.nodes if self._flight else None)
        elif rounds and spent and flight.alone:
            self._pace = 0.8 * self._pace + 0.2 * spent / rounds if self._pace else spent / rounds
        self._heard = now if self._flight else 0.0
        self._watch("blocks", 1)
        self._watch("rounds", rounds)
        self._watch(f"rounds of {flight.nodes}", rounds)

    def _grow(self, job: Job, report: Report, row: int, now: float) -> None:
        """Adds what a block did to a job's log, and ends the job where its row has ended."""
        log, start = job.log, len(job.row.ids) + len(job.log.ids) - int(report.start[row])
        stop = int(report.length[row]) - int(report.start[row])
        done = len(log.emitted) - int(report.first[row])
        made = slice(done, int(report.rounds[row]) - int(report.first[row]))
        log.ids.extend(report.tokens[row, start:stop].tolist())
        for known, fresh in zip(
            (log.accept_lengths, log.tree_sizes, log.emitted),
            (report.accept_lengths, report.tree_sizes, report.emitted),
            strict=True,
        ):
            known.extend(fresh[row, made].tolist())
        if job.row.option.logprobs and report.logprobs is not None and report.top is not None:
            assert log.logprobs is not None
            log.logprobs.extend(report.logprobs[row, start:stop].tolist())
            pairs = zip(
                report.top.token[row, start:stop].tolist(), report.top.logprob[row, start:stop].tolist(), strict=True
            )
            job.top.extend(list(zip(*pair, strict=True)) for pair in pairs)
        if job.draw and (size := int(report.drawn.size[row])):
            drawn = (report.drawn.tokens[row, :size], report.drawn.parents[row, :size])
            path = report.drawn.path[row, : int(report.drawn.count[row])]
            job.draft = Draft(*(x.tolist() for x in (*drawn, path)))
        if not job.first:
            job.first = now
        if report.next is not None:
            job.plain += float(report.next.seconds[0]) * int(report.emitted[row, made].sum())
        reason = int(report.reason[row])
        kept = job.row.read(log.ids, reason)
        job.log = log._replace(reason=reason) if kept is None else log.cut(kept, TEXT)
        del job.top[len(job.log.ids) :]
        if job.log.reason != RUNNING:
            self._end(job, now, running=reason == RUNNING)
        elif job.stream and job.told < len(job.log.ids):
            job.tell(Update(job.piece()))

    def _end(self, job: Job, now: float, running: bool) -> None:
        """Frees the slot of a row that has ended, and hands its result over."""
        self._free(job, running)
        job.ended = now
        known = {"capacity": self.slots.plan.capacity, "nodes": self.slots.plan.nodes, "depth": self.slots.depth}
        result = job.row.conclude(job.log, job.seconds(), settings(job, known), str(self.slots.target.dtype))
        piece = job.piece()
        self._over(job)
        job.tell(Update(piece, result))

    def _free(self, job: Job, running: bool = True) -> None:
        """Takes a job out of its slot, and keeps its row for one that begins likewise.

        running: whether the device may still run it.
        """
        slot = job.slot
        if self._prefixes.limit and job.log.ids and job.log.reason != NONFINITE:
            self._prefixes.add(job.known, self.slots.take(slot))
            self._other = True
        self._table[slot] = None
        if running:
            self._ended.add(slot)

    def _over(self, job: Job) -> None:
        job.over = True
        self._watch("cancelled" if job.cancelled else "finished", 1)

    def _gone(self) -> None:
        with self._lock:
            self._count -= 1

    def _fail(self, line: str) -> None:
        """Tells the owners of all jobs that are left."""
        while True:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                break
        left = [*self._waiting, *([self._reading[0]] if self._reading else []), *filter(None, self._table)]
        self._waiting.clear()
        self._reading, self._table, self._count = None, [None], 0
        for job in left:
            if not (job.over or job.cancelled):
                job.over = True
                job.tell(Update(error=line))
