# SPDX-License-Identifier: Apache-2.0
"""Makes all runs of a plan, round after round, and keeps every one as soon as it is measured."""

import os
import shutil
import signal
import statistics
import sys
import time

from scaling import UserError, analysis, model, plan, result as result_file, trainers

ALL_REDUCE_ROUNDS = 3


class Stopped(Exception):
    """Ctrl-C, SIGTERM, or the terminal is lost (SIGHUP)."""


class Stops:
    """Within `with`: a signal that stops the program makes `begin`'s caller raise Stopped, once. What comes later, or
    after `end`, waits until the block is left, so that what is measured is saved and drawn. Signals that are ignored
    stay so: nohup and a shell's `&` want a measurement that outlives its terminal.

        with Stops() as stops:
            try:
                stops.begin()
                ...
                stops.end()
            except Stopped:
                ...
    """

    def __init__(self):
        self.raising = False
        self.stopped = False
        self.held = []
        self.before = {}

    def __enter__(self):
        for number in trainers.STOPS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._take)
        return self

    def begin(self):
        self.raising = True
        if self.held:
            self._take(self.held.pop(), None)

    def end(self):
        self.raising = False

    def __exit__(self, *_):
        self.raising = False
        for number, handler in self.before.items():
            # A shell may tell of its end again.
            again = self.stopped and number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if again else handler)
        if not self.stopped:
            for number in self.held:
                signal.raise_signal(number)

    def _take(self, number, _frame):
        if not self.raising:
            self.held.append(number)
            return
        self.raising = False
        self.stopped = True
        raise Stopped


