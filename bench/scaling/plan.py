# SPDX-License-Identifier: Apache-2.0
"""Which runs are made. Everything here is data and pure functions."""

import itertools
from dataclasses import asdict, dataclass, replace

from scaling import UserError

MODELS = {
    # model: program and its own flags
    "mlp": ("train_mlp", ["--hidden=1024,1024"]),
    "lenet": ("train_cnn", ["--model=lenet"]),
    "resnet20": ("train_cnn", ["--model=resnet20"]),
    "resnet50": ("train_cnn", ["--model=resnet50"]),
}
# Samples per step, on each rank (weak) and on all ranks together (strong).
BATCHES = (64, 256)
BATCHES_OF = {("resnet50", "cpu"): (8, 32), ("resnet50", "cuda"): (128, 512)}
PRECISIONS = {
    "cpu": {"fp32": [], "bf16": ["--amp=bf16"]},
    "cuda": {"fp32": [], "tf32": ["--tf32"], "bf16": ["--amp=bf16"], "fp16": ["--amp=fp16"]},
}
BACKENDS = ("auto", "hierarchical", "nccl", "local")
REDUCTIONS = {
    # the trainers' --reduce: how a title names it
    "overlap": "buckets overlapped",
    "end": "one reduction after backward",
    "each": "every parameter alone",
    "gather": "gathered and broadcast by rank 0",
    "none": "without reduction",
}
DEFAULT_RANKS = (1, 2, 4, 8)
MOST_RANKS = 1024
PILOT_STEPS = 8
PILOT_WARMUP = 3


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    device: str
    precision: str
    backend: str
    bucket_mb: float | None = None  # None: the trainer's default; 0: chosen automatically
    reduce: str = "overlap"  # of REDUCTIONS

    def key(self):
        bucket = bucket_name(self.bucket_mb) if self.reduce == "overlap" else self.reduce
        return f"{self.key_without_reduction()}-{bucket}"

    def key_without_reduction(self):
        return f"{self.model}-{self.device}-{self.precision}-{self.backend}"

    def without_reduction(self):
        """What every choice of bucket and reduction is compared with; on one rank it stands for all of them."""
        return replace(self, bucket_mb=None, reduce="none")

    def training(self):
        """The title without how gradients are reduced."""
        return replace(self, bucket_mb=None, reduce="overlap").title()

    def title(self):
        words = [self.model, "GPU" if self.device == "cuda" else "CPU", self.precision]
        if self.backend != "auto":
            words.append(self.backend)
        if self.bucket_mb is not None:
            words.append(f"buckets {bucket_name(self.bucket_mb)}")
        if self.reduce != "overlap":
            words.append(REDUCTIONS[self.reduce])
        return ", ".join(words)


@dataclass(frozen=True)
class Job:
    """One measurement, made once in every round."""

    case: Case
    scaling: str  # weak: the batch of a rank is fixed; strong: that of all ranks together
    ranks: int
    batch: int  # on each rank

    def key(self):
        return f"{self.case.key()}/{self.scaling}/{self.ranks}"

    def steps_key(self):
        """Jobs that are compared with each other make the same number of steps."""
        return f"{self.case.key_without_reduction()}/{self.scaling}"

    def title(self):
        title = self.case.training() if self.ranks == 1 else self.case.title()
        return f"{title}, {self.scaling}, {count(self.ranks, 'rank')}"


