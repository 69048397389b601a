#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how training scales over ranks and writes a report: see --help and docs/scaling.md."""

import os
import sys

sys.dont_write_bytecode = True  # what root's Python writes beside the installed package would stay when that is removed
# The package lies beside this file in the source tree, and in share/ddp when this file is installed as bin/ddp-scaling.
_here = os.path.dirname(os.path.realpath(__file__))
_installed = os.path.join(os.path.dirname(_here), "share", "ddp")
sys.path.insert(0, _here if os.path.isdir(os.path.join(_here, "scaling")) else _installed)

from scaling.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