class LiveLine:
    """What runs now and how long the rest will take: one line that is rewritten; without a terminal a line per run."""

    def __init__(self, stream=sys.stderr):
        self.stream = stream
        self.terminal = stream.isatty()
        self.width = 0

    def show(self, text):
        if self.terminal:
            text = text[: shutil.get_terminal_size().columns - 1]  # a longer line could not be rewritten
            self._write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self._write(text + "\n")

    def say(self, text):
        """A line that stays, in full."""
        self._write(f"\r{' ' * self.width}\r{text}\n" if self.terminal else f"{text}\n")
        self.width = 0

    def _write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # nobody reads it: the terminal or the reader of a pipe is gone, but the measurement goes on
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # else what is buffered would fail again at the end of the program
            os.close(nowhere)


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Session:
    """One call of the program: makes the runs of `jobs` that `result` does not have yet."""

    def __init__(self, result, jobs, launcher, bin_folder, slots, folder, line, stops):
        self.result = result
        self.settings = result["settings"]
        self.jobs = jobs
        self.launcher = launcher
        self.bin_folder = bin_folder
        self.slots = slots
        self.folder = folder
        self.line = line
        self.stops = stops
        self.began = time.monotonic()
        self.failed = set()
        # A run that failed before is made again.
        result["runs"] = [run for run in result["runs"] if run["status"] == "ok"]
        self.seconds = {}
        for run in result["runs"]:
            self.seconds.setdefault(plan.job_of(run).key(), run["wall_s"])

    def measure(self):
        """Makes the runs. Returns how it ended: "complete", "interrupted", "time limit"."""
        try:
            self.stops.begin()
            ended = self._pilots() and self._rounds() and (not self.settings["predict"] or self._time_all_reduces())
            ended = "complete" if ended else "time limit"
            self.stops.end()
        except Stopped:
            ended = "interrupted"
        self.result["ended"] = ended
        result_file.write(self.result, self.folder)
        return ended

    def _late(self, seconds=0.0):
        """Whether what takes so long would end after the time limit."""
        limit = self.settings["limit_minutes"]
        return bool(limit) and time.monotonic() - self.began + seconds > 60 * limit

    # These return whether they are complete: else the time limit is reached.

    def _rounds(self):
        done = {(plan.job_of(run).key(), run["round"]) for run in self.result["runs"]}
        todo = [
            (round_, job)
            for round_ in range(self.settings["rounds"])
            for job in self.jobs
            if (job.key(), round_) not in done
        ]
        for position, (round_, job) in enumerate(todo):
            if job.key() in self.failed:
                continue
            left = [j for _, j in todo[position:] if j.key() not in self.failed]
            if self._late(self._expected(job)):
                return False
            self.line.show(
                f"round {round_ + 1}/{self.settings['rounds']}  run {position + 1}/{len(todo)}  {job.title()}  "
                f"{clock(sum(map(self._expected, left)))} left"
            )
            self._run(job, round_)
        return True

    def _pilots(self):
        """One short run of each group of jobs tells how many steps fill the time of a run."""
        first, measured = {}, {plan.job_of(run).steps_key() for run in self.result["runs"]}
        for job in self.jobs:
            first.setdefault(job.steps_key(), job)
        for position, (key, job) in enumerate(first.items()):
            if key in measured:  # with the steps that it has, or the runs could not be compared
                continue
            if self._late():
                return False
            self.line.show(f"short run {position + 1}/{len(first)}  {job.title()}")
            record = self._start(job, plan.PILOT_STEPS, plan.PILOT_WARMUP)
            # If even that fails, the runs are made all the same: their errors belong into the report.
            step_ms = (
                analysis.step_ms({**record, "ranks": job.ranks, "batch": job.batch}) if record["summary"] else 1000.0
            )
            steps, warmup = plan.choose_steps(step_ms, self.settings["seconds"])
            if record["summary"] is None:
                steps, warmup = plan.PILOT_STEPS, plan.PILOT_WARMUP
            start_s = max(0.1, record["wall_s"] - (plan.PILOT_STEPS + plan.PILOT_WARMUP) * step_ms / 1000)
            self.result["pilots"][key] = {
                "step_ms": step_ms,
                "batch": job.batch,
                "start_s": round(start_s, 3),
                "steps": steps,
                "warmup": warmup,
            }
        return True

    def _time_all_reduces(self):
        """For the model of the machine: the median of ROUNDS times of each size and layout, taken in turn."""
        layouts = model.layouts(self.settings, self.slots)
        self.result.pop("prediction_error", None)  # of an earlier attempt
        times, seconds = {}, {}
        for round_ in range(ALL_REDUCE_ROUNDS):
            for ranks, nodes in layouts:
                if self._late(seconds.get((ranks, nodes), 0.0)):
                    return False
                began = time.monotonic()
                self.line.show(
                    f"all-reduces, round {round_ + 1}/{ALL_REDUCE_ROUNDS}  {plan.count(ranks, 'rank')},"
                    f" {plan.count(nodes, 'node')}"
                )
                try:
                    found = trainers.time_all_reduces(
                        self.launcher,
                        self.bin_folder,
                        ranks,
                        nodes,
                        model.SIZES,
                        self.settings["timeout"],
                        self.settings["device"],
                    )
                except UserError as error:
                    self.line.say(f"{error}; nothing is predicted")
                    self.result["prediction_error"] = str(error)
                    return True
                seconds[ranks, nodes] = time.monotonic() - began
                for size, time_us in found.items():
                    times.setdefault((ranks, nodes, size), []).append(time_us)
        self.result["collectives"] = [
            {"ranks": ranks, "nodes": nodes, "bytes": size, "time_us": statistics.median(values)}
            for (ranks, nodes, size), values in times.items()
        ]
        return True

    def _expected(self, job):
        known = self.seconds.get(job.key())
        return known or plan.expected_seconds(
            job, self.result["pilots"][job.steps_key()], self.settings, self.slots
        )

    def _start(self, job, steps, warmup):
        program, flags = plan.trainer_flags(job, self.settings, steps, warmup)
        return trainers.run(
            self.launcher,
            self.bin_folder,
            program,
            flags,
            job.ranks,
            self._oversubscribed(job),
            self.settings["threads"],
            self.settings["timeout"],
        )

    def _oversubscribed(self, job):
        return plan.crowding(job.ranks, self.settings, self.slots) > 1

    def _run(self, job, round_):
        pilot = self.result["pilots"][job.steps_key()]
        record = self._start(job, pilot["steps"], pilot["warmup"])
        self.result["runs"].append(
            {
                "job": job.key(),
                "case": plan.fields_of(job.case),
                "scaling": job.scaling,
                "ranks": job.ranks,
                "batch": job.batch,
                "round": round_,
                "steps": pilot["steps"],
                "oversubscribed": self._oversubscribed(job),
                **record,
            }
        )
        if record["status"] == "ok":
            self.seconds[job.key()] = record["wall_s"]
        else:
            self.failed.add(job.key())
            self.line.say(f"{job.title()}: {record['error']}; its other rounds are left out")
        result_file.write(self.result, self.folder)
