"""Every option, declared once.

A field of these records is an option of the command line, a keyword of the Python API,
a key of a TOML file, and what run.json records.

    values    which values options take, and how these are read
    help      the help texts of all options
    fields    a field as an option, made of its annotation, its type and its text
    run       the options of `run`, and those that commands share
    commands  the options of the other commands
"""

from featviz.options.fields import (
    DRAWING,
    GENERAL,
    GROUPS,
    OPTIONS,
    OUTPUT,
    Option,
    declared_options,
    every_option,
    nested_records,
    no_option,
    option,
    read,
    read_from,
)
from featviz.options.help import HELP
from featviz.options.run import (
    INTERPOLATIONS,
    PAD_GREY,
    DrawOptions,
    InputOptions,
    ModelOptions,
    PassOptions,
    RunOptions,
    flag,
)