def count(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"


def bucket_name(bucket_mb):
    if bucket_mb is None:
        return "default"
    return "automatic" if bucket_mb == 0 else f"{bucket_mb:g} MiB"


def case_of(fields):
    return Case(**{name: fields[name] for name in Case.__dataclass_fields__})


def fields_of(case):
    return asdict(case)


def job_of(run):
    """The job of a run in scaling.json."""
    return Job(case_of(run["case"]), run["scaling"], run["ranks"], run["batch"])


def default_ranks(slots):
    """1, 2, 4, 8 as far as there is a core or GPU for each rank, but at least 1 and 2."""
    return [n for n in DEFAULT_RANKS if n <= max(2, slots)]


def make_cases(settings):
    # Only overlapped reduction has buckets to choose.
    reductions = [(bucket, "overlap") for bucket in settings["buckets"] if "overlap" in settings["reductions"]]
    reductions += [(None, reduce) for reduce in settings["reductions"] if reduce not in ("overlap", "none")]
    cases = [
        Case(model, settings["device"], precision, backend, *reduction)
        for model, precision, backend, reduction in itertools.product(
            settings["models"], settings["precisions"], settings["backends"], reductions
        )
    ]
    known = PRECISIONS[settings["device"]]
    for case in cases:
        if case.precision not in known:
            raise UserError(
                f"--precision={case.precision} is not possible with --device={case.device}: "
                f"it may be {', '.join(known)}"
            )
    return cases


def make_jobs(cases, settings):
    """The jobs of a round. Those that are compared with each other follow each other.

    Ways to reduce beside the first are measured with one kind of scaling only.
    """
    jobs = []
    groups = dict.fromkeys(case.without_reduction() for case in cases)
    for alone, scaling, ranks in itertools.product(groups, settings["scaling"], settings["ranks"]):
        first = scaling == settings["scaling"][0]
        reducing = [
            case
            for case in cases
            if case.without_reduction() == alone and (first or case.reduce == settings["reductions"][0])
        ]
        weak_batch, global_batch = batches(alone.model, settings)
        if scaling == "strong" and global_batch % ranks != 0:
            raise UserError(
                f"--global-batch={global_batch} cannot be divided by {ranks} ranks: give a multiple of "
                "every number in --ranks"
            )
        batch = weak_batch if scaling == "weak" else global_batch // ranks
        jobs += [Job(case, scaling, ranks, batch) for case in ([*reducing, alone] if ranks > 1 else [alone])]
    return jobs


def batches(model, settings):
    """Samples per step: of a rank with weak, of all ranks with strong scaling."""
    weak, strong = BATCHES_OF.get((model, settings["device"]), BATCHES)
    return settings["batch"] or weak, settings["global_batch"] or strong


def trainer_flags(job, settings, steps, warmup):
    """The program of a job, and its flags."""
    program, own = MODELS[job.case.model]
    flags = [
        *own,
        f"--batch={job.batch}",
        f"--steps={steps + warmup}",
        f"--warmup={warmup}",
        "--lr=0.01",
        f"--threads={settings['threads']}",
        f"--device={job.case.device}",
        *PRECISIONS[job.case.device][job.case.precision],
    ]
    flags.append(f"--data={settings['data']}" if settings["data"] else "--synthetic")
    if job.case.backend != "auto":
        flags.append(f"--backend={job.case.backend}")
    if job.case.bucket_mb is not None:
        flags.append(f"--bucket-mb={job.case.bucket_mb:g}")
    if job.case.reduce != "overlap" and job.ranks > 1:
        flags.append(f"--reduce={job.case.reduce}")
    return program, flags


def choose_steps(step_ms, seconds):
    """Steps and warm-up steps of a run that should take so long on one rank."""
    steps = max(10, min(2000, round(1000 * seconds / step_ms)))
    return steps, max(5, steps // 10)


def crowding(ranks, settings, slots):
    """How many ranks share a core or GPU: 1 unless the machine is oversubscribed."""
    per_rank = settings["threads"] if settings["device"] == "cpu" else 1
    return max(1.0, ranks * per_rank / slots)


def expected_seconds(job, pilot, settings, slots):
    """How long a run of this job will take, from a short run on the fewest ranks."""
    step_ms = pilot["step_ms"] * job.batch / pilot["batch"] * crowding(job.ranks, settings, slots)
    return pilot["start_s"] * max(1.0, job.ranks / slots) + (pilot["steps"] + pilot["warmup"]) * step_ms / 1000
