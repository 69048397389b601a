# SPDX-License-Identifier: Apache-2.0
"""How training scales over ranks: plans and makes the runs, computes the statistics, draws the report.

main         the command line
plan         which runs are made, and with which flags
trainers     finds the trainers and mpirun, starts one run, reads its output
run          makes all runs, in interleaved rounds
environment  the machine, the build and the launcher
result       scaling.json and the CSV file
model        the model of the machine, and what it predicts: pure functions
analysis     figures computed from the runs: pure functions over scaling.json
charts       the pictures (the only user of matplotlib)
markup       parts of pages
text         figures as text
report       the page of one result
compare      the page of two results
"""


class UserError(Exception):
    """One line that says what is wrong and how to put it right; the program ends with exit code 2."""
