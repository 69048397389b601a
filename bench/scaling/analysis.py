# SPDX-License-Identifier: Apache-2.0
"""Figures computed from the runs. Pure functions over what scaling.json holds."""

import statistics

from scaling import plan
from scaling.text import number

# How far the mean loss of the first steps may differ, as a part of it. Other sums in other orders: hardly at all.
LOSS_TOLERANCE = 1e-3
LOSS_TOLERANCE_16_BIT = 2e-3
# From that of other numbers of ranks: batch normalisation looks at a rank's part of the batch only.
LOSS_TOLERANCE_OTHER_PARTS = {"resnet20": 5e-2, "resnet50": 5e-2}
STEPS_OTHER_PARTS = 5  # that are compared then: such trainings part sooner, at small batches before their 20th step
DISTURBED = 0.15  # share of the cores that other programs may use


def summarize(values):
    """Median, least and greatest; None without values."""
    values = list(values)
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def reduces(run):
    return run["case"]["reduce"] != "none"


def rate(run):
    """Samples per second of all ranks."""
    return run["summary"]["samples_per_second"]


def step_ms(run):
    """The mean step, not the median: ranks that share a core make many quick steps and wait long for the others."""
    return 1000 * run["ranks"] * run["batch"] / rate(run)


def communication_is_measured(run):
    """Whether the trainer told the means of its measured steps. Those of earlier versions did not."""
    return "mean_communication_ms" in run["summary"]


def communication(run):
    """Per step and on rank 0: the time in which at least one bucket was under way, and the part of it that the backward
    pass did not hide. None without communication.

    Both are of the same steps. The summaries of earlier trainers have the median of the exposed times, and the quotient
    of sums: these do not give the communication, as a few long waits change one of them only. Their last step is known.
    """
    if run["ranks"] == 1 or not reduces(run):
        return None
    if communication_is_measured(run):
        total, exposed = run["summary"]["mean_communication_ms"], run["summary"]["mean_exposed_ms"]
    else:
        total, exposed = last_step(run["buckets"])
    return (total, exposed) if total else None


def last_step(buckets):
    """As `communication`, of the buckets of one step. Its backward pass ends when the last of them is ready."""
    total, end = 0.0, 0.0
    for bucket in sorted(buckets, key=lambda b: b["launched_ms"]):
        total += max(0.0, bucket["done_ms"] - max(end, bucket["launched_ms"]))
        end = max(end, bucket["done_ms"])
    exposed = max(0.0, end - max((bucket["ready_ms"] for bucket in buckets), default=0.0))
    return total, min(total, exposed)


def bus_bandwidth(run):
    """GB/s by nccl-tests' definition, for the reduction of all gradients (float32) in a step."""
    times = communication(run)
    if not times or not run["parameters"]:
        return None
    return 4 * run["parameters"] * 2 * (run["ranks"] - 1) / run["ranks"] / (times[0] * 1e6)


def good_runs(result):
    return [run for run in result["runs"] if run["status"] == "ok"]


def paired(above, below, function):
    """`function` of two runs, for every round in which both were made."""
    return [function(above[round_], below[round_]) for round_ in sorted(above) if round_ in below]


class Series:
    """The runs of one case and kind of scaling, and of its training without reduction: by ranks, then by round."""

    def __init__(self, case, scaling, runs):
        self.case, self.scaling = case, scaling
        self.reduced = self._by_ranks(case, runs)
        self.alone = self._by_ranks(case.without_reduction(), runs)
        if 1 in self.alone:  # one rank has nothing to reduce
            self.reduced[1] = self.alone[1]

    def _by_ranks(self, case, runs):
        found = {}
        for run in runs:
            if run["scaling"] == self.scaling and plan.case_of(run["case"]) == case:
                found.setdefault(run["ranks"], {})[run["round"]] = run
        return found

    def ranks(self):
        return sorted(self.reduced)


def series_of(result):
    runs = good_runs(result)
    cases = plan.make_cases(result["settings"])
    found = [Series(case, scaling, runs) for case in cases for scaling in ("weak", "strong")]
    return [series for series in found if series.reduced]


def headline(result, points_):
    """The points of the first way to reduce, which stands for all where these are not compared."""
    return [p for p in points_ if p["reduction"] == result["settings"]["reductions"][0]]


def points(result):
    """One dictionary for every case, kind of scaling and number of ranks that was measured."""

    def crowd(ranks):
        return plan.crowding(ranks, result["settings"], result["environment"]["slots"])

    return [
        point(series, ranks, crowd(ranks) / crowd(series.ranks()[0]))
        for series in series_of(result)
        for ranks in series.ranks()
    ]


