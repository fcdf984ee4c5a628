"""The operators by name: quern.ops.rms_norm(x, w, eps=1e-5).

The functions are made from the schemas of quern.library() when they are first
used. help(quern.ops.rms_norm) shows the schema, the equation, shapes and dtypes;
dir(quern.ops) lists all names.
"""

from . import _call, _library


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library = _library.library()
    schema = library.schemas.get(name)
    if schema is None:
        near = _library.near(name, library.schemas)
        raise AttributeError(f"quern: no operator {name!r}; {near}dir(quern.ops) lists all")
    function = _call.make(library, schema)
    # Another thread's function may be replaced; both compute the same.
    globals()[name] = function
    return function


def __dir__():
    return sorted(_library.library().schemas)
