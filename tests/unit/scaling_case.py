# SPDX-License-Identifier: Apache-2.0
"""What the tests of bench/scaling.py share: a call of the program with stand-ins for mpirun and the trainers."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
BENCH = os.path.join(os.path.dirname(os.path.dirname(HERE)), "bench")
sys.path.insert(0, BENCH)
sys.path.insert(0, HERE)

import scaling_fakes as fakes  # noqa: E402
from scaling import analysis, charts, main  # noqa: E402
from scaling.run import LiveLine  # noqa: E402

needs_matplotlib = unittest.skipIf(charts.matplotlib is None, "no matplotlib")


def draws(test):
    """For tests of what is in the pictures: the others spare the time to draw them."""
    test.draws = True
    return test


def blank(figure, name, description):
    """In the place of charts.finish."""
    charts.pyplot.close(figure)
    return f'<svg id="{name}" width="8" height="8" role="img" aria-label="{description}"></svg>'


class Scaling(unittest.TestCase):
    """A folder with the stand-ins, and ddp-scaling called within this process on a machine of two cores."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = scratch.name
        self.out = os.path.join(self.folder, "out")
        self.programs = fakes.make_programs(self.folder)
        # The programs of the machine must not count as others that disturb.
        patch = mock.patch("scaling.trainers.busy_seconds", return_value=None)
        patch.start()
        self.addCleanup(patch.stop)
        if not hasattr(getattr(self, self._testMethodName), "draws"):
            patch = mock.patch("scaling.charts.finish", blank)
            patch.start()
            self.addCleanup(patch.stop)

    def call(self, *argv, behaviour=""):
        """Exit code, standard output, standard error."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, {"FAKE_BEHAVIOUR": behaviour}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("scaling.main.LiveLine", lambda: LiveLine(err)),
        ):
            code = main.main(list(argv))
        return code, out.getvalue(), err.getvalue()

    def measure(self, *argv, behaviour=""):
        return self.call(
            *self.programs,
            f"--out={self.out}",
            "--models=mlp",
            "--seconds=0.01",
            "--rounds=2",
            *argv,
            behaviour=behaviour,
        )

    def read(self, name):
        with open(os.path.join(self.out, name), encoding="utf-8") as file:
            return file.read()

    def result(self):
        return json.loads(self.read("scaling.json"))

    def points(self):
        return {(p["scaling"], p["ranks"]): p for p in analysis.points(self.result())}

    def assert_refused(self, pattern, code, out, err):
        """One line that says what is wrong, and exit code 2."""
        self.assertEqual((code, out), (2, ""))
        self.assertRegex(err, rf"^ddp-scaling: .*{pattern}.*\n$")
        self.assertEqual(err.count("\n"), 1)


def run_tests():
    if charts.matplotlib is None:
        print(f"skipped: reports of ddp-scaling, as {sys.executable} has no matplotlib")
    unittest.main()
