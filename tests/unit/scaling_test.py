# SPDX-License-Identifier: Apache-2.0
"""Tests of measurements and reports of bench/scaling.py. Takes the arguments of unittest."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from unittest import mock

# It also finds the modules of the program.
from scaling_case import BENCH, Scaling, blank, draws, needs_matplotlib, run_tests

import scaling_fakes as fakes
from scaling import UserError, analysis, main, result as result_file, trainers


@needs_matplotlib
class Measurement(Scaling):
    def test_figures_of_known_steps(self):
        code, out, _ = self.measure("--ranks=1,2")
        self.assertEqual(code, 0)
        weak, strong = self.points()["weak", 2], self.points()["strong", 2]
        # 64 samples in 10 ms alone; with two ranks 10 + 1 + 2 ms.
        self.assertAlmostEqual(weak["efficiency"], 10 / 13)
        self.assertAlmostEqual(weak["speedup"], 20 / 13)
        self.assertAlmostEqual(weak["lost_to_sharing"], 1 - 10 / 11)
        self.assertAlmostEqual(weak["lost_to_communication"], 10 / 11 - 10 / 13)
        self.assertEqual(weak["lost_to_cores"], 0)
        self.assertTrue(weak["communication_sure"])
        self.assertAlmostEqual(weak["ideal_ms"] + weak["sharing_ms"] + weak["reduction_ms"], 13)
        self.assertAlmostEqual(weak["reduction_ms"], 2)
        self.assertAlmostEqual(weak["communication_ms"], 2)  # 1 ms exposed, half hidden
        self.assertAlmostEqual(weak["hidden_ms"], 1)
        self.assertAlmostEqual(weak["communication_to_computation"], 2 / 11)
        self.assertAlmostEqual(weak["bus_bandwidth_gb_s"], 4e6 * 2 * 1 / 2 / 2e-3 / 1e9)
        self.assertEqual(weak["peak_memory_mib"], 102)
        # 256 samples in 40 ms alone, 128 on each of two ranks in 20 + 1 + 2 ms.
        self.assertAlmostEqual(strong["speedup"], 40 / 23)
        self.assertEqual(strong["loss_check"], "as with 1 rank")
        self.assertIn("mlp, CPU, fp32, weak: 2 ranks train 1.54 times as fast as 1 rank", out)

        page = self.read("report.html")
        self.assertNotIn("<span class=range>noise", page)
        self.assertIn("Fake CPU", page)
        self.assertIn("onednn 3.7.2", page)

        self.assertIsNone(weak["joules_per_sample"])
        self.assertNotIn("energy of a sample", page)

    def test_hidden_communication_is_the_rest_of_the_medians(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=3")
        rounds = ((2, 1), (4, 4), (9, 2))  # communication and what of it is exposed; the median difference is 1

        def change(result):
            for run in result["runs"]:
                if run["case"]["reduce"] == "overlap":
                    communication, exposed = rounds[run["round"]]
                    run["summary"].update(mean_communication_ms=communication, mean_exposed_ms=exposed)

        fakes.edit_result(self.out, change)
        point = self.points()["weak", 2]
        self.assertEqual((point["communication_ms"], point["exposed_ms"], point["hidden_ms"]), (4, 2, 2))

    def test_without_one_rank_the_fewest_ranks_reduce_too(self):
        self.measure("--ranks=2,4", "--scaling=weak")
        rates = {(2, "overlap"): 180, (2, "none"): 200, (4, "overlap"): 360, (4, "none"): 400}

        def change(result):
            result["environment"]["slots"] = 4
            for run in result["runs"]:
                run["summary"]["samples_per_second"] = rates[run["ranks"], run["case"]["reduce"]]

        fakes.edit_result(self.out, change)
        point = self.points()["weak", 4]
        losses = ("lost_to_cores", "lost_to_sharing", "lost_to_communication", "sharing_ms", "reduction_ms")
        self.assertEqual([point[name] for name in losses], [0, 0, 0, 0, 0])
        axes = {}

        def finish(figure, name, description):
            axes[name] = figure.axes[0]
            return blank(figure, name, description)

        rates[4, "none"] = 600
        fakes.edit_result(self.out, change)
        with mock.patch("scaling.charts.finish", finish):
            self.call("report", self.out)
        self.assertGreater(axes["mlp-cpu-fp32-auto-default-efficiency"].get_ylim()[1], 1.5)
        legend = axes["mlp-cpu-fp32-auto-default-step-weak"].get_legend()
        self.assertEqual([text.get_text() for text in legend.get_texts()], ["ideal"])  # the gain hides what is lost
        verdict = analysis.verdict(self.points()["weak", 4])
        self.assertIn("50.0 points are gained from caches, memory bandwidth and cores that the ranks share,", verdict)
        self.assertIn("50.0 points are lost to communication", verdict)

    def test_energy_and_operations(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1", behaviour="metered")
        self.assertEqual(self.points()["weak", 2]["joules_per_sample"], 0.25)
        self.assertEqual(self.points()["weak", 2]["share_of_products"], 0.75)
        page = self.read("report.html")
        self.assertIn("energy of a sample (J)", page)
        self.assertIn("<p>Energy: processors only.</p>", page)
        self.assertIn("75&nbsp;%", page)

        def beyond_the_whole(result):
            for run in result["runs"]:
                run["summary"]["operations"]["share_of_products"] = 1.25

        fakes.edit_result(self.out, beyond_the_whole)
        self.assertIsNone(self.points()["weak", 2]["share_of_products"])

    def test_one_round_proves_nothing(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1")
        self.assertFalse(self.points()["weak", 2]["communication_sure"])
        self.assertIn("<span class=range>noise", self.read("report.html"))
        self.assertIn("within the noise", self.read("report.html"))

    def test_rounds_take_turns(self):
        self.measure("--ranks=1,2", "--scaling=weak")
        order = [(run["round"], run["ranks"], run["case"]["reduce"]) for run in self.result()["runs"]]
        once = [(1, "none"), (2, "overlap"), (2, "none")]
        self.assertEqual(order, [(round_, *job) for round_ in (0, 1) for job in once])

    @draws
    def test_ways_to_reduce_are_set_beside_each_other(self):
        code, out, _ = self.measure("--ranks=1,2", "--scaling=weak", "--reduce=overlap,end,each,gather,none")
        self.assertEqual(code, 0)
        # One rank and the training without reduction are measured once for all.
        once = [(1, "none"), *((2, way) for way in ("overlap", "end", "each", "gather", "none"))]
        self.assertEqual([(run["ranks"], run["case"]["reduce"]) for run in self.result()["runs"]], 2 * once)
        for run in self.result()["runs"]:
            flags = [word for word in run["command"].split() if word.startswith("--reduce=")]
            way = run["case"]["reduce"]
            self.assertEqual(flags, [f"--reduce={way}"] if run["ranks"] > 1 and way != "overlap" else [])
        (group,) = analysis.reductions(analysis.points(self.result()))
        self.assertEqual([p["reduction"] for p in group], ["overlap", "end", "each", "gather"])
        for p, added in zip(group, (2, 4, 5, 6)):
            self.assertAlmostEqual(p["added_ms"], added)
            self.assertAlmostEqual(p["efficiency"], 10 / (11 + added))
            self.assertAlmostEqual(p["efficiency_without_reduction"], 10 / 11)
        page = self.read("report.html")
        self.assertIn("What overlap and buckets are worth", page)
        self.assertRegex(page, r"overlap <span class=range>buckets overlapped</span></td>.*<td>0\.5</td>")
        self.assertEqual(len(re.findall(r"<svg ", page)), 4 + 1)  # the cases' pictures are those of overlap
        self.assertIn("mlp, CPU, fp32, 2 ranks: reduction adds to a step, in ms: overlap 2, end 4, each 5,", out)
        xml.etree.ElementTree.fromstring(self.read("mlp-cpu-fp32-auto-reductions.svg"))

    def test_overlap_with_given_buckets_is_one_of_the_ways_to_reduce(self):
        flags = ("--reduce=overlap,end", "--bucket-mb=1,0", "--precision=fp32,bf16")
        _, out, _ = self.measure("--ranks=1,2", "--scaling=weak", "--rounds=1", *flags)
        for training in ("mlp, CPU, fp32", "mlp, CPU, bf16"):
            self.assertIn(f"{training}, 2 ranks: reduction adds to a step, in ms: overlap 2, end 4", out)
            self.assertIn(f"<figcaption>{training}: communication per step", self.read("report.html"))
        self.assertIn("overlap <span class=range>buckets overlapped, 1 MiB</span>", self.read("report.html"))

    def test_other_ways_to_reduce_are_measured_with_one_kind_of_scaling(self):
        self.measure("--ranks=1,2", "--reduce=overlap,end", "--rounds=1")
        made = [(run["scaling"], run["ranks"], run["case"]["reduce"]) for run in self.result()["runs"]]
        weak = [("weak", 1, "none"), ("weak", 2, "overlap"), ("weak", 2, "end"), ("weak", 2, "none")]
        self.assertEqual(made, weak + [("strong", 1, "none"), ("strong", 2, "overlap"), ("strong", 2, "none")])

    def test_other_loss_of_one_way_is_an_error(self):
        code, out, _ = self.measure("--ranks=1,2", "--scaling=weak", "--reduce=overlap,end", behaviour="loss_end:2")
        self.assertEqual(code, 1)
        self.assertIn("error: mlp, CPU, fp32: --reduce=end has a loss of 1.5, and --reduce=overlap 1.25", out)
        self.assertIn("differs: 1.5", self.read("report.html"))

    def test_failure_of_one_way_leaves_the_others(self):
        code, _, _ = self.measure("--ranks=1,2", "--scaling=weak", "--reduce=overlap,end", behaviour="fail_end:2")
        self.assertEqual(code, 1)
        self.assertEqual([p["reduction"] for p in analysis.points(self.result())], ["overlap", "overlap", "end"])
        self.assertIn("one reduction after backward, weak, 2 ranks", self.read("report.html"))

    @draws
    def test_report_is_one_file(self):
        self.measure("--ranks=1,2,4", "--bucket-mb=1,25", "--scaling=weak")
        page = self.read("report.html")
        self.assertNotRegex(page, r"(?:src|href)=\"(?!#)|url\((?!#)|@import|<script")
        self.assertEqual(len(re.findall(r"<svg ", page)), 2 * 4 + 1)
        ids = re.findall(r'\bid="([^"]+)"', page)
        self.assertEqual(len(ids), len(set(ids)))
        self.assertNotIn("#00000", page)  # every stand-in colour became a variable
        self.assertIn("prefers-color-scheme:dark", page)
        pictures = [name for name in os.listdir(self.out) if name.endswith(".svg")]
        self.assertEqual(len(pictures), 2 * 4 + 1)
        for name in pictures:
            xml.etree.ElementTree.fromstring(self.read(name))
        rows = list(csv.DictReader(io.StringIO(self.read("scaling.csv"))))
        self.assertEqual([row["ranks"] for row in rows], ["1", "2", "4"] * 2)

    def test_gains_of_choices_are_medians_of_ratios_within_rounds(self):
        self.measure("--ranks=1,2", "--bucket-mb=1,25", "--scaling=weak", "--rounds=3")
        rates = {1: (100, 300, 200), 25: (200, 150, 400)}  # 2, 0.5 and 2 times; of the medians it is 1

        def change(result):
            for run in result["runs"]:
                if run["case"]["reduce"] == "overlap":
                    run["summary"]["samples_per_second"] = rates[run["case"]["bucket_mb"]][run["round"]]

        fakes.edit_result(self.out, change)
        (gain,) = analysis.choices(analysis.points(self.result()))
        self.assertEqual(gain["gain"], 2)

        def no_round_in_common(result):
            result["runs"] = [
                run for run in result["runs"] if run["round"] == {1: 0, 25: 1}.get(run["case"]["bucket_mb"], 0)
            ]

        fakes.edit_result(self.out, no_round_in_common)
        (gain,) = analysis.choices(analysis.points(self.result()))
        self.assertIsNone(gain["gain"])
        self.assertEqual(self.call("report", self.out)[0], 0)

    @draws
    def test_oversubscribed_is_marked_everywhere(self):
        self.measure("--ranks=1,2,4", "--scaling=weak")
        point = self.points()["weak", 4]
        self.assertTrue(point["oversubscribed"])
        self.assertFalse(self.points()["weak", 2]["oversubscribed"])
        self.assertEqual(point["lost_to_cores"], 0.5)
        self.assertIn("--oversubscribe", self.result()["runs"][-1]["command"])
        self.assertNotIn("--oversubscribe", self.result()["runs"][0]["command"])
        page = self.read("report.html")
        self.assertEqual(
            len(re.findall(r"<td class=\"text\">(?:weak, )?4 <span class=badge>oversubscribed", page)), 2
        )  # each table
        self.assertNotRegex(page, r"<td class=\"text\">(?:weak, )?[12] <span class=badge>")
        for name in ("speedup", "efficiency", "step-weak"):
            self.assertIn("oversubscribed", self.read(f"mlp-cpu-fp32-auto-default-{name}.svg"), name)
        self.assertNotIn("4 ranks train", page)  # never taken for scaling

    def test_many_threads_oversubscribe_too(self):
        self.measure("--ranks=1,2", "--scaling=weak", "--threads=2")
        self.assertFalse(self.points()["weak", 1]["oversubscribed"])
        self.assertTrue(self.points()["weak", 2]["oversubscribed"])

    def test_failure_is_in_the_report_beside_the_rest(self):
        code, _, err = self.measure("--ranks=1,2,4", "--scaling=weak", behaviour="fail:4")
        self.assertEqual(code, 1)
        self.assertEqual(sorted(self.points()), [("weak", 1), ("weak", 2)])
        self.assertIn("train_mlp: rank 1: the link is broken (exit code 3)", err)
        page = self.read("report.html")
        self.assertIn("rank 1: the link is broken (exit code 3)", page)
        self.assertIn("2 runs failed", page)
        self.assertIn('<td class="text">mlp, CPU, fp32, weak, 4 ranks <span class=badge>oversubscribed</span></td>', page)
        # Not tried again in the second round.
        self.assertEqual(sum(run["ranks"] == 4 for run in self.result()["runs"]), 2)

    def test_failure_of_one_rank_leaves_the_others(self):
        code, _, _ = self.measure("--ranks=1,2,4", "--scaling=weak", behaviour="fail:1")
        self.assertEqual(code, 1)
        point = self.points()["weak", 4]
        self.assertEqual((point["base_ranks"], self.points()["weak", 2]["efficiency"]), (2, 1))
        self.assertAlmostEqual(point["efficiency"], 13 / 15)

    def test_nothing_measured_still_gives_a_report(self):
        code, _, _ = self.measure("--ranks=2", "--scaling=weak", behaviour="fail:2")
        self.assertEqual(code, 1)
        self.assertIn("Nothing was measured", self.read("report.html"))

    def test_hanging_program_is_ended(self):
        # The longer one where a busy machine needs more than half a second for the run that does not hang.
        for limit in ("0.5", "10"):
            self.out = os.path.join(self.folder, limit)
            began = time.monotonic()
            code, _, _ = self.measure("--ranks=1,2", "--scaling=weak", f"--timeout={limit}", behaviour="hang:2")
            took = time.monotonic() - began
            if ("weak", 1) in self.points():
                break
        self.assertLess(took, 50)
        self.assertEqual(code, 1)
        self.assertIn(f"took more than {limit} s and was ended", self.read("report.html"))
        self.assertIn(("weak", 1), self.points())

    def test_quick_measurement_ends_hanging_programs_in_time(self):
        # The last run starts before the time limit; SIGTERM and the report take some seconds.
        self.assertLessEqual(60 * main.QUICK["limit_minutes"] + main.QUICK["timeout"] + trainers.KILL_AFTER, 175)
        for flags, expected in (((), main.QUICK["timeout"]), (("--timeout=60",), 60)):
            self.out = os.path.join(self.folder, str(expected))
            self.measure("--quick", "--ranks=1", "--scaling=weak", *flags)
            self.assertEqual(self.result()["settings"]["timeout"], expected)

    def test_bad_summaries_are_failures(self):
        for behaviour, words in (
            ("not_json:2", "a summary that is not JSON"),
            ("no_number:2", "without the number overlap"),
        ):
            with self.subTest(behaviour):
                self.out = os.path.join(self.folder, behaviour)
                code, _, err = self.measure("--ranks=1,2", "--scaling=weak", behaviour=behaviour)
                self.assertEqual(code, 1)
                self.assertIn(words, err)

    def test_launcher_that_starts_each_rank_alone_is_a_failure(self):
        alone = fakes.MPIRUN.replace("FAKE_RANKS=$2", "FAKE_RANKS=1")
        fakes.write_program(os.path.join(self.folder, "mpirun"), alone)
        code, out, err = self.measure("--ranks=1,2", "--scaling=weak")
        self.assertEqual(code, 1)
        words = "train_mlp: ran as 1 rank instead of 2: give the launcher of the MPI that it was built with (--mpirun)"
        self.assertIn(words, err)
        self.assertIn(words, self.read("report.html"))
        self.assertNotIn("2 ranks train", out)
        self.assertEqual(sorted(self.points()), [("weak", 1)])

    def test_other_loss_is_an_error(self):
        code, out, _ = self.measure("--ranks=1,2", "--scaling=strong", behaviour="loss:2")
        self.assertEqual(code, 1)
        self.assertRegex(out, r"(?m)^error: The loss differs where it should be equal")
        self.assertEqual(self.points()["strong", 2]["loss_check"], "differs: 1.5 instead of 1.25")
        self.assertIn("not the same training", self.read("report.html"))

    def test_batch_normalisation_makes_trainings_part_soon(self):
        self.measure("--models=resnet50", "--ranks=1,2", "--rounds=1")

        def losses(late, early):
            def change(result):
                for run in result["runs"]:
                    two = run["ranks"] == 2 and run["case"]["reduce"] != "none"
                    run["summary"]["first_step_losses"] = 5 * [early if two else 8] + 15 * [late if two else 8]

            fakes.edit_result(self.out, change)
            return self.points()["strong", 2]["loss_check"]

        self.assertEqual(losses(16, 8), "as with 1 rank")
        self.assertEqual(losses(16, 9), "differs: 9 instead of 8")

    def test_last_losses_may_differ_by_noise(self):
        self.measure("--ranks=1,2", "--scaling=strong", behaviour="noise:2")
        self.assertEqual(self.points()["strong", 2]["loss_check"], "as with 1 rank")

    def test_time_limit_keeps_what_is_measured(self):
        code, _, err = self.measure(
            "--ranks=1,2", "--scaling=weak", "--limit-minutes=0.02", "--rounds=1000", behaviour="slow:2"
        )
        self.assertEqual(code, 0)
        self.assertIn("the time limit is reached", err)
        self.assertIn("reached its time limit", self.read("report.html"))
        self.assertEqual(self.result()["ended"], "time limit")

    def test_time_limit_holds_for_short_runs(self):
        flags = ("--ranks=1", "--models=mlp,lenet", "--scaling=weak", "--rounds=1")
        with mock.patch("scaling.run.Session._start", side_effect=AssertionError):
            code, _, err = self.measure(*flags, "--limit-minutes=1e-9")
        self.assertEqual(code, 0)
        self.assertNotIn("short run", err)
        self.assertIn("the time limit is reached; --resume goes on from here", err)
        self.assertEqual((self.result()["ended"], self.result()["runs"]), ("time limit", []))
        self.assertEqual(self.measure(*flags, "--resume")[0], 0)
        self.assertEqual((self.result()["ended"], len(self.result()["runs"])), ("complete", 2))

    def test_live_line_says_what_runs_and_how_long(self):
        _, _, err = self.measure("--ranks=1,2", "--scaling=weak")
        self.assertRegex(
            err, r"(?m)^round 1/2  run 3/6  mlp, CPU, fp32, without reduction, weak, 2 ranks  \d+:\d\d left$"
        )

    def test_report_is_drawn_again(self):
        self.measure("--ranks=1,2", "--scaling=weak")
        before = self.read("report.html")
        os.remove(os.path.join(self.out, "report.html"))
        code, out, _ = self.call("report", self.out)
        self.assertEqual((code, out.strip()), (0, os.path.join(self.out, "report.html")))
        self.assertEqual(self.read("report.html"), before)

    def test_documents_show_what_is_drawn_from_recorded_runs(self):
        recorded = os.path.join(os.path.dirname(BENCH), "docs", "results", "two-cores")
        code, _, _ = self.call("report", recorded, f"--out={self.out}")
        self.assertEqual(code, 0)
        shown = {name for name in os.listdir(recorded) if name.endswith(".svg")}
        self.assertTrue(shown)
        self.assertLessEqual(shown, set(os.listdir(self.out)))

    def test_recorded_runs_of_earlier_trainers_do_not_have_the_quotient_of_two_statistics(self):
        recorded = os.path.join(os.path.dirname(BENCH), "docs", "results", "two-cores", "scaling.json")
        with open(recorded, encoding="utf-8") as file:
            result = json.load(file)
        points = {(p["model"], p["scaling"], p["ranks"]): p for p in analysis.points(result)}
        point = points["mlp", "weak", 2]
        self.assertGreater(point["communication_ms"], 1)
        self.assertLess(point["bus_bandwidth_gb_s"], 10)
        self.assertLessEqual(point["exposed_ms"], point["communication_ms"])
        notices = " ".join(text for _, text in analysis.notices(result, points.values()))
        self.assertIn("of the last step of each run", notices)


@needs_matplotlib
class Resume(Scaling):
    def test_makes_only_what_is_missing(self):
        self.measure("--ranks=1,2", "--scaling=weak", behaviour="fail:2")
        before = self.result()["runs"][0]
        code, _, err = self.measure("--ranks=1,2", "--scaling=weak", "--resume")
        self.assertEqual(code, 0)
        self.assertEqual(self.result()["runs"][0], before)
        self.assertEqual([run["status"] for run in self.result()["runs"]], ["ok"] * 6)
        self.assertIn("run 1/4", err)
        self.assertNotIn("Failed runs", self.read("report.html"))

    def test_other_settings_or_machine_are_refused(self):
        self.measure("--ranks=1,2", "--scaling=weak")
        self.assert_refused(
            "ranks was .* give the same flags", *self.measure("--ranks=1,2,4", "--scaling=weak", "--resume")
        )
        fakes.edit_result(self.out, lambda result: result["environment"]["cpu"].update(model="another"))
        self.assert_refused("the cpu was", *self.measure("--ranks=1,2", "--scaling=weak", "--resume"))

    def test_other_flags_of_mpirun_are_refused(self):
        mpirun = self.programs[1]
        self.measure("--ranks=1", "--scaling=weak", "--rounds=1", f"{mpirun} --bind-to  core")
        again = ("--ranks=1", "--scaling=weak", "--rounds=1", "--resume")
        self.assertEqual(self.measure(*again, f"{mpirun} --bind-to core")[0], 0)
        self.assert_refused(
            "mpirun_flags was --bind-to core and is --bind-to none now: give the same flags",
            *self.measure(*again, f"{mpirun} --bind-to none"),
        )
        self.assert_refused("mpirun_flags was --bind-to core and is None now", *self.measure(*again))

    def test_other_variables_or_libraries_are_refused(self):
        for name, change, words in (
            ("variables", {"NCCL_ALGO": "Ring"}, "the variables were {'NCCL_ALGO': 'Ring'}, now {}: measure as before"),
            ("libraries", {"onednn": "2.6.3"}, "the libraries were .*2.6.3.*, now .*3.7.2"),
        ):
            with self.subTest(name):
                self.out = os.path.join(self.folder, name)
                self.measure("--ranks=1", "--scaling=weak")
                fakes.edit_result(self.out, lambda result, n=name, c=change: result["environment"][n].update(c))
                self.assert_refused(words, *self.measure("--ranks=1", "--scaling=weak", "--resume"))

    def test_result_is_not_overwritten(self):
        self.measure("--ranks=1", "--scaling=weak")
        self.assert_refused("holds a result already", *self.measure("--ranks=1", "--scaling=weak"))

    def test_nothing_to_resume(self):
        self.assert_refused("holds no scaling.json", *self.measure("--resume"))

    def test_second_measurement_at_once_is_refused(self):
        once = ("--ranks=1", "--scaling=weak", "--rounds=1")
        self.measure(*once)
        before = self.read("scaling.json")
        words = "another measurement writes to .*out, and holds .*scaling.json.lock: wait for its end, or give another"
        with result_file.claim(self.out):
            self.assert_refused(words, *self.measure(*once, "--resume"))
            os.remove(os.path.join(self.out, "scaling.json"))
            self.assert_refused(words, *self.measure(*once))
        self.assertFalse(os.path.exists(os.path.join(self.out, "scaling.json")))
        self.assertEqual(self.measure(*once)[0], 0)
        self.assertEqual(self.measure(*once, "--resume")[0], 0)
        self.assertEqual(len(self.result()["runs"]), len(json.loads(before)["runs"]))

    def test_measurement_holds_its_folder(self):
        def look(*_):
            with self.assertRaises(UserError):
                result_file.claim(self.out)
            return "complete"

        with mock.patch("scaling.main.Session.measure", look):
            self.assertEqual(self.measure("--ranks=1")[0], 0)
        result_file.claim(self.out).close()

    def test_ctrl_c_keeps_what_is_measured(self):
        command = [
            sys.executable,
            os.path.join(BENCH, "scaling.py"),
            *self.programs,
            f"--out={self.out}",
            "--models=mlp",
            "--scaling=weak",
            "--ranks=1,2",
            "--seconds=0.01",
            "--rounds=500",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stderr:
                if "run 5/" in line:
                    process.send_signal(signal.SIGINT)
                    break
            _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("interrupted; --resume goes on from here", err)
        self.assertEqual(self.result()["ended"], "interrupted")
        self.assertGreaterEqual(len(self.result()["runs"]), 4)
        self.assertIn("was interrupted", self.read("report.html"))


if __name__ == "__main__":
    run_tests()
