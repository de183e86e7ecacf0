# SPDX-License-Identifier: Apache-2.0
"""Exits with a message if the Python that runs this is too old. Runs on any Python 3."""

import sys

OLDEST = (3, 11)  # as in pyproject.toml

if sys.version_info < OLDEST:
    sys.exit(
        "jax_ep needs Python 3.11 to 3.13; {} is Python {}.{}. Name another one: "
        "make PYTHON=python3.11 ...".format(sys.argv[1], *sys.version_info[:2])
    )
