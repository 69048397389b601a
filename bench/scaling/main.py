# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import os
import shlex
import sys

from scaling import (
    UserError,
    analysis,
    charts,
    compare,
    environment,
    model,
    plan,
    report,
    result as result_file,
    trainers,
)
from scaling.run import LiveLine, Session, Stops

PROGRAM = "ddp-scaling"
INTRODUCTION = """Measures how training scales over ranks, and writes a report:

  ddp-scaling --quick --out=FOLDER           mlp and lenet on 1 and 2 ranks, in at most 3 minutes
  ddp-scaling --out=FOLDER                   all models, on as many ranks as there are cores, up to 8
  ddp-scaling --out=FOLDER --resume          makes the runs that are missing after Ctrl-C, a failure or a time limit
  ddp-scaling report FOLDER                  draws the report of a measurement again
  ddp-scaling compare A B --out=FOLDER       sets two results (folders or scaling.json) side by side

FOLDER gets report.html, scaling.json, scaling.csv and the pictures. Keep the machine idle meanwhile. Ctrl-C keeps what
is measured and writes the report. Exit codes: 0; 1: a run failed or trained something else; 2: the command cannot be
carried out; 130: stopped by Ctrl-C.
"""
# Also the last run that is started has to end, and the report to be drawn, within 3 minutes.
QUICK = {
    "models": ["mlp", "lenet"],
    "ranks": [1, 2],
    "rounds": 3,
    "seconds": 1.0,
    "limit_minutes": 2.0,
    "timeout": 45.0,
}
# --resume may change these: they do not change what a run measures.
FREE_SETTINGS = ("rounds", "timeout", "limit_minutes")
ENDS = {
    "complete": "all runs are made",
    "interrupted": "interrupted; --resume goes on from here",
    "time limit": "the time limit is reached; --resume goes on from here",
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")

    def print_help(self, file=None):  # argparse's own passes over output that is lost
        print(self.format_help(), end="", file=file)


def parser(name, **options):
    return Parser(prog=name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)


def list_of(kind, what):
    def parse(text):
        try:
            values = [kind(word) for word in text.split(",") if word]
        except ValueError:
            values = []
        if not values:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of {what}, such as {'1,2,4' if kind is not str else 'a,b'}"
            )
        return list(dict.fromkeys(values))

    return parse


def positive(kind):
    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return value

    return parse


