# SPDX-License-Identifier: Apache-2.0
"""A model of the machine: latency and bandwidth of all-reduces, and what follows for the training on more ranks.

An all-reduce of S bytes on n ranks of a node and m nodes takes
  inside(n, S) + between(m, S), each: ceil(log2 k) * latency + v * cost + max(0, v - knee) * extra
for k = n or m members that move v = 2 (k - 1) / k * S bytes. `extra` is what a byte costs more if the data do not fit
into the caches. The figures are fitted to measured all-reduces, and the model is checked with others. Pure functions.
"""

import math
import statistics
from dataclasses import dataclass

from scaling import analysis, plan
from scaling.text import number

LIMIT = 0.15  # a prediction is shown if the median error is at most this, for all-reduces and for steps
# And at most this for what reduction adds to a step. Most of a step is measured, not predicted: a model without any
# communication would pass the limit for steps, but is wrong by 100 % here.
ADDED_LIMIT = 0.5
MOST_RANKS = 100_000
FIT_SIZES = [1 << shift for shift in range(14, 27, 2)]  # bytes: 16 KiB, 64 KiB, ... 64 MiB
CHECK_SIZES = [1 << shift for shift in range(15, 26, 2)]
SIZES = sorted(FIT_SIZES + CHECK_SIZES)


@dataclass(frozen=True)
class Level:
    """The links within a node, or between nodes."""

    latency_us: float
    us_per_byte: float
    knee: float = math.inf  # bytes
    extra_us_per_byte: float = 0.0

    def time_us(self, members, size):
        if members == 1:
            return 0.0
        volume = moved(members, size)
        beyond = max(0.0, volume - self.knee) * self.extra_us_per_byte if math.isfinite(self.knee) else 0.0
        return steps(members) * self.latency_us + volume * self.us_per_byte + beyond

    def gb_s(self):
        return 1e-3 / self.us_per_byte if self.us_per_byte > 0 else math.inf

    def has_knee(self):
        return math.isfinite(self.knee) and self.extra_us_per_byte > 0

    def gb_s_beyond(self):
        """The rate of the bytes beyond the knee, which is all that counts for large arrays."""
        return 1e-3 / (self.us_per_byte + self.extra_us_per_byte) if self.has_knee() else self.gb_s()

    def text(self, micro="u"):
        """Its figures in words. `micro`: how a microsecond begins."""
        rate = f"{number(self.gb_s())} GB/s" if math.isfinite(self.gb_s()) else "no cost of a byte"
        if self.has_knee():
            knee, beyond = number(self.knee / 2**20), number(self.gb_s_beyond())
            rate += f" up to {knee} MiB that a member moves, {beyond} GB/s beyond"
        return f"{number(self.latency_us)} {micro}s and {rate}"


@dataclass(frozen=True)
class Machine:
    inside: Level
    between: Level

    def time_us(self, ranks, node_size, size):
        local = min(ranks, node_size)
        return self.inside.time_us(local, size) + self.between.time_us(math.ceil(ranks / local), size)


def steps(members):
    return math.ceil(math.log2(members))


def moved(members, size):
    """Bytes that each member sends and receives."""
    return 2 * (members - 1) / members * size


def solve(rows, values):
    """Least squares by the normal equations; None if they have no single solution."""
    count = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(count)] + [sum(r[i] * v for r, v in zip(rows, values))]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda k, column=i: abs(matrix[k][column]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(count):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i])]
    return [matrix[i][count] / matrix[i][i] for i in range(count)]


def fit(points):
    """The level that is nearest to `points` (members, bytes, us), by relative errors. None without points."""
    knees = [math.inf, *sorted({moved(members, size) for members, size, _ in points})[1:-1]]
    best, least = None, math.inf
    for knee in knees:
        for terms in ((0, 1, 2), (0, 1), (1, 2), (1,)):  # without those that would be negative
            if math.isinf(knee) and 2 in terms:
                continue
            rows = []
            for members, size, _ in points:
                volume = moved(members, size)
                columns = (steps(members), volume / 1e6, max(0.0, volume - knee) / 1e6)
                rows.append([columns[term] for term in terms])
            scaled = [[x / t for x in row] for row, (_, _, t) in zip(rows, points)]
            found = solve(scaled, [1.0] * len(points)) if len(points) >= len(terms) else None
            if found is None or min(found) < 0:
                continue
            by_term = dict(zip(terms, found))
            level = Level(by_term.get(0, 0.0), by_term[1] / 1e6, knee, by_term.get(2, 0.0) / 1e6)
            error = sum(((level.time_us(m, s) - t) / t) ** 2 for m, s, t in points)
            if error < 0.999 * least:
                best, least = level, error
            break
    return best


def fit_machine(collectives, link=None):
    """The machine of measured all-reduces: dictionaries with ranks, nodes, bytes, time_us. None without both levels.

    `link`, a Level, stands for links between nodes where none were measured.
    """
    fitted = [c for c in collectives if c["bytes"] in FIT_SIZES]
    inside = fit([(c["ranks"], c["bytes"], c["time_us"]) for c in fitted if c["nodes"] == 1])
    between = fit([(c["nodes"], c["bytes"], c["time_us"]) for c in fitted if c["nodes"] == c["ranks"]]) or link
    return Machine(inside, between) if inside and between else None


def given_link(wanted):
    """The link between nodes that the user has given, or None."""
    if not wanted["link_gb_s"]:
        return None
    return Level(wanted["link_latency_us"], 1e-3 / wanted["link_gb_s"])


