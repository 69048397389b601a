# SPDX-License-Identifier: Apache-2.0
"""Figures as text, for the terminal, pages and pictures."""


def number(value, digits=3):
    """A figure with so many significant digits, or a dash. A large one as a whole number, never with an exponent."""
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    # Rounding may make a thousand of what is less.
    return f"{value:,.0f}" if abs(value) >= 1000 or "e+" in text else text