def point(series, ranks, crowd):
    """`crowd`: how many times fewer cores a rank has than with the fewest ranks."""
    base = series.ranks()[0]
    runs, alone, base_runs = series.reduced[ranks], series.alone.get(ranks, {}), series.reduced[base]

    def efficiency(run, of):
        return rate(run) / run["ranks"] / (rate(of) / of["ranks"])

    made = list(runs.values())
    efficiencies = summarize(paired(runs, base_runs, efficiency))
    # The fewest ranks, too, without reduction: what it costs them is no gain of more ranks.
    without = summarize(paired(alone, series.alone.get(base, {}), efficiency))
    p = {
        "case": series.case.key(),
        "case_without_reduction": series.case.key_without_reduction(),
        "bucket": plan.bucket_name(series.case.bucket_mb),
        "reduction": series.case.reduce,
        "title": series.case.title(),
        "training": series.case.training(),
        "model": series.case.model,
        "device": series.case.device,
        "scaling": series.scaling,
        "ranks": ranks,
        "base_ranks": base,
        "oversubscribed": any(run["oversubscribed"] for run in made),
        "rounds": len(made),
        "batch": made[0]["batch"],
        "samples_per_second": median(map(rate, made)),
        "rates": {round_: rate(run) for round_, run in runs.items()},
        "step_ms": median(map(step_ms, made)),
        "step_ms_without_reduction": median(map(step_ms, alone.values())),
    }
    for name, value in (("efficiency", efficiencies), ("efficiency_without_reduction", without)):
        p[name] = value["median"] if value else None
        p[f"{name}_min"], p[f"{name}_max"] = (value["min"], value["max"]) if value else (None, None)
    p["speedup"] = p["efficiency"] * ranks / base if efficiencies else None
    p["crowding"] = crowd
    add_communication(p, made)
    add_losses(p, paired(runs, alone, lambda run, other: 1 - rate(run) / rate(other)))
    added = summarize(paired(runs, alone, lambda run, other: step_ms(run) - step_ms(other))) if ranks > 1 else None
    for name, end in (("added_ms", "median"), ("added_ms_min", "min"), ("added_ms_max", "max")):
        p[name] = added[end] if added else None
    p["peak_memory_mib"] = max(peak_memory(run) for run in made)
    p["joules_per_sample"] = median(cost(run, "energy", "joules_per_sample") for run in made)
    p["energy_contains"] = next((text for text in (cost(run, "energy", "contains") for run in made) if text), None)
    p["share_of_products"] = median(map(share_of_products, made))
    p["loss"] = median(run["summary"]["final_loss"] for run in made)
    p["early_loss"] = median(map(early_loss, made))
    p["loss_check"] = check_loss(series, ranks, base)
    p["loss_tolerance"] = tolerance_of(series.case)
    return p


def peak_memory(run):
    """MiB of a rank's GPU that were in use when its training ended, or the most that a rank has had of the host's."""
    gpus = [gpu["memory_mib"] for gpu in cost(run, "energy", "gpus") or [] if gpu.get("memory_mib")]
    return max(gpus, default=run["summary"]["peak_rss_mb"])


def share_of_products(run):
    """None, too, where earlier trainers tell more than the whole: products that are slower are no limit."""
    share = cost(run, "operations", "share_of_products")
    return share if share is not None and share <= 1 else None


def cost(run, kind, name):
    """What the trainer says about energy or operations; None if it has not measured it."""
    return run["summary"].get(kind, {}).get(name)


def add_communication(p, made):
    times = [found for found in map(communication, made) if found]
    p["communication_ms"] = median(total for total, _ in times)
    p["exposed_ms"] = median(exposed for _, exposed in times)
    p["hidden_ms"] = p["communication_ms"] - p["exposed_ms"] if times else None
    alone = p["step_ms_without_reduction"]
    p["communication_to_computation"] = (
        p["communication_ms"] / alone if p["communication_ms"] is not None and alone else None
    )
    p["bus_bandwidth_gb_s"] = median(map(bus_bandwidth, made))


def add_losses(p, slowdowns):
    """What the missing efficiency was lost to: in shares of the ideal rate, and in ms of a step."""
    full, alone = p["efficiency"], p["efficiency_without_reduction"]
    for name in (
        "lost_to_cores",
        "lost_to_sharing",
        "lost_to_communication",
        "ideal_ms",
        "cores_ms",
        "sharing_ms",
        "reduction_ms",
    ):
        p[name] = None
    p["communication_sure"] = False
    if p["ranks"] == p["base_ranks"] or not full or not alone:
        return
    crowd = p["crowding"]
    p["lost_to_cores"] = 1 - 1 / crowd
    p["lost_to_sharing"] = 1 / crowd - alone
    p["lost_to_communication"] = alone - full
    p["communication_sure"] = len(slowdowns) > 1 and (min(slowdowns) > 0 or max(slowdowns) < 0)
    p["ideal_ms"] = p["step_ms"] * full
    p["cores_ms"] = p["ideal_ms"] * (crowd - 1)
    # From the ratios within rounds, so that the parts of a step agree with the shares that were lost.
    p["sharing_ms"] = p["ideal_ms"] / alone - p["ideal_ms"] - p["cores_ms"]
    p["reduction_ms"] = p["step_ms"] - p["ideal_ms"] / alone


