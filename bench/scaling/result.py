# SPDX-License-Identifier: Apache-2.0
"""scaling.json: its schema, reading, writing; and the CSV file."""

import contextlib
import csv
import fcntl
import json
import os

from scaling import UserError

SCHEMA = "ddp-scaling"
VERSION = 2
FILE = "scaling.json"
# What the report needs. The summary is that of the trainer, and null if the run failed.
RUN_KEYS = """job case scaling ranks batch round oversubscribed status error command wall_s parameters buckets
    summary""".split()
SUMMARY_KEYS = "samples_per_second final_loss exposed_comm_ms overlap peak_rss_mb".split()
COLLECTIVE_KEYS = "ranks nodes bytes time_us".split()
SETTINGS_KEYS = "device threads models precisions backends buckets reductions predict".split()
ENVIRONMENT_KEYS = """date cpu numa_nodes memory_mib gpus system libraries launcher build python variables
    load_at_start slots""".split()
CSV_COLUMNS = """case scaling ranks oversubscribed rounds batch samples_per_second speedup efficiency efficiency_min
    efficiency_max efficiency_without_reduction step_ms step_ms_without_reduction communication_ms exposed_ms hidden_ms
    communication_to_computation bus_bandwidth_gb_s peak_memory_mib joules_per_sample
    share_of_products loss loss_check""".split()


def new_result(settings, environment, command):
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "command": command,
        "settings": settings,
        "environment": environment,
        "ended": "not yet",
        "pilots": {},
        "runs": [],
        "collectives": [],
    }


def path_in(folder_or_file):
    """The result file that an argument names: itself, or the one in that folder."""
    return os.path.join(folder_or_file, FILE) if os.path.isdir(folder_or_file) else folder_or_file


def not_json(word):
    raise ValueError(f"{word} is no number of JSON")


@contextlib.contextmanager
def drawing_on(path):
    """What computes with a result that was read from `path`: contents that it cannot digest become a UserError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path_in(path)} is damaged: {' '.join(what.split())}; give a {FILE} that this program wrote"
        ) from error


def read(path):
    """A result file that has been checked. Raises UserError."""
    path = path_in(path)
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file, parse_constant=not_json)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; give a {FILE} that this program wrote") from None
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise UserError(f"{path} is not a scaling result; give a {FILE} that this program wrote")
    if result.get("version") != VERSION:
        raise UserError(
            f"{path} has version {json.dumps(result.get('version'))}, and this program reads version {VERSION}: "
            "measure again, or use the program of that version"
        )
    kinds = {"settings": dict, "environment": dict, "pilots": dict, "runs": list, "collectives": list}
    for key, kind in kinds.items():
        if not isinstance(result.get(key), kind):
            raise UserError(f'{path} is damaged: it has no "{key}"')
    check_keys(path, "settings", result["settings"], SETTINGS_KEYS)
    check_keys(path, "environment", result["environment"], ENVIRONMENT_KEYS)
    for collective in result["collectives"]:
        check_keys(path, "all-reduce", collective, COLLECTIVE_KEYS)
    for run in result["runs"]:
        check_keys(path, "run", run, RUN_KEYS)
        if run["status"] == "ok":
            check_keys(path, "summary", run["summary"], SUMMARY_KEYS)
    return result


def check_keys(path, what, found, keys):
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise UserError(f'{path} is damaged: its {what} has no "{missing[0]}"')


@contextlib.contextmanager
def replacing(path, **options):
    """A file that replaces `path` as a whole, so that no reader and no crash ever sees half of it. Raises UserError."""
    try:
        with open(path + ".new", "w", encoding="utf-8", **options) as file:
            yield file
        os.replace(path + ".new", path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; make room there, or give another --out") from None


def write_text(path, text):
    # What the text quotes, the name of a folder, say, may be no UTF-8.
    with replacing(path, errors="backslashreplace") as file:
        file.write(text)


def exists(folder):
    return os.path.exists(os.path.join(folder, FILE))


def claim(folder):
    """Keeps other measurements out of `folder` until the file that it returns is closed. Raises UserError, OSError."""
    path = os.path.join(folder, FILE + ".lock")
    file = open(path, "w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"another measurement writes to {folder}, and holds {path}: wait for its end, or give another --out"
        ) from None
    return file


def write(result, folder):
    write_text(os.path.join(folder, FILE), json.dumps(result, indent=1) + "\n")


def write_csv(points, folder):
    with replacing(os.path.join(folder, "scaling.csv"), newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(points)
