# SPDX-License-Identifier: Apache-2.0
"""Tests of bench/scaling.py: streams, refused flags and files, comparisons. Takes the arguments of unittest."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from unittest import mock

from scaling_case import BENCH, Scaling, draws, needs_matplotlib, run_tests  # it also finds the modules of the program

import scaling_fakes as fakes
from scaling import charts, report, result as result_file
from scaling.run import Session


def processes_of(program):
    """Numbers of the processes in whose command line `program` is a word."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{number}/cmdline", "rb") as file:
            if program in file.read().split(b"\0"):
                found.append(number)
    return found


class Streams(Scaling):
    """The program as a process of its own."""

    def start(self, *flags, **variables):
        command = [sys.executable, os.path.join(BENCH, "scaling.py"), *self.programs, f"--out={self.out}", *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **variables}, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    def test_ctrl_c_before_anything_is_measured(self):
        modules = os.path.join(self.folder, "modules")
        os.mkdir(modules)
        stop = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        fakes.write_program(os.path.join(modules, "shlex.py"), stop)
        stopped = (130, "", "ddp-scaling: stopped by Ctrl-C; what has been measured is kept\n")
        self.assertEqual(self.start(PYTHONPATH=modules), stopped)
        if charts.matplotlib is not None:
            fakes.write_program(os.path.join(self.folder, "mpirun"), "#!/bin/sh\nkill -INT $PPID; sleep 5\n")
            self.assertEqual(self.start(), stopped)
        self.assertFalse(os.path.exists(self.out))

    @needs_matplotlib
    def test_terminal_that_is_closed(self):
        scratch = os.path.join(self.folder, "scratch")
        os.mkdir(scratch)
        with self.begin(FAKE_BEHAVIOUR="hang:2", TMPDIR=scratch) as process:
            self.await_second_run(process)
            process.stderr.close()
            process.send_signal(signal.SIGHUP)
            process.stdout.read()
        self.assertEqual(process.returncode, 130)
        self.assertEqual(self.running_trainers(), [])
        self.assertEqual(os.listdir(scratch), [])
        self.assertEqual(self.result()["ended"], "interrupted")
        self.assertIn("was interrupted", self.read("report.html"))

    @needs_matplotlib
    def test_when_it_is_killed_its_run_ends_too(self):
        with self.begin(FAKE_BEHAVIOUR="hang:2") as process:
            self.await_second_run(process)
            process.kill()
        until = time.monotonic() + 30  # half of what a trainer that nobody ends takes
        while self.running_trainers() and time.monotonic() < until:
            time.sleep(0.01)
        self.assertEqual(self.running_trainers(), [])

    @needs_matplotlib
    def test_reader_of_the_live_line_that_ends(self):
        with self.begin() as process:
            process.stderr.readline()
            process.stderr.close()
            out = process.stdout.read()
        self.assertEqual(process.returncode, 0)
        self.assertIn("2 ranks train 1.54 times as fast", out)
        self.assertEqual(self.result()["ended"], "complete")
        self.assertIn("At a glance", self.read("report.html"))

    def running_trainers(self):
        return processes_of(os.path.join(self.folder, "train_mlp").encode())

    def await_second_run(self, process):
        """Its trainer has started."""
        for line in process.stderr:
            if "run 2/" in line:
                break
        until = time.monotonic() + 60
        while not self.running_trainers() and time.monotonic() < until:
            time.sleep(0.01)
        self.assertTrue(self.running_trainers())

    def begin(self, **variables):
        flags = ("--models=mlp", "--scaling=weak", "--ranks=1,2", "--seconds=0.01", "--rounds=2")
        return subprocess.Popen(
            [sys.executable, os.path.join(BENCH, "scaling.py"), *self.programs, f"--out={self.out}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where nohup runs the tests
        )

    def test_output_that_is_lost(self):
        program = os.path.join(BENCH, "scaling.py")
        for unbuffered in ("", "1"):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run(
                    [sys.executable, program, "--help"],
                    stdout=full,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                    env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                )
            words = "ddp-scaling: cannot write to standard output: No space left on device; make room there\n"
            self.assertEqual((done.returncode, done.stderr), (1, words))
        closed = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "-", sys.executable, program, "--help"], check=False)
        self.assertEqual(closed.returncode, 0)

    @needs_matplotlib
    def test_full_disk(self):
        self.measure("--ranks=1", "--scaling=weak", "--rounds=1")
        for command, file in (
            (("report", self.out), "report.html"),
            (("compare", self.out, self.out), "compare.html"),
            ((*self.programs, "--models=mlp", "--ranks=1"), "scaling.json"),
        ):
            with self.subTest(file):
                full = os.path.join(self.folder, file)
                done = subprocess.run(
                    [sys.executable, os.path.join(BENCH, "scaling.py"), *command, f"--out={full}"],
                    capture_output=True,
                    text=True,
                    check=False,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)),
                )
                words = f"cannot write {re.escape(full)}/.*: File too large; make room there, or give another --out"
                self.assert_refused(words, done.returncode, done.stdout, done.stderr)

    @needs_matplotlib
    def test_folders_whose_names_are_no_utf_8(self):
        data = os.path.join(self.folder, os.fsdecode(b"d\xff"))
        os.mkdir(data)
        self.out = os.path.join(self.folder, os.fsdecode(b"o\xff"))
        flags = ("--models=mlp", "--scaling=weak", "--ranks=1", "--seconds=0.01", "--rounds=1", f"--data={data}")
        for again in ((), ("--resume",)):
            code, out, err = self.start(*flags, *again)
            self.assertEqual(code, 0, err)
            self.assertNotIn("Traceback", err)
            self.assertIn("o?/report.html", out)
            self.assertIn(r"d\udcff", self.read("report.html"))
        self.assertEqual(self.call("report", self.out)[0], 0)
        other, self.out = self.out, os.path.join(self.folder, os.fsdecode(b"c\xff"))
        self.assertEqual(self.call("compare", other, other, f"--out={self.out}")[0], 0)
        self.assertIn(r"o\udcff", self.read("compare.html"))

    @needs_matplotlib
    def test_output_in_another_encoding(self):
        flags = ("--models=mlp", "--scaling=weak", "--ranks=1,2", "--seconds=0.01", "--rounds=1")
        code, out, err = self.start(*flags, PYTHONIOENCODING="ascii", FAKE_BEHAVIOUR="fail:2")
        self.assertEqual(code, 1, err)
        self.assertIn("under ?Failed runs?", out)


