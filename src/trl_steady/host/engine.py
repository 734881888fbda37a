"""placeholder"""

import contextlib


def capturing_engine():
    return contextlib.nullcontext()
