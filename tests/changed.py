"""Bugs put into hardware on purpose: classes with pieces of their source changed."""

import inspect
import sys
import textwrap

__all__ = ["changed"]


def changed(source, *changes):
    """Return a class, or a function, with pieces of its source changed.

    Parameters
    ----------
    source : type or function
        At the top of its module, whose names it sees as they are now.
    changes : (str, str)
        What is there once, and what takes its place.
    """
    text = textwrap.dedent(inspect.getsource(source))
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    names = dict(vars(sys.modules[source.__module__]))
    exec(text, names)
    return names[source.__name__]