@needs_matplotlib
class Signals(Scaling):
    """What becomes of Ctrl-C, within this process."""

    def handle(self, handler):
        before = signal.signal(signal.SIGINT, handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)

    def test_while_the_report_is_drawn_it_waits(self):
        drawn = []
        self.handle(lambda *_: drawn.append(sorted(os.listdir(self.out))))

        def interrupted(result, folder):
            signal.raise_signal(signal.SIGINT)
            return write(result, folder)

        write = report.write
        with mock.patch("scaling.main.report.write", interrupted):
            self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")
        self.assertEqual(len(drawn), 1)
        self.assertIn("report.html", drawn[0])
        self.assertEqual(self.result()["ended"], "complete")

    def test_a_second_one_is_no_matter(self):
        self.handle(lambda *_: self.fail("called"))

        def interrupted(*_):
            signal.raise_signal(signal.SIGINT)

        def again(result, folder):
            signal.raise_signal(signal.SIGINT)
            return write(result, folder)

        write = report.write
        with mock.patch("scaling.run.Session._run", interrupted), mock.patch("scaling.main.report.write", again):
            self.assertEqual(self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")[0], 130)
        self.assertEqual(self.result()["ended"], "interrupted")
        self.assertIn("was interrupted", self.read("report.html"))

    def test_where_it_is_ignored_it_stays_so(self):
        self.handle(signal.SIG_IGN)

        def interrupted(session, *job):
            signal.raise_signal(signal.SIGINT)
            run(session, *job)

        run = Session._run
        with mock.patch("scaling.run.Session._run", interrupted):
            self.assertEqual(self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")[0], 0)
        self.assertEqual(self.result()["ended"], "complete")
        self.assertEqual(signal.getsignal(signal.SIGINT), signal.SIG_IGN)


class Refused(Scaling):
    @needs_matplotlib
    def test_no_mpirun(self):
        self.assert_refused(
            "/no/mpirun is not a program: install an MPI", *self.call(self.programs[0], "--mpirun=/no/mpirun")
        )
        self.assertFalse(os.path.exists(self.out))

    @needs_matplotlib
    def test_no_trainers(self):
        self.assert_refused("no train_mlp in /nowhere: build them", *self.measure("--bin=/nowhere"))

    @needs_matplotlib
    def test_trainers_that_do_not_describe_the_machine(self):
        fakes.write_program(os.path.join(self.folder, "train_mlp"), "#!/bin/sh\necho 'train_mlp: unknown flag' >&2\n")
        self.assert_refused("train_mlp --environment failed: train_mlp: unknown flag; build the", *self.measure())

    @needs_matplotlib
    def test_no_gpu(self):
        with mock.patch("scaling.main.environment.gpus", return_value=[]):
            self.assert_refused("--device=cuda needs a GPU", *self.measure("--device=cuda"))

    @needs_matplotlib
    def test_flags(self):
        for flag, words in (
            ("--models=alexnet", "may be mlp, lenet"),
            ("--ranks=0", "out of range"),
            ("--ranks=x", "not a list of numbers"),
            ("--rounds=0", "not a number above 0"),
            ("--precision=fp16", "not possible with --device=cpu"),
            ("--backend=gloo", "may be auto"),
            ("--scaling=both", "may be weak, strong"),
            ("--bucket-mb=-1", "out of range"),
            ("--reduce=ring", "may be overlap, end, each, gather, none"),
            ("--reduce=none", "is always measured"),
            ("--colour=red", "unrecognized arguments: --colour=red; --help lists the flags"),
            ("--ranks=1,3", "cannot be divided by 3 ranks"),
            ("--out=/proc/x", "cannot write to --out"),
        ):
            with self.subTest(flag):
                self.assert_refused(words, *self.measure(flag))

    def test_no_matplotlib(self):
        code = (
            "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, sys.argv.pop(1)); from scaling.main"
            " import main; sys.exit(main(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, BENCH, *self.programs], capture_output=True, text=True, check=False
        )
        self.assert_refused("needs matplotlib: install it", done.returncode, done.stdout, done.stderr)

    @needs_matplotlib
    def test_files_that_are_no_results(self):
        path = os.path.join(self.folder, "other.json")
        settings = dict.fromkeys(result_file.SETTINGS_KEYS, [])
        good = result_file.new_result(settings, dict.fromkeys(result_file.ENVIRONMENT_KEYS), "")
        for text, words in (
            ("{", "is not JSON"),
            ("[" * 100000, "is not JSON"),
            (json.dumps({**good, "version": float("nan")}), "is not JSON: NaN"),
            ("[1]", "is not a scaling result"),
            (json.dumps({**good, "version": 99}), "has version 99"),
            (json.dumps({**good, "version": "2"}), 'has version "2", and this program reads version 2'),
            (json.dumps({**good, "runs": [{}]}), "damaged: its run has no"),
            (json.dumps({**good, "runs": 1}), "damaged: it has no"),
            (json.dumps({**good, "environment": {}}), "damaged: its environment has no"),
        ):
            with self.subTest(text):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
                self.assert_refused(words, *self.call("report", path))
        self.assert_refused("cannot read", *self.call("compare", path + ".not", path))


@needs_matplotlib
class Broken(Scaling):
    """Result files that look whole but are not."""

    def test_each_command_names_the_file(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")
        good = self.read("scaling.json")
        path = os.path.join(self.out, "scaling.json")

        def spoil(run, **changes):
            return lambda result: result["runs"][run].update(changes)

        for change, words in (
            (lambda result: result["environment"]["cpu"].pop("hardware_threads"), 'has no .hardware_threads'),
            (lambda result: result["environment"].update(build=[]), "damaged"),
            (lambda result: result["pilots"].clear(), "has no .mlp-cpu-fp32-auto/weak"),
            (spoil(0, case=7), "damaged"),
            (spoil(0, ranks="two"), "damaged"),
            (spoil(1, wall_s=None), "damaged"),
            (spoil(1, buckets=[{"mib": 1}]), "has no .done_ms"),
            (lambda result: result["runs"][0]["summary"].update(samples_per_second=0), "division by zero"),
            (lambda result: result["runs"][1]["summary"].update(first_step_losses=["low"]), "damaged"),
        ):
            with open(path, "w", encoding="utf-8") as file:
                file.write(good)
            fakes.edit_result(self.out, change)
            words = f"{re.escape(path)} is damaged: .*{words.removeprefix('damaged')}.*; give a scaling.json"
            with self.subTest(words):
                self.assert_refused(words, *self.call("report", self.out))
        self.assert_refused(words, *self.call("compare", path, path))
        self.assert_refused(words, *self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1", "--resume"))
        with open(path, "w", encoding="utf-8") as file:
            file.write(good[: len(good) // 2])
        self.assert_refused("is not JSON", *self.call("report", self.out))


@needs_matplotlib
class Compare(Scaling):
    @draws
    def test_two_results_side_by_side(self):
        self.measure("--ranks=1,2", "--scaling=weak")
        a, self.out = self.out, os.path.join(self.folder, "b")
        self.measure("--ranks=1,2,4", "--scaling=weak")

        def twice_as_fast(result):
            for run in result["runs"]:
                run["summary"]["samples_per_second"] *= 2

        fakes.edit_result(self.out, twice_as_fast)
        b, self.out = self.out, os.path.join(self.folder, "both")
        code, out, _ = self.call("compare", a, b, f"--out={self.out}", "--price-a=3.6", "--price-b=9")
        self.assertEqual(code, 0)
        self.assertIn("B is 2.00 to 2.00 times as fast as A", out)
        page = self.read("compare.html")
        self.assertIn("Only in B: mlp, CPU, fp32, weak, 4 ranks", page)
        # 6400 samples/s at 3.6 an hour: 0.156 for a million; B: 2.5 times the price at twice the rate.
        self.assertRegex(page, r"<td>0\.156</td><td>0\.195</td><td>1\.25</td>")
        self.assertEqual(len(re.findall(r"<svg ", page)), 2)

    def test_what_differs_beside_the_machines_is_said(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")
        a, self.out = self.out, os.path.join(self.folder, "b")
        self.measure("--ranks=2", "--scaling=weak", "--rounds=1", "--seconds=0.02", "--data=images", "--threads=2")
        b, self.out = self.out, os.path.join(self.folder, "both")
        self.call("compare", a, b, f"--out={self.out}")
        words = (
            "The efficiencies have different bases, and cannot be compared, first for mlp, CPU, fp32, weak: those of A"
            " are relative to 1 rank, those of B to 2 ranks.",
            "with other threads of a rank: 1 in A, 2 in B.",
            "with other data: not given in A, images in B.",
            "with other seconds of a run: 0.01 in A, 0.02 in B.",
        )
        page = self.read("compare.html")
        for text in words:
            self.assertIn(text, page)
        self.call("compare", a, a, f"--out={self.out}")
        page = self.read("compare.html")
        for text in ("different bases", "measured with other"):
            self.assertNotIn(text, page)

    def test_two_settings_side_by_side(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")
        a = self.out
        settings = {
            "--precision=bf16": "mlp, CPU, bf16",
            "--reduce=end": "mlp, CPU, fp32, one reduction after backward",
            "--bucket-mb=1": "mlp, CPU, fp32, buckets 1 MiB",
            "--backend=hierarchical": "mlp, CPU, fp32, hierarchical",
        }
        for number, (flag, title) in enumerate(settings.items()):
            self.out = os.path.join(self.folder, f"b{number}")
            self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1", flag)
            code, out, _ = self.call("compare", a, self.out, f"--out={self.out}", "--price-a=1", "--price-b=2")
            self.assertEqual(code, 0)
            self.assertIn("times as fast as A", out)
            page = self.read("compare.html")
            self.assertIn(f"<span>A: mlp, CPU, fp32; B: {title} – weak</span>", page)
            self.assertEqual(len(re.findall(r"<svg ", page)), 2)
            self.assertNotIn("Only in", page)

    def test_one_setting_has_no_place_beside_two_others(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1", "--precision=fp32,bf16")
        a, self.out = self.out, os.path.join(self.folder, "b")
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1", "--reduce=end")
        self.assertIn("nothing in common", self.call("compare", a, self.out, f"--out={self.out}")[1])

    def test_cpu_beside_gpu(self):
        recorded = os.path.join(os.path.dirname(BENCH), "docs", "results")
        two = [os.path.join(recorded, name) for name in ("two-cores", "four-h200")]
        code, out, _ = self.call("compare", *two, f"--out={self.out}")
        self.assertEqual(code, 0)
        self.assertIn("times as fast as A", out)
        self.assertIn("<span>A: resnet20, CPU, fp32; B: resnet20, GPU, fp16 – weak</span>", self.read("compare.html"))

    def test_nothing_in_common(self):
        self.measure("--ranks=1", "--scaling=weak")
        a, self.out = self.out, os.path.join(self.folder, "b")
        self.measure("--ranks=2", "--scaling=weak")
        code, out, _ = self.call("compare", a, self.out, f"--out={self.out}")
        self.assertEqual(code, 0)
        self.assertIn("nothing in common", out)
        self.assertIn("have no case", self.read("compare.html"))
        self.assertIn("Only in A: mlp, CPU, fp32, weak, 1 rank.", self.read("compare.html"))


if __name__ == "__main__":
    run_tests()