def tolerance_of(case, same_ranks=True):
    tolerance = LOSS_TOLERANCE_16_BIT if case.precision in ("fp16", "bf16") else LOSS_TOLERANCE
    return tolerance if same_ranks else max(tolerance, LOSS_TOLERANCE_OTHER_PARTS.get(case.model, 0))


def early_loss(run, same_ranks=True):
    """The mean of the first steps, before rounding makes trainings part."""
    summary = run["summary"]
    # Earlier trainers tell the first losses of rank 0 only, and the last epoch's of all.
    losses = summary.get("first_step_losses") or (same_ranks and summary.get("first_losses")) or []
    if not same_ranks and run["case"]["model"] in LOSS_TOLERANCE_OTHER_PARTS:
        losses = losses[:STEPS_OTHER_PARTS]
    return statistics.fmean(losses) if losses else summary["final_loss"]


def alike(loss, expected, tolerance):
    return abs(loss - expected) <= tolerance * abs(expected)


def check_loss(series, ranks, base):
    """Whether the same training was timed, by the losses of the fewest ranks (strong) or of the other rounds (weak)."""
    runs = series.reduced[ranks].values()
    steps = {run["summary"].get("steps") for n in {ranks, base} for run in series.reduced[n].values()}
    if len(steps) > 1:
        return "not compared: other numbers of steps"
    as_base = series.scaling == "strong" and ranks != base
    expected = median(early_loss(run, not as_base) for run in series.reduced[base if as_base else ranks].values())
    worst = max((early_loss(run, not as_base) for run in runs), key=lambda loss: abs(loss - expected))
    if not alike(worst, expected, tolerance_of(series.case, same_ranks=not as_base)):
        return f"differs: {worst:.5g} instead of {expected:.5g}"
    if as_base:
        return f"as with {plan.count(base, 'rank')}"
    return "equal in all rounds" if len(runs) > 1 else "one round"


def failures(result):
    return [
        {
            "case": plan.case_of(run["case"]).key(),
            "scaling": run["scaling"],
            "ranks": run["ranks"],
            "case_without_reduction": plan.case_of(run["case"]).key_without_reduction(),
            "oversubscribed": run["oversubscribed"],
            "title": plan.job_of(run).title(),
            "status": run["status"],
            "error": run["error"],
            "command": run["command"],
        }
        for run in result["runs"]
        if run["status"] != "ok"
    ]


def largest(points_, scaling):
    """For each case its point on the most ranks that are not oversubscribed, if any had more than the fewest."""
    best = {}
    for p in points_:
        if p["scaling"] == scaling and not p["oversubscribed"]:
            if p["case"] not in best or p["ranks"] > best[p["case"]]["ranks"]:
                best[p["case"]] = p
    return list(best.values())


def choices(points_, scaling="weak"):
    """What each choice (precision, backend, bucket size) gains over the first case of its model, on as many ranks: the
    median of the ratios within rounds, None if no round has both.

    For the ways to reduce see `reductions`."""
    gains, first = [], {}
    for p in largest(points_, scaling):
        base = first.setdefault(p["model"], p)
        if p is not base and p["ranks"] == base["ranks"] and p["reduction"] == base["reduction"]:
            gains.append(
                {
                    "model": p["model"],
                    "title": p["title"],
                    "over": base["title"],
                    "ranks": p["ranks"],
                    "gain": median(paired(p["rates"], base["rates"], lambda above, below: above / below)),
                    "exposed_ms": p["exposed_ms"],
                    "base_exposed_ms": base["exposed_ms"],
                }
            )
    return gains


def reductions(points_):
    """Points that differ only in how gradients are reduced, overlap with the first size of buckets: one list for each
    training."""
    groups = {}
    for p in largest(points_, "weak" if any(p["scaling"] == "weak" for p in points_) else "strong"):
        if p["ranks"] > 1:
            groups.setdefault((p["case_without_reduction"], p["ranks"]), {}).setdefault(p["reduction"], p)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def reductions_line(group):
    """One line for the terminal: what each way to reduce adds to a step."""
    added = [f"{p['reduction']} {number(p['added_ms'])}" for p in group if p["added_ms"] is not None]
    return f"{group[0]['training']}, {group[0]['ranks']} ranks: reduction adds to a step, in ms: {', '.join(added)}"


def same_training(p, first):
    """Whether two ways to reduce had the same loss, as they must."""
    return alike(p["early_loss"], first["early_loss"], p["loss_tolerance"])


