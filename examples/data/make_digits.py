#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes digits_data.inc from the digits.csv.gz that the Python package scikit-learn ships.

  python3 make_digits.py path/to/sklearn/datasets/data/digits.csv.gz > digits_data.inc

One string per image: 64 pixels, row by row, as the letters 'A' (0) to 'Q' (16), then the label.
"""
import gzip
import sys

print("""// Optical Recognition of Handwritten Digits. E. Alpaydin, C. Kaynak (1998). UCI Machine Learning Repository.
// https://doi.org/10.24432/C50P49. Licensed under CC BY 4.0, https://creativecommons.org/licenses/by/4.0/.
// Changed: of the test part only the notation, by make_digits.py; the rest is left out.""")
with gzip.open(sys.argv[1], "rt") as rows:
    for row in rows:
        *pixels, label = (int(float(x)) for x in row.split(","))
        assert len(pixels) == 64 and all(0 <= p <= 16 for p in pixels) and 0 <= label <= 9
        print('"' + "".join(chr(ord("A") + p) for p in pixels) + str(label) + '",')