def measure_parser():
    p = parser(PROGRAM, description=INTRODUCTION, usage="%(prog)s [--quick] [--out=FOLDER] [flags]")
    p.add_argument(
        "--out", metavar="FOLDER", default="scaling-report", help="where the results go (default: scaling-report)"
    )
    p.add_argument(
        "--quick", action="store_true", help="mlp and lenet, 1 and 2 ranks, 3 rounds of short runs, at most 3 minutes"
    )
    p.add_argument("--resume", action="store_true", help="go on with the measurement in FOLDER; give the same flags")
    p.add_argument("--models", type=list_of(str, "models"), help=f"of {', '.join(plan.MODELS)} (default: all)")
    p.add_argument(
        "--ranks", type=list_of(int, "numbers"), help="default: those of 1, 2, 4, 8 that have a core or GPU each"
    )
    p.add_argument(
        "--scaling", type=list_of(str, "kinds"), default=["weak", "strong"], help="weak, strong (default: both)"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument(
        "--precision",
        type=list_of(str, "precisions"),
        default=["fp32"],
        help="of fp32, bf16, with GPUs also tf32, fp16",
    )
    p.add_argument("--backend", type=list_of(str, "backends"), default=["auto"], help=f"of {', '.join(plan.BACKENDS)}")
    p.add_argument(
        "--bucket-mb",
        type=list_of(float, "sizes"),
        help="sizes of buckets in MiB; 0: automatic (default: the trainer's)",
    )
    p.add_argument(
        "--reduce",
        type=list_of(str, "ways"),
        default=["overlap"],
        help=f"how gradients are reduced, of {', '.join(plan.REDUCTIONS)} (default: overlap; none is always measured)",
    )
    p.add_argument(
        "--batch", type=positive(int), help="weak scaling: samples per step on each rank (default: by model and device)"
    )
    p.add_argument(
        "--global-batch",
        type=positive(int),
        help="strong scaling: samples per step on all ranks (default: by model and device)",
    )
    p.add_argument("--rounds", type=positive(int), help="how often everything is measured, in turn (default: 5)")
    p.add_argument("--seconds", type=positive(float), help="how long a run should take on one rank (default: 4)")
    p.add_argument("--limit-minutes", type=positive(float), help="start nothing that would end later")
    p.add_argument(
        "--timeout",
        type=positive(float),
        help=f"seconds after which a run has failed (default: 300; with --quick {QUICK['timeout']:g})",
    )
    p.add_argument(
        "--predict",
        action="store_true",
        help="also time all-reduces, fit a model of the machine, and predict up to 100,000 ranks (on CPUs)",
    )
    add_prediction(p)
    p.add_argument("--threads", type=positive(int), default=1, help="threads of arithmetic on each rank (default: 1)")
    p.add_argument("--data", default="", help="data set folder of the trainers (default: random images)")
    p.add_argument(
        "--bin",
        metavar="FOLDER",
        help="folder of train_mlp and train_cnn (default: build/release/bin, or as installed)",
    )
    p.add_argument("--mpirun", default="mpirun", help="the launcher, and flags of yours for it")
    return p


def add_prediction(p):
    p.add_argument("--node-size", type=positive(int), help="predict for so many ranks on a node (default: as measured)")
    p.add_argument("--link-gb-s", type=positive(float), help="and for links between nodes that move so many GB/s ...")
    p.add_argument("--link-latency-us", type=positive(float), help="... with this latency (default: 5)")


NO_LINK = "--link-latency-us says how fast a link begins, but not how fast it is: give --link-gb-s too"


def prediction_of(arguments):
    if arguments.link_latency_us and not arguments.link_gb_s:
        raise UserError(NO_LINK)
    return {
        "node_size": arguments.node_size,
        "link_gb_s": arguments.link_gb_s,
        "link_latency_us": arguments.link_latency_us or 5.0,
    }


def check_names(flag, given, known):
    for name in given:
        if name not in known:
            raise UserError(f"--{flag}={name} is not known: it may be {', '.join(known)}")


def settings_of(arguments, slots):
    """What is measured, from the flags."""
    quick = QUICK if arguments.quick else {}
    check_names("scaling", arguments.scaling, ("weak", "strong"))
    check_names("backend", arguments.backend, plan.BACKENDS)
    check_names("reduce", arguments.reduce, plan.REDUCTIONS)
    reductions = [way for way in arguments.reduce if way != "none"]
    if not reductions:
        raise UserError("--reduce=none reduces nothing, and is always measured: give what to compare it with")
    if arguments.bucket_mb and "overlap" not in reductions:
        raise UserError("--bucket-mb is for --reduce=overlap: add that, or leave --bucket-mb out")
    ranks = sorted(arguments.ranks or quick.get("ranks") or plan.default_ranks(slots))
    if ranks[0] < 1 or ranks[-1] > plan.MOST_RANKS:
        raise UserError(f"--ranks={','.join(map(str, ranks))} is out of range: each may be 1 to {plan.MOST_RANKS}")
    if arguments.predict and arguments.device == "cuda" and not arguments.link_gb_s:
        raise UserError("--predict on GPUs knows no link between nodes: give --link-gb-s, and --link-latency-us")
    if not arguments.predict and (arguments.node_size or arguments.link_gb_s or arguments.link_latency_us):
        raise UserError("--node-size and --link-... are for predictions: give --predict too")
    if any(not 0 <= size <= 1 << 20 for size in arguments.bucket_mb or []):
        raise UserError("--bucket-mb is out of range: each size may be 0 to 1048576")
    return {
        "models": models_of(arguments),
        "ranks": ranks,
        "scaling": arguments.scaling,
        "device": arguments.device,
        "precisions": arguments.precision,
        "backends": arguments.backend,
        "buckets": arguments.bucket_mb or [None],
        "reductions": reductions,
        "predict": prediction_of(arguments) if arguments.predict else None,
        "batch": arguments.batch,
        "global_batch": arguments.global_batch,
        "rounds": arguments.rounds or quick.get("rounds") or 5,
        "seconds": arguments.seconds or quick.get("seconds") or 4.0,
        "limit_minutes": arguments.limit_minutes or quick.get("limit_minutes"),
        "timeout": arguments.timeout or quick.get("timeout") or 300,
        "threads": arguments.threads,
        "data": arguments.data,
    }


def models_of(arguments):
    check_names("models", arguments.models or [], plan.MODELS)
    return arguments.models or (QUICK if arguments.quick else {}).get("models") or list(plan.MODELS)


def look_around(arguments, launcher, bin_folder, program):
    """The environment, and in it how many ranks have a core or GPU of their own."""
    if arguments.device == "cuda" and not environment.gpus():
        raise UserError(
            "--device=cuda needs a GPU, and nvidia-smi lists none: leave --device out to measure on the CPU"
        )
    found = environment.snapshot(os.path.join(bin_folder, program), arguments.device, launcher)
    return {**found, "slots": found["cpu"]["cores"] if arguments.device == "cpu" else len(found["gpus"])}


def check_prediction(settings, slots):
    """All-reduces of ranks that share a core would say nothing about more ranks."""
    if settings["predict"] and not model.layouts(settings, slots):
        threads = settings["threads"] if settings["device"] == "cpu" else 1
        has = plan.count(slots, "GPU" if settings["device"] == "cuda" else "core")
        needs = "each" if threads == 1 else f"each of their {threads} threads"
        raise UserError(
            f"--predict times all-reduces of ranks that have a core or GPU for {needs}, and this machine has {has}:"
            f" none of --ranks={','.join(map(str, settings['ranks']))} above 1 fits; give one that does, or leave"
            " --predict out"
        )


def check_resumed(old, new):
    """Figures of two machines, builds or settings must not become one result."""
    for name, value in new["settings"].items():
        before = old["settings"].get(name)
        if name not in FREE_SETTINGS and before != value:
            raise UserError(f"--resume: {name} was {before} and is {value} now: give the same flags, or another --out")
    # Variables such as NCCL_ALGO or OMP_NUM_THREADS change speed as much as a flag does.
    for name in ("cpu", "gpus", "slots", "build", "launcher", "libraries", "variables"):
        before, now = old["environment"].get(name), new["environment"].get(name)
        if before != now:
            verb = "were" if name in ("gpus", "slots", "libraries", "variables") else "was"
            raise UserError(
                f"--resume: the {name} {verb} {before}, now {now}: measure as before, or anew with another --out"
            )


def read_result(path):
    """A result from which everything can be computed that this program computes. Raises UserError."""
    result = result_file.read(path)
    with result_file.drawing_on(path):
        report.render(result)
        for run in result["runs"]:
            job = plan.job_of(run)
            pilot = result["pilots"][job.steps_key()]
            run["wall_s"] + plan.expected_seconds(job, pilot, result["settings"], result["environment"]["slots"])
    return result


def claim_folder(arguments):
    """A file that keeps other measurements out of the folder while it is open."""
    folder = arguments.out
    if arguments.resume and not result_file.exists(folder):
        raise UserError(f"--resume: {folder} holds no {result_file.FILE}: leave --resume out to start anew")
    try:
        os.makedirs(folder, exist_ok=True)
        return result_file.claim(folder)
    except OSError as error:
        raise UserError(f"cannot write to --out={folder}: {error.strerror}") from None


def open_result(arguments, new):
    """The result to add to: a new one, or with --resume the one in the folder."""
    folder = arguments.out
    if not arguments.resume:
        if result_file.exists(folder):
            raise UserError(f"{folder} holds a result already: give --resume to go on with it, or another --out")
        result_file.write(new, folder)
        return new
    old = read_result(folder)
    check_resumed(old, new)
    return {**old, "settings": new["settings"], "ended": "not yet"}


def measure(argv):
    arguments = measure_parser().parse_args(argv)
    charts.require()
    programs = sorted({plan.MODELS[model][0] for model in models_of(arguments)})
    launcher = trainers.Launcher(arguments.mpirun)
    bench = [trainers.ALL_REDUCE_BENCH] if arguments.predict else []
    bin_folder = trainers.find_bin(arguments.bin, programs + bench)
    snapshot = look_around(arguments, launcher, bin_folder, programs[0])
    slots = snapshot["slots"]
    settings = {**settings_of(arguments, slots), "mpirun_flags": shlex.join(launcher.words[1:]) or None}
    check_prediction(settings, slots)
    jobs = plan.make_jobs(plan.make_cases(settings), settings)
    with claim_folder(arguments):
        result = open_result(arguments, result_file.new_result(settings, snapshot, shlex.join([PROGRAM, *argv])))
        line = LiveLine()
        with Stops() as stops:
            ended = Session(result, jobs, launcher, bin_folder, slots, arguments.out, line, stops).measure()
            line.say(ENDS[ended])
            path = report.write(result, arguments.out)
    wrong = tell(result)
    print(path)
    return 130 if ended == "interrupted" else 1 if wrong else 0


def tell(result):
    """Prints what was found. Returns whether some of it is wrong."""
    points = analysis.points(result)
    headline = analysis.headline(result, points)
    for point in analysis.largest(headline, "weak") + analysis.largest(headline, "strong"):
        if point["ranks"] > point["base_ranks"]:
            print(f"{point['title']}, {point['scaling']}: {analysis.verdict(point)}")
    for group in analysis.reductions(points):
        print(analysis.reductions_line(group))
    predicted = model.prediction(result, points)
    if predicted:
        print(model.line(predicted))
    found = analysis.notices(result, points)
    for kind, text in found:
        print(f"{'error' if kind == 'bad' else 'note'}: {text}")
    return any(kind == "bad" for kind, _ in found)


def draw_again(argv):
    p = parser(f"{PROGRAM} report", description="Draws the report of a measurement again.")
    p.add_argument("result", help="the folder of a measurement, or its scaling.json")
    p.add_argument("--out", metavar="FOLDER", help="where the report goes (default: beside scaling.json)")
    add_prediction(p)
    arguments = p.parse_args(argv)
    charts.require()
    result = read_result(arguments.result)
    folder = make_folder(arguments.out or os.path.dirname(os.path.abspath(result_file.path_in(arguments.result))))
    given = {name: getattr(arguments, name) for name in ("node_size", "link_gb_s", "link_latency_us")}
    given = {name: value for name, value in given.items() if value}
    if result["settings"]["predict"]:
        saved = result["settings"]["predict"]
        if given.get("link_latency_us") and not given.get("link_gb_s", saved["link_gb_s"]):
            raise UserError(NO_LINK)
        saved.update(given)
    elif given:
        raise UserError(f"{arguments.result} holds no all-reduces to predict from: measure with --predict")
    print(report.write(result, folder))
    return 0


def make_folder(folder):
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out={folder}: {error.strerror}") from None
    return folder


def compare_two(argv):
    p = parser(f"{PROGRAM} compare", description="Sets two results side by side.")
    p.add_argument("a", metavar="A", help="the folder of a measurement, or its scaling.json")
    p.add_argument("b", metavar="B")
    p.add_argument(
        "--out", metavar="FOLDER", default="scaling-compare", help="where compare.html goes (default: scaling-compare)"
    )
    p.add_argument(
        "--price-a",
        type=positive(float),
        help="what an hour of A's machine costs; the page then shows costs per million samples",
    )
    p.add_argument("--price-b", type=positive(float), help="what an hour of B's machine costs, in the same currency")
    arguments = p.parse_args(argv)
    charts.require()
    a, b = read_result(arguments.a), read_result(arguments.b)
    prices = (arguments.price_a, arguments.price_b)
    path = compare.write(a, b, (arguments.a, arguments.b), prices, make_folder(arguments.out))
    print(compare.speed_line(compare.pairs(analysis.points(a), analysis.points(b))[0]))
    print(path)
    return 0


def main(argv):
    commands = {"report": draw_again, "compare": compare_two}
    try:
        if argv and argv[0] in commands:
            return commands[argv[0]](argv[1:])
        return measure(argv)
    except (UserError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