def timeline(result, case_key):
    """The run whose buckets are shown: if possible weak and not oversubscribed, on the most ranks; the last such."""
    runs = [
        run
        for run in good_runs(result)
        if run["buckets"] and plan.case_of(run["case"]).key() == case_key
    ]
    return max(
        runs,
        key=lambda run: (not run["oversubscribed"], run["scaling"] == "weak", run["ranks"], run["round"]),
        default=None,
    )


def disturbed(result):
    """The share of runs beside which other programs kept more than DISTURBED of the cores busy."""
    known = [run["other_cores"] for run in result["runs"] if "other_cores" in run]
    cores = result["environment"]["cpu"]["hardware_threads"]
    return sum(1 for other in known if other > DISTURBED * cores) / len(known) if known else 0


def notices(result, points_):
    """What a reader must know before the figures, the gravest first: pairs of "bad" or "warn" and a sentence."""
    bad, warnings = [], []
    failed = failures(result)
    if failed:
        bad.append(
            f"{plan.count(len(failed), 'run')} failed: the report lists {'it' if len(failed) == 1 else 'them'} under"
            " “Failed runs”."
        )
    if result.get("prediction_error"):
        bad.append(f"Nothing is predicted: {result['prediction_error']}. --resume tries again.")
    wrong = [p for p in points_ if p["loss_check"].startswith("differs")]
    if wrong:
        bad.append(
            f"The loss differs where it should be equal, first for {wrong[0]['title']}, {wrong[0]['scaling']}, "
            f"{plan.count(wrong[0]['ranks'], 'rank')} ({wrong[0]['loss_check']}): not the same training was "
            "timed, so these figures mean nothing."
        )
    for group in reductions(points_):
        for p in group:
            if not same_training(p, group[0]):
                bad.append(
                    f"{p['training']}: --reduce={p['reduction']} has a loss of {p['early_loss']:.5g}, and"
                    f" --reduce={group[0]['reduction']} {group[0]['early_loss']:.5g}: they did not train the same."
                )
    if result["ended"] != "complete":
        how = {"interrupted": "was interrupted", "time limit": "reached its time limit"}.get(
            result["ended"], "has not ended"
        )
        warnings.append(
            f"The measurement {how}: some figures come from fewer rounds, or are missing. --resume continues it."
        )
    warnings += doubts(result, points_)
    return [("bad", text) for text in bad] + [("warn", text) for text in warnings]


def doubts(result, points_):
    """What makes figures say less than they seem to, one sentence each."""
    found = []
    share = disturbed(result)
    if share > 0.1:
        found.append(
            f"Other programs kept the processors busy during {100 * share:.0f} % of the runs. These figures"
            " show this machine as it was, not what it can do."
        )
    if any(run["ranks"] > 1 and reduces(run) and not communication_is_measured(run) for run in good_runs(result)):
        found.append(
            "The trainers of this measurement did not tell the mean times of communication: what is communicated,"
            " exposed and hidden is that of the last step of each run."
        )
    build = result["environment"]["build"]
    if build.get("sanitizers") or build.get("build_type", "Release") not in ("Release", "RelWithDebInfo"):
        found.append(
            f"The trainers are not a release build ({build.get('build_type')}): measure with the release preset."
        )
    if any(p["oversubscribed"] for p in points_):
        kind = "GPUs" if result["settings"]["device"] == "cuda" else "cores"
        slots = result["environment"]["slots"]
        found.append(
            f"This machine has {slots} {kind if slots != 1 else kind[:-1]}. Points marked “oversubscribed” have"
            " more ranks than that. They show that the training works, not how it scales."
        )
    return found


def verdict(p):
    """A point in a sentence or two."""
    if p["speedup"] is None:
        return ""
    text = (
        f"{p['ranks']} ranks train {p['speedup']:.2f} times as fast as {plan.count(p['base_ranks'], 'rank')}:"
        f" efficiency {100 * p['efficiency']:.0f} % ({100 * p['efficiency_min']:.0f} to"
        f" {100 * p['efficiency_max']:.0f})."
    )
    if p["lost_to_sharing"] is None:
        return text
    shared = "the host, power and links" if p["device"] == "cuda" else "caches, memory bandwidth and cores"
    why = f"{shared} that the ranks share" + (", and smaller batches" if p["scaling"] == "strong" else "")
    text += (
        f" Without reduction it would be {100 * p['efficiency_without_reduction']:.0f} %:"
        f" {signed(p['lost_to_sharing'])} {why},"
    )
    text += f" {signed(p['lost_to_communication'])} communication"
    return text + ("." if p["communication_sure"] else ", which is within the noise of these rounds.")


def signed(share):
    return f"{abs(100 * share):.1f} points are {'lost to' if share >= 0 else 'gained from'}"
