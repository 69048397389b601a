#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how training scales over ranks and writes a report: see --help and docs/scaling.md."""

import os
import signal
import sys


def _stop(_number, _frame):
    # Not by an exception: within an import it would become a traceback, or a module that seems to be missing.
    os.write(2, b"ddp-scaling: stopped by Ctrl-C; what has been measured is kept\n")
    os._exit(130)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:  # closed: a file that is opened would take its number
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
# Where the encoding lacks a character; and all is written, and fails, at the end.
sys.stdout.reconfigure(errors="replace", line_buffering=False, write_through=False)


def _check_output():
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"ddp-scaling: cannot write to standard output: {error.strerror}; make room there", file=sys.stderr)
        os._exit(1)


sys.dont_write_bytecode = True  # what root's Python writes beside the installed package would stay when that is removed
# The package lies beside this file in the source tree, and in share/ddp when this file is installed as bin/ddp-scaling.
_here = os.path.dirname(os.path.realpath(__file__))
_installed = os.path.join(os.path.dirname(_here), "share", "ddp")
sys.path.insert(0, _here if os.path.isdir(os.path.join(_here, "scaling")) else _installed)

from scaling.main import main  # noqa: E402

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        _check_output()
