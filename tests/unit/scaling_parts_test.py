# SPDX-License-Identifier: Apache-2.0
"""Tests of the predictions of bench/scaling.py, and of its parts by themselves. Takes the arguments of unittest."""

import argparse
import io
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from unittest import mock

from scaling_case import BENCH, Scaling, draws, needs_matplotlib, run_tests  # it also finds the modules of the program

import compare_training
import peer_tools
import scaling_fakes as fakes
from scaling import UserError, analysis, charts, environment, model, plan, trainers
from scaling.run import LiveLine
from scaling.text import number


@needs_matplotlib
class Prediction(Scaling):
    def predict(self, *argv, **options):
        return self.measure("--ranks=1,2", "--scaling=weak", "--predict", *argv, **options)

    def predicted(self):
        result = self.result()
        return model.prediction(result, analysis.points(result))

    @draws
    def test_known_machine(self):
        code, out, _ = self.predict()
        self.assertEqual(code, 0)
        self.assertIn("within a node 2 us and 2 GB/s, between nodes 20 us and 1 GB/s; its median error is 0 %", out)
        found = self.predicted()
        self.assertTrue(found["good"])
        self.assertEqual(len(found["errors"]), 2 * len(model.CHECK_SIZES))
        (training,) = found["trainings"].values()
        last = training["rows"][-1]
        self.assertEqual((last["ranks"], last["nodes"]), (100_000, 50_000))
        # Two buckets of 1.91 MiB, both ready at 4 ms, on 50,000 nodes of two ranks.
        size = 1.91 * 2**20
        once = (2 + size * 5e-4 + 16 * 20 + 2 * 49_999 / 50_000 * size * 1e-3) / 1000
        self.assertAlmostEqual(last["exposed_ms"], 2 * once)
        self.assertAlmostEqual(last["step_ms"], 11 + last["exposed_ms"])
        self.assertAlmostEqual(last["efficiency"], 10 / last["step_ms"])
        page = self.read("report.html")
        self.assertIn("What more ranks would do", page)
        self.assertIn(">100,000</td>", page)
        xml.etree.ElementTree.fromstring(self.read("mlp-cpu-fp32-auto-default-predicted.svg"))

    def test_both_rates_are_shown_where_large_arrays_are_slower(self):
        self.predict()

        def slower(result):
            for collective in result["collectives"]:
                if collective["nodes"] == 1:  # which move as many bytes as they reduce
                    collective["time_us"] += max(0, collective["bytes"] - (1 << 20)) * 2e-3

        fakes.edit_result(self.out, slower)
        words = "2 {}s and 2 GB/s up to 1 MiB that a member moves, 0.4 GB/s beyond, between nodes 20 {}s and 1 GB/s"
        self.assertIn(words.format("u", "u"), model.line(self.predicted()))
        self.call("report", self.out)
        self.assertIn(words.format("µ", "µ"), self.read("report.html"))

    def test_other_nodes_and_links(self):
        self.predict()
        before = self.predicted()["trainings"]
        code, _, _ = self.call("report", self.out, "--node-size=8", "--link-gb-s=100", "--link-latency-us=1")
        self.assertEqual(code, 0)
        self.assertIn("nodes of 8 ranks, with links of the given latency", self.read("report.html"))
        fakes.edit_result(
            self.out,
            lambda result: result["settings"].update(
                predict={"node_size": 8, "link_gb_s": 100.0, "link_latency_us": 1.0}
            ),
        )
        after = self.predicted()["trainings"]
        for case, training in after.items():
            self.assertEqual(training["rows"][0]["ranks"], 16)
            self.assertLess(training["rows"][-1]["step_ms"], before[case]["rows"][-1]["step_ms"])

    def test_gpus_of_one_host_need_a_link_between_nodes(self):
        fakes.write_program(os.path.join(self.folder, "nvidia-smi"), fakes.NVIDIA_SMI)
        with mock.patch.dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}"):
            self.assert_refused("give --link-gb-s", *self.predict("--device=cuda"))
            code, out, _ = self.predict("--device=cuda", "--link-gb-s=50", "--link-latency-us=4")
        self.assertEqual(code, 0)
        self.assertIn("within a node 2 us and 2 GB/s, between nodes 4 us and 50 GB/s", out)
        self.assertEqual({(c["ranks"], c["nodes"]) for c in self.result()["collectives"]}, {(2, 1)})
        self.assertEqual(len(self.predicted()["errors"]), len(model.CHECK_SIZES))
        self.assertTrue(self.predicted()["good"])

    def test_nothing_is_predicted_by_a_model_that_does_not_fit(self):
        code, out, _ = self.predict(behaviour="rough")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"above 15 % .*so nothing is predicted")
        self.assertFalse(self.predicted()["good"])
        self.assertNotIn("(predicted)", self.read("report.html"))
        self.assertFalse([name for name in os.listdir(self.out) if "predicted" in name])

    def test_nothing_is_predicted_by_a_model_without_communication(self):
        # It has the step right within 9 %, since computation is measured, and what reduction adds, 2 ms, not at all.
        code, out, _ = self.predict("--batch=128", behaviour="empty")
        self.assertEqual(code, 0)
        self.assertLess(self.predicted()["step_errors"][0], model.LIMIT)
        self.assertFalse(self.predicted()["good"])
        self.assertRegex(out, r"100 % for what reduction adds to a step: above .*so nothing is predicted")
        self.assertNotIn("(predicted)", self.read("report.html"))

    def test_nothing_is_predicted_where_reduction_adds_no_more_than_noise(self):
        self.predict()

        def one_round_without_loss(result):
            runs = {(run["round"], run["ranks"], run["case"]["reduce"]): run["summary"] for run in result["runs"]}
            runs[0, 2, "overlap"]["samples_per_second"] = runs[0, 2, "none"]["samples_per_second"]

        fakes.edit_result(self.out, one_round_without_loss)
        self.assertEqual(self.predicted()["added_errors"], [])
        self.assertFalse(self.predicted()["good"])
        self.assertIn("within the noise", model.verdict(self.predicted()))

    def test_nothing_is_predicted_from_one_round(self):
        code, out, _ = self.predict("--rounds=1")
        self.assertEqual(code, 0)
        self.assertFalse(analysis.points(self.result())[1]["communication_sure"])
        self.assertEqual(self.predicted()["added_errors"], [])
        self.assertIn("within the noise and checks nothing, so nothing is predicted", out)
        self.assertNotIn("(predicted)", self.read("report.html"))

    def test_failing_benchmark_leaves_the_rest(self):
        code, out, err = self.predict(behaviour="no_bench")
        self.assertEqual(code, 1)
        self.assertIn("ddp_perf: no memory (exit code 1); nothing is predicted", err)
        words = "Nothing is predicted: ddp_perf on 2 ranks failed: ddp_perf: no memory (exit code 1). --resume tries"
        self.assertIn(f"error: {words}", out)
        self.assertIn(words, self.read("report.html"))
        self.assertIn("At a glance", self.read("report.html"))
        self.assertNotIn("What more ranks", self.read("report.html"))
        code, _, _ = self.predict("--resume")
        self.assertEqual(code, 0)
        self.assertNotIn("Nothing is predicted", self.read("report.html"))
        self.assertIn("What more ranks", self.read("report.html"))

    def test_time_limit_holds_for_all_reduces(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--predict")
        fakes.edit_result(self.out, lambda result: result["collectives"].clear())
        code, _, err = self.predict("--resume", "--limit-minutes=1e-9")
        self.assertEqual(code, 0)
        self.assertNotIn("all-reduces, round", err)
        self.assertIn("the time limit is reached; --resume goes on from here", err)
        self.assertEqual((self.result()["ended"], self.result()["collectives"]), ("time limit", []))
        self.assertIn("reached its time limit", self.read("report.html"))
        self.predict("--resume")
        self.assertTrue(self.predicted()["good"])

    def test_ranks_that_share_cores_predict_nothing(self):
        once = ("--scaling=weak", "--rounds=1", "--predict")
        self.assert_refused(
            "has 2 cores: none of --ranks=1,4 above 1 fits; give one that does", *self.measure("--ranks=1,4", *once)
        )
        self.assert_refused(
            "a core or GPU for each of their 2 threads.*none of --ranks=1,2 above 1",
            *self.measure("--ranks=1,2", "--threads=2", *once),
        )
        self.assertFalse(os.path.exists(self.out))

    def test_all_reduces_of_fewer_ranks_are_a_failure(self):
        alone = fakes.MPIRUN.replace("FAKE_RANKS=$2", "FAKE_RANKS=1")
        launcher = trainers.Launcher(fakes.write_program(os.path.join(self.folder, "alone"), alone))
        with self.assertRaisesRegex(UserError, "ddp_perf on 2 ranks failed: it ran as 1 rank instead of 2: give the"):
            trainers.time_all_reduces(launcher, self.folder, 2, 2, [1024], 60)

    def test_refused(self):
        self.assert_refused("give --predict too", *self.measure("--node-size=4"))
        self.assert_refused("give --link-gb-s too", *self.predict("--link-latency-us=4"))
        os.remove(os.path.join(self.folder, "ddp_perf"))
        self.assert_refused("no ddp_perf and train_mlp in|no train_mlp and ddp_perf in", *self.predict())
        self.measure("--ranks=1", "--scaling=weak", "--rounds=1")
        self.assert_refused("measure with --predict", *self.call("report", self.out, "--node-size=4"))


class Parts(unittest.TestCase):
    def test_gpus_as_nvidia_smi_lists_them(self):
        with tempfile.TemporaryDirectory() as folder:
            fakes.write_program(os.path.join(folder, "nvidia-smi"), fakes.NVIDIA_SMI)
            with mock.patch.dict(os.environ, {"PATH": f"{folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}):
                launcher = trainers.Launcher(fakes.make_programs(folder)[1].partition("=")[2])
                snapshot = environment.snapshot(os.path.join(folder, "train_mlp"), "cuda", launcher)
        self.assertEqual([gpu["name"] for gpu in snapshot["gpus"]], ["NVIDIA H200"])  # the second is not visible
        self.assertEqual(snapshot["gpus"][0]["driver_version"], "580.1")
        self.assertEqual(snapshot["gpu_topology"], ["\tGPU0\tGPU1", "GPU0\t X \tNV18"])
        self.assertEqual(snapshot["launcher"]["version"], "mpirun (Open MPI) 4.1.4")

    def test_communication_of_steps_of_which_few_wait_long(self):
        # 9 steps of 10 expose 0.01 ms of 2, the others 10 ms of 12: a mean of 1.009 of 3 ms.
        run = {
            "ranks": 2,
            "case": {"reduce": "overlap"},
            "parameters": 750_000,
            "summary": {
                "exposed_comm_ms": 0.01,
                "overlap": 1 - 1.009 / 3,
                "mean_communication_ms": 3.0,
                "mean_exposed_ms": 1.009,
            },
            "buckets": [{"ready_ms": 1, "launched_ms": 1, "done_ms": 90}],
        }
        self.assertEqual(analysis.communication(run), (3.0, 1.009))
        self.assertAlmostEqual(analysis.bus_bandwidth(run), 1.0)
        self.assertIsNone(analysis.communication({**run, "ranks": 1}))
        self.assertIsNone(analysis.communication({**run, "case": {"reduce": "none"}}))
        nothing = {"mean_communication_ms": 0.0, "mean_exposed_ms": 0.0}
        self.assertIsNone(analysis.communication({**run, "summary": nothing}))

    def test_communication_of_earlier_trainers_is_that_of_the_last_step(self):
        run = {
            "ranks": 2,
            "case": {"reduce": "overlap"},
            "summary": {"exposed_comm_ms": 0.01, "overlap": 0.5},
            "buckets": [
                {"ready_ms": 1, "launched_ms": 1, "done_ms": 3},
                {"ready_ms": 2, "launched_ms": 2, "done_ms": 4},
                {"ready_ms": 5, "launched_ms": 6, "done_ms": 7},
            ],
        }
        self.assertEqual(analysis.communication(run), (4, 2))
        self.assertIsNone(analysis.communication({**run, "buckets": []}))

    def test_output_of_the_trainers(self):
        read = trainers.read_output(
            "model: lenet; 1199882 parameters; sgd\n  bucket        MiB      ready\n       0       4.51      0.550     "
            " 0.551     12.024\n       1       0.07     22.123     22.123     22.223\n"
        )
        self.assertEqual(read["parameters"], 1199882)
        self.assertEqual([bucket["done_ms"] for bucket in read["buckets"]], [12.024, 22.223])

    def test_fit_finds_latency_bandwidth_and_caches(self):
        def time(size):
            volume = model.moved(4, size)
            return 2 * 3.0 + volume * 1e-4 + max(0, volume - 1.5 * 2**22) * 2e-4

        level = model.fit([(4, size, time(size)) for size in model.FIT_SIZES])
        self.assertAlmostEqual(level.latency_us, 3)
        self.assertAlmostEqual(level.us_per_byte * 1e4, 1)
        self.assertAlmostEqual(level.extra_us_per_byte * 1e4, 2)
        self.assertEqual(level.knee, 1.5 * 2**22)
        # Large arrays get a third of the rate of small ones.
        self.assertEqual(level.text(), "3 us and 10 GB/s up to 6 MiB that a member moves, 3.33 GB/s beyond")
        big = 1 << 40
        self.assertAlmostEqual(1e-3 * model.moved(4, big) / level.time_us(4, big), level.gb_s_beyond(), places=3)
        self.assertEqual(model.Level(2.0, 1e-3).text("µ"), "2 µs and 1 GB/s")
        self.assertEqual(model.Level(2.0, 0.0).text(), "2 us and no cost of a byte")
        # Never a negative latency or cost.
        level = model.fit([(2, 1 << 20, 100.0), (2, 1 << 22, 500.0)])
        self.assertGreaterEqual(level.latency_us, 0)
        self.assertIsNone(model.fit([]))

    def test_default_ranks_follow_the_cores(self):
        self.assertEqual(
            [plan.default_ranks(cores) for cores in (1, 2, 6, 64)], [[1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
        )

    def test_steps_fill_the_time(self):
        self.assertEqual(plan.choose_steps(10, 2), (200, 20))
        self.assertEqual(plan.choose_steps(1e5, 2), (10, 5))
        self.assertEqual(plan.choose_steps(1e-3, 2), (2000, 200))

    def test_live_line_is_rewritten_on_a_terminal(self):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        with mock.patch("shutil.get_terminal_size", return_value=os.terminal_size((10, 24))):
            line = LiveLine(terminal)
            line.show("0123456789abc")
            line.show("short")
            line.say("an error that is longer")
        self.assertEqual(terminal.getvalue(), "\r012345678\rshort    \r     \ran error that is longer\n")

    def test_error_line_skips_the_frame_of_mpirun(self):
        self.assertEqual(
            trainers.error_line("train_mlp", 1, "-----\nmpirun noticed\ntrain_mlp: no memory\n"),
            "train_mlp: no memory (exit code 1)",
        )
        self.assertEqual(trainers.error_line("train_mlp", 1, "----\nnot found\n"), "not found (exit code 1)")

    def test_error_line_names_the_rank_that_died_and_not_those_that_were_stopped(self):
        frame = "-----\nPrimary job  terminated normally, but\n-----\n"
        stopped = "train_mlp: rank 0: stopped by SIGTERM after step 90; nothing is saved without --save"
        killed = "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed)."
        hydra = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"
        first = "The first process to do so was:\n\n  Process name: [[150,1],1]\n  Exit code:    3\n-----\n"
        for err, words in (
            (f"{frame}{stopped}\n-----\n{killed}\n-----\n", f"{stopped}; {killed}"),
            (f"{frame}{killed}\n", killed),
            (f"{stopped}\n{'=' * 20}\n=   EXIT CODE: 9\n{'=' * 20}\n{hydra}\n", f"{stopped}; {hydra}"),
            (f"{frame}{stopped}\n{first}", f"{stopped}; rank 1 ended first, with exit code 3"),
            (f"{stopped}\ntrain_mlp: rank 1: no memory\n{killed}\n{first}", "train_mlp: rank 1: no memory"),
            (f"{stopped}\n", stopped),
        ):
            self.assertEqual(trainers.error_line("train_mlp", 137, err), f"{words} (exit code 137)")

    def test_flags_of_open_mpi_are_for_open_mpi(self):
        for version, flags in (
            ("mpirun (Open MPI) 4.1.4", {"--oversubscribe", "--mca", "--bind-to"}),
            ("HYDRA build details:", set()),
        ):
            with self.subTest(version), tempfile.TemporaryDirectory() as folder:
                mpirun = os.path.join(folder, "a folder", "mpirun")
                os.mkdir(os.path.dirname(mpirun))
                fakes.write_program(mpirun, f"#!/bin/sh\necho '{version}'\n")
                setup = peer_tools.Setup(argparse.Namespace(mpirun=mpirun))
                self.assertEqual(setup.mpirun(1)[:3], [mpirun, "-n", "1"])
                for command in (
                    setup.mpirun(setup.cpus + 1),
                    trainers.Launcher(shlex.quote(mpirun)).command(setup.cpus + 1, True, 1),
                ):
                    self.assertEqual({word for word in command if word.startswith("--")}, flags)

    def test_peer_is_pytorch_with_its_faster_settings(self):
        def torch_ddp(command, _timeout):
            rate = 200 if "--onednn-linear" in command and "--batch=64" in command else 100
            return f"torch-2,mlp,cpu,fp32,plain,1,1,64,9,9,1,1,1,{rate},nan,nan,7\n"

        setup = mock.Mock(arguments=argparse.Namespace(peers="peers", steps=9))
        setup.mpirun.return_value = ["mpirun"]
        with mock.patch("compare_training.run", side_effect=torch_ddp) as run:
            row = compare_training.train_torch(setup, "python3", 1, 64)
            self.assertEqual((row["samples_per_s"], row["flags"]), ("200", "--onednn-linear"))
            self.assertEqual(run.call_count, 2)  # which one is faster depends on the processor
            self.assertEqual(compare_training.train_torch(setup, "python3", 1, 32)["flags"], "")
        with mock.patch("compare_training.run", return_value=None):
            self.assertIsNone(compare_training.train_torch(setup, "python3", 1, 64))

    def test_compressed_trainings_start_as_the_other_tools_do(self):
        program = os.path.join(BENCH, "compression_accuracy.py")
        trainer = '#!/bin/sh\nfor word; do :; done\necho "{\\"test_accuracy\\": 0.5}" >${word#*=}\n'
        variables = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
        for version in ("mpirun (Open MPI) 4.1.4", "HYDRA build details:"):
            with self.subTest(version), tempfile.TemporaryDirectory() as folder:
                log = os.path.join(folder, "log")
                text = fakes.MPIRUN.replace("mpirun (Open MPI) 4.1.4", version)
                note = f'echo "$* as ${{OMPI_ALLOW_RUN_AS_ROOT-nobody}}" >>{log}'
                text = text.replace("esac\nwhile", f"esac\n{note}\nwhile")
                mpirun = fakes.write_program(os.path.join(folder, "mpirun"), text)
                fakes.write_program(os.path.join(folder, "train_mlp"), trainer)
                command = [sys.executable, program, f"--bin={folder}", "--data=x", "--modes=bf16", "--seeds=2"]
                done = subprocess.run(
                    [*command, f"--mpirun={mpirun}"], capture_output=True, text=True, check=False, env=variables
                )
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("| bf16 | 50.000 % | +0.000 | +0.000 to +0.000 |", done.stdout)
                with open(log, encoding="utf-8") as file:
                    first = file.readline()
                self.assertEqual("--oversubscribe" in first, "Open MPI" in version)
                allowed = "Open MPI" in version and os.geteuid() == 0
                self.assertIn(" as 1" if allowed else " as nobody", first)
                done = subprocess.run(
                    [*command, f"--mpirun={folder}/none"], capture_output=True, text=True, check=False, env=variables
                )
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, r"^compression_accuracy.py: .*/none is not a program: .*\n$")

    def test_numbers_have_no_exponents(self):
        for value, digits, text in (
            (999.4, 3, "999"),
            (999.7, 3, "1,000"),
            (-999.7, 3, "-1,000"),
            (1170.2, 3, "1,170"),
            (150.3, 2, "150"),
            (99.96, 3, "100"),
            (9999.7, 4, "10,000"),
            (0.01234, 3, "0.0123"),
            (0.0, 3, "0"),
            (None, 3, "–"),
        ):
            self.assertEqual(number(value, digits), text)

    @needs_matplotlib
    def test_pictures_name_a_step_of_a_second_in_figures(self):
        p = {"step_ms": 1170.2, "ideal_ms": None, "ranks": 1, "oversubscribed": False, "title": "resnet50"}
        p |= {key: None for key, _, _ in charts.BREAKDOWN}
        with mock.patch("scaling.charts.finish", side_effect=lambda figure, *_: figure):
            texts = [text.get_text() for text in charts.breakdown([p], "weak", "name").axes[0].texts]
        self.assertEqual(texts, ["1,170 ms"])

    def test_program_that_is_being_started_at_ctrl_c_is_ended(self):
        started = []

        class Interrupted(subprocess.Popen):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                started.append(self)
                signal.raise_signal(signal.SIGINT)

        def stop(_number, _frame):
            raise InterruptedError

        before = signal.signal(signal.SIGINT, stop)
        try:
            with (
                mock.patch("scaling.trainers.subprocess.Popen", Interrupted),
                self.assertRaises(InterruptedError),
            ):
                trainers.start(["sleep", "60"], 60, None)
            self.assertIs(signal.getsignal(signal.SIGINT), stop)
            self.assertEqual(started[0].returncode, -signal.SIGTERM)
            with self.assertRaises(FileNotFoundError):
                trainers.start(["/no/such/program"], 60, None)
            self.assertIs(signal.getsignal(signal.SIGINT), stop)
        finally:
            signal.signal(signal.SIGINT, before)

    def test_launcher_needs_a_program(self):
        with self.assertRaises(UserError):
            trainers.Launcher("/no/such/mpirun")


if __name__ == "__main__":
    run_tests()