def errors(machine, collectives):
    """Relative errors for all-reduces to which the model was not fitted."""
    return [
        abs(machine.time_us(c["ranks"], c["ranks"] // c["nodes"], c["bytes"]) - c["time_us"]) / c["time_us"]
        for c in collectives
        if c["bytes"] not in FIT_SIZES or c["nodes"] not in (1, c["ranks"])
    ]


def step_ms(machine, ranks, node_size, buckets, alone_ms):
    """The step, and the part of it that waits for reductions, from the buckets' sizes and when they were ready."""
    end = 0.0
    for bucket in sorted(buckets, key=lambda b: b["launched_ms"]):
        size = bucket["mib"] * (1 << 20)
        end = max(end, bucket["ready_ms"]) + machine.time_us(ranks, node_size, size) / 1000
    exposed = max(0.0, end - max(bucket["ready_ms"] for bucket in buckets))
    return alone_ms + exposed, exposed


def rank_counts(node_size):
    """More than one node, up to MOST_RANKS."""
    return [2**k for k in range(1, 17) if 2**k > node_size] + [MOST_RANKS]


def prediction(result, points):
    """What the model says, or None without measured all-reduces.

    A dictionary: machine, errors (of all-reduces), step_errors (of trainings), added_errors (of what reduction adds to
    their steps, where that is above the noise), good (whether they are small enough), and for every training with weak
    scaling a list of rows (ranks, nodes, step_ms, exposed_ms, efficiency).
    """
    wanted = result["settings"].get("predict")
    machine = fit_machine(result.get("collectives", []), given_link(wanted)) if wanted else None
    if machine is None:
        return None
    found = errors(machine, result["collectives"])
    measured_node = max(c["ranks"] for c in result["collectives"] if c["nodes"] == 1)
    trainings, step_errors, added_errors = {}, [], []
    for p in analysis.largest(analysis.headline(result, points), "weak"):
        run = analysis.timeline(result, p["case"])
        if not run or p["ranks"] == p["base_ranks"] or p["efficiency_without_reduction"] is None:
            continue
        alone, ideal = p["step_ms_without_reduction"], p["step_ms"] * p["efficiency"]
        expected, exposed = step_ms(machine, p["ranks"], p["ranks"], run["buckets"], alone)
        step_errors.append(abs(expected - p["step_ms"]) / p["step_ms"])
        if p["communication_sure"] and p["added_ms_min"] > 0:
            added_errors.append(abs(exposed - p["added_ms"]) / p["added_ms"])
        trainings[p["case"]] = {"point": p, "rows": rows(machine, wanted, measured_node, run["buckets"], alone, ideal)}
    limits = ((found, LIMIT), (step_errors, LIMIT), (added_errors, ADDED_LIMIT))
    return {
        "machine": machine,
        "errors": found,
        "step_errors": step_errors,
        "added_errors": added_errors,
        "good": all(values and statistics.median(values) <= limit for values, limit in limits),
        "node_size": wanted["node_size"] or measured_node,
        "links": "given" if wanted["link_gb_s"] else "measured",
        "trainings": trainings,
    }


def line(predicted):
    """The model in a line for the terminal."""
    inside, between = predicted["machine"].inside, predicted["machine"].between
    return (
        f"model of the machine: within a node {inside.text()}, between nodes {between.text()}; {verdict(predicted)}"
    )


def verdict(predicted):
    """How well the model does where it was not fitted."""
    if not predicted["errors"] or not predicted["step_errors"]:
        return "it could not be checked, so nothing is predicted"
    all_reduce, step = (100 * statistics.median(predicted[name]) for name in ("errors", "step_errors"))
    text = (
        f"its median error is {all_reduce:.0f} % for {plan.count(len(predicted['errors']), 'all-reduce')}"
        f" and {step:.0f} % for the steps of {plan.count(len(predicted['step_errors']), 'training')}"
        " that it was not fitted to"
    )
    if not predicted["added_errors"]:
        return f"{text}; what reduction adds to a step is within the noise and checks nothing, so nothing is predicted"
    text += f", and {100 * statistics.median(predicted['added_errors']):.0f} % for what reduction adds to a step"
    limits = f"{100 * LIMIT:.0f} % (what reduction adds: {100 * ADDED_LIMIT:.0f} %)"
    return text if predicted["good"] else f"{text}: above {limits}, so nothing is predicted"


def rows(machine, wanted, measured_node, buckets, alone, ideal):
    node_size = wanted["node_size"] or measured_node
    machine = Machine(machine.inside, given_link(wanted) or machine.between)
    found = []
    for ranks in rank_counts(node_size):
        step, exposed = step_ms(machine, ranks, node_size, buckets, alone)
        nodes = math.ceil(ranks / node_size)
        found.append(
            {"ranks": ranks, "nodes": nodes, "step_ms": step, "exposed_ms": exposed, "efficiency": ideal / step}
        )
    return found


def layouts(settings, slots):
    """(ranks, nodes) for which all-reduces are measured: those that leave a core or a GPU for each rank.

    NCCL uses the links between the GPUs of a host however its ranks are divided: they are one node.
    """
    free = [n for n in settings["ranks"] if n > 1 and plan.crowding(n, settings, slots) <= 1]
    if settings["device"] == "cuda":
        return [(n, 1) for n in free]
    return [(n, nodes) for n in free for nodes in sorted({1, 2, n}) if n % nodes == 0]
